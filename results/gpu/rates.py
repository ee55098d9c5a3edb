"""Which learning rates suit 30M parameters? python results/gpu/rates.py --data prose --results runs/rates30m

Short runs of gpt at several rates of Muon and AdamW, and of muddformer at several rates of its mixing parameters, all
at the same time on one GPU, by study.py, whose options it takes. Prints the factors by which study.py should multiply
its rates: of the tries within 0.01 of the lowest loss those of the lowest rates, since longer runs want lower ones.
"""
import math
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "study"), str(HERE.parent)]
import study  # noqa: E402
from compare import table  # noqa: E402

from nanodepth.cli import Parser, UserError, run_script  # noqa: E402

FACTORS = {  # system: (factors of muon_lr, adamw_lr and mix_lr in study.py's list) of each try
    "gpt": [(muon, adamw, 1) for muon in (1, 2) for adamw in (2, 1, 0.5, 0.25)] + [(4, 1, 1), (4, 0.5, 1)],
    "muddformer": [(1, 0.5, mix) for mix in (1, 0.5, 0.25)]}
FLAGS = ("--preset study-30m --dtype auto --scales 1 --seeds 1 --steps 150 --warmup_steps 40 --save_every 1000 "
         "--jobs 13 --micro_batch 8 --systems")                         # 32 would take 13 x 9 GiB


def main(argv):
    parser = Parser("rates.py", description=__doc__)
    parser.add_argument("--results", type=Path, required=True, help="folder for runs.csv, logs.jsonl.xz and the runs")
    folder = parser.parse_known_args(argv)[0].results
    tries = {f"{system}-{'-'.join(map(str, each))}": (system, each) for system in FACTORS for each in FACTORS[system]}
    for name, (system, each) in tries.items():
        study.SYSTEMS[name] = system, tuple(rate * factor for rate, factor in zip(study.SYSTEMS[system][1], each))
    code, best = study.main([*FLAGS.split(), *tries, *argv]), {}
    runs = [run for run in table(folder / "runs.csv") if run["system"] in tries]
    for system in FACTORS:
        found = [(run["loss"], tries[run["system"]][1]) for run in runs if tries[run["system"]][0] == system]
        if (least := min((loss for loss, _ in found), default=math.inf)) == math.inf:
            raise UserError(f"no try of {system} has ended: see {folder}", code or 1)
        best[system] = min((math.prod(each), loss, each) for loss, each in found if loss < least + 0.01)[2]
    factors = (*best["gpt"][:2], best["muddformer"][2])
    (folder / "factors").write_text(" ".join(map(str, factors)))
    print("factors", *factors)
    return code                                             # of tries that have failed


if __name__ == "__main__":
    run_script("rates.py", main)
