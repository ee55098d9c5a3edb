"""The registry: every .py file in this folder is a model under its file name. Drop in a file and it exists.

A model file defines `Config`, a dataclass with vocab_size and max_len, and `Model(config)` with config, blocks and
forward, as gpt.py shows. It may also have
    Cache, Model.generate       to write text: sample.py needs the first, train.py --sample_every both
    Model.muon_modules          the modules that Muon trains, if they are not the blocks
    Model.micro_tokens          how many tokens a forward pass takes by default, if 32,768 do not fit
    neutral(model)              sets the own parameters so that the model equals its baseline, which a test checks
    costs(config, T)            (parameters, forward FLOPs per token, numbers read per token) more than gpt.py's
and lines in its docstring: `Changed from gpt.py: ...` (or another file), `Other default than gpt.py's: ...`.
"""
import math
import re
import traceback
import typing
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path


def names():
    """Names of all models, gpt first."""
    found = sorted(p.stem for p in Path(__file__).parent.glob("*.py") if not p.stem.startswith("_"))
    return sorted(found, key=lambda name: name != "gpt")


def module(name):
    """The module of one model. ValueError if there is no such file, or if it is not a model file."""
    if name not in names():
        raise ValueError(f"no model {name!r}: choose from {', '.join(names())}")
    if "." in name:
        raise ValueError(f"models/{name}.py: a model's name has no dot")
    try:
        found = import_module(f"{__name__}.{name}")
        wrong = defect(found)
    except SyntaxError as e:
        wrong = e                                                           # has the line
    except Exception as e:
        lines = [at.lineno for at in traceback.extract_tb(e.__traceback__) if Path(at.filename).stem == name]
        wrong = f"{type(e).__name__}: {e}{f' (line {lines[-1]})' if lines else ''}"
    if wrong:
        raise ValueError(f"models/{name}.py: {wrong}")
    return found


def defect(found):
    """What a model file lacks, in a line, or None: Model, and Config, whose fields become options."""
    for name in ("Config", "Model"):
        if not hasattr(found, name):
            return f"no class {name}: models/gpt.py shows what a model file needs"
    if "__dataclass_fields__" not in vars(found.Config):                    # a base's are not its own
        return "Config must be a @dataclass"
    types = typing.get_type_hints(found.Config)
    for name in ("vocab_size", "max_len"):
        if name not in types:
            return f"Config has no field {name}, which the scripts need by this name"
    for f in fields(found.Config):
        if f.default is None and types[f.name] in (int, float, bool, str):
            return f"Config.{f.name} = None needs the type {types[f.name].__name__} | None"
        if f.default is MISSING or len(kinds(types[f.name])) != 1 or kinds(types[f.name])[0] not in (
                int, float, bool, str):
            return f"Config.{f.name} must have a default and be int, float, bool or str (or one of them | None)"
    for name, value in vars(found.Config).items():
        if name not in types and name[:1] != "_" and isinstance(value, (int, float, str, tuple, type(None))):
            kind = "float | None" if value is None else type(value).__name__
            return f"Config.{name} needs a type to be an option: {name}: {kind} = {value!r}"


def kinds(hint):
    """The types that a type hint allows, without None."""
    return [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]


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
        if type(value) is float and not math.isfinite(value):
            raise ValueError(f"{key} must be finite, not {value}")
        if type(value) is float and value < 0 and hasattr(module("gpt").Config, key):
            raise ValueError(f"{key} must not be negative, not {value}")
    model = mod.Model(mod.Config(**config))
    if not hasattr(model, "config"):
        raise ValueError(f"models/{name}.py: Model needs self.config = config")
    return model


def cache_class(name):
    """The Cache of a model file. ValueError if it has none: then it can be trained and scored, but writes no text."""
    found = getattr(module(name), "Cache", None)
    if found is None:
        raise ValueError(f"models/{name}.py has no class Cache to write text with: see Cache and generate in gpt.py")
    return found


def check_types(cls, values):
    """ValueError for the first of `values` that is not of the type of its field of the dataclass `cls`."""
    types = typing.get_type_hints(cls)                                      # f.type may be a text
    for f in fields(cls):
        allowed, value = typing.get_args(types[f.name]) or (types[f.name],), values.get(f.name, f.default)
        if not (type(value) in allowed or type(value) is int and float in allowed):
            raise ValueError(f"{f.name} must be {' or '.join(k.__name__ for k in allowed)}, not {value!r}")
