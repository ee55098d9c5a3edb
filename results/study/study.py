"""The study of this folder, run by run: python results/study/study.py --data wiki      (from the top folder; about a day of one core)

    tune    every system at TRIES triples of rates, a quarter of the length, with a seed of their own
    main    every system at its best rates, SEEDS seeds
    length  gpt at other lengths, each with a schedule of its own: how many tokens is an idea worth?
    depth   some systems and gpt with 6 and 24 layers
    plain   the papers' plain recipe: no QK norm, no zero init, AdamW, cosine, one rate; tuned and run as above

One run at a time, in one thread. It may be killed at any moment: a run goes on from its last checkpoint. The log of a
finished run is copied to logs/, and what is there is not run again. --stages chooses.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]
SYSTEMS = {  # name in the tables: model and its options
    "gpt": "gpt", "gpt-gated": "gpt --gate elementwise", "resformer": "resformer", "exoformer": "exoformer",
    "exoformer-dynamic": "exoformer --mixing dynamic", "satformer": "satformer", "muddformer": "muddformer", "attnres": "attnres",
    "denseformer": "denseformer", "hyperconnections": "hyperconnections", "hyperconnections-manifold": "hyperconnections --connection manifold"}
MIXES_NOTHING = ("gpt", "gpt-gated", "satformer")               # no parameter is trained at mix_lr
DEEP = ("gpt", "satformer", "denseformer", "attnres", "muddformer")
STEPS, SEEDS, TUNING_SEED = 1000, 3, 100
RATES = ((0.005, 0.024, 0.002), (0.01, 0.024, 0.002), (0.005, 0.012, 0.002), (0.005, 0.048, 0.002))     # muon, adamw, mix
THEN = {True: ((1, 1, 0.25), (1, 1, 4)), False: ((0.7, 1, 1), (1.4, 1, 1))}        # factors of the best: mixes something, or not
PLAIN = "--no-qk_norm --no-zero_init --optimizer adamw --schedule cosine"
PLAIN_RATES = (0.001, 0.002, 0.004)                             # AdamW's, for all parameters


@dataclass
class Run:
    name: str                                                   # folder under runs/study and under logs/
    system: str
    seed: int
    rates: tuple                                                # muon_lr, adamw_lr, mix_lr; or adamw_lr alone for the plain recipe
    steps: int = STEPS
    more: dict = field(default_factory=dict)                    # further options

    def command(self, args):
        model, *options = SYSTEMS[self.system].split()
        rates = zip(("muon_lr", "adamw_lr", "mix_lr") if len(self.rates) == 3 else ("adamw_lr",), self.rates)
        given = dict(data=args.data, out=args.out / self.name, seed=self.seed, max_steps=self.steps, eval_every=self.steps // 4, **dict(rates), **self.more)
        options += [word for key, value in given.items() for word in (f"--{key}", str(value))]
        if len(self.rates) == 1:
            options += [*PLAIN.split(), "--mix_lr", "none"]
        return [sys.executable, str(TOP / "train.py"), "--model", model, "--preset", "study", "--compile", *options]


def final_loss(folder):
    """The last validation loss of a published run; None if there is none, inf if it stopped with a loss that is not finite."""
    if not (folder / "log.jsonl").exists():
        return None
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    steps = json.loads((folder / "config.json").read_text())["options"]["max_steps"]
    return next((row["loss"] for row in rows if row["kind"] == "val" and row["step"] == steps), float("inf"))


def train(run, args):
    """The final loss of a run, which is made, or finished, if it has not been."""
    logs, folder = HERE / "logs" / run.name, args.out / run.name
    if final_loss(logs) is None:
        words = run.command(args)
        if (folder / "ckpt.pt").exists():
            words = [*words[:2], "--resume", str(folder)]
        else:
            shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{folder}.txt", "a") as f:
            code = subprocess.call(words, stdout=f, stderr=subprocess.STDOUT, cwd=TOP, env=os.environ | {"OMP_NUM_THREADS": "1"})
        if code not in (0, 3):                                  # 3: the loss is not finite
            sys.exit(f"{folder}: train.py ended with {code}, see {folder}.txt")
        publish(folder, logs)
    loss = final_loss(logs)
    print(f"{run.name}  rates {run.rates}  val {loss:.4f}", flush=True)
    return loss


def publish(run, to):
    """What is committed of a run: its configuration without this machine's paths, its validations, every tenth step."""
    config = json.loads((run / "config.json").read_text())
    config["command"] = ["python", "train.py", *config["command"][2:]]
    text = json.dumps(config, indent=1)
    for path, name in ((config["data"]["path"], "data/wiki"), (config["options"]["out"], f"runs/study/{to.name}")):
        text = text.replace(path, name)
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    kept = [row for row in rows if row["kind"] == "val" or row["step"] % 10 == 0]
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    (to / "config.json").write_text(text + "\n")
    (to / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in kept))


def best_rates(system, args, plain=False):
    """The triple of rates with the lowest loss after a quarter of the steps, of as many tries as every system has."""
    def loss(rates):
        name = f"tune-{'plain-' if plain else ''}{system}-" + "-".join(f"{x:g}" for x in rates)
        return train(Run(name, system, TUNING_SEED, rates, STEPS // 4), args)

    if plain:
        return min([(x,) for x in PLAIN_RATES], key=loss)
    first = min(RATES, key=loss)
    then = [tuple(round(x * f, 6) for x, f in zip(first, factors)) for factors in THEN[system not in MIXES_NOTHING]]
    return min([first, *then], key=loss)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="wiki", help="folder made by data_prep.py, or its name under data/ (wiki)")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="where the runs go (runs/study)")
    parser.add_argument("--stages", nargs="+", default=["main", "length", "depth", "plain"], help="main length depth plain (all, in this order)")
    args = parser.parse_args()
    args.out = args.out.resolve()
    best = {system: best_rates(system, args) for system in SYSTEMS}
    if "main" in args.stages:
        for seed in range(SEEDS):
            for system in SYSTEMS:
                train(Run(f"{system}-seed{seed}", system, seed, best[system]), args)
    if "length" in args.stages:
        for seed in range(SEEDS):
            for steps in (STEPS // 2, 3 * STEPS // 2, 2 * STEPS):
                train(Run(f"gpt-{steps}-seed{seed}", "gpt", seed, best["gpt"], steps), args)
    if "depth" in args.stages:
        for seed in range(2):
            for n_layer in (6, 24):
                for system in DEEP:
                    train(Run(f"{system}-layers{n_layer}-seed{seed}", system, seed, best[system], more=dict(n_layer=n_layer)), args)
    if "plain" in args.stages:
        rates = {system: best_rates(system, args, plain=True) for system in SYSTEMS}
        for seed in range(2):
            for system in SYSTEMS:
                train(Run(f"plain-{system}-seed{seed}", system, seed, rates[system]), args)


if __name__ == "__main__":
    main()
