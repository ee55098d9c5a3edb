"""Shared pieces have the same text in every model file, or the docstring's `Changed from gpt.py:` line names them.

A file that is built on another file than gpt.py names that one (muddpythia.py: `Changed from pythia.py:`). Pieces that
gpt.py lacks are compared among the models of the repository, those in README's tables. A user's own file is
only held to its `Changed from` line, if it has one.
"""
import ast
import dataclasses
import difflib
import re
import runpy
from pathlib import Path

import pytest
import settings
from small import combined_text

import models

pytestmark = pytest.mark.quick
MODELS = Path(__file__).parents[2] / "models"
FILES = sorted(p for p in (*MODELS.glob("*.py"), *MODELS.glob("more/*.py")) if not p.stem.startswith("_"))
OTHERS = [p for p in FILES if p.stem != "gpt"]
OURS = [p for p in FILES if settings.belongs(p.stem)]


def pieces(path):
    """{qualified name: text} of each top-level function, class head and method, decorators and comments included."""
    source = path.read_text()
    lines, out = source.splitlines(), {}

    def begin(node):
        return min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1

    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            out[node.name] = lines[begin(node):node.end_lineno]
        elif isinstance(node, ast.ClassDef):
            methods = [m for m in node.body if isinstance(m, ast.FunctionDef)]
            out[node.name] = lines[begin(node):begin(methods[0]) if methods else node.end_lineno]
            out |= {f"{node.name}.{m.name}": lines[begin(m):m.end_lineno] for m in methods}
    return {name: "\n".join(text).rstrip() for name, text in out.items()}


def announced(path):
    """(file it is built on, names of the pieces that it changes); names are None without a `Changed from` line."""
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    found = re.search(r"^Changed from (?:more/)?(\w+\.py):(.*?)(?:^(?=\S)|\Z)", docstring, re.M | re.S)
    if not found:
        return MODELS / "gpt.py", None
    parent = next((p for p in FILES if p.name == found[1]), MODELS / found[1])
    return parent, {name.strip() for name in found[2].split(",")} - {""}


def check_announced(path):
    origin, told = announced(path)
    for name in re.findall(r"^(?:Changed from|Equal to) (?:more/)?(\w+)\.py", path.read_text(), re.M):
        assert name in models.names(), f"models/{path.name}: its docstring names {name}.py, which does not exist"
    base, mine = pieces(origin), pieces(path)
    changed = {name for name in base if mine.get(name) != base[name]}
    line = f"Changed from {origin.name}: {', '.join(name for name in base if name in changed)}"
    if told is None and changed and not settings.belongs(path.stem):
        pytest.skip(f"add to the docstring of models/{path.name}: {line}")
    told = told or set()
    for name in changed - told:
        texts = base[name].splitlines(), mine.get(name, "").splitlines()
        print("\n".join(difflib.unified_diff(*texts, origin.name, path.name, "")))
    where = f"the docstring of models/{path.name}"
    assert changed == told, f"make the pieces equal in both files, or write into {where}:\n{line}"


@pytest.mark.parametrize("path", OTHERS, ids=lambda p: p.stem)
def test_unannounced_pieces_equal_the_baseline(path):
    check_announced(path)


@pytest.mark.parametrize("heading", ["MUDDFormer with value", "Hyper-connections with"])
def test_combinations_announce_what_they_change(heading, tmp_path):
    (tmp_path / "mine.py").write_text(combined_text(heading))
    check_announced(tmp_path / "mine.py")


def test_pieces_that_only_the_others_share_are_equal():
    """But for what a file announces to change of its parent."""
    base, seen = pieces(MODELS / "gpt.py"), {}
    for path in OURS:
        for name, text in pieces(path).items():
            if name not in base and name not in (announced(path)[1] or ()):
                first = seen.setdefault(name, (path.name, text))
                assert text == first[1], f"{name} differs between {first[0]} and {path.name}"


@pytest.mark.parametrize("path", OURS, ids=lambda p: p.stem)
def test_the_diff_is_the_paper(path):
    """Lines of code that differ from the parent's, lines of the docstring, lines in all; the pages' columns of them."""
    sizes = runpy.run_path(str(MODELS.parent / "results" / "sizes.py"))
    _, docstring, lines = sizes["code"](path)
    core, most = path.parent == MODELS, settings.of(path.stem, "LINES", 55 if path.parent == MODELS else 120)
    assert sizes["changed"](path.stem) <= most and docstring <= 25 and (not core or lines <= 310)
    row = re.search(rf"^\| `{path.stem}` \| \w+ \| (\d+) \|", (MODELS.parent / "results/sizes.md").read_text(), re.M)
    front = re.search(rf"^\| \[`{path.stem}`\](?:[^|]*\|){{3}} (\d+) \|", settings.README, re.M)
    for found in (row, front) if core else (row,):
        assert found and int(found[1]) == sizes["changed"](path.stem), "python results/sizes.py"


def test_common_config_fields_come_first_and_agree():
    """A line `Other default than gpt.py's: FIELD` in the docstring frees the default of that field."""
    common = "vocab_size n_layer n_head n_kv_head d_model d_ff max_len rope_theta norm_eps tie_embeddings z_loss"
    base, *others = [{f.name: (f.type, f.default) for f in dataclasses.fields(models.module(path.stem).Config)}
                     for path in (MODELS / "gpt.py", *OURS)]
    for path, mine in zip(OURS, others):
        first = [name for name in common.split() if name in mine or name != "rope_theta"]
        assert [*mine][:len(first)] == first, path.name
        free = re.findall(r"^Other default than gpt.py's: (\w+)", models.module(path.stem).__doc__, re.M)
        assert [name for name in first if mine[name] != base[name]] == free, path.name


@pytest.mark.parametrize("path", OURS, ids=lambda p: p.stem)
def test_a_model_file_stands_alone(path):
    """Only torch and the standard library; no state at module level; every Config field has its comment."""
    tree = ast.parse(path.read_text())
    imported = {(n.module or "") if isinstance(n, ast.ImportFrom) else a.name
                for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom)) for a in n.names}
    assert {name.split(".")[0] for name in imported} <= {"torch", "math", "dataclasses"}
    assert all(isinstance(n, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.If, ast.Expr))
               for n in tree.body)
    for line in re.findall(r"^    \w+: .*", pieces(path)["Config"], re.M):
        assert re.search(r"  # \S", line), line
