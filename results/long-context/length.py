"""Texts longer than in training: python results/long-context/length.py --data wiki8k         (hours on a CPU)

Trains each system on windows of T tokens. The same checkpoint then predicts every token of the same validation text
once, in windows of T, 2 T and 4 T. All systems have the shape, batches, steps and learning rates of gpt in the study
of study-small. You may stop it and start it again. Writes runs.csv and the table in README.md.
"""
import argparse
import csv
import math
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "study"), str(HERE.parent), str(HERE.parents[1])]
from eval import parse, score  # noqa: E402
from publish import fill, final_loss, markdown  # noqa: E402
from study import ended, flags, forked  # noqa: E402

import train  # noqa: E402

SYSTEMS = {                                     # name in the table: model and options; kernel=0: without DAPE
    "gpt (RoPE)": "--model gpt", "RoPE + DAPE": "--model dape --position rope",
    "NoPE": "--model dape --position none --kernel 0", "NoPE + DAPE": "--model dape --position none",
    "Kerple": "--model dape --kernel 0", "Kerple + DAPE": "--model dape"}
T, TOKENS, LOSSES = 128, 65536, {1: "loss", 2: "loss_2x", 4: "loss_4x"}                   # times T: column
RECIPE = dict(n_layer=8, d_model=128, n_head=4, batch_tokens=2048, max_steps=480, warmup_steps=30, eval_every=480,
              eval_tokens=TOKENS, muon_lr=0.005, adamw_lr=0.024, seq_len=T, max_len=T * max(LOSSES), threads=1, seed=0)


def trained(system, args):
    """The folder of a system's run, which is trained if it is not finished."""
    run = args.out.resolve() / system.replace(" ", "-")
    if final_loss(run) == math.inf:
        new = [*SYSTEMS[system].split(), "--compile", *flags(**RECIPE, data=args.data, out=run)]
        if ended(forked(train.main, flags(resume=run) if (run / "ckpt.pt").exists() else new)):
            sys.exit(f"{system} was not trained to the end")
    return run


def measure(system, run):
    """The line of a run in runs.csv."""
    line = {"run": run.name, "system": system, "seed": 0}
    for times, column in LOSSES.items():
        row = score(run, parse([str(run), *flags(seq_len=times * T, tokens=TOKENS, batch_tokens=4 * T)]))
        line |= {"steps": row["step"], "parameters": row["parameters"], "data": row["fingerprint"], "seq_len": T,
                 column: row["loss"]}
    return line


def table(lines):
    """The losses, and their change in longer windows."""
    rows = [[line["system"], f"{line['parameters']:,}", f"{line['loss']:.4f}", *(
        f"{line[longer]:.4f} ({line[longer] - line['loss']:+.4f})" for longer in list(LOSSES.values())[1:])]
        for line in lines]
    return markdown(["system", "parameters", *(f"loss at {n * T}" for n in LOSSES)], rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="wiki8k", help="folder of data_prep.py, or its name under data/ (wiki8k)")
    parser.add_argument("--out", type=Path, default=Path("runs/length"), help="folder for the runs (runs/length)")
    args = parser.parse_args()
    folders = {system: trained(system, args) for system in SYSTEMS}         # all first: then the device may be used
    lines = [measure(*each) for each in folders.items()]
    with open(HERE / "runs.csv", "w") as file:
        writer = csv.DictWriter(file, lines[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    fill(HERE / "README.md", losses=table(lines))


if __name__ == "__main__":
    main()
