"""Texts longer than in training: python results/length/length.py --data wiki     (from the top folder; hours)

Each system is trained on windows of T tokens; then the same checkpoint reads the same validation text, every token
predicted once, in windows of T, 2 T and 4 T. Shape, batches, steps and rates of all systems are those of gpt in
results/study-small. What is done is not repeated, so it can be interrupted. Writes losses.jsonl and
prints the table.
"""
import argparse
import json
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import publish  # noqa: E402

SYSTEMS = {                                     # name in the table: model and options; kernel=0: the positions alone
    "gpt (RoPE)": "gpt", "RoPE + DAPE": "dape position=rope",
    "NoPE": "dape position=none kernel=0", "NoPE + DAPE": "dape position=none",
    "ALiBi": "dape position=alibi kernel=0", "ALiBi + DAPE": "dape position=alibi",
    "Kerple": "dape kernel=0", "Kerple + DAPE": "dape"}
SHAPE = dict(n_layer=8, d_model=128, n_head=4, batch_tokens=2048, warmup_steps=30, eval_tokens=65536, muon_lr=0.005,
             adamw_lr=0.024)
TIMES = (1, 2, 4)


def measure(args, system, seed):
    """Trains and evaluates one run, unless its losses are there -> a row per length; [] if training diverged."""
    model, *own = SYSTEMS[system].split()
    folder = args.out / f"{args.seq_len}x{args.max_steps}"
    run = folder / f"{'-'.join([model, *own]).replace('=', '-')}-seed{seed}"
    kept = Path(f"{run}.json")
    if not kept.exists():
        options = SHAPE | dict(option.split("=") for option in own)
        loss = publish.train(run, model, **options, data=args.data, seed=seed, max_steps=args.max_steps,
                             eval_every=args.max_steps, save_every=args.max_steps, seq_len=args.seq_len,
                             max_len=args.seq_len * max(TIMES))
        lengths = [n * args.seq_len for n in TIMES if loss < math.inf]
        rows = [{"system": system, "seed": seed, **evaluate(args, run, n)} for n in lengths]
        publish.runs.write_text(kept, json.dumps(rows))
    rows = json.loads(kept.read_text())
    print(f"{system}, seed {seed}: ", *(f"{row['loss']:.4f}" for row in rows), flush=True)
    return rows


def evaluate(args, run, seq_len):
    """The row of a trained run, read in windows of seq_len tokens."""
    found = Path(f"{run}.eval.json")
    if publish.script(Path(f"{run}.txt"), "eval.py", run, "--seq_len", seq_len, "--tokens", args.tokens,
                      "--batch_tokens", 4 * args.seq_len, "--json", found):
        sys.exit(f"{run}: eval.py failed, see {run}.txt")
    (row,) = json.loads(found.read_text())
    found.unlink()
    return {"trained": args.seq_len, "steps": row["step"], "parameters": row["parameters"], "data": row["fingerprint"],
            **{key: row[key] for key in ("seq_len", "eval_tokens", "loss")}}


def table(rows):
    """Mean losses as a Markdown table, with the change by longer windows; ±: standard deviation over seeds."""
    T = rows[0]["trained"]
    lines = ["| system | parameters | seeds | " + " | ".join(f"loss at {n * T}" for n in TIMES) + " |",
             "|---" * (3 + len(TIMES)) + "|"]
    for system in dict.fromkeys(row["system"] for row in rows):
        own = [row for row in rows if row["system"] == system]
        losses = {n: {row["seed"]: row["loss"] for row in own if row["seq_len"] == n * T} for n in TIMES}
        cells = []
        for n in TIMES:
            by_seed = [loss - (losses[1][seed] if n > 1 else 0) for seed, loss in losses[n].items()]
            spread = f" ± {stdev(by_seed):.4f}" if len(by_seed) > 1 else ""
            cells.append(f"{mean(by_seed):.4f}{spread}" if n == 1 else
                         f"{mean(losses[n].values()):.4f} ({mean(by_seed):+.4f}{spread})")
        lines.append(f"| {system} | {own[0]['parameters']:,} | {len(losses[1])} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="wiki", help="folder made by data_prep.py, or its name under data/ (wiki)")
    parser.add_argument("--out", type=Path, default=Path("runs/length"), help="where the runs go (runs/length)")
    parser.add_argument("--results", type=Path, default=HERE, help="where losses.jsonl goes (this folder)")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="NAME",
                        help=f"of {', '.join(SYSTEMS)} (all)")
    parser.add_argument("--seq_len", type=int, default=256, help="T, tokens of a training window (256)")
    parser.add_argument("--max_steps", type=int, default=480, help="training steps (480)")
    parser.add_argument("--tokens", type=int, default=65536,
                        help="tokens of the validation split; a multiple of 4 T (65536)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each system (3)")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each (2)")
    args = parser.parse_args()
    args.out = args.out.resolve()
    with ThreadPoolExecutor(args.jobs) as pool:
        tasks = [(system, seed) for seed in range(args.seeds) for system in args.systems]
        found = list(pool.map(lambda task: measure(args, *task), tasks))
    rows = sorted((row for rows in found for row in rows), key=lambda row: args.systems.index(row["system"]))
    args.results.mkdir(parents=True, exist_ok=True)
    (args.results / "losses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print("\n" + table(rows), end="")


if __name__ == "__main__":
    main()
