"""The registry: every .py file in this folder is a model under its file name. Drop in a file and it exists.

A model file defines `Config` (a dataclass) and `Model(config)`; gpt.py shows the whole contract.
"""
import math
import re
import typing
from dataclasses import fields
from importlib import import_module
from pathlib import Path


def names():
    """Names of all models, gpt first."""
    found = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))
    return sorted(found, key=lambda name: name != "gpt")


def module(name):
    """The module of one model. ValueError if there is no such file."""
    if name not in names():
        raise ValueError(f"no model {name!r}: choose from {', '.join(names())}")
    return import_module(f"{__name__}.{name}")


def baseline(name):
    """The model that `name` is built on: BASELINE of its docstring's line `Changed from BASELINE.py:`, or else gpt."""
    found = re.search(r"^Changed from (\w+)\.py:", module(name).__doc__ or "", re.M)
    return found[1] if found else "gpt"


def build(name, **config):
    """Model `name` with the given Config fields, initialised. ValueError for a wrong name, field or value."""
    mod = module(name)
    unknown = set(config) - {f.name for f in fields(mod.Config)}
    if unknown:
        raise ValueError(f"{name} has no option {', '.join(sorted(map(str, unknown)))}")
    check_types(mod.Config, config)
    for key, value in config.items():
        if type(value) is int and value > (10_000 if key == "n_layer" else 2 ** 31):
            raise ValueError(f"{key} {value:,} is too large")
        if type(value) is float and not 0 <= value < math.inf:
            raise ValueError(f"{key} must be a number from 0 on, not {value}")
    return mod.Model(mod.Config(**config))


def check_types(cls, values):
    """ValueError for the first of `values` that is not of the type of its field of the dataclass `cls`."""
    types = typing.get_type_hints(cls)                                      # f.type may be a text
    for f in fields(cls):
        kinds, value = typing.get_args(types[f.name]) or (types[f.name],), values.get(f.name, f.default)
        if not (type(value) in kinds or type(value) is int and float in kinds):
            raise ValueError(f"{f.name} must be {' or '.join(k.__name__ for k in kinds)}, not {value!r}")
