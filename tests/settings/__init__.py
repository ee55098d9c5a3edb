"""What the generic tests run of a model besides its default setting: tests/settings/NAME.py. All of it is optional:

CASES     dicts of options that every generic test runs, besides the default
NEUTRAL   dicts of options with which the model starts as its baseline, once neutral(model) has run
neutral   a function that sets the model's own parameters, if need be; filled() makes one. Without NEUTRAL it is for the
          default options
BAD       dicts of options that Config refuses
MUON      names of the matrices that gpt.py does not have and Muon trains, without the numbers of layers
MIXES     the same of what has the rate mix_lr
ROUNDING  largest difference that a later token may make to earlier logits in float64; without it none, in fp32
LINES     most lines of code that may differ from the parent, if not 55 (core) or 120 (models/more/)
SHALLOW   layers of the model that test_compile.py compiles, if not 2
NO_DEPTH_MATRIX  True where what a sublayer reads is no weighted sum of outputs

A model in README's table belongs to the repository and is held to all of its habits. Any other is somebody's own: what
it does not have (a cache, a final_norm) is skipped, and its docstring may leave its changes unsaid.
"""
import re
from importlib import import_module
from pathlib import Path

import pytest

import models

README = (Path(__file__).parents[2] / "README.md").read_text()


def belongs(name):
    return f"[`{name}`](models/" in README


def of(name, what, default=()):
    """One of the above of one model."""
    there = Path(__file__).with_name(f"{name}.py").exists()
    return getattr(import_module(f"settings.{name}"), what, default) if there else default


def baseline(name):
    """The model that `name` is compared with, by its docstring's line `Equal to ..`; else its parent."""
    found = re.search(r"^Equal to (?:more/)?(\w+)\.py", models.module(name).__doc__ or "", re.M)
    return found[1] if found else models.parent(name)


def fitting(name, options, *classes):
    """Those of the options that the model's Config, or another of the classes, has: somebody's own may lack some."""
    known = (models.module(name).Config, *classes)
    return {key: value for key, value in options.items() if any(hasattr(cls, key) for cls in known)}


def filled(**values):
    """A function neutral(model) that fills the parameters whose names contain a key with its value."""
    def neutral(model):
        for name, p in model.named_parameters():
            for key, value in values.items():
                if key in name:
                    p.fill_(value)
    return neutral


def show(x):
    """The name of a test case: of a model, or of its options."""
    return "-".join(f"{k}={v}" for k, v in x.items()) or "default" if isinstance(x, dict) else str(x)


def need(name, thing, *attributes):
    """Models of the repository have it; somebody's own may not."""
    missing = [a for a in attributes if not hasattr(thing, a)]
    if missing and not belongs(name):
        pytest.skip(f"{name} has no {missing[0]}")
    assert not missing, f"{name} has no {missing[0]}"
