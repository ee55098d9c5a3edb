"""A user's own model is one file: copied, changed, trained for five steps and tested with `pytest -k mine`.

In a copy of the repository. The file has Config and Model and nothing else: no settings, probes, neutral or costs.
"""
import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import settings

import data_prep
import models
import train
from forked import within
from nanodepth import runs

ROOT = Path(__file__).parent.parent
HOUSE = [name for name in models.names() if settings.belongs(name)]
TINY = dict(n_layer=2, d_model=32, n_head=2, d_ff=64, max_len=64, seq_len=16, batch_tokens=128, micro_batch=4,
            max_steps=5, eval_tokens=200, device="cpu", dtype="fp32", data="tiny")


def text(name):
    return (ROOT / models.path(name)).read_text()


def replaced(source, *pairs):
    for old, new in pairs:
        assert old in source, f"not in the file any more: {old}"
        source = source.replace(old, new)
    return source


def with_a_parameter():
    """gpt.py with a bias on the embedding, a parameter of Model itself. The docstring does not mention it."""
    return replaced(text("gpt"),
                    ("        self.init_weights()\n",
                     "        self.shift = nn.Parameter(torch.empty(c.d_model))\n        self.init_weights()\n"),
                    ('            if module.endswith("norm"):\n                p.fill_(1.0)\n',
                     '            if name == "shift":\n                p.zero_()\n'
                     '            elif module.endswith("norm"):\n                p.fill_(1.0)\n'),
                    ("x = self.embed(idx)", "x = (self.embed(idx) + self.shift)"))


def with_a_module():
    """gpt.py with a bottleneck after every MLP, and the line in the docstring that the README asks for."""
    return replaced(text("gpt"),
                    ('attend to each other.\n', 'attend to each other.\n\n'
                     'Changed from gpt.py: Block.__init__, Block.forward, Model.init_weights\n'),
                    ("class Block(nn.Module):",
                     "class Bottleneck(nn.Module):\n    def __init__(self, d_model):\n        super().__init__()\n"
                     "        self.down = nn.Linear(d_model, 8, bias=False)\n"
                     "        self.up = nn.Linear(8, d_model, bias=False)\n\n"
                     "    def forward(self, x):\n        return x + self.up(self.down(x).tanh())\n\n\n"
                     "class Block(nn.Module):"),
                    ("        self.mlp = MLP(c.d_model, c.d_ff)\n",
                     "        self.mlp = MLP(c.d_model, c.d_ff)\n        self.bottleneck = Bottleneck(c.d_model)\n"),
                    ("return x + self.mlp(self.mlp_norm(x))", "return self.bottleneck(x + self.mlp(self.mlp_norm(x)))"),
                    ('"head"):\n                nn.init', '"head", "down", "up"):\n                nn.init'))


def changed(name):
    """A changed mechanism."""
    assert settings.of(name, "CHANGED"), f"tests/settings/{name}.py lacks CHANGED"
    return replaced(text(name), settings.of(name, "CHANGED"))


def run(folder, *words):
    """What it printed."""
    done = subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=1500,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""})
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def copy(tmp_path):
    """The repository without its results, and a little data."""
    out = tmp_path / "nanodepth"
    skip = shutil.ignore_patterns(".*", "__pycache__", "results", "runs", "data", "*.png")
    shutil.copytree(ROOT, out, ignore=skip)
    (tmp_path / "a.txt").write_text("".join(f"{i} green bottles hanging on the wall\n\n" for i in range(200)))
    data_prep.prepare_text([tmp_path / "a.txt"], out / "data" / "tiny", "byte")
    return out


def try_out(copy, files):
    """Trains each of the files {name: text}, and tests all of them."""
    for name, source in files.items():
        (copy / "models" / f"{name}.py").write_text(source)
    for name in files:
        printed = run(copy, "train.py", "--model", name,
                      *(word for key, value in TINY.items() for word in (f"--{key}", str(value))))
        assert re.search(r"^step +5/5 \| val ", printed, re.M), printed
    tests = [f"tests/test_{name}.py" for name in ("models", "copies", "compile", "train", "record")]    # of all models
    printed = run(copy, "-m", "pytest", "-q", "-rs", "-k", "mine", "-p", "no:cacheprovider", *tests)
    passed = int(re.search(r"(\d+) passed", printed)[1])
    assert passed >= 20 * len(files), printed
    return printed


def test_a_parameter(copy):
    """The test prints the line that the file's docstring lacks."""
    one = replaced(with_a_parameter(), ("import math\n", "from __future__ import annotations\nimport math\n"))
    printed = try_out(copy, {"mine": one})
    line = "for its docstring: Changed from gpt.py: Model.__init__, Model.init_weights, Model.forward"
    assert line in " ".join(printed.split())


def test_pytest_says_which_file_is_broken(copy):
    (copy / "models" / "mine.py").write_text(replaced(text("gpt"), ("class Config:", "class Config")))
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-k", "gpt"], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 4 and "models/mine.py: expected ':'" in done.stderr and len(done.stderr) < 200


@pytest.fixture
def own(tmp_path, monkeypatch, data, capsys):
    """own(source, *words): (exit code, stderr) of train.py with this text as models/mine.py, in this process."""
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "gpt.py").write_text(text("gpt"))
    monkeypatch.setattr(models, "HERE", folder)
    monkeypatch.setattr(models, "__path__", [str(folder)])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)                   # a file of the same second and size

    def train_it(source, *words):
        (folder / "mine.py").write_text(source)
        importlib.invalidate_caches()
        for name in ("models.mine", "models.gpt"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        options = [word for key, value in (TINY | dict(model="mine", data=data)).items()
                   for word in (f"--{key}", str(value))]
        return within("train.py", train.main, *options, *words), capsys.readouterr().err
    return train_it


def test_a_mistake_of_the_file_is_a_line(own):
    """But a bug of the file keeps its traceback."""
    gpt = text("gpt")
    line = gpt[:gpt.index("class Config:")].count("\n") + 1
    assert own(replaced(gpt, ("class Config:", "class Config"))) == (
        2, f"train.py: error: models/mine.py: expected ':' (mine.py, line {line})\n")
    line = gpt[:gpt.index("import math")].count("\n") + 2
    assert own(replaced(gpt, ("import math\n", "import math\nimport nopackage\n"))) == (
        2, f"train.py: error: models/mine.py: ModuleNotFoundError: No module named 'nopackage' (line {line})\n")
    code, said = own(replaced(gpt, ("self.blocks", "self.layers")))
    assert code == 2 and said.startswith("train.py: error: models/mine.py: Model has no module blocks: name what")
    assert own(replaced(gpt, ("    zero_init: bool", "    seed: int = 0\n    zero_init: bool"))) == (
        2, "train.py: error: models/mine.py: Config.seed is an option of train.py too: take another name\n")
    code, said = own(replaced(gpt, ("    def generate(", "    def write(")), "--sample_every", "5")
    assert code == 2 and said.count("\n") == 1 and "no Model.generate" in said
    with pytest.raises(ValueError, match="too many values to unpack"):
        own(replaced(gpt, ("        self.init_weights()\n", "        a, b = 1, 2, 3\n        self.init_weights()\n")))


def test_options_may_be_negative_and_none(own, tmp_path):
    """The run can be read again."""
    source = replaced(text("gpt"), ("    zero_init: bool", (
        "    bias: float = -2.0\n    tau: float | None = None\n    zero_init: bool")))
    assert own(source, "--out", str(tmp_path / "a"), "--bias", "-1.5", "--tau", "0.5") == (0, "")
    assert vars(runs.load(tmp_path / "a")[0].config) | dict(bias=-1.5, tau=0.5) == vars(
        runs.load(tmp_path / "a")[0].config)


@pytest.mark.full
def test_other_habits_are_no_mistakes(copy):
    """Dropout, a frozen embedding, nn.LayerNorm under other names; such a run can be read and go on."""
    source = replaced(text("gpt"), (
        "        self.init_weights()\n", "        self.ln_e = nn.LayerNorm(c.d_model)\n        self.init_weights()\n"
        "        self.embed.weight.requires_grad_(False)\n"),
        ('module.endswith("norm"):', 'module.endswith("norm") or name == "ln_e.weight":'),
        ("            else:\n                raise",
         '            elif name == "ln_e.bias":\n                p.zero_()\n            else:\n                raise'),
        ("x = self.embed(idx)", "x = F.dropout(self.ln_e(self.embed(idx)), 0.1, self.training)"))
    try_out(copy, {"mine": source})
    run(copy, "train.py", "--resume", "runs/mine-tiny/before_decay")


SCRATCH = """
from dataclasses import dataclass
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    vocab_size: int = 50304
    n_layer: int = 3
    d_model: int = 32
    max_len: int = 64


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln, self.qkv = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, 3 * c.d_model)
        self.out = nn.Linear(c.d_model, c.d_model)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.ln(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + F.dropout(self.out(y), 0.1, self.training)


class Model(nn.Module):
    muon_modules = ("layers",)

    def __init__(self, config):
        super().__init__()
        self.config, C = config, config.d_model
        self.wte, self.wpe = nn.Embedding(config.vocab_size, C), nn.Embedding(config.max_len, C)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        for layer in self.layers[1:]:
            layer.out.weight = self.layers[0].out.weight
        self.head = nn.Linear(C, config.vocab_size, bias=False)

    def forward(self, idx, targets=None):
        x = self.wte(idx) + self.wpe.weight[:idx.size(1)]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        return logits, None if targets is None else F.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
"""


@pytest.mark.full
def test_a_file_from_scratch(copy):
    """Other names, learned positions, weights that blocks share, no cache: all but writing text, where a line says so.
    """
    (copy / "models" / "mine.py").write_text(SCRATCH)
    words = [word for key, value in TINY.items() if key not in ("n_head", "d_ff")
             for word in (f"--{key}", str(value))]
    run(copy, "train.py", "--model", "mine", "--out", "runs/a", *words)
    run(copy, "train.py", "--resume", "runs/a/before_decay")
    printed = run(copy, "bench.py", "--models", "mine", "--n_layer", "2", "--d_model", "32", "--n_head", "2", "--batch",
                  "1", "--seq_len", "16", "--rounds", "1", "--new_tokens", "2", "--prompt", "4", "--no-compile")
    assert re.search(r"\| `mine` ", printed)
    printed = run(copy, "-m", "pytest", "-q", "-k", "mine", "-p", "no:cacheprovider")
    assert re.search(r"\d\d passed", printed) and "failed" not in printed
    for words in (["sample.py", "runs/a"], ["train.py", "--model", "mine", "--sample_every", "5"]):
        done = subprocess.run([sys.executable, *words], cwd=copy, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
        assert "models/mine.py has no class Cache" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("form", [text, changed], ids=["unchanged", "changed"])
def test_copies_of_every_model(copy, form):
    try_out(copy, {f"mine_{name}": form(name) for name in HOUSE})


def test_errors_say_what_to_write(copy):
    """A change that the docstring does not announce, wrong claims of costs() and neutral(), and usual mistakes."""
    wrong = {"costs": "costs(c, T):\n    return 7, 0, 0", "neutral": "neutral(model):\n    model.shift.data.fill_(1.0)"}
    files = {f"mine_{name}": with_a_parameter() for name in wrong}
    for name, claim in wrong.items():
        (copy / "probes" / f"mine_{name}.py").write_text(f"def {claim}\n")
    files["mine_module"] = replaced(with_a_module(), ("Block.__init__, Block.forward, ", ""))
    wide = ("        self.init_weights()\n", "        self.wide = torch.ones(c.d_model)\n        self.init_weights()\n")
    mistakes = {
        "later": ([("is_causal=True", "is_causal=False")],
                  "causal_later_tokens_do_not_change_earlier_logits", "a token changes the logits before it"),
        "batch": ([("x = self.embed(idx)", "x = (self.embed(idx) + self.embed(idx).roll(1, 0))")],
                  "causal_later_tokens_do_not_change_earlier_logits", "a text changes the logits of another one"),
        "plain": ([wide, ("x = self.embed(idx)", "x = (self.embed(idx) * self.wide)")],
                  "every_parameter_and_buffer_gets_a_value", "Model.wide is a plain tensor: use register_buffer"),
        "empty": ([("    p.zero_()\n            elif module", "    pass\n            elif module")],
                  "every_parameter_and_buffer_gets_a_value", "shift has no finite initial value: see init_weights"),
        "idle": ([("(self.embed(idx) + self.shift)", "self.embed(idx)")],
                 "every_parameter_gets_a_gradient_after_two_steps_and_has_moved_after_five", "shift gets no gradient")}
    files |= {f"mine_{name}": replaced(with_a_parameter() if name in ("empty", "idle") else text("gpt"), *pairs)
              for name, (pairs, *_) in mistakes.items()}
    for name, source in files.items():
        (copy / "models" / f"{name}.py").write_text(source)
    tests = [f"tests/test_models.py::test_{test}[mine_{name}-default]" for name, (_, test, _) in mistakes.items()]
    tests += [f"tests/test_models.py::{test}[{name}-default]" for name, test in (
        ("mine_costs", "test_costs_are_the_counted_parameters"),
        ("mine_neutral", "test_neutral_setting_equals_the_baseline"))]
    tests += ["tests/test_copies.py::test_unannounced_pieces_equal_the_baseline[mine_module]"]
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *tests], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 1 and "8 failed" in done.stdout, done.stdout
    assert "Changed from gpt.py: Block.__init__, Block.forward, Model.init_weights" in done.stdout
    for name, (*_, said) in mistakes.items():
        assert re.search(rf"models/mine_{name}.py: {said}", done.stdout), done.stdout
    for name in wrong:
        line = next(line for line in done.stdout.splitlines() if f"{name}() of probes/mine_{name}.py" in line)
        assert "correct or remove it" in line
