"""Which learning rates suit 30M parameters? python results/study-30m/rates.py --data prose --out runs/rates30m

Short runs of gpt at several rates of Muon and AdamW, and of muddformer at several rates of its mixing parameters, all
at the same time on one GPU. Writes OUT/rates.csv, and prints the factors by which study.py should multiply its rates:
of the tries within 0.01 of the lowest loss those of the lowest rates, since longer runs want lower ones. A finished
try is not repeated.
"""
import argparse
import math
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "study"), str(HERE.parent)]
from publish import final_loss  # noqa: E402
from study import SYSTEMS, ended, forked  # noqa: E402

import train  # noqa: E402

FACTORS = {  # system: (factors of muon_lr, adamw_lr and mix_lr in study.py's list) of each try
    "gpt": [(muon, adamw, 1) for muon in (1, 2) for adamw in (2, 1, 0.5, 0.25)] + [(4, 1, 1), (4, 0.5, 1)],
    "muddformer": [(1, 0.5, mix) for mix in (1, 0.5, 0.25)]}


def run(folder, words):
    """Trains in a process of its own, whose output goes to FOLDER.txt."""
    with open(f"{folder}.txt", "a") as f:
        os.dup2(f.fileno(), 1), os.dup2(f.fileno(), 2)
    return train.main(words)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder made by data_prep.py")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--jobs", type=int, default=13, help="runs at the same time (%(default)s)")
    args, options = parser.parse_known_args()                               # further options go to train.py
    args.out.mkdir(parents=True, exist_ok=True)
    tries, jobs = {}, []
    for system, factors in FACTORS.items():
        for each in factors:
            rates = [rate * factor for rate, factor in zip(SYSTEMS[system][1], each)]
            folder = args.out / f"{system}-{'-'.join(f'{factor:g}' for factor in each)}"
            tries[folder] = system, each, rates
            if final_loss(folder) < math.inf:
                continue
            words = dict(zip(("muon_lr", "adamw_lr", "mix_lr"), rates), model=system, data=args.data, out=folder)
            words = [str(word) for name, x in words.items() for word in (f"--{name}", x)]
            flags = "--preset study-30m --max_steps 150 --warmup_steps 40 --eval_every 50 --save_every 1000"
            if len(jobs) >= args.jobs:
                ended(jobs.pop(0))
            jobs.append(forked(run, folder, [*flags.split(), *words, *options]))
    for job in jobs:
        ended(job)
    losses = {folder: final_loss(folder) for folder in tries}
    rows = ["system,muon_lr,adamw_lr,mix_lr,loss"]
    rows += [",".join(map(str, (system, *(round(rate, 6) for rate in rates), round(losses[folder], 4))))
             for folder, (system, _, rates) in tries.items()]
    (args.out / "rates.csv").write_text("\n".join(rows) + "\n")
    print("\n".join(rows))
    best = {}
    for system in FACTORS:
        found = [(losses[folder], each) for folder, (name, each, _) in tries.items() if name == system]
        if (least := min(found)[0]) == math.inf:
            sys.exit(f"no try of {system} has ended: see {args.out}")
        best[system] = min((each for loss, each in found if loss < least + 0.01), key=math.prod)
    factors = (*best["gpt"][:2], best["muddformer"][2])
    (args.out / "factors").write_text(" ".join(map(str, factors)))
    print("factors", *factors)


if __name__ == "__main__":
    main()
