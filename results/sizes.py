"""Lines, parameters and FLOPs of every model against gpt.py: python results/sizes.py writes sizes.md beside it."""
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
import models  # noqa: E402
from models.__main__ import sizes  # noqa: E402
from nanodepth.options import same_shape  # noqa: E402
from publish import markdown  # noqa: E402

TEXT = """# Sizes

`python results/sizes.py` makes this table. Lines: of the file, and those of `diff models/gpt.py models/NAME.py`. The
rest is at the default shape, for a context of 1,024 tokens, against gpt with the same settings (a gate, where the model
has one by default); forward FLOPs are those of matrix products. gpt's MLP has three matrices of 8/3 d_model, those of
gpt3 and pythia have two of 4 d_model. Of kern's experts a token uses two of sixteen, of
speedrun's tables a row each.

"""


def changed(name):
    """(lines of a model's file, lines added to gpt.py, lines taken from it)."""
    base, own = (models.module(n).__file__ for n in ("gpt", name))
    lines = subprocess.run(["diff", base, own], capture_output=True, text=True).stdout.splitlines()
    signs = [line[0] for line in lines]
    return len(Path(own).read_text().splitlines()), signs.count(">"), signs.count("<")


def row(name):
    lines, more, less = changed(name)
    own, base = models.module(name).Config, models.module("gpt").Config
    (_, n, _, flops), (_, n0, _, flops0) = sizes(name, {}), sizes("gpt", same_shape(own, base, {}))
    return [f"`{name}`", str(lines), f"+{more} -{less}", f"{n:,}", f"{n - n0:+,}", f"{flops / flops0 - 1:+.1%}"]


def main():
    head = ["model", "lines", "against gpt.py", "parameters", "more than gpt", "more FLOPs"]
    (HERE / "sizes.md").write_text(f"{TEXT}{markdown(head, [row(name) for name in models.names()])}\n")


if __name__ == "__main__":
    main()
