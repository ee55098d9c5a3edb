"""A user's own model is one file: copied, changed, trained for five steps and tested with `pytest -k mine`.

In a copy of the repository. The file has Config and Model and nothing else: no settings and no probes.
"""
import importlib
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
import settings
import torch

import data_prep
import models
import train
from forked import within
from nanodepth import runs
from small import ROOT, flags, losses

TINY = dict(n_layer=2, d_model=32, n_head=2, d_ff=64, max_len=64, seq_len=16, batch_tokens=128, micro_batch=4,
            max_steps=5, eval_tokens=200, device="cpu", dtype="fp32", data="tiny")
READY = "        self.init_weights()\n"                                           # the last line of Model.__init__


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
                    (READY, f"        self.shift = nn.Parameter(torch.empty(c.d_model))\n{READY}"),
                    ('            if module.endswith("norm"):\n                p.fill_(1.0)\n',
                     '            if name == "shift":\n                p.zero_()\n'
                     '            elif module.endswith("norm"):\n                p.fill_(1.0)\n'),
                    ("x = self.embed(idx)", "x = (self.embed(idx) + self.shift)"))


def run(folder, *words, code=0):
    """What it printed, on stderr too."""
    done = subprocess.run([sys.executable, *words], cwd=folder, text=True, timeout=1500, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""})
    assert done.returncode == code, done.stdout[-9000:]
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
        words = *flags(**TINY | dict(model="mine", data=data)), *words
        (folder / "mine.py").write_text(source)
        importlib.invalidate_caches()
        for name in ("models.mine", "models.gpt"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        return within("train.py", train.main, *words), capsys.readouterr().err
    return train_it


@pytest.mark.parametrize("old, new, said", [
    ("class Config:", "class Config", "expected ':' (mine.py, line LINE)"),
    ("import math\n", "import nopackage\n", "ModuleNotFoundError: No module named 'nopackage' (line LINE)"),
    ("self.blocks", "self.layers", "Model has no module blocks: name what"),
    ("    zero_init: bool", "    seed: int = 0\n    zero_init: bool", "Config.seed is an option of train.py too"),
    ("        if self.d_model %", "        self.d_ff *= 2\n        if self.d_model %",
     "Config.d_ff is 128 now, but 256 when the run is loaded: keep it"),
    ("        if self.training and self.config.z_loss:\n            loss = loss + self.config.z_loss *",
     "        if True:\n            loss = loss + 1e-3 *", "add penalties only if self.training"),
    (READY, f"        c.d_ff += 64\n{READY}", "Config.d_ff is 64 now, but 128 when the run is loaded"),
    (READY, f"        self.wide = {{0: [nn.Parameter(torch.ones(3))]}}\n{READY}",
     "Model.wide holds tensors or modules that nothing trains or saves: use nn.Parameter"),
    ("MLP(c.d_model, c.d_ff)", "(MLP(c.d_model, c.d_ff),)", "Block.mlp holds tensors or modules that nothing trains")])
def test_a_mistake_of_the_file_is_a_line(old, new, said, own):
    gpt = text("gpt")
    code, line = own(replaced(gpt, (old, new)))
    said = said.replace("LINE", str(gpt[:gpt.index(old)].count("\n") + 1))
    assert code == 2 and line.startswith("train.py: error: models/mine.py") and line.count("\n") == 1 and said in line


def test_a_bug_of_the_file_keeps_its_traceback(own):
    with pytest.raises(ValueError, match="too many values to unpack"):
        own(replaced(text("gpt"), (READY, "        a, b = 1, 2, 3\n")))


def test_every_generator_is_seeded_and_options_may_be_negative_and_none(own, tmp_path):
    """The run can be read again."""
    source = replaced(text("gpt"), ("import math\n", "import math\nimport random\n\nimport numpy as np\n"), (
        "nn.init.trunc_normal_(p, std=0.02, a=-0.06, b=0.06)",
        "p.copy_(torch.from_numpy(np.random.randn(*p.shape)) * random.uniform(0.01, 0.03))"), (
        "    zero_init: bool", "    bias: float = -2.0\n    tau: float | None = None\n    zero_init: bool"))
    for name in "ab":
        assert own(source, "--out", str(tmp_path / name), "--bias", "-1.5", "--tau", "0.5") == (0, "")
    config = runs.load(tmp_path / "a")[0].config
    assert losses(tmp_path / "a") == losses(tmp_path / "b") and (config.bias, config.tau) == (-1.5, 0.5)


NOTES = """        with open(f"of rank {os.environ['RANK']}", "a") as file:
            mask = F.dropout(torch.ones(64)).tolist() if self.training else []
            print([self.training, mask, self.seen.tolist(), self.embed.weight.sum().item()], file=file)
        self.seen += idx.sum() if self.training else 0
"""


def test_two_ranks_have_dropout_of_their_own_and_one_buffer(copy):
    """From the first step, on the same initial weights; the first rank's buffer goes to the other, and is saved. A run
    that is resumed goes on with the random state of each rank.
    """
    (copy / "models" / "mine.py").write_text(replaced(
        text("gpt"), ("import math\n", "import math\nimport os\n"),
        (READY, f"{READY}        self.register_buffer('seen', torch.zeros(1))\n"),
        ("        rope = self.rope(idx", f"{NOTES}        rope = self.rope(idx")))
    two = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "train.py"
    run(copy, *two, "--model", "mine", *flags(**TINY), "--eval_every", "2", "--out", "runs/a")
    notes = [[json.loads(line.lower()) for line in (copy / f"of rank {rank}").read_text().splitlines()]
             for rank in (0, 1)]
    (masks, sums), (others, other_sums) = [zip(*[(mask, total) for training, mask, _, total in rows if training])
                                           for rows in notes]
    assert len(masks) == len(others) == 5 and sums[0] == other_sums[0]
    assert all(a != b for a, b in zip(masks, others))
    a, b = [[tuple(seen) for training, _, seen, _ in rows if training] for rows in notes]
    assert a == b and len(set(a)) == 5
    saved = torch.load(copy / "runs" / "a" / "ckpt.pt")["model"]["seen"].tolist()
    assert max(seen for _, _, seen, _ in notes[0]) == saved
    run(copy, *two, "--resume", "runs/a/before_decay", "--save_every", "1")
    for rank in (0, 1):                                                     # the last step, once more
        notes = map(json.loads, (copy / f"of rank {rank}").read_text().lower().splitlines())
        *_, whole, resumed = [mask for training, mask, *_ in notes if training]
        assert resumed == whole


SCRATCH = """
from __future__ import annotations
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
        self.ln, self.out = nn.LayerNorm(c.d_model), nn.Linear(c.d_model, c.d_model)

    def forward(self, x):
        return x + F.dropout(self.out(self.ln(x).cumsum(1).tanh()), 0.1, self.training)


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
        self.wpe.weight.requires_grad_(False)

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
    """Other names, dropout, nn.LayerNorm, frozen positions, weights that blocks share, no cache: all but writing text,
    where a line says so."""
    (copy / "models" / "mine.py").write_text(SCRATCH)
    words = flags(**{key: value for key, value in TINY.items() if key not in ("n_head", "d_ff")})
    run(copy, "train.py", "--model", "mine", "--out", "runs/a", *words)
    run(copy, "train.py", "--resume", "runs/a/before_decay")
    printed = run(copy, "bench.py", "--models", "mine", "--n_layer", "2", "--d_model", "32", "--n_head", "2", "--batch",
                  "1", "--seq_len", "16", "--rounds", "1", "--no-compile")
    assert re.search(r"\| `mine` ", printed)
    printed = run(copy, "-m", "pytest", "-q", "-k", "mine", "-p", "no:cacheprovider")
    assert re.search(r"\d\d passed", printed) and "failed" not in printed
    said = run(copy, "sample.py", "runs/a", code=2)
    assert "models/mine.py has no Model.generate to sample text" in said and said.count("\n") == 1


@pytest.mark.full
def test_copies_of_every_model(copy):
    """Which has no probes and no settings, and is held to less."""
    names = [name for name in models.names() if settings.belongs(name)]
    for name in names:
        (copy / "models" / f"mine_{name}.py").write_text(text(name))
        printed = run(copy, "train.py", *flags(**TINY, model=f"mine_{name}"))
        assert re.search(r"^step +5/5 \| val ", printed, re.M), printed
    tests = [f"tests/{name}.py" for name in ("models/test_models", "models/test_copies", "models/test_compile",
                                             "scripts/test_train", "scripts/test_inside")]              # of all models
    printed = run(copy, "-m", "pytest", "-q", "-k", "mine", "-p", "no:cacheprovider", *tests)
    assert int(re.search(r"(\d+) passed", printed)[1]) >= 16 * len(names), printed


WIDE = (READY, f"        self.wide = [torch.ones(c.d_model)]\n{READY}")
CAUSAL, VALUES = "causal_later_tokens_do_not_change_earlier_logits", "every_parameter_and_buffer_gets_a_value"
MOVES = "every_parameter_gets_a_gradient_after_two_steps_and_has_moved_after_five"
MISTAKES = {   # name: (changes of gpt.py, or of gpt.py with a parameter; the test of test_models.py; what it says)
    "later": ([("is_causal=True", "is_causal=False")], CAUSAL, "a token changes the logits before it"),
    "batch": ([("x = self.embed(idx)", "x = (self.embed(idx) + self.embed(idx).roll(1, 0))")], CAUSAL,
              "a text changes the logits of another one"),
    "plain": ([WIDE, ("x = self.embed(idx)", "x = (self.embed(idx) * self.wide[0])")], VALUES,
              "Model.wide holds tensors or modules that nothing trains or moves: use nn.Parameter"),
    "empty": ([("    p.zero_()\n            elif module", "    pass\n            elif module")], VALUES,
              "shift has no finite initial value: see init_weights"),
    "unkept": ([(READY, f"        self.register_buffer('n', torch.zeros(()), persistent=False)\n{READY}"),
                ("        rope = self.rope(idx", "        self.n += 1\n        rope = self.rope(idx")], MOVES,
               "training changes n, and no checkpoint has it: drop persistent=False"),
    "idle": ([("(self.embed(idx) + self.shift)", "self.embed(idx)")], MOVES, "shift gets no gradient"),
    "neutral": ([], "neutral_setting_equals_the_baseline",
                "neutral setting of tests/settings/mine_neutral.py: not gpt.py, correct or remove it")}


def test_errors_say_what_to_write(copy):
    """Changes that the docstring announces in part or not at all, a wrong neutral(), usual mistakes, a broken file."""
    tests = [f"tests/models/test_copies.py::test_unannounced_pieces_equal_the_baseline[mine_{name}]"
             for name in ("said", "neutral")]
    end = "more/pythia.py.\n"
    announced = f"{end}\nChanged from gpt.py: Model.__init__, Model.init_weights\n"
    (copy / "models" / "mine_said.py").write_text(replaced(with_a_parameter(), (end, announced)))
    for name, (changes, test, _) in MISTAKES.items():
        base = with_a_parameter() if name in ("empty", "idle", "neutral") else text("gpt")
        (copy / "models" / f"mine_{name}.py").write_text(replaced(base, *changes))
        tests.append(f"tests/models/test_models.py::test_{test}[mine_{name}-default]")
    (copy / "tests" / "settings" / "mine_neutral.py").write_text("def neutral(model):\n    model.shift.fill_(1.0)\n")
    printed = run(copy, "-m", "pytest", "-q", "-rs", *tests, code=1)
    assert "8 failed" in printed, printed
    line = "Changed from gpt.py: Model.__init__, Model.init_weights, Model.forward"
    assert f"add to the docstring of models/mine_neutral.py: {line}" in " ".join(printed.split())
    for name, (*_, said) in MISTAKES.items():
        assert (f"models/mine_{name}.py: {said}" if name != "neutral" else said) in printed, printed
    (copy / "models" / "mine.py").write_text(replaced(text("gpt"), ("class Config:", "class Config")))
    said = run(copy, "-m", "pytest", "-q", "-k", "gpt", code=4)
    assert "mine.py: SyntaxError: expected ':'" in said and len(said) < 200
