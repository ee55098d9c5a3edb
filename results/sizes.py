"""Lines, parameters and FLOPs of every model: python results/sizes.py writes sizes.md, and a column in README."""
import ast
import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "results"), str(ROOT)]
import torch  # noqa: E402
from compare import markdown  # noqa: E402

import models  # noqa: E402
from bench import same_shape  # noqa: E402
from nanodepth.devices import flops_per_token  # noqa: E402

TEXT = """# Sizes

How much code, parameters and FLOPs does each idea add? Most ideas change fewer than 60 lines and add less than 2% of
parameters and FLOPs. "Lines changed" counts lines of code added to and removed from the parent file, without docstrings
and blank lines. "More" is relative to gpt with the same settings (gated, where that is the model's default), at the
default shape and a context of 1,024 tokens. FLOPs are those of matrix products in a forward pass. Those of kern and
muddmoe include padding. `python results/sizes.py` makes the table.

"""


def code(path):
    """(a file's lines of code without docstrings and blank lines, number of lines of its docstring, of the file)."""
    text, docstrings = path.read_text(), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            docstrings.append(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = text.splitlines()
    return [line for i, line in enumerate(lines, 1) if line and not any(i in each for each in docstrings)], \
        docstrings[0].stop - 1, len(lines)


def changed(name):
    """How many lines of code a model's file adds to its parent and removes from it."""
    own, parent = (code(ROOT / models.path(n))[0] for n in (name, models.parent(name)))
    return sum(line[0] in "+-" for line in list(difflib.unified_diff(parent, own, n=0, lineterm=""))[2:])


def sizes(name, options):
    """(parameters, forward FLOPs per token in a context of 1,024) of a model."""
    with torch.device("meta"):
        model = models.build(name, **options)
    return sum(p.numel() for p in model.parameters()), flops_per_token(model, 1024)


def row(name):
    same = same_shape(models.module(name).Config, models.module("gpt").Config, {})
    (n, flops), (n0, flops0) = sizes(name, {}), sizes("gpt", same)
    return [f"`{name}`", models.parent(name), str(changed(name)), f"{n:,}", f"{n - n0:+,}",
            f"{flops / flops0 - 1:+.1%}"]


def main():
    text, rows = (ROOT / "README.md").read_text(), []
    for name in dict.fromkeys(re.findall(r"\[`(\w+)`\]\(models/", text)):
        rows.append(row(name))                      # | [`name`](file) | idea | what a layer reads | lines | ...
        text = re.sub(rf"^(\| \[`{name}`\](?:[^|]*\|){{3}})[^|]*\|", rf"\1 {rows[-1][2]} |", text, flags=re.M)
    head = ["model", "parent", "lines changed", "parameters", "more parameters", "more FLOPs"]
    (ROOT / "results" / "sizes.md").write_text(f"{TEXT}{markdown(head, rows)}\n")
    (ROOT / "README.md").write_text(text)


if __name__ == "__main__":
    main()
