"""Depth matrices of the study's models, from probes/: python results/study-small/depth.py

Draws probes/depth.png, all of them, and docs/depth.png, six for the documentation.
"""
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]
sys.path.insert(0, str(TOP))
from nanodepth import pictures  # noqa: E402
from study import MODELS  # noqa: E402

SIX = ("gpt", "resformer, values", "denseformer", "muddformer, v input", "attnres", "hyperconnections")


def main():
    found = {name: json.loads((HERE / "probes" / f"{name}-seed0.json").read_text()) for name in MODELS}
    list(pictures.save({"depth": lambda: pictures.draw_depth(found)}, HERE / "probes"))
    list(pictures.save({"depth": lambda: pictures.draw_depth(found, SIX)}, TOP / "docs"))


if __name__ == "__main__":
    main()
