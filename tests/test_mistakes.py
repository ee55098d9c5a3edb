"""A user's mistakes at train.py, eval.py and sample.py: one line, exit code 2, nothing lost."""
import base64
import os
import shutil

import pytest
import torch

import data_prep
import models
from nanodepth import runs
from small import SMALL, flags


def broken_data(data, folder, what):
    """A copy of the data folder with one thing wrong."""
    shutil.copytree(data, folder)
    shard = next(folder.glob("train*.bin"))
    raw = shard.read_bytes()
    if what == "truncated":
        shard.write_bytes(raw[:-100])
    elif what == "foreign":
        shard.write_bytes(b"PK\3\4" + raw[4:])
    elif what == "missing":
        shard.unlink()
    elif what == "ids":
        meta = (folder / "meta.json").read_text()
        (folder / "meta.json").write_text(meta.replace('"vocab_size": 257', '"vocab_size": 90'))
    elif what == "meta":
        (folder / "meta.json").write_text("{")
    elif what == "public":                                                      # no meta.json: GPT-2 tokens
        for name in ("meta.json", "token_bytes.npy"):
            (folder / name).unlink()
    elif what == "no val":
        (folder / "meta.json").unlink()
        next(folder.glob("val*.bin")).unlink()
    return folder


BAD = {   # name: (flags, what the line must say)
    "unknown flag": (["--lerning_rate", "1"], "unknown argument --lerning_rate"),
    "misspelt flag": (["--max_step", "9"], "did you mean --max_steps?"),
    "another model's flag": (["--value_act", "relu"], "unknown argument --value_act"),
    "no such model": (["--model", "gtp"], "no model 'gtp'"),
    "no such preset": (["--preset", "tniy"], "no preset 'tniy'"),
    "nanoGPT's name": (["--n_embd", "64"], "unknown argument --n_embd: did you mean --d_model?"),
    "one rate for all": (["--learning_rate=1"], "did you mean --muon_lr or --adamw_lr?"),
    "no switch": (["--compile=maybe"], "argument --compile/--no-compile: a switch takes true, false or nothing"),
    "too large a model": (["--d_ff", "1000000000"], "out of memory: the model alone does not fit"),
    "a switch with a value": (["--compile", "yes"], "--compile is a switch and takes no value: --compile or --no-"),
    "epochs": (["--num_train_epochs", "3"], "did you mean --max_steps?"),
    "a flag like no other": (["--dropout", "0.1"], "unknown argument --dropout: see --help"),
    "no threads": (["--threads", "0"], "--threads must be positive"),
    "far too many threads": (["--threads", "10000"], "--threads must lie between 0 and 1,024"),
    "no rate of a mean": (["--second_moment", "5"], "--second_moment must lie between 0 and 1"),
    "not a number": (["--max_steps", "many"], "--max_steps"),
    "no steps": (["--max_steps", "0"], "--max_steps must be positive"),
    "negative seed": (["--seed", "-1"], "--seed"),
    "rate not finite": (["--muon_lr", "inf"], "--muon_lr"),
    "no such optimizer": (["--optimizer", "sgd"], "--optimizer must be one of"),
    "no such schedule": (["--schedule", "step"], "--schedule must be one of"),
    "long warm-up": (["--warmup_steps", "41"], "--warmup_steps"),
    "batch not whole": (["--batch_tokens", "100"], "--batch_tokens 100 must be a multiple"),
    "micro-batch not a divisor": (["--micro_batch", "3"], "--micro_batch 3 must divide"),
    "sequence too long": (["--seq_len", "128"], "--max_len 128"),
    "heads do not divide": (["--n_head", "3"], "n_head"),
    "small vocabulary": (["--vocab_size", "100"], "--vocab_size 100"),
    "package missing": (["--wandb"], "pip install wandb"),
    "bad gate": (["--gate", "maybe"], "gate must be"),
    "no such device": (["--device", "gpu7"], "--device gpu7"),
    "no such data": (["--data", "nowhere"], "data_prep.py"),
    "data that are a file": (["--data", "b.txt"], "b.txt: a file, and not a data folder"),
    "samples without a tokenizer": (["--data", "DATA:public", "--sample_every", "5"], "tokenizer gpt2 needs"),
    "truncated shard": (["--data", "DATA:truncated"], "prepare the folder again"),
    "foreign shard": (["--data", "DATA:foreign"], "not a token shard"),
    "missing shard": (["--data", "DATA:missing"], "is in meta.json but not in the folder"),
    "ids beyond the vocabulary": (["--data", "DATA:ids"], "beyond the vocabulary of 90"),
    "broken meta.json": (["--data", "DATA:meta"], "meta.json: broken"),
    "no validation shard": (["--data", "DATA:no val"], "no val shard"),
    "folder in the way": (["--out", "RUN"], "exists: choose another --out"),
    "file in the way": (["--out", "b.txt"], "b.txt exists: choose another --out"),
    "nothing to resume": (["--resume", "EMPTY"], "ckpt.pt does not exist"),
    "checkpoint cut short": (["--resume", "CUT"], "not a readable checkpoint (cut off"),
    "checkpoint with code": (["--resume", "CODE"], "not a readable checkpoint"),
    "checkpoint of something else": (["--resume", "OTHER"], "not a checkpoint of train.py"),
    "resume contradicts": (["--resume", "RUN", "--d_model", "64"], "--d_model 64 contradicts"),
    "resume another model": (["--resume", "RUN", "--model", models.names()[-1]],
                             f"--model {models.names()[-1]} contradicts"),
    "resume on other data": (["--resume", "RUN", "--data", "DATA:other"], "is not the data"),
    "resume nothing": (["--resume="], "--resume is empty"),
    "weights of nothing": (["--init_from="], "--init_from is empty"),
    "model without a name": (["--model="], "--model is empty"),
    "preset without a name": (["--preset="], "--preset is empty"),
    "run folder in use": (["--resume", "LOCKED"], "in use by another process"),
}


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.fixture(scope="session")
def bad_runs(data, whole, scripts, tmp_path_factory):
    """All bad commands: {name: (process, whether it made its run folder, whether all other files are as before)}."""
    base = tmp_path_factory.mktemp("bad")
    for name in ("RUN", "CUT", "CODE", "OTHER", "LOCKED"):
        shutil.copytree(whole, base / name)
    (base / "EMPTY").mkdir()
    (base / "stub").mkdir()                                                     # as if wandb were not installed
    (base / "stub" / "wandb.py").write_text("raise ImportError")
    (base / "CUT" / "ckpt.pt").write_bytes((whole / "ckpt.pt").read_bytes()[:5000])
    torch.save({"model": Bomb(str(base / "code ran"))}, base / "CODE" / "ckpt.pt")
    torch.save({"weights": torch.zeros(2)}, base / "OTHER" / "ckpt.pt")
    held = runs.lock(base / "LOCKED")
    (base / "b.txt").write_text("other text, long enough to be cut into windows of sixteen tokens, " * 20)
    data_prep.prepare_text([base / "b.txt"], base / "other", "byte", val_frac=0.2)

    def go(item):
        name, (words, _) = item
        out = base / f"out of {name}"
        words = [str(base / w) if (base / w).exists() else w for w in words]
        words = [str(broken_data(data, base / f"data of {name}", w[5:])) if w.startswith("DATA:") and w != "DATA:other"
                 else str(base / "other") if w == "DATA:other" else w for w in words]
        first = flags(**SMALL, data=data, out=out) if "--resume" not in words else []
        before = {p: p.read_bytes() for what in ("log.jsonl", "ckpt.pt") for p in base.glob(f"*/{what}")}
        done = scripts.run("train.py", *first, *words, PYTHONPATH=str(base / "stub"))
        harmless = before == {p: p.read_bytes() for p in before} and not (base / "code ran").exists()
        return name, (done, out.exists(), harmless)

    results = dict(map(go, BAD.items()))
    held.close()
    return results


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_and_exit_code_2(name, bad_runs):
    done, made_folder, untouched = bad_runs[name]
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2 and len(lines) == 1, done.stderr
    assert lines[0].startswith("train.py: error: ") and BAD[name][1] in lines[0]
    assert not made_folder and untouched


@pytest.mark.parametrize("script, words, said", [
    ("eval.py", ["nowhere"], "ckpt.pt does not exist"), ("sample.py", ["a prompt " * 99], "ckpt.pt does not exist"),
    ("sample.py", ["nowhere"], "ckpt.pt does not exist"),
    ("eval.py", ["RUN", "--data", "nowhere"], "no such data folder"),
    ("eval.py", ["RUN", "--seq_len", "65"], "max_len 64"),
    ("eval.py", ["RUN", "--limit", "5"], "are for --tasks"),
    ("eval.py", ["RUN", "--batch_size", "5"], "did you mean --batch_tokens?"),
    ("eval.py", ["RUN", "--data", "OTHER"], "was trained on (byte): prepare the text with --tokenizer byte"),
    ("sample.py", ["RUN", "--temperature", "nan"], "--temperature"),
    ("sample.py", ["RUN", "--max_new_tokens", "64"], "max_len 64"),
    ("sample.py", ["RUN", "--temperature", "-1"], "--temperature"),
    ("sample.py", ["RUN", "--n", 10 ** 13, "--max_new_tokens", 3], "out of memory: lower --n"),
    ("sample.py", ["RUN", "--n", 10 ** 20, "--max_new_tokens", 3], f"--n {10 ** 20} is too large"),
    ("eval.py", ["RUN", "--device", "gpu7"], "gpu7"), ("sample.py", ["RUN", "--device", "gpu7"], "gpu7")])
def test_bad_input_of_the_other_scripts(script, words, said, whole, scripts, tmp_path):
    if "OTHER" in words:                                                        # another vocabulary of the same size
        ranks = [base64.b64encode(bytes([255 - i])) + b" %d" % i for i in range(256)]
        (tmp_path / "ranks").write_bytes(b"\n".join(ranks))
        (tmp_path / "a.txt").write_text("some text " * 99)
        data_prep.prepare_text([tmp_path / "a.txt"], tmp_path / "OTHER", str(tmp_path / "ranks"), val_frac=0.2)
    done = scripts.run(script, *[whole if w == "RUN" else tmp_path / w if w == "OTHER" else w for w in words])
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and said in done.stderr, done.stderr
