"""The house: imports point down, no place knows a model by name, and what a model file must have."""
import ast
import re
from types import ModuleType

import pytest
import settings

import models
from small import ROOT

SCRIPTS = {path.stem for path in ROOT.glob("*.py")} - {"muon"}
OURS = {"models", "nanodepth", "probes", "muon"} | SCRIPTS
MAY_NAME_MODELS = {"presets", "test_presets",                        # papers' tables, layouts of published checkpoints
                   "convert", "published", "test_convert", "test_convert_mistakes", "test_probes"}


def imports(path):
    """Top-level packages that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {node.module} if isinstance(node, ast.ImportFrom) else {alias.name for alias in node.names}
    return {name.split(".")[0] for name in found}


@pytest.mark.quick
def test_imports_point_down():
    assert imports(ROOT / "muon.py") & OURS == set()
    for path in ROOT.glob("nanodepth/*.py"):
        assert imports(path) & OURS <= {"models", "muon", "nanodepth", "probes"}, path
    for name in SCRIPTS:
        assert imports(ROOT / f"{name}.py") & SCRIPTS <= ({"data_prep"} if name == "train" else set()), name


@pytest.mark.quick
def test_no_model_is_known_by_name():
    """Except gpt, the baseline and default, and by its own tests. In a text a name counts as a word of its own, as in
    "kern:top_k=2"."""
    known = {name for name in models.names() if settings.belongs(name)} - {"gpt"}
    own = {f"test_{name}" for name in models.names()}
    found = []
    rooms = "*.py", "nanodepth/*.py", "tests/helpers/*.py", "tests/models/*.py", "tests/scripts/*.py"
    for path in sorted(path for room in rooms for path in ROOT.glob(room)):
        for node in ast.walk(ast.parse(path.read_text())) if path.stem not in MAY_NAME_MODELS | own else ():
            texts = [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []
            if isinstance(node, ast.ImportFrom) and node.module == "models":
                texts = [alias.name for alias in node.names]
            for words in (set(re.split(r"[\s:\[,]+", text)) - {""} for text in texts):
                if words & known and len(words) <= 6:
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {words & known}")
    assert not found, "\n".join(["a model by name, outside of models/NAME.py, probes/NAME.py and their tests:", *found])


def test_scripts_of_the_results_start(scripts):
    for path in sorted((ROOT / "results").glob("*/*.py")):
        if " Parser(" in path.read_text():
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


def test_the_python_of_the_readme(whole, capsys):
    snippet = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[1]
    exec(snippet.replace("runs/gpt-tiny", str(whole)), {})
    assert capsys.readouterr().out.startswith("import ")


FIELD = "class Model: pass\n@dataclass\nclass Config:\n    {}\n    vocab_size: int = 1; max_len: int = 1"


@pytest.mark.parametrize("text, said", [
    ("class Model: pass", "no class Config: models/gpt.py"), ("class Config: pass", "no class Model"),
    ("class Model: pass\n@dataclass\nclass Base: max_len: int = 1\nclass Config(Base): b: int = 1",
     "Config must be a @dataclass"),
    ("class Model: pass\n@dataclass\nclass Config: max_len: int = 1", "Config has no field vocab_size"),
    *((FIELD.format(a), "Config.a must be int, float, bool or str (or one of them | None), and have a default of this")
      for a in ("a: int", "a: tuple = (1, 2)", "a: int | str = 1", "a: float = None", "a: int = 0.5")),
    (FIELD.format("a = 16"), "Config.a needs a type to be an option: a: int = 16"),
    (FIELD.format("a: int = 1\n    b: None | float = None\n    def c(self): pass\n    _d = 2"), None)])
def test_what_a_model_file_must_have(text, said):
    file = ModuleType("mine")
    exec(f"from dataclasses import dataclass\n{text}", vars(file))
    wrong = models.defect(file)
    assert wrong is said or wrong.startswith(said) and "\n" not in wrong
