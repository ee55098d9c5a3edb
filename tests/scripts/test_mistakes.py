"""A user's mistakes at train.py, eval.py and sample.py: one line, exit code 2, nothing lost."""
import shutil

import pytest
import torch

import data_prep
import models
from folders import ranks_file
from nanodepth import runs
from small import SMALL, Bomb, flags

BAD = {   # name: (flags, what the line must say). Words in capitals are files of the fixture `place`.
    "misspelt flag": (["--max_step", "9"], "unknown argument --max_step: did you mean --max_steps?"),
    "a flag like no other": (["--dropout", "0.1"], "unknown argument --dropout: see --help"),
    "nanoGPT's name": (["--n_embd", "64"], "unknown argument --n_embd: did you mean --d_model?"),
    "one rate for all": (["--learning_rate=1"], "did you mean --muon_lr or --adamw_lr?"),
    "no switch": (["--compile=maybe"], "argument --compile: invalid bool value"),
    "no such model": (["--model", "gtp"], "no model 'gtp'"),
    "no such preset": (["--preset", "tniy"], "no preset 'tniy'"),
    "no such optimizer": (["--optimizer", "sgd"], "--optimizer must be one of muon adamw"),
    "no such device": (["--device", "gpu7"], "--device gpu7"),
    "no value": (["--max_steps=--"], "--max_steps needs a value"),
    "too many threads": (["--threads", str(10 ** 30)], "--threads must lie between 0 and 2,147,483,647"),
    "no steps": (["--max_steps", "0"], "--max_steps must be positive"),
    "rate not finite": (["--muon_lr", "inf"], "--muon_lr must be positive"),
    "long warm-up": (["--warmup_steps", "41"], "--max_steps 40 is shorter than the warm-up, --warmup_steps 41"),
    "a folder like a flag": (["--out=-x"], "--out -x: the name of a run folder cannot begin with -"),
    "batch not whole": (["--batch_tokens", "100"], "--batch_tokens 100 must be a multiple"),
    "micro-batch not a divisor": (["--micro_batch", "3"], "--micro_batch 3 must divide"),
    "sequence too long": (["--seq_len", "128"], "--max_len 128"),
    "heads do not divide": (["--n_head", "3"], "n_head"),
    "too many layers": (["--n_layer", "100000"], "n_layer must be at least 1 and at most 10,000"),
    "too large a model": (["--d_ff", "1000000000"], "take a smaller model"),
    "small vocabulary": (["--vocab_size", "100"], "--vocab_size 100"),
    "no such data": (["--data", "nowhere"], "data_prep.py"),
    "data that are a file": (["--data", "A.TXT"], "A.TXT: a file, and not a data folder"),
    "folder in the way": (["--out", "RUN"], "exists: choose another --out, or go on with --resume"),
    "folder of something else": (["--out", "OTHER"], "which no run writes: choose another --out"),
    "file in the way": (["--out", "A.TXT"], "A.TXT: Not a directory"),
    "checkpoint cut short": (["--resume", "CUT"], "not a readable checkpoint"),
    "checkpoint with code": (["--resume", "CODE"], "not a readable checkpoint"),
    "checkpoint of something else": (["--resume", "WEIGHTS"], "not a readable checkpoint of train.py (KeyError: "),
    "resume contradicts": (["--resume", "RUN", "--d_model", "64"], "--d_model 64 contradicts"),
    "resume another model": (["--resume", "RUN", "--model", models.names()[-1]],
                             f"--model {models.names()[-1]} contradicts"),
    "resume on other data": (["--resume", "RUN", "--data", "OTHER"], "is not the data"),
    "resume nothing": (["--resume="], "--resume is empty"),
    "run folder in use": (["--resume", "LOCKED"], "in use by another process"),
}
OTHERS = [   # (script, words, what the line must say)
    ("eval.py", ["nowhere"], "ckpt.pt does not exist"), ("sample.py", ["a prompt " * 99], "ckpt.pt does not exist"),
    ("eval.py", ["RUN", "--data", "nowhere"], "no such data folder"),
    ("eval.py", ["RUN", "--seq_len", "65"], "max_len 64"),
    ("eval.py", ["RUN", "--limit", "5"], "cannot be used without --tasks"),
    ("eval.py", ["RUN", "--batch_size", "5"], "did you mean --batch_tokens?"),
    ("eval.py", ["RUN", "--data", "OTHER TOKENS"], "was trained on (byte): prepare the text with --tokenizer byte"),
    ("sample.py", ["RUN", "--temperature", "-1"], "--temperature"),
    ("sample.py", ["RUN", "--max_new_tokens", "64"], "max_len 64"),
    ("sample.py", ["RUN", "--top_p", 0], "--top_p must lie above 0"),
    ("sample.py", ["RUN", "--top_p", 1.5], "--top_p must lie above 0"),
    ("sample.py", ["RUN", "--temperature", "nan"], "--temperature must be at least 0 and finite, not nan"),
    ("sample.py", ["RUN", "--n", 2 ** 63], "--n must be at least 1 and finite"),
    ("sample.py", ["RUN", "--top_k", 0], "--top_k must be at least 1"),
    ("sample.py", ["RUN", "--file", "nowhere", "--max_new_tokens", 9], "nowhere: No such file"),
    ("sample.py", ["RUN", "--file", "nowhere", "--prompt", "a"], "two prompts"),
    ("sample.py", ["RUN", "--num_samples", 3], "did you mean --n?"),
    ("sample.py", ["RUN", "--start", "a"], "did you mean --prompt?"),
    ("sample.py", ["RUN", "--n", 10 ** 13, "--max_new_tokens", 3], "out of memory: lower --n"),
    ("eval.py", ["RUN", "--device", "gpu7"], "gpu7"), ("sample.py", ["RUN", "--device", "gpu7"], "gpu7")]


@pytest.fixture(scope="session")
def place(data, whole, tmp_path_factory):
    """A folder with runs, data and texts that are good or broken."""
    place = tmp_path_factory.mktemp("bad")
    for name in ("RUN", "CUT", "CODE", "WEIGHTS", "LOCKED"):
        shutil.copytree(whole, place / name)
    (place / "CUT" / "ckpt.pt").write_bytes((whole / "ckpt.pt").read_bytes()[:5000])
    torch.save({"model": Bomb()}, place / "CODE" / "ckpt.pt")
    torch.save({"weights": torch.zeros(2)}, place / "WEIGHTS" / "ckpt.pt")
    (place / "A.TXT").write_text("other text, long enough to be cut into windows of sixteen tokens, " * 20)
    ranks = ranks_file(place / "ranks", [bytes([255 - i]) for i in range(256)])
    for name, tokenizer in (("OTHER", "byte"), ("OTHER TOKENS", str(ranks))):
        data_prep.prepare_text([place / "A.TXT"], place / name, tokenizer, val_frac=0.2)
    held = runs.lock(place / "LOCKED")
    yield place
    held.close()


def files(place):
    return {path: path.read_bytes() for path in place.rglob("*")
            if path.is_file() and path.name not in (".lock", "shards_index.json")}


def refused(scripts, place, script, words):
    """The one line that the script says before it exits with 2, no file changed or made."""
    before = files(place)
    words = [place / word if str(word).isupper() else word for word in words]
    done = scripts.run(script, *words, cwd=place)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2 and len(lines) == 1 and lines[0].startswith(f"{script}: error: "), done.stderr
    assert before == files(place) and not (place / "new").exists()
    return lines[0]


@pytest.mark.parametrize("name", BAD)
def test_mistakes_at_train(name, data, place, scripts):
    words, said = BAD[name]
    first = flags(**SMALL, data=data, out="new") if "--resume" not in words else []
    assert said in refused(scripts, place, "train.py", [*first, *words])


@pytest.mark.parametrize("script, words, said", OTHERS)
def test_mistakes_at_the_other_scripts(script, words, said, place, scripts):
    assert said in refused(scripts, place, script, words)
