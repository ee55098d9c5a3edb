"""Only its own files know a model by name: no `if name == ...` in scripts, nanodepth/ or generic tests."""
import ast
import re
from pathlib import Path

import settings

import models

ROOT = Path(__file__).parent.parent
ALLOWED = {"presets", "layouts", "test_presets",                     # papers' tables, layouts of published checkpoints
           "published", "test_convert", "test_convert_mistakes"}


def places():
    """The files that must not name a model."""
    for path in sorted([*ROOT.glob("*.py"), *(ROOT / "nanodepth").glob("*.py"), *(ROOT / "tests").glob("*.py")]):
        own = {f"test_{name}" for name in models.names()} | {f"test_probe_{name}" for name in models.names()}
        if path.stem not in ALLOWED | own:
            yield path


def quoted(path):
    """[(line, text)] of all string literals but docstrings, and of the names of imported modules."""
    tree = ast.parse(path.read_text())
    docs = {id(node.body[0].value) for node in ast.walk(tree)
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
            and node.body and isinstance(node.body[0], ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield node.lineno, node.value
        elif isinstance(node, ast.ImportFrom) and node.module == "models":
            yield from ((node.lineno, alias.name) for alias in node.names)


def test_no_model_is_known_by_name():
    """Except gpt, the baseline and default. In a text a name counts as a word of its own, as in "kern:top_k=2"."""
    known = {name for name in models.names() if settings.belongs(name)} - {"gpt"}
    found = []
    for path in places():
        for line, text in quoted(path):
            words = set(re.split(r"[\s:\[,]+", text)) - {""} if len(text) < 200 else set()
            if text in known or words & known and len(words) <= 6:
                found.append(f"{path.relative_to(ROOT)}:{line}: {text!r}")
    assert not found, "\n".join(["a model by name, outside of models/NAME.py, probes/NAME.py and their tests:", *found])
