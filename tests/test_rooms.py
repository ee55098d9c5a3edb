"""Imports between the folders, nanodepth.load() for a notebook, and the report of python -m models."""
import ast
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import settings
import torch

import models
import nanodepth
import probes
from nanodepth.cli import UserError

ROOT = Path(__file__).parent.parent
SCRIPTS = {path.stem for path in ROOT.glob("*.py")} - {"muon"}
FIRST = next(name for name in models.names() if probes.of(name, "neutral"))
OURS = {"models", "nanodepth", "probes", "muon"} | SCRIPTS


def imports(path):
    """Top-level packages that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module.split(".")[0])
    return found


def test_imports_point_down():
    assert imports(ROOT / "muon.py") & OURS == set()
    for path in ROOT.glob("nanodepth/*.py"):
        assert imports(path) & OURS <= {"models", "muon", "nanodepth", "probes"}, path
    for name in SCRIPTS:
        assert imports(ROOT / f"{name}.py") & SCRIPTS <= ({"data_prep"} if name == "train" else set()), name


def test_every_module_can_be_imported_first():
    """No circular imports: each module alone in a new process."""
    modules = [f"nanodepth.{path.stem}" for path in ROOT.glob("nanodepth/*.py") if path.stem != "__init__"]
    code = "import importlib, os, sys\nfor name in sys.argv[1:]:\n    pid = os.fork()\n    if pid == 0:\n" \
           "        importlib.import_module(name)\n        os._exit(0)\n    if os.waitpid(pid, 0)[1]: sys.exit(name)"
    code = f"import numpy, tiktoken, torch, tqdm\n{code}"
    done = subprocess.run([sys.executable, "-c", code, *modules, "nanodepth", "models", "probes"],
                          cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_scripts_of_the_results_start(scripts):
    for path in sorted((ROOT / "results").glob("*/*.py")):
        if "ArgumentParser" in path.read_text():
            done = scripts.run(path.relative_to(ROOT), "--help")
            assert done.returncode == 0 and done.stdout.startswith(f"usage: {path.name}"), (path, done.stderr)


def test_lines_have_at_most_120_characters():
    """Of all files but a user's own models."""
    own = {ROOT / room / f"{name}.py" for name in models.names() if not settings.belongs(name)
           for room in ("models", "probes", "tests/settings")}
    rooms = ("models", "nanodepth", "probes", "tests", "results")
    paths = {*ROOT.glob("*.py"), *(path for room in rooms for path in (ROOT / room).rglob("*.py"))} - own
    found = [f"{path.relative_to(ROOT)}:{i}" for path in sorted(paths)
             for i, line in enumerate(path.read_text().split("\n"), 1) if len(line) > 120]
    assert not found, found


def test_load_for_a_notebook_and_the_python_of_the_readme(tmp_path, capsys):
    made = models.build("gpt", vocab_size=257, n_layer=2, n_head=2, d_model=32, max_len=64)
    run = {"model": "gpt", "model_config": vars(made.config),
           "options": {"preset": "tiny", "seq_len": 32, "dtype": "fp32"}, "tokenizer": "byte",
           "data": {"path": "gone", "fingerprint": ""}}
    (tmp_path / "run").mkdir()
    torch.save({"model": made.state_dict(), "optimizers": [], "step": 7, "tokens": 70, "rng": torch.get_rng_state(),
                "config": run, "tokenizer": "byte"}, tmp_path / "run" / "ckpt.pt")
    model, tokenizer, config = nanodepth.load(tmp_path / "run")
    assert config["model"] == "gpt" and not model.training
    snippet = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    exec(snippet.replace("runs/gpt-tiny", str(tmp_path / "run")), {})
    assert capsys.readouterr().out.startswith("import ")
    with pytest.raises(UserError, match="ckpt.pt does not exist"):
        nanodepth.load(tmp_path)


@pytest.mark.parametrize("words, said", [
    (["nothing"], "no model 'nothing'"), (["gpt", "n_head=7"], "n_head"),
    (["gpt", "n_layer=many"], "'many' is not a value of n_layer"),
    (["gpt", "heads=2"], "gpt has no option 'heads=2'"), (["gpt", "n_layer=100000"], "n_layer 100,000 is too large")])
def test_mistakes_of_the_report(words, said, scripts):
    done = scripts.run("-m models", *words)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and said in done.stderr, done.stderr
    assert done.stderr.startswith("python -m models: error: ") and done.stdout == ""


@pytest.mark.parametrize("words, said", [
    ("FIRST n_head=6 n_layer=5 norm_eps=1e-6", "differ"), ("FIRST max_len=16", "in a context of 16 (")])
def test_the_report_of_legal_options(words, said, scripts):
    """At the asked depth and number of heads, in few channels."""
    done = scripts.run("-m models", *words.replace("FIRST", FIRST).split())
    assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr
    found = re.search(r"by at most (\S+)$", done.stdout, re.M)
    assert not found or float(found[1]) < 1e-7


@pytest.mark.parametrize("text, said", [
    ("class Model: pass", "no class Config: models/gpt.py"), ("class Config: pass", "no class Model"),
    ("class Model: pass\n@dataclass\nclass Base: max_len: int = 1\nclass Config(Base): b: int = 1",
     "Config must be a @dataclass"),
    ("class Model: pass\n@dataclass\nclass Config: max_len: int = 1", "Config has no field vocab_size"),
    ("class Model: pass\nclass Config: a: int = 1", "Config must be a @dataclass"), *(
        (f"class Model: pass\n@dataclass\nclass Config:\n    {field}\n    vocab_size: int = 1; max_len: int = 1", said)
        for field, said in (
            ("a: int", "Config.a must have a default and be int, float, bool or str"),
            ("a: tuple = (1, 2)", "Config.a must have a default and be"),
            ("a: int | str = 1", "Config.a must have a default and be"),
            ("a: list | None = None", "Config.a must have a default and be"),
            ("a: int = None", "Config.a = None needs the type int | None"),
            ("a = 16", "Config.a needs a type to be an option: a: int = 16"),
            ("a = None", "Config.a needs a type to be an option: a: float | None = None"),
            ("a: int = 1\n    b: None | float = None\n    def c(self): pass\n    _d = 2", None)))])
def test_what_a_model_file_must_have(text, said):
    file = ModuleType("mine")
    exec(f"from dataclasses import dataclass\n{text}", vars(file))
    wrong = models.defect(file)
    assert wrong is said or wrong.startswith(said) and "\n" not in wrong


def test_build_names_what_is_wrong():
    for options, said in ((dict(nothing=1), "gpt has no option nothing"),
                          (dict(n_layer="2"), "n_layer must be int, not '2'"),
                          (dict(norm_eps=-1.0), "norm_eps must not be negative, not -1.0"),
                          (dict(rope_theta=float("nan")), "rope_theta must be finite, not nan")):
        with pytest.raises(ValueError, match=said):
            models.build("gpt", **options)
