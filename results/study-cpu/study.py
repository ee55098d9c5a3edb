"""The study of this folder: python results/study-cpu/study.py --data wiki     (from the repository's top, hours on 2 cores)

Three stages, all with the same data and batches; runs that are done are not repeated, so it can be interrupted.
    search  gpt alone, 3 x 3 rates for Muon and AdamW, short runs: the centre of the next stage
    tune    every model at the pairs of rates around the centre that FACTORS names, the models after FIRST at all but the last
            of them, short runs
    final   every model at its best rates, long runs, several seeds, none of them that of the short runs
Then the logs are copied here, and analyze.py makes the curves of all and the probes of seed 0.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]
MODELS = {
    "gpt": [], "gpt-gated": ["--gate", "elementwise"], "resformer": [], "exoformer": [], "satformer": [], "muddformer": [],
    "attnres": [], "denseformer": [], "hyperconnections": [], "geonorm": [], "dape": [], "sas": [], "sambay": [], "kern": [], "gpt3": [],
    "pythia": [], "muddpythia": []}                                         # name in the tables: options
FIRST = list(MODELS)[:7]
COMMON = dict(n_layer=8, d_model=128, n_head=4, max_len=256, seq_len=256, batch_tokens=2048, warmup_steps=30,
              eval_tokens=65536)
LENGTHS = {"short": dict(max_steps=240, eval_every=240, save_every=240), "long": dict(max_steps=480, eval_every=80, save_every=480)}
MUON, ADAMW = (0.0025, 0.005, 0.01), (0.006, 0.012, 0.024)
FACTORS = ((0.5, 0.5), (1, 1), (1, 0.5), (1, 0.25), (2, 2))                 # of the centre's rates for Muon and AdamW
TUNING_SEED = 100
CLAIMS = [  # (what should have the lower loss, than what, says who)
    ("gpt gate=elementwise", "gpt", "ExoFormer, table 1"), ("resformer", "gpt", "ExoFormer, table 1; SATFormer, table 5"),
    ("satformer", "gpt", "SATFormer, table 5"), ("satformer", "resformer", "SATFormer, section 4.3, at every scale"),
    ("exoformer", "gpt gate=elementwise", "ExoFormer, table 1"), ("exoformer", "resformer", "ExoFormer, table 1"),
    ("muddformer", "gpt", "MUDDFormer, figure 3"), ("muddformer", "resformer", "SATFormer, table 5 (Wikitext)"),
    ("satformer", "muddformer", "SATFormer, table 5 (Wikitext), at 130M; at 760M the opposite"), ("attnres", "gpt", "Attention Residuals"),
    ("attnres", "denseformer", "Attention Residuals, ablations"), ("denseformer", "gpt", "MUDDFormer, figure 3"),
    ("hyperconnections", "gpt", "MUDDFormer, figure 3"), ("muddformer", "denseformer", "MUDDFormer, figure 3"),
    ("muddformer", "hyperconnections", "MUDDFormer, figure 3"), ("muddpythia", "pythia", "MUDDFormer, table 3"),
    ("gpt", "gpt3", "MUDDFormer, figure 3"), ("geonorm", "gpt", "GeoNorm"), ("dape", "gpt", "DAPE V2"), ("sas", "gpt", "SAS"),
    ("sambay", "gpt", "SambaY"), ("kern", "gpt", "KERN, by downstream accuracy")]


def val(run, step):
    """The validation loss of a run at a step; None if it is not there, inf if the run stopped with a loss not finite."""
    try:
        rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    return next((row["loss"] for row in rows if row["kind"] == "val" and row["step"] == step), None)


def rates(run):
    """The rates for Muon and AdamW that a run was made with."""
    options = json.loads((run / "config.json").read_text())["options"]
    return options["muon_lr"], options["adamw_lr"]


def train(args, out, name, seed, muon_lr, adamw_lr, length):
    """One run, in one thread; made again from its beginning if it was cut off or had other rates. Returns its last validation loss."""
    run, length = args.out / out, LENGTHS[length]
    if val(run, length["max_steps"]) is None or rates(run) != (muon_lr, adamw_lr):
        shutil.rmtree(run, ignore_errors=True)
        options = COMMON | length | dict(data=args.data, out=run, seed=seed, muon_lr=muon_lr, adamw_lr=adamw_lr)
        words = [sys.executable, str(TOP / "train.py"), "--model", name.split("-")[0], *MODELS[name], "--compile"]
        words += [str(word) for key, value in options.items() for word in (f"--{key}", value)]
        run.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{run}.txt", "w") as f:
            code = subprocess.call(words, stdout=f, stderr=subprocess.STDOUT, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if code not in (0, 3):                                              # 3: the loss is not finite
            sys.exit(f"{run}: train.py ended with {code}, see {run}.txt")
    loss = val(run, length["max_steps"])
    print(f"{out}  muon_lr {muon_lr:g}  adamw_lr {adamw_lr:g}  val {loss}", flush=True)
    return float("inf") if loss is None else loss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="wiki", help="folder made by data_prep.py, or its name under data/ (wiki)")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="where the runs go (runs/study)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the last stage (3)")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each (2)")
    args = parser.parse_args()
    with ThreadPoolExecutor(args.jobs) as pool:
        def race(tasks):
            return dict(zip(tasks, pool.map(lambda t: train(args, *t), tasks)))

        def short(name, muon_lr, adamw_lr):
            return f"short/{name}-{muon_lr:g}-{adamw_lr:g}", name, TUNING_SEED, muon_lr, adamw_lr, "short"

        losses = race([short("gpt", m, a) for m, a in product(MUON, ADAMW)])
        m, a = min(losses, key=losses.get)[3:5]
        tried = {name: [short(name, m * f, a * g) for f, g in (FACTORS if name in FIRST else FACTORS[:4])] for name in MODELS}
        losses |= race([task for tasks in tried.values() for task in tasks])
        best = {name: min(tasks, key=losses.get)[3:5] for name, tasks in tried.items()}
        race([(f"final/{name}-seed{seed}", name, seed, *best[name], "long") for seed in range(args.seeds) for name in MODELS])
    with open(HERE / "rates.jsonl", "w") as f:
        for (out, name, seed, muon_lr, adamw_lr, _), loss in losses.items():
            row = {"run": out, "model": name, "seed": seed, "muon_lr": muon_lr, "adamw_lr": adamw_lr, "val": loss}
            f.write(json.dumps(row) + "\n")
    finals = [args.out / "final" / f"{name}-seed{seed}" for name in MODELS for seed in range(args.seeds)]
    shutil.rmtree(HERE / "logs", ignore_errors=True)
    for run in finals:
        publish(run, HERE / "logs" / run.name)
    (HERE / "claims.md").write_text(claims([HERE / "logs" / run.name for run in finals]))
    analyze = [sys.executable, str(TOP / "analyze.py")]
    subprocess.run([*analyze, "curves", *(str(HERE.relative_to(TOP) / "logs" / run.name) for run in finals), "--out", str(HERE)], check=True, cwd=TOP)
    subprocess.run([*analyze, "probe", *(str(run) for run in finals if run.name.endswith("seed0")), "--out", str(HERE / "probes")],
                   check=True)


def publish(run, to):
    """What is committed of a run: its configuration without this machine's paths, its validations, every tenth step."""
    to.mkdir(parents=True)
    config = json.loads((run / "config.json").read_text())
    config["command"] = ["python", "train.py", *config["command"][2:]]
    (to / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    kept = [row for row in rows if row["kind"] == "val" or row["step"] % 10 == 0]
    (to / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))


def claims(runs):
    """The papers' orderings of final losses as a Markdown table, each with the paired difference and its 95% interval."""
    sys.path.insert(0, str(TOP))
    from nanodepth import curves
    groups = curves.systems([curves.read_log(run) for run in runs])
    lines = ["| lower loss expected | than | says | difference (95% interval) | here |", "|---|---|---|---|---|"]
    for a, b, source in CLAIMS:
        gap, half = curves.interval(curves.gaps(groups[a], groups[b], curves.curve(groups[a])[-1][0]))
        verdict = "within noise" if abs(gap) <= half else "holds" if gap < 0 else "the opposite"
        lines.append(f"| `{a}` | `{b}` | {source} | {gap:+.4f} ± {half:.4f} | {verdict} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
