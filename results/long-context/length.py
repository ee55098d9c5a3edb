"""Texts longer than in training: python results/long-context/length.py --data wiki     (from the top folder; hours)

Trains each system on windows of T tokens. The same checkpoint then predicts every token of the same validation text
once, in windows of T, 2 T and 4 T. All systems have the shape, batches, steps and rates of gpt in results/study-small.
Start it again after an interruption: finished runs are kept. Writes runs.csv and the table in README.md.
"""
import argparse
import csv
import json
import math
import sys
from pathlib import Path
from statistics import mean, stdev

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import publish  # noqa: E402

SYSTEMS = {                                     # name in the table: model and options; kernel=0: without DAPE
    "gpt (RoPE)": "gpt", "RoPE + DAPE": "dape position=rope",
    "NoPE": "dape position=none kernel=0", "NoPE + DAPE": "dape position=none",
    "ALiBi": "dape position=alibi kernel=0", "ALiBi + DAPE": "dape position=alibi",
    "Kerple": "dape kernel=0", "Kerple + DAPE": "dape"}
SHAPE = dict(n_layer=8, d_model=128, n_head=4, batch_tokens=2048, max_steps=480, warmup_steps=30, eval_every=480,
             eval_tokens=65536, muon_lr=0.005, adamw_lr=0.024)
LOSSES = {1: "loss", 2: "loss_2x", 4: "loss_4x"}                        # times T: column
COLUMNS = ["run", "system", "seed", "steps", "parameters", "data", "seq_len", *LOSSES.values()]


def measure(run, system, seed, data, T):
    """The line of a run in runs.csv. Trains the run if necessary."""
    model, *own = SYSTEMS[system].split()
    loss = publish.train(run, model, **SHAPE, **dict(option.split("=") for option in own), data=data, seed=seed,
                         seq_len=T, max_len=T * max(LOSSES))
    if not math.isfinite(loss):
        sys.exit(f"{run} diverged: leave out {system}")
    line, found = {"run": run.name, "system": system, "seed": seed, "seq_len": T}, Path(f"{run}.json")
    for times, column in LOSSES.items():
        if publish.script(Path(f"{run}.txt"), "eval.py", run, "--seq_len", times * T, "--tokens", 65536,
                          "--batch_tokens", 4 * T, "--json", found):
            sys.exit(f"{run}: eval.py failed, see {run}.txt")
        (row,) = json.loads(found.read_text())
        line |= {"steps": row["step"], "parameters": row["parameters"], "data": row["fingerprint"], column: row["loss"]}
    return line


def table(lines):
    """Mean losses as a Markdown table, with the change in longer windows; ±: standard deviation over seeds."""
    T, rows = int(lines[0]["seq_len"]), []
    for system in dict.fromkeys(line["system"] for line in lines):
        own = [line for line in lines if line["system"] == system]
        cells = [system, f"{int(own[0]['parameters']):,}", str(len(own))]
        for column in LOSSES.values():
            losses = [float(line[column]) for line in own]
            change = [x - float(line["loss"]) for x, line in zip(losses, own)]
            spread = losses if column == "loss" else change
            spread = f" ± {stdev(spread):.4f}" if len(own) > 1 else ""
            cells.append(f"{mean(losses):.4f}" + (spread if column == "loss" else f" ({mean(change):+.4f}{spread})"))
        rows.append(cells)
    return publish.markdown(["system", "parameters", "seeds", *(f"loss at {n * T}" for n in LOSSES)], rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="wiki", help="folder made by data_prep.py, or its name under data/ (wiki)")
    parser.add_argument("--out", type=Path, default=Path("runs/length"), help="folder for the runs (runs/length)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="NAME",
                        help=f"systems to train, of {', '.join(SYSTEMS)} (all)")
    parser.add_argument("--seq_len", type=int, default=256, help="T, tokens of a training window (256)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds per system (3)")
    args = parser.parse_args()
    lines = []
    for system in args.systems:
        for seed in range(args.seeds):
            name = "-".join(SYSTEMS[system].replace("=", "-").split())
            run = args.out.resolve() / f"{name}-{args.seq_len}-seed{seed}"
            lines.append(measure(run, system, seed, args.data, args.seq_len))
            print(lines[-1], flush=True)
    with open(HERE / "runs.csv", "w") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    publish.fill(HERE / "README.md", losses=table(lines))


if __name__ == "__main__":
    main()
