"""Damaged files: data, runs, texts and vocabularies, cut off, grown, exchanged; seeded.

    python tests/scripts/fuzz.py --n 1000 --seed 0      counts, and every case that breaks the rule, with its files

The rule: the script ends well (exit code 0, or 3 if a loss is not finite), or prints one line on stderr, exits with 2
and changes no file. Never a traceback, never more than a minute, and no code from a checkpoint is executed.
"""
import argparse
import pickle
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from endurance import prepare
from folders import ranks_file, write_docs
from forked import Scripts
from small import Bomb, flags

import data_prep
import models

SMALL = dict(n_layer=2, d_model=32, n_head=2, d_ff=64, max_len=64, seq_len=16, batch_tokens=64, max_steps=2,
             warmup_steps=1, eval_every=1, eval_tokens=100, device="cpu", dtype="fp32")
SHORT = ["--tokens", "100", "--device", "cpu"]
TEXT = ["data_prep.py", "text", "--out", "new", "--val_frac", "0.2"]
TEXTS = "a.txt a.jsonl a.txt.gz a.txt.xz a.txt.zst a.parquet".split()


def good_folder(folder, scripts):
    """Makes what the cases copy: data, data with its own vocabulary, a finished run on each, and texts.

    Returns {file: the commands that read it}.
    """
    folder.mkdir()
    prepare(folder)
    for name in TEXTS:
        write_docs(folder / name, [f"document {i} of words" for i in range(200)])
    ranks = ranks_file(folder / "ranks", [bytes([i]) for i in range(256)] + [b" of", b" words"])
    data_prep.prepare_text([folder / "a.txt"], folder / "own", str(ranks), val_frac=0.2)
    readers = {name: [[*TEXT, name, "--tokenizer", "byte"]] for name in TEXTS}
    readers["ranks"] = [[*TEXT, "a.txt", "--tokenizer", "ranks"]]
    for data, run, model in (("data", "run", "gpt"), ("own", "run of its own", models.names()[-1])):
        train = ["train.py", *flags(**SMALL, model=model, data=data)]
        done = scripts.run(*train, "--out", run, cwd=folder)
        assert done.returncode == 0, done.stderr
        users = [["train.py", "--resume", run], ["eval.py", run, *SHORT], ["eval.py", run, "--data", data, *SHORT],
                 ["analyze.py", "probe", run, "--out", "new", *SHORT],
                 ["sample.py", run, "--max_new_tokens", "5", "--prompt", "the"]]
        curves = [["analyze.py", "curves", run, "--out", "new"]]
        readers |= {f"{run}/ckpt.pt": users, f"{run}/config.json": users + curves, f"{run}/log.jsonl": curves}
        readers |= {f"{data}/{path.name}": [[*train, "--out", "new"], *users] for path in (folder / data).iterdir()}
    return readers


def spoil(path, rng):
    """Damages a file as disks, networks and people do; says how."""
    if path.name == "ckpt.pt" and rng.random() < 0.5:
        return foreign_checkpoint(path, rng)
    raw = path.read_bytes()
    kind = rng.choice(["cut", "grow", "zeros", "empty", "delete", "another file", "folder"])
    at = rng.randrange(len(raw))
    other = rng.choice([p for p in sorted(path.parent.iterdir()) if p.is_file()]).read_bytes()
    path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind != "delete":
        path.write_bytes({"cut": raw[:at], "grow": raw + rng.randbytes(rng.choice([1, 2, 3, 1000])), "empty": b"",
                          "zeros": raw[:at] + bytes(len(raw) - at), "another file": other}[kind])
    return kind


def foreign_checkpoint(path, rng):
    """Puts something else that torch.load or pickle reads in a checkpoint's place; says what."""
    checkpoint = torch.load(path, weights_only=True)
    kind = rng.choice(["code", "pickled code", "a part", "other", "of another shape"])
    if kind == "pickled code":
        path.write_bytes(pickle.dumps({"model": Bomb()}, protocol=rng.choice([0, 2, 4])))
        return kind
    if kind == "code":
        rng.choice([checkpoint, checkpoint["model"]])["x"] = Bomb()
    elif kind == "a part":
        del checkpoint[rng.choice(sorted(checkpoint))]
    elif kind == "other":
        checkpoint = rng.choice([[], 5, "text", None, torch.zeros(3), {"model": {}}, checkpoint["model"]])
    else:
        name = rng.choice(sorted(checkpoint["model"]))
        checkpoint["model"][name] = checkpoint["model"][name][:1].clone()
    torch.save(checkpoint, path)
    return kind


def tree_of(folder):
    """{path: contents} without the lock files of runs and what is known of shards."""
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")
            if path.name not in (".lock", "shards_index.json")}


def case(rng, readers, folder, scripts):
    """One case in the folder, a copy of the good one. Returns (kind, exit code, None or how it breaks the rule)."""
    file = rng.choice(sorted(readers))
    kind, said, words = Path(file).name, spoil(folder / file, rng), rng.choice(readers[file])
    before = tree_of(folder)
    done = scripts.run(*words, cwd=folder, seconds=60)
    after = tree_of(folder)
    changed = [str(k.relative_to(folder)) for k in before.keys() | after.keys() if before.get(k) != after.get(k)]
    one_line = done.stderr.startswith(f"{words[0]}: error: ") and done.stderr.count("\n") == 1
    broken = [what for what, holds in {
        f"exit code {done.returncode}": done.returncode not in (0, 2, 3),
        "a traceback": "Traceback" in done.stderr + done.stdout,
        "not one line": done.returncode == 2 and not one_line,
        f"files changed: {sorted(changed)[:5]}": done.returncode == 2 and changed,
        "input files changed": any(folder / name in before and not name.startswith("run") and name not in words
                                   for name in changed),
        "CODE WAS EXECUTED": (folder / "code ran").exists()}.items() if holds]
    report = f"{kind}: {said}: {' '.join(words)}\n  {', '.join(broken)}\n  {done.stderr[-1500:]}" if broken else None
    return kind, done.returncode, report


def fuzz(n, seed, folder):
    """Runs n cases; returns ({(kind, exit code): count}, reports of those that break the rule, whose files stay)."""
    good, counts, reports = folder / "good", Counter(), []
    with Scripts() as scripts:
        readers = good_folder(good, scripts)
        for i in range(n):
            here = shutil.copytree(good, folder / f"case-{i}")
            kind, code, report = case(random.Random(f"{seed} {i}"), readers, here, scripts)
            counts[kind, code] += 1
            if report:
                reports.append(f"case {i}, {report}")
            else:
                shutil.rmtree(here)
    return counts, reports


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1000, help="cases [%(default)s]")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    counts, reports = fuzz(args.n, args.seed, folder)
    for (kind, code), n in sorted(counts.items(), key=str):
        print(f"{n:5d}  {kind}, exit code {code}")
    print(*reports, sep="\n")
    print(f"{args.n} inputs, {len(reports)} broke the rule{f'; their files are in {folder}' if reports else ''}")
    if not reports:
        shutil.rmtree(folder)
    sys.exit(bool(reports))
