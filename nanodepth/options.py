"""Options: from words of a command line to fields of dataclasses."""
from dataclasses import fields

import models


def parse_spec(spec):
    """"name:option=value:..." -> (name, {option: value}). ValueError if there is no such model or option."""
    name, *words = spec.split(":")
    types, options = {f.name: f.type for f in fields(models.module(name).Config)}, {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in types or not equals:
            raise ValueError(f"{spec}: {name} has no option {word!r} (NAME:option=value)")
        kind = {bool: lambda s: {"true": True, "false": False}[s.lower()], str: str, float: float}.get(types[key], int)
        try:
            options[key] = kind(value)
        except (ValueError, KeyError):
            raise ValueError(f"{spec}: {value!r} is not a value of {key}") from None
    return name, options
