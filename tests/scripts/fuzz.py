"""Damaged files and random flags: data, runs, texts and vocabularies, cut off, grown, exchanged; seeded.

The rule: the script ends well (exit code 0, or 3 if a loss is not finite), or prints one line on stderr, exits with 2
and changes no file. Never a traceback, never more than a minute, and no code from a checkpoint is executed.
"""
import pickle
import random
import shutil
from dataclasses import fields

import data_prep
import models
import small
import train
from folders import ranks_file, write_docs

SMALL = {**small.SMALL, "batch_tokens": 64, "max_steps": 2, "warmup_steps": 1, "eval_every": 1, "eval_tokens": 100}
SHORT = ["--tokens", "100", "--device", "cpu"]
TEXTS = "a.txt a.jsonl a.txt.gz a.txt.xz a.txt.zst a.parquet".split()
WORDS = ["", "0", "-1", "2.5", "nan", "1e30", "true", "none", "x", "--", "\udcff", "data", "run", "a.txt"]


def good_folder(folder, scripts):
    """Makes what the cases copy: data with its own vocabulary, a finished run, texts -> {file: commands that read it}.
    """
    folder.mkdir()
    for name in TEXTS:
        write_docs(folder / name, [f"document {i} of words" for i in range(200)])
    ranks = ranks_file(folder / "ranks", [bytes([i]) for i in range(256)] + [b" of", b" words"])
    data_prep.prepare_text([folder / "a.txt"], folder / "data", str(ranks), val_frac=0.2)
    new = ["train.py", *small.flags(**SMALL, model=models.names()[-1], data="data")]
    assert scripts.run(*new, "--out", "run", cwd=folder).returncode == 0
    text = ["data_prep.py", "text", "--out", "new", "--val_frac", "0.2"]
    readers = {name: [[*text, name, "--tokenizer", "byte"]] for name in TEXTS}
    readers["ranks"] = [[*text, "a.txt", "--tokenizer", "ranks"]]
    users = [["train.py", "--resume", "run"], ["eval.py", "run", *SHORT],
             ["analyze.py", "probe", "run", "--out", "new", *SHORT], ["sample.py", "run", "--max_new_tokens", "5"]]
    curves = ["analyze.py", "curves", "run", "--out", "new"]
    readers |= {"run/ckpt.pt": users, "run/config.json": [*users, curves], "run/log.jsonl": [curves]}
    return readers | {f"data/{path.name}": [[*new, "--out", "new"], *users] for path in (folder / "data").iterdir()}


def spoil(path, rng):
    """Damages a file as disks, networks and people do; says how."""
    raw, other = path.read_bytes(), rng.choice([p for p in sorted(path.parent.iterdir()) if p.is_file()]).read_bytes()
    at = rng.randrange(len(raw))
    new = {"cut": raw[:at], "grow": raw + rng.randbytes(rng.choice([1, 2, 1000])), "another file": other,
           "zeros": raw[:at] + bytes(len(raw) - at), "code": pickle.dumps({"model": small.Bomb()}), "deleted": None}
    kind = rng.choice([*new])
    path.unlink() if new[kind] is None else path.write_bytes(new[kind])
    return f"{path.name} {kind}"


def case(rng, readers, folder, scripts):
    """One case in the folder, a copy of the good one -> how it breaks the rule, or ""."""
    file = rng.choice(sorted(readers))
    words, said = rng.choice(readers[file]), "a flag"
    if rng.random() < 0.2:
        words = [*readers["data/meta.json"][0], f"--{rng.choice(fields(train.Options)).name}", rng.choice(WORDS)]
    else:
        said = spoil(folder / file, rng)
    before = small.files_of(folder)
    done = scripts.run(*words, cwd=folder, seconds=60)
    refused = (done.returncode == 2 and done.stderr.startswith(f"{words[0]}: error: ")
               and done.stderr.count("\n") == 1 and small.files_of(folder) == before)
    if (done.returncode in (0, 3) or refused) and "Traceback" not in done.stderr and not (folder / "code ran").exists():
        return ""
    return f"{said}: {words}, exit code {done.returncode}\n  {done.stderr[-1500:]}"


def fuzz(n, seed, folder, scripts):
    """Runs n cases; returns reports of those that break the rule, whose files stay."""
    readers, reports = good_folder(folder / "good", scripts), []
    for i in range(n):
        here = shutil.copytree(folder / "good", folder / f"case-{i}")
        if wrong := case(random.Random(f"{seed} {i}"), readers, here, scripts):
            reports.append(f"case {i}, {wrong}")
        else:
            shutil.rmtree(here)
    return reports
