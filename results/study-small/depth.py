"""Draws what each layer reads in four models, from depth.json: python results/study-small/depth.py

depth.json has {model: its depth matrix}, of muddformer that of the values, which `analyze.py probe` found in the first
seed's run (all numbers: results/study-small/probes at commit cbab47f).
"""
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))
from nanodepth import pictures  # noqa: E402


def main():
    found = {name: {"depth": {"v": matrix}, "values": {}}
             for name, matrix in json.loads((HERE / "depth.json").read_text()).items()}
    fig = pictures.draw_depth(found, 2, (2.5, 2.1))
    *panels, bar = fig.axes
    for ax in panels:
        ax.set(xlabel="", ylabel="", xticks=[0, 5, 10, 15])
    bar.set_ylabel("weight, mean over tokens (grey: comes later)", fontsize=9)
    fig.suptitle("What a layer reads", x=0.01, ha="left", fontsize=11)
    fig.supxlabel("output of a sublayer (0: the embedding)", fontsize=9)
    fig.supylabel("read by the attention of layer", fontsize=9)
    fig.savefig(HERE.parents[1] / "docs" / "depth_small.png", dpi=200)


if __name__ == "__main__":
    main()
