"""What ran: the text that Python imported, and everything else that makes two runs different systems."""
import importlib
import os
import subprocess
import sys
import types

import pytest

from nanodepth import ran, runs
from small import ROOT

BASE = "class Model:\n    def forward(self, x):\n        return x + 1\n"


@pytest.mark.parametrize("edited, same", [
    ("# why\nclass Model:\n\n    def forward(self, x):  # x\n        return (x + 1)\n", True),
    ('"""A."""\nclass Model:\n    """B."""\n    def forward(self, x):\n        "C"\n        return x + 1\n', True),
    ("class Model:\n    def forward(self, x):\n        return x - 1\n", False),
    ("class Model:\n    def forward(self, x):\n        return x + 2\n", False),
    ("class Model:\n    def forward(self, x=0):\n        return x + 1\n", False)])
def test_comments_and_docstrings_are_no_code(edited, same):
    assert (ran.digest(edited.encode()) == ran.digest(BASE.encode())) is same


def test_the_digest_is_the_same_in_every_python():
    text = """class A:\n    def f(self, x: int, *, y=None) -> tuple:\n        for a, b in x:
            yield f"{a['k']} {b!r:>9}", x[1, 2]\n"""                 # ast.unparse writes it in three ways
    assert ran.digest(text.encode()) == "985ce7a1dc82"


def test_texts_are_kept_before_torch_takes_its_seconds():
    words = sys.executable, "-c", "import sys, nanodepth; print(*sys.modules)"
    assert "torch" not in subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


@pytest.fixture
def zoo(tmp_path, monkeypatch):
    """A repository with a package of models, of which one is made from another. zoo(file, text) writes a file."""
    def write(file, text):
        (tmp_path / "zoo" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "zoo" / file).write_text(text)

    monkeypatch.setattr(ran, "ROOT", tmp_path)
    monkeypatch.setattr(ran, "DECIDE", ())
    monkeypatch.syspath_prepend(tmp_path)
    write("__init__.py", "")
    yield write
    for name in [name for name in sys.modules if name.startswith(("zoo", "theirs"))]:
        del sys.modules[name]


@pytest.mark.parametrize("line", [
    "from zoo import base", "from zoo.base import Model as Parent", "import zoo.base", "from . import base",
    "from .base import Model as Parent", "import torch\nfrom zoo.between import base",
    "import importlib\n\n\nclass Model(importlib.import_module('zoo.base').Model):\n    pass"])
def test_what_a_model_file_imports_counts(zoo, line):
    for name, text in (("base", BASE), ("between", "from zoo import base\n"), ("alone", BASE),
                       ("mine", f"{line}\n\n\ndef own():\n    return 1\n")):
        zoo(f"{name}.py", text)
    mine, alone = importlib.import_module("zoo.mine"), importlib.import_module("zoo.alone")
    wanted = {"zoo/mine.py", "zoo/base.py"} | ({"zoo/between.py"} if "between" in line else set())
    assert set(ran.code(mine)) == wanted and set(ran.code(alone)) == {"zoo/alone.py"}
    assert ran.code(mine)["zoo/base.py"] == ran.digest(BASE.encode())


def test_an_optimizer_s_file_and_a_folder_without_init_count(zoo, tmp_path, monkeypatch):
    for name, text in (("kernels/fast", BASE), ("soap", BASE), ("mine", "import zoo_kernels.fast\n"),
                       ("venv/lib/python3.12/site-packages/theirs", BASE), ("own", "import zoo_soap\nimport theirs\n")):
        zoo(f"../{name if 'venv' in name else f'zoo_{name}'}.py", text)
    monkeypatch.syspath_prepend(tmp_path / "venv" / "lib" / "python3.12" / "site-packages")
    monkeypatch.setitem(sys.modules, "muon", importlib.import_module("zoo_own"))
    mine = importlib.import_module("zoo_mine")
    assert set(ran.code(mine)) == {"zoo_mine.py", "zoo_kernels/fast.py", "zoo_own.py", "zoo_soap.py"}


def test_a_package_of_helpers_counts(zoo):
    """Also the file that its __init__.py takes a function from."""
    zoo("kit/__init__.py", "from .acts import squash\n")
    zoo("kit/acts.py", "def squash(x):\n    return x\n")
    zoo("mine.py", "from zoo.kit import squash\n")
    mine = importlib.import_module("zoo.mine")
    assert set(ran.code(mine)) == {"zoo/mine.py", "zoo/kit/__init__.py", "zoo/kit/acts.py"}


def test_modules_that_are_no_plain_files(zoo, tmp_path, monkeypatch):
    """A compiled one counts by its bytes, one whose file is not there does not; pdb gives its script no package."""
    zoo("fast.so", "\0")
    for name, file in (("fast", tmp_path / "zoo" / "fast.so"), ("lost", "_lost.py"), ("none", None)):
        monkeypatch.setitem(sys.modules, f"zoo.{name}", made := types.ModuleType(f"zoo.{name}"))
        made.__file__ = file and str(file)
    zoo("mine.py", "import zoo.fast, zoo.lost, zoo.none\ntry:\n    from .x import y\nexcept ImportError:\n    pass\n")
    monkeypatch.delattr(mine := importlib.import_module("zoo.mine"), "__package__")
    code = ran.code(mine)
    assert set(code) == {"zoo/mine.py", "zoo/fast.so"} and code["zoo/fast.so"] == "6e340b9cffb3"


def test_the_script_that_trains_counts(zoo, monkeypatch):
    """A copy of train.py, and what it and nanodepth/data.py import; not our other modules."""
    monkeypatch.setattr(ran, "DECIDE", ("train.py", "zoo/parts.py"))
    monkeypatch.setattr(ran, "HARMLESS", ("theirs.py",))
    for file, text in (("../train.py", BASE), ("../theirs.py", BASE), ("mine.py", BASE), ("losses.py", BASE),
                       ("order.py", BASE), ("parts.py", "from zoo import order\n"),
                       ("copy.py", f"import theirs\nfrom zoo import losses, parts\n{BASE}")):
        zoo(file, text)
    mine, script = importlib.import_module("zoo.mine"), importlib.import_module("zoo.copy")
    shared = {"zoo/parts.py", "zoo/order.py", "zoo/mine.py"}
    assert set(ran.code(mine, script)) == shared | {"zoo/copy.py", "zoo/losses.py"}
    zoo("same.py", f"# why\n{BASE}")
    for other in (None, importlib.import_module("zoo.same")):               # a copy without edits is train.py
        assert set(ran.code(mine, other)) == shared | {"train.py"}


def test_the_text_that_was_imported(zoo, tmp_path):
    """Not that which the file has by then: also of the same size, and within the same second."""
    zoo("mine.py", BASE)
    mine, before = importlib.import_module("zoo.mine"), os.stat(tmp_path / "zoo" / "mine.py")
    zoo("mine.py", BASE.replace("+", "-"))
    os.utime(tmp_path / "zoo" / "mine.py", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert ran.code(mine) == {"zoo/mine.py": ran.digest(BASE.encode())}
    ran.copy(ran.code(mine), tmp_path / "source")
    assert (tmp_path / "source" / "zoo" / "mine.py").read_text() == BASE
    del sys.modules["zoo.mine"]
    assert importlib.import_module("zoo.mine").Model().forward(3) == 2              # no .pyc of the old text


def test_an_old_text_is_named(whole, monkeypatch, capsys):
    """A notebook has imported gpt.py, somebody edits it and trains."""
    file = ROOT / "models" / "gpt.py"
    monkeypatch.setitem(ran.texts, file, file.read_bytes() + b"edited = False\n")
    runs.load(whole)
    assert capsys.readouterr().err == f"models/gpt.py, as imported, differs from the copy in {whole}/source\n"
