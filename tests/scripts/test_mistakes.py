"""A user's mistakes: one line, exit code 2, nothing lost. Those of convert.py and of benchmarks are in their tests."""
import json
import shlex
import shutil
import sys

import pytest
import torch

import convert
import data_prep
import eval as eval_py
import models
import train
from folders import make, meta_of, ranks_file, shard_bytes
from nanodepth import benchmarks, runs
from small import SMALL, Bomb, flags

LAST = models.names()[-1]
OUT = "--out x --tokenizer byte"
MISTAKES = {   # script: {words: what the line must say}. The words name files of the fixture `place`, where it runs.
    "train.py": {
        "--max_step 9": "unknown argument --max_step: did you mean --max_steps?",
        "--dropout 0.1": "unknown argument --dropout: see --help",
        "--learning_rate=1": "did you mean --muon_lr or --adamw_lr?",
        "--compile=maybe": "argument --compile: invalid bool value",
        "--model gtp": "no model 'gtp'",
        "--preset tniy": "no preset 'tniy'",
        "--optimizer sgd": "--optimizer must be one of muon adamw",
        "--device gpu7": "--device gpu7",
        f"--threads 1{30 * '0'}": "--threads must lie between 0 and 2,147,483,647",
        "--max_steps 0": "--max_steps must be positive",
        "--muon_lr inf": "--muon_lr must be positive",
        "--warmup_steps 41": "--max_steps 40 is shorter than the warm-up, --warmup_steps 41",
        "--batch_tokens 100": "--batch_tokens 100 must be a multiple",
        "--micro_batch 3": "--micro_batch 3 must divide",
        "--seq_len 128": "--max_len 128",
        "--n_layer 100000": "n_layer must be at least 1 and at most 10,000",
        "--d_ff 1000000000": "take a smaller model",
        "--vocab_size 100": "--vocab_size 100",
        "--data nowhere": "nowhere: no such data folder: make it with python data_prep.py",
        "--data a.txt": "a.txt: a file, and not a data folder",
        "--out run": "exists: choose another --out, or go on with --resume",
        "--out other": "which no run writes: choose another --out",
        "--out a.txt": "a.txt: Not a directory",
        f"--init_from run --model {LAST}": "do not fit the model",
        "--init_from run --data 'other tokens'": "has other tokens",
        "--init_from run --tie_embeddings": "head.weight is the same parameter as embed.weight, which",
        "--resume cut": "not a readable checkpoint",
        "--resume code": "not a readable checkpoint",
        "--resume weights": "not a readable checkpoint of train.py (KeyError: ",
        "--resume run --d_model 64": "--d_model 64 contradicts",
        "--resume run --data other": "is not the data",
        "--resume=": "--resume is empty",
        "--resume auto": "--resume auto needs --out"},
    "eval.py": {
        "run --seq_len 65": "max_len 64",
        "swapped": "is not the data that swapped was trained on",
        "run --limit 5": "cannot be used without --tasks",
        "run --tasks x --tokens 3 --data x": "--data and --tokens cannot be used with --tasks x",
        "run --tokens 0": "--tokens must be at least 1",
        "run --tasks x --num_fewshot -1": "--num_fewshot must be at least 0",
        "run --data 'other tokens'": "was trained on (byte): prepare the text with --tokenizer byte",
        "run --json no/such/folder/x.json": "no/such/folder/x.json cannot be written"},
    "sample.py": {
        f"{50 * 'prompt'}": "ckpt.pt does not exist",
        "run --max_new_tokens 64": "max_len 64",
        "run --top_p 0": "--top_p must lie above 0",
        "run --temperature nan": "--temperature must be at least 0 and finite, not nan",
        "run --file nowhere --max_new_tokens 9": "nowhere: No such file",
        "run --file nowhere --prompt a": "two prompts",
        "run --file latin.txt": "not UTF-8 text",
        "nan --max_new_tokens 9": "its weights are not finite"},
    "bench.py": {
        "--models gpt:width=3": "gpt:width=3: unknown argument --width",
        "--models gpt:n_kv_head=4": "n_kv_head",
        "--batch 0": "must be at least 1",
        "--models gpt --batch 1000000000": "out of memory: lower --batch",
        "--json /": "cannot be written"},
    "analyze.py": {
        "": "the following arguments are required: curves|probe",
        "curves nothing": "nothing is not the folder of a run",
        "curves cut": "cut has only one validation: it has just begun, or was stopped",
        "curves run --out a.txt": "--out a.txt is not a folder",
        "probe run run": "a run is given twice",
        "probe run --data data/text --tokens 5": "must hold one sequence of 16 tokens",
        "probe run --tokens 0": "--tokens and --batch_tokens must be at least 1",
        "probe nan --data data/text": "nan: the residual stream is not finite"},
    "data_prep.py": {
        "": "required",
        "stdlib --out file": "file: exists already",
        "text a.txt --name x --tokenizer gpt2": "TIKTOKEN_CACHE_DIR",
        "text a.txt --name x --tokenizer nope": "tokenizer 'nope': No such file or directory",
        "text a.txt": "one of the arguments --name --out is required",
        f"text a.txt {OUT} --train_bpe 300": "--train_bpe: not allowed with argument --tokenizer",
        "text a.txt --name x --val_frac 2": "--val_frac 2.0",
        "text a.txt --name x --shard_tokens 0": "--shard_tokens 0",
        "text a.txt missing.txt --name x": "missing.txt: no such file",
        "text a.txt --val pages --name x": "pages: no text in this folder: .txt, .md, .jsonl (plain",
        "text pages/p*.html --name x": "page.html: not a text file: .txt, .md, .jsonl (plain",
        "text books books/deep --name x": "books/deep/b.txt: given twice",
        "text books --val books/deep/b.txt --name x": "books/deep/b.txt: is for training and in --val",
        f"text empty.txt {OUT}": "no text for the train split in empty.txt",
        f"text latin.txt {OUT}": "latin.txt:3: not UTF-8 text (byte 0xe9)",
        "text a.txt --out /proc/x --tokenizer byte": "error: /proc/x",
        "fineweb-edu --shards 100": "--shards 100",
        "fineweb-edu --shards 1 --url nonsense --out pages": "nonsense",
        "fineweb-edu --shards 1 --out other": "belongs to other data: choose another --out"}}


@pytest.fixture(scope="module")
def place(data, whole, tmp_path_factory):
    """A folder with runs, data and texts that are good or broken."""
    place = tmp_path_factory.mktemp("bad")
    shutil.copytree(data, place / "data" / "text")
    for name in ("run", "cut", "code", "weights", "swapped", "nan"):
        shutil.copytree(whole, place / name)
    (place / "cut" / "ckpt.pt").write_bytes((whole / "ckpt.pt").read_bytes()[:5000])
    (place / "cut" / "log.jsonl").write_text("")
    torch.save({"model": Bomb()}, place / "code" / "ckpt.pt")
    torch.save({"weights": torch.zeros(2)}, place / "weights" / "ckpt.pt")
    checkpoint = runs.read_checkpoint(whole)
    checkpoint["model"]["embed.weight"].fill_(float("nan"))
    torch.save(checkpoint, place / "nan" / "ckpt.pt")
    for name, raw in {"a.txt": b"long enough to be cut into windows of sixteen tokens, " * 20, "empty.txt": b"",
                      "latin.txt": b"line one\nline two\ncaf\xe9\n", "pages/page.html": b"x", "file": b"x",
                      "books/deep/b.txt": b"a book\n"}.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(raw)
    ranks = ranks_file(place / "ranks", [bytes([255 - i]) for i in range(256)])
    for name, tokenizer in (("other", "byte"), ("other tokens", str(ranks))):
        data_prep.prepare_text([place / "a.txt"], place / name, tokenizer, val_frac=0.2)
    swapped = (whole / "config.json").read_text().replace(str(data), str(place / "other"))
    (place / "swapped" / "config.json").write_text(swapped)
    return place


@pytest.mark.parametrize("script, words, said", [
    (script, words, said) for script, table in MISTAKES.items() for words, said in table.items()])
def test_a_mistake_is_one_line(script, words, said, place, refused):
    words = shlex.split(words)
    if script == "train.py" and not words[0].startswith("--resume"):
        few = {"seq_len": 16, "device": "cpu"} if "--init_from" in words else SMALL
        words = [*flags(**few, data="data/text", out="new"), *words]
    assert said in refused(script, *words, at=place)


SHARDS = {"train_000000.bin": 4, "val_000000.bin": 3}


@pytest.mark.parametrize("file, raw, said", [
    *(("train_000000.bin", raw, f"d/train_000000.bin: {said}") for raw, said in [
        (b"", "not a token shard: 0 bytes"),
        (b"x" * 2000, "not a token shard: 2,000 bytes that start with 2021161080,"),
        (shard_bytes([1, 2], version=2), "not a token shard: 1,028 bytes that start with 20240520, 2, 2"),
        (shard_bytes([1, 2], count=1_000_000), "header says 1,000,000 tokens, file holds 2: prepare the folder again"),
        (shard_bytes([1, 2]) + b"!", "header says 2 tokens, file holds 2.5:"),
        (shard_bytes([1, 50257]), "token id 50257 is beyond the vocabulary of 50,257 (gpt2)")]),
    ("train_000000.bin", None, "d: no train shard"), ("val_000000.bin", None, "d: no val shard"),
    ("token_bytes.npy", b"", "meta.json is missing: prepare the folder again"),
    *(("meta.json", raw, "meta.json: broken") for raw in (
        b"[]", b"\xff", json.dumps(meta_of({}) | {"shards": {name: {"tokens": 4} for name in SHARDS}}).encode())),
    ("meta.json", json.dumps(meta_of(SHARDS, tokenizer="own")).encode(), "d/own is missing: prepare the folder again"),
    *(("meta.json", json.dumps(meta_of(shards)).encode(), "d: its shards are not those that its meta.json lists")
      for shards in ({"train_000000.bin": 4}, SHARDS | {"train_000000.bin": 5}))])
def test_a_folder_that_no_run_can_train_on(file, raw, said, refused, tmp_path):
    folder = make(tmp_path / "d", [[1, 2, 3, 4]])
    (folder / file).unlink() if raw is None else (folder / file).write_bytes(raw)
    assert said in refused("train.py", "--data", "d", main=train.main)


@pytest.mark.parametrize("script, main, words, package", [
    ("data_prep.py", data_prep.main, f"text a.parquet {OUT}", "pyarrow"),
    ("data_prep.py", data_prep.main, f"text a.txt.zst {OUT}", "backports.zstd"),
    ("convert.py", convert.main, "gpt2 . --out x --tokenizer byte", "safetensors"),
    ("eval.py", eval_py.main, "run --tasks exo", "lm_eval"), ("train.py", train.main, "--wandb", "wandb")])
def test_a_package_that_is_missing(script, main, words, package, refused, whole, tmp_path, monkeypatch):
    for name in ("a.parquet", "a.txt.zst", "model.safetensors"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "config.json").write_text("{}")
    shutil.copytree(whole, tmp_path / "run")
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(benchmarks, "lm_eval", None)
    newest = "-U " if package == "lm_eval" else ""                          # an old one may be there
    assert refused(script, *words.split(), main=main).endswith(f"pip install {newest}{package}\n")
