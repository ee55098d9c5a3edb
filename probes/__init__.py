"""What to watch in a trained model: one file per model, under the model's name, found by it. None is needed."""
from importlib import import_module
from pathlib import Path


def find(name):
    """The module of the probes of model `name`, or None if there is no such file."""
    return import_module(f"{__name__}.{name}") if Path(__file__).with_name(f"{name}.py").exists() else None
