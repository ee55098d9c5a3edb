"""Every model at the tiny preset: python results/tiny-cpu/tiny.py     (hours of one core)

One run at a time, compiled, in one thread, all with gpt's rates. It may be killed at any moment: a run goes on from its
last checkpoint. The log of a finished run is copied to logs/ and its row written into README.md; what is there is not
run again.
"""
import argparse
import json
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
import publish  # noqa: E402

import models  # noqa: E402

GATED = "gpt --gate elementwise"                                # the baseline of exoformer
SYSTEMS = ["gpt", GATED, *(name for name in models.names() if name != "gpt")]


def folder(system):
    return HERE / "logs" / ("gpt-gated" if system == GATED else system)


def row(system):
    """Model, parameters, bits per byte at the end."""
    config, log = ((folder(system) / name).read_text() for name in ("config.json", "log.jsonl"))
    with torch.device("meta"):
        model = models.build(system.split()[0], **json.loads(config)["model_config"])
    last = json.loads(log.splitlines()[-1])
    return [f"`{system}`", f"{sum(p.numel() for p in model.parameters()):,}", f"{last['bpb']:.4f}"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/tiny-cpu"), help="where the runs go (runs/tiny-cpu)")
    out = parser.parse_args().out.resolve()
    for system in SYSTEMS:
        logs = folder(system)
        if not logs.exists():
            loss = publish.train(out / logs.name, *system.split())
            publish.publish(out / logs.name, logs, f"runs/tiny-cpu/{logs.name}", data="data/stdlib")
            print(f"{system}: {loss:.4f}", flush=True)
        table = publish.markdown(["model", "parameters", "val bits per byte"],
                                 [row(x) for x in SYSTEMS if folder(x).exists()])
        publish.fill(HERE / "README.md", rows=table)


if __name__ == "__main__":
    main()
