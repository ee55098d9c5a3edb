"""Reasoning depth: how many arrows does each model learn to follow?     python results/reasoning-depth/hops.py (hours)

The task is Depo of "Physics of Language Models: Part 4.1" (arXiv:2512.17351). A document is a random cycle of N nodes,
its arrows in random order, then questions: at which node do you arrive if you follow k arrows from node q?

    end-of-text  x1 y1 ... xN yN  k q answer  k q answer ...

All systems get the same shape, data, steps and rates. The score is the percent of right answers per k on unseen
documents. Only a document's first question for each k counts: later answers may be copied. Runs go one after another,
in one thread. You may kill it at any moment: a run with a line in runs.csv is kept. Writes the table in README.md.
"""
import argparse
import csv
import sys
from pathlib import Path
from statistics import mean

import numpy as np
import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
import publish  # noqa: E402

from nanodepth import runs  # noqa: E402
from nanodepth.devices import autocast  # noqa: E402
from nanodepth.shards import Writer, finish_folder  # noqa: E402
from nanodepth.tokenizers import load_tokenizer, token_bytes  # noqa: E402

SYSTEMS = "gpt", "resformer", "muddformer", "denseformer", "attnres"
NODES, HOPS, QUESTIONS = 4, 2, 24
SHAPE = dict(n_layer=4, max_steps=1200, muon_lr=0.007, adamw_lr=0.01, eval_every=100, eval_tokens=65536)
COLUMNS = ["run", "system", "seed", *(f"k={k}" for k in range(1, HOPS + 1)), "loss"]
EOT = 256                                       # of the tokenizer "byte"; 0 ... 127: nodes, 128 + k: the question for k


def document(rng):
    """A random document, int64 (1 + 2 NODES + 3 QUESTIONS,)."""
    cycle = rng.permutation(128)[:NODES]                                        # an arrow: cycle[i] to cycle[i + 1]
    arrows = rng.permutation(np.stack((cycle, np.roll(cycle, -1)), axis=1))
    k, at = rng.integers(1, HOPS + 1, QUESTIONS), rng.integers(NODES, size=QUESTIONS)
    questions = np.stack((128 + k, cycle[at], cycle[(at + k) % NODES]), axis=1)
    return np.concatenate(([EOT], arrows.ravel(), questions.ravel()))


def prepare(folder, n_tokens=8_000_000):
    """Writes the task as a data folder."""
    folder.mkdir(parents=True, exist_ok=True)
    widths, writers = token_bytes(load_tokenizer("byte")), {}
    for seed, (split, amount) in enumerate((("train", n_tokens), ("val", n_tokens // 40))):
        writers[split] = writer = Writer(folder, split, 2**24, widths)
        rng = np.random.default_rng((HOPS, seed))
        while writer.tokens < amount:
            writer.add(document(rng))
    finish_folder(folder, "byte", widths, writers, f"cycles of {NODES} nodes")


@torch.inference_mode()
def score(run, n_documents=2048):
    """Percent of documents whose first question for k is answered correctly, for k = 1 ... HOPS."""
    model, config = runs.load(run, torch.device("cpu"))
    rng = np.random.default_rng((HOPS, 2))
    tokens = torch.from_numpy(np.stack([document(rng) for _ in range(n_documents)]))
    k, _, answers = tokens[:, 1 + 2 * NODES:].unflatten(1, (QUESTIONS, 3)).unbind(-1)
    with autocast(torch.device("cpu"), config["options"]["dtype"]):
        guesses = torch.cat([model(part[:, :-1])[0].argmax(-1) for part in tokens.split(32)])
    right = (guesses[:, 2 + 2 * NODES::3] == answers).double()
    asked = [k == 128 + i for i in range(1, HOPS + 1)]
    first = [of_k & (of_k.cumsum(1) == 1) for of_k in asked]
    return [round(100 * right[at].mean().item(), 1) for at in first]


def table(lines):
    """One row per system: the mean over its seeds, and each seed."""
    rows = []
    for system in dict.fromkeys(line["system"] for line in lines):
        mine = [line for line in lines if line["system"] == system]
        right = {k: [float(line[k]) for line in mine] for k in COLUMNS[3:-1]}
        cells = [f"{mean(values):.1f} ({', '.join(f'{x:.0f}' for x in values)})" for values in right.values()]
        rows.append([f"`{system}`", str(len(mine)), *cells, f"{mean(float(line['loss']) for line in mine):.3f}"])
    return publish.markdown(["system", "seeds", *(k.replace("=", " = ") for k in right), "final loss"], rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/hops"), help="folder for data and runs (runs/hops)")
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds per system (3)")
    args = parser.parse_args()
    out, kept = args.out.resolve(), HERE / "runs.csv"
    if not (out / "data" / "meta.json").exists():
        prepare(out / "data")
    lines = list(csv.DictReader(kept.open()))
    for seed in range(args.seeds):
        for system in SYSTEMS:
            run = out / f"{system}-seed{seed}"
            if run.name in (line["run"] for line in lines):
                continue
            loss = publish.train(run, system, preset="study", data=out / "data", seed=seed, **SHAPE)
            lines.append(dict(zip(COLUMNS, (run.name, system, seed, *score(run), loss))))
            with kept.open("w") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(lines)
            publish.fill(HERE / "README.md", table=table(lines))


if __name__ == "__main__":
    main()
