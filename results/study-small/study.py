"""The study of this folder: python results/study-small/study.py --data wiki     (from the top folder, hours on 2 cores)

Three stages, all with the same data and batches; runs that are done are not repeated, so it can be interrupted.
    search  gpt alone, 3 x 3 rates for Muon and AdamW, short runs: the centre of the next stage
    tune    every model at the pairs of rates around the centre in FACTORS, short runs; models after FIRST skip the last
    final   every model at its best rates, long runs, several seeds, none of them that of the short runs
Then the logs are copied here, and analyze.py makes the curves of all and the probes of seed 0.
"""
import argparse
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
import publish  # noqa: E402

MODELS = {name.replace(" --gate elementwise", "-gated"): name for name in (     # name in the tables: model and options
    "gpt", "gpt --gate elementwise", "resformer", "exoformer", "satformer", "muddformer", "attnres", "denseformer",
    "hyperconnections", "geonorm", "dape", "sas", "sambay", "kern", "gpt3", "pythia", "muddpythia")}
FIRST = list(MODELS)[:7]
COMMON = dict(n_layer=8, d_model=128, n_head=4, max_len=256, seq_len=256, batch_tokens=2048, warmup_steps=30,
              eval_tokens=65536)
SHORT, LONG = (dict(max_steps=n, eval_every=every, save_every=n) for n, every in ((240, 240), (480, 80)))
MUON, ADAMW = (0.0025, 0.005, 0.01), (0.006, 0.012, 0.024)
FACTORS = ((0.5, 0.5), (1, 1), (1, 0.5), (1, 0.25), (2, 2))                 # of the centre's rates for Muon and AdamW
TUNING_SEED = 100
CLAIMS = [  # (what should have the lower loss, than what, says who)
    ("gpt gate=elementwise", "gpt", "ExoFormer, table 1"),
    ("resformer", "gpt", "ExoFormer, table 1; SATFormer, table 5"),
    ("satformer", "gpt", "SATFormer, table 5"), ("satformer", "resformer", "SATFormer, section 4.3, at every scale"),
    ("exoformer", "gpt gate=elementwise", "ExoFormer, table 1"), ("exoformer", "resformer", "ExoFormer, table 1"),
    ("muddformer", "gpt", "MUDDFormer, figure 3"), ("muddformer", "resformer", "SATFormer, table 5 (Wikitext)"),
    ("satformer", "muddformer", "SATFormer, table 5 (Wikitext), at 130M; at 760M the opposite"),
    ("attnres", "gpt", "Attention Residuals"),
    ("attnres", "denseformer", "Attention Residuals, ablations"), ("denseformer", "gpt", "MUDDFormer, figure 3"),
    ("hyperconnections", "gpt", "MUDDFormer, figure 3"), ("muddformer", "denseformer", "MUDDFormer, figure 3"),
    ("muddformer", "hyperconnections", "MUDDFormer, figure 3"), ("muddpythia", "pythia", "MUDDFormer, table 3"),
    ("gpt", "gpt3", "MUDDFormer, figure 3"), ("geonorm", "gpt", "GeoNorm"), ("dape", "gpt", "DAPE V2"),
    ("sas", "gpt", "SAS"), ("sambay", "gpt", "SambaY"), ("kern", "gpt", "KERN, by downstream accuracy")]


def train(args, out, name, seed, muon_lr, adamw_lr, length):
    loss = publish.train(args.out / out, *MODELS[name].split(), **COMMON, **length, data=args.data, seed=seed,
                         muon_lr=muon_lr, adamw_lr=adamw_lr)
    print(f"{out}  val {loss:.4f}", flush=True)
    return loss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="wiki", help="folder made by data_prep.py, or its name under data/ (wiki)")
    parser.add_argument("--out", type=Path, default=Path("runs/study"), help="where the runs go (runs/study)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the last stage (3)")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one thread each (2)")
    args = parser.parse_args()
    args.out = args.out.resolve()
    with ThreadPoolExecutor(args.jobs) as pool:
        def losses_of(runs):
            """{(name, muon_lr, adamw_lr): loss} of short runs."""
            tasks = [(f"short/{name}-{m:g}-{a:g}", name, TUNING_SEED, m, a, SHORT) for name, m, a in runs]
            return dict(zip(runs, pool.map(lambda task: train(args, *task), tasks)))

        losses = losses_of([("gpt", m, a) for m, a in product(MUON, ADAMW)])
        _, m, a = min(losses, key=losses.get)
        tried = {name: [(name, m * f, a * g) for f, g in FACTORS[:5 if name in FIRST else 4]] for name in MODELS}
        losses |= losses_of([run for runs in tried.values() for run in runs])
        best = {name: min(runs, key=losses.get)[1:] for name, runs in tried.items()}
        finals = {f"{name}-seed{seed}": ("final/{:g}-{:g}/".format(*best[name]) + f"{name}-seed{seed}", name, seed)
                  for seed in range(args.seeds) for name in MODELS}
        list(pool.map(lambda task: train(args, *task, *best[task[1]], LONG), finals.values()))
    with open(HERE / "rates.jsonl", "w") as f:
        for (name, m, a), loss in losses.items():
            row = {"run": f"short/{name}-{m:g}-{a:g}", "model": name, "seed": TUNING_SEED, "muon_lr": m, "adamw_lr": a}
            f.write(json.dumps(row | {"val": loss}) + "\n")
    shutil.rmtree(HERE / "logs", ignore_errors=True)
    for label, (out, *_) in finals.items():
        publish.publish(args.out / out, HERE / "logs" / label, f"runs/study/{out}")
    logs = [f"{HERE.relative_to(publish.TOP)}/logs/{name}-seed{seed}" for name in MODELS for seed in range(args.seeds)]
    (HERE / "claims.md").write_text(claims([publish.TOP / log for log in logs]))
    probed = [args.out / out for label, (out, *_) in finals.items() if label.endswith("seed0")]
    for words in (["curves", *logs, "--out", HERE], ["probe", *probed, "--out", HERE / "probes"]):
        if publish.script(args.out / "analyze.txt", "analyze.py", *words):
            sys.exit(f"analyze.py failed, see {args.out}/analyze.txt")


def claims(runs):
    """The papers' orderings of final losses as a Markdown table, with paired differences and 95% intervals."""
    sys.path.insert(0, str(publish.TOP))
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
