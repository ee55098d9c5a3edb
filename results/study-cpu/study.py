"""The study of this folder, run by run: python results/study-cpu/study.py --data wiki     (about 40 hours of one core)

    tune    every system at six triples of rates, a quarter of the length, with a seed of their own
    main    every system at its best rates, --seeds seeds
    length  gpt at other lengths, each with a schedule of its own: how many tokens is an idea worth?
    half    gpt and muddformer at half of these rates: is a quarter of the length enough to choose them?
    depth   some systems and gpt with 6 and 24 layers
    plain   the papers' plain recipe: no QK norm, no zero init, AdamW, cosine, one rate, of which the better counts

One run at a time, in one thread. It may be killed at any moment: a run goes on from its last checkpoint. The log of a
finished run is copied to --logs, and what is there is not run again. --stages chooses, and with --systems several
queues can share the work. Other data or another length need logs of their own, with gpt's runs again:

    python results/study-cpu/study.py --data stdlib --logs runs/mine/logs --systems gpt mine --steps 200 --stages main
    python results/study-cpu/report.py runs/mine/logs
"""
import argparse
import json
import math
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import publish  # noqa: E402

import data_prep  # noqa: E402
import models  # noqa: E402
import muon  # noqa: E402
from nanodepth.cli import UserError  # noqa: E402
from train import parse  # noqa: E402

SYSTEMS = {  # name in the tables: model and its options
    "gpt": "gpt", "gpt-gated": "gpt --gate elementwise", "resformer": "resformer", "exoformer": "exoformer",
    "exoformer-dynamic": "exoformer_dynamic", "exoformer-no-norm": "exoformer --norms none",
    "satformer": "satformer", "muddformer": "muddformer", "attnres": "attnres", "denseformer": "denseformer",
    "hyperconnections": "hyperconnections", "hyperconnections-manifold": "mhc",
    "speedrun": "speedrun", "muddformer-trimmed": "muddformer_ablations --last_k 2 --streams vr",
    "attnres-additive": "attnres_delta", "hyperconnections-lite": "mhc_lite",
    "cla": "cla", "kern": "kern", "kern-softmax": "kern --router softmax", "muddmoe": "muddmoe"}
STRONG_ONLY = ("speedrun", "muddformer-trimmed", "attnres-additive", "hyperconnections-lite", "cla", "kern",
               "kern-softmax", "muddmoe")
DEEP = ("gpt", "satformer", "denseformer", "attnres", "muddformer")
STEPS, SEEDS, TUNING_SEED = 1000, 3, 100
RATES = ((0.005, 0.024, 0.002), (0.01, 0.024, 0.002), (0.005, 0.012, 0.002), (0.005, 0.048, 0.002))  # muon, adamw, mix
THEN = {True: ((1, 1, 0.25), (1, 1, 4)),                        # factors of the best: of systems that train something
        False: ((0.7, 1, 1), (1.4, 1, 1))}                      # at mix_lr, and of the others
PLAIN = "--no-qk_norm --no-zero_init --optimizer adamw --schedule cosine --mix_lr none"
PLAIN_RATES = (0.002, 0.004)                                    # AdamW's, for all parameters
STAGES = ("main", "length", "half", "depth", "plain")


@dataclass
class Run:
    name: str                                                   # folder under runs/study and under logs/
    system: str
    seed: int
    rates: tuple                                                # muon_lr, adamw_lr, mix_lr; plain recipe: adamw_lr
    part: float = 1                                             # of the length
    more: dict = field(default_factory=dict)                    # further options


def train(run, args):
    """The final loss of a run, which is made, or finished, if it has not been."""
    logs, folder, steps = args.logs / run.name, args.out / run.name, round(run.part * args.steps)
    if publish.final_loss(logs) is not None:
        there = json.loads((logs / "config.json").read_text())
        if (there["data"]["fingerprint"], there["options"]["max_steps"]) != (args.fingerprint, steps):
            sys.exit(f"{logs} is of other data than {args.data}, or not of {steps} steps: name another --logs")
    else:
        plain = len(run.rates) == 1
        rates = dict(zip(("adamw_lr",) if plain else ("muon_lr", "adamw_lr", "mix_lr"), run.rates))
        words = [*SYSTEMS.get(run.system, run.system).split(), "--preset", "study", *(PLAIN.split() if plain else ())]
        publish.train(folder, *words, data=args.data, seed=run.seed, max_steps=steps, eval_every=max(1, steps // 4),
                      **rates, **run.more)
        publish.publish(folder, logs, f"runs/study/{run.name}", f"data/{Path(args.data).name}")
    loss = publish.final_loss(logs)
    if run.seed != TUNING_SEED and math.isfinite(loss) and not (logs / "copying.json").exists() \
            and (folder / "ckpt.pt").exists():
        publish.runs.write_text(logs / "copying.json", json.dumps(publish.copying(folder)) + "\n")
    print(f"{run.name}  rates {run.rates}  val {loss:.4f}", flush=True)
    return loss


def mixes(system):
    """Whether a system has a parameter that is trained at mix_lr."""
    options, config, _ = parse(["--model", *SYSTEMS.get(system, system).split(), "--preset", "study"])
    with torch.device("meta"):
        return bool(muon.mixes(models.build(options.model, **config)))


def best_rates(system, args):
    """The triple of rates with the lowest loss after a quarter of the steps, of as many tries as every system has."""
    def loss(rates):
        name = f"tune-{system}-" + "-".join(f"{x:g}" for x in rates)
        return train(Run(name, system, TUNING_SEED, rates, 0.25), args)

    first = min(RATES, key=loss)
    then = [tuple(round(x * f, 6) for x, f in zip(first, factors)) for factors in THEN[mixes(system)]]
    return min([first, *then], key=loss)


def plain_run(system, seed, rate):
    return Run(f"plain-{system}-{rate:g}-seed{seed}", system, seed, (rate,))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="wiki", help="folder made by data_prep.py, or its name under data/ (wiki)")
    parser.add_argument("--logs", type=Path, default=HERE / "logs", help="logs of finished runs (those of this folder)")
    parser.add_argument("--out", type=Path, help="where the runs go (runs/study, or beside --logs)")
    parser.add_argument("--steps", type=int, default=STEPS, help="of a main run (%(default)s)")
    parser.add_argument("--stages", nargs="+", default=STAGES, choices=("tune", *STAGES), metavar="STAGE",
                        help=f"{' '.join(STAGES)} (all, in this order), each after tune; or tune alone")
    parser.add_argument("--seeds", type=int, default=SEEDS,
                        help="of the main and length runs (%(default)s); at most 2 of the others")
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=[*SYSTEMS, *models.names()],
                        metavar="SYSTEM", help=f"{' '.join(SYSTEMS)} (all), or any other model")
    args = parser.parse_args()
    args.logs = args.logs.resolve()
    args.out = (args.out or (Path("runs") if args.logs == HERE / "logs" else args.logs.parent) / "study").resolve()
    try:
        args.fingerprint = publish.data.Data(publish.data.find_folder(args.data)).fingerprint
    except UserError as e:
        parser.error(str(e))
    best = {system: best_rates(system, args) for system in args.systems}
    if "main" in args.stages:
        for seed in range(args.seeds):
            for system in args.systems:
                train(Run(f"{system}-seed{seed}", system, seed, best[system]), args)
    if "length" in args.stages and "gpt" in args.systems:
        for seed in range(args.seeds):
            for part in (0.5, 1.5, 2):
                train(Run(f"gpt-{round(part * args.steps)}-seed{seed}", "gpt", seed, best["gpt"], part), args)
    if "half" in args.stages:
        for system in (x for x in ("gpt", "muddformer") if x in args.systems):
            train(Run(f"{system}-half-seed0", system, 0, tuple(x / 2 for x in best[system])), args)
    if "depth" in args.stages:
        for seed in range(min(2, args.seeds)):
            for n_layer in (6, 24):
                for system in (x for x in DEEP if x in args.systems):
                    name = f"{system}-layers{n_layer}-seed{seed}"
                    train(Run(name, system, seed, best[system], more=dict(n_layer=n_layer)), args)
    if "plain" in args.stages:
        for system in (x for x in args.systems if x not in STRONG_ONLY):
            rate = min(PLAIN_RATES, key=lambda rate: train(plain_run(system, 0, rate), args))
            for seed in range(1, min(2, args.seeds)):
                train(plain_run(system, seed, rate), args)


if __name__ == "__main__":
    main()
