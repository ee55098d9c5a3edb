"""The study of this folder: python results/study-cpu/study.py --data wiki     (from the repository's top, hours on 2 cores)

Three stages, all with the same data, batches and steps; runs that are done are not repeated, so it can be interrupted.
    search  gpt alone, 3 x 3 rates for Muon and AdamW, short runs: the centre of the next stage
    tune    every model at 1/2, 1 and 2 times the centre, short runs, a seed of its own
    final   every model at its best rates, long runs, several seeds
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

TOP = Path(__file__).resolve().parents[2]
MODELS = {
    "gpt": [], "gpt-gated": ["--gate", "elementwise"], "resformer": [], "exoformer": [], "satformer": [], "muddformer": [],
    "attnres": []}                                                          # name in the tables: options
COMMON = dict(n_layer=8, d_model=128, n_head=4, max_len=256, seq_len=256, batch_tokens=2048, warmup_steps=30,
              eval_tokens=65536)
SHORT, LONG = dict(max_steps=240, eval_every=240, save_every=240), dict(max_steps=640, eval_every=80, save_every=640)
MUON, ADAMW, FACTORS = (0.0025, 0.005, 0.01), (0.006, 0.012, 0.024), (0.5, 1, 2)
TUNING_SEED = 100


def val(run, step):
    """The validation loss of a run at a step; None if it is not there, inf if the run stopped with a loss not finite."""
    try:
        rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    return next((row["loss"] for row in rows if row["kind"] == "val" and row["step"] == step), None)


def train(args, out, name, seed, muon_lr, adamw_lr, length):
    """One run, in one thread; made again from its beginning if it was cut off. Returns its last validation loss."""
    run = args.out / out
    if val(run, length["max_steps"]) is None:
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

        grid = race([(f"search/{m:g}-{a:g}", "gpt", TUNING_SEED, m, a, Frozen(SHORT)) for m, a in product(MUON, ADAMW)])
        centre = min(grid, key=grid.get)[3:5]
        grid = race([(f"tune/{name}-{f:g}", name, TUNING_SEED, f * centre[0], f * centre[1], Frozen(SHORT))
                     for name in MODELS for f in FACTORS])
        best = {name: min((t for t in grid if t[1] == name), key=grid.get)[3:5] for name in MODELS}
        race([(f"final/{name}-seed{seed}", name, seed, *best[name], Frozen(LONG)) for seed in range(args.seeds) for name in MODELS])


class Frozen(dict):
    """A dict that may stand in a key."""

    def __hash__(self):
        return hash(tuple(self.items()))


if __name__ == "__main__":
    main()
