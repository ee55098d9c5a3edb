"""The registry: every .py file in models/ and models/more/ is a model under its file name. Drop one in and it exists.

A model file defines `Config`, a dataclass with vocab_size and max_len, and `Model(config)` with config, blocks and
forward, as gpt.py shows. It may also have
    Cache, Model.generate       to sample text and to answer benchmarks' questions
    Model.muon_modules          the modules that Muon trains, if they are not the blocks
    Model.micro_tokens          tokens per forward pass by default, if 32,768 do not fit in memory
    Model.compiled_parts        the name of a list of modules, which torch.compile takes one by one, and Model.output
and lines in its docstring: `Changed from gpt.py: ...`, `Equal to gpt.py when: ...` or `at initialisation: ...` (or
another file), and `Other default than gpt.py's: ...`. What its mechanism does is measured by probes/NAME.py.
Draw random numbers with torch: a run that is resumed goes on with torch's generators, and seeds all others again.
"""
import itertools
import math
import re
import traceback
import typing
from contextlib import contextmanager
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path

import torch
from torch.utils._pytree import tree_leaves

HERE = Path(__file__).parent


class UserError(ValueError):
    """A mistake of the user: one line with what is wrong, the value seen, what to do. code: the exit code."""

    def __init__(self, message, code=2):
        super().__init__(message)
        self.code = code


@contextmanager
def user_errors(prefix=""):
    """Turns a ValueError in this block into a UserError, with the prefix before its message."""
    try:
        yield
    except UserError:
        raise
    except ValueError as e:
        raise UserError(prefix + str(e).split("\n")[0]) from None


def names():
    """Names of all models: gpt, the others in models/, those in models/more/."""
    found = [p for p in (*HERE.glob("*.py"), *HERE.glob("more/*.py")) if not p.stem.startswith("_")]
    return [p.stem for p in sorted(found, key=lambda p: (p.stem != "gpt", p.parent != HERE, p.stem))]


def path(name):
    """The file of a model, relative to the repository."""
    return f"models/{name}.py" if (HERE / f"{name}.py").exists() else f"models/more/{name}.py"


def module(name):
    """The module of one model. UserError if there is no such file, or if it is not a model file."""
    if name not in names():
        raise UserError(f"no model {name!r}: choose from {', '.join(names())}")
    try:
        found = import_module(path(name).removesuffix(".py").replace("/", "."))
        wrong = defect(found)
    except Exception as e:
        lines = [at.lineno for at in traceback.extract_tb(e.__traceback__) if Path(at.filename).stem == name]
        wrong = f"{type(e).__name__}: {e}{f' (line {lines[-1]})' if lines else ''}"
    if wrong:
        raise UserError(f"{path(name)}: {wrong}")
    return found


def defect(found):
    """What a model file lacks, in a line, or None: Model, and Config, whose fields become options."""
    for name in ("Config", "Model"):
        if not hasattr(found, name):
            return f"no class {name}: models/gpt.py shows what a model file needs"
    if "__dataclass_fields__" not in vars(found.Config):                    # not inherited ones
        return "Config must be a @dataclass"
    types = typing.get_type_hints(found.Config)
    for name in ("vocab_size", "max_len"):
        if name not in types:
            return f"Config has no field {name}, which the scripts need by this name"
    for f in fields(found.Config):
        if kinds(types[f.name]) not in ([int], [float], [bool], [str]) or not fits(f.default, types[f.name]):
            return (f"Config.{f.name} must be int, float, bool or str (or one of them | None), and have a default of "
                    "this type")
    for name, value in vars(found.Config).items():
        if name not in types and name[:1] != "_" and isinstance(value, (int, float, str, tuple, type(None))):
            return f"Config.{name} needs a type to be an option: {name}: {type(value).__name__} = {value!r}"


def kinds(hint):
    """The types that a type hint allows, without None."""
    return [kind for kind in typing.get_args(hint) or (hint,) if kind is not type(None)]


def fits(value, hint):
    """Whether a value has the type of a type hint; an int is also a float."""
    allowed = typing.get_args(hint) or (hint,)
    return type(value) in allowed or type(value) is int and float in allowed


def parent(name):
    """The model that `name` was made from, by its docstring's line `Changed from ..`; gpt if there is none."""
    found = re.search(r"^Changed from (?:more/)?(\w+)\.py", module(name).__doc__ or "", re.M)
    return found[1] if found else "gpt"


def config(name, **values):
    """The Config of model `name` with these fields. UserError for a wrong name, field or value."""
    Config, common = module(name).Config, module("gpt").Config
    if unknown := set(values) - {f.name for f in fields(Config)}:
        raise UserError(f"{name} has no option {', '.join(sorted(map(str, unknown)))}")
    check_types(Config, values)
    for key, value in values.items():
        least = (1 if type(value) is int else 0) if hasattr(common, key) else -math.inf
        most = 10_000 if key == "n_layer" else 2 ** 31
        if type(value) in (int, float) and not (least <= value <= most and math.isfinite(value)):
            raise UserError(f"{key} must be at least {least} and at most {most:,}, not {value}")
    with user_errors(f"{name}: "):
        return Config(**values)


def build(name, **values):
    """Model `name` with the given fields of Config, initialised. UserError as in config() and check_kept()."""
    chosen = config(name, **values)
    before, model = asdict(chosen), module(name).Model(chosen)
    check_kept(name, before, model)
    return model


def check_kept(name, before, model):
    """UserError if a saved run would not give this model again: another Config than `before`, or tensors that no module
    knows of (in a list, say), which no optimizer trains either.
    """
    again = asdict(config(name, **asdict(model.config)))
    if key := next((key for key in before if again[key] != before[key]), None):
        raise UserError(f"{path(name)}: Config.{key} is {before[key]!r} now, but {again[key]!r} when the run is "
                        "loaded: keep it as it is, and compute other values from it")
    known = {id(p) for p in model.parameters()}
    for part in model.modules():
        for key, held in vars(part).items():
            parts = [x.parameters() if isinstance(x, torch.nn.Module) else [x] for x in tree_leaves(held)]
            tensors = [x for x in itertools.chain(*parts) if isinstance(x, torch.Tensor)]
            if any(x.requires_grad and x.is_leaf and id(x) not in known for x in tensors):
                raise UserError(f"{path(name)}: {type(part).__name__}.{key} holds tensors or modules that nothing "
                                "trains or saves: use nn.Parameter, nn.ParameterList or nn.ModuleList")


def check_gradients(name, model):
    """UserError, after a backward pass, if a parameter took no part in it."""
    if unused := [key for key, p in model.named_parameters() if p.requires_grad and p.grad is None]:
        raise UserError(f"{path(name)}: {unused[0]} takes no part in the loss: use it in forward, or delete it")


def check_types(cls, values):
    """UserError for the first of `values` whose type is not that of its field in the dataclass `cls`."""
    types = typing.get_type_hints(cls)                                      # f.type may be a string
    for f in fields(cls):
        hint, value = types[f.name], values.get(f.name, f.default)
        if not fits(value, hint):
            allowed = " or ".join(kind.__name__ for kind in typing.get_args(hint) or (hint,))
            raise UserError(f"{f.name} must be {allowed}, not {value!r}")
