"""examples/look_inside.ipynb: its cells run in their order, and what is stored of them is small and of no machine."""
import json
import re
from pathlib import Path

import pytest

from small import SMALL, flags

NOTEBOOK = Path(__file__).parents[2] / "examples" / "look_inside.ipynb"
CELLS = json.loads(NOTEBOOK.read_text())["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]
RUN = re.search(r'^RUN = "(\.\./runs/(\w+)-tiny)"$', CODE[0], re.M)


@pytest.mark.full
def test_the_cells_run(data, scripts, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    small = {**SMALL, "max_steps": 2, "warmup_steps": 1, "max_len": 320, "seq_len": 32}
    done = scripts.run("train.py", "--model", RUN[2], *flags(**small, data=data), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path / "examples")
    monkeypatch.syspath_prepend("")                                                 # pytest puts the old path back
    capsys.readouterr()
    space = {}
    for code in CODE:
        exec(compile(code, NOTEBOOK.name, "exec"), space)
        last = code.splitlines()[-1]
        if not last.startswith("print("):                                           # the value that Jupyter shows
            assert eval(last, space)._repr_png_().startswith(b"\x89PNG"), last
    assert space["config"]["model"] == RUN[2] and space["maps"].shape == (2, 2, 32, 32)
    assert capsys.readouterr().out.startswith(f"{RUN[2]}: 2 layers, ")


def test_what_is_stored():
    outputs = [output for cell in CELLS for output in cell.get("outputs", ())]
    assert {output["output_type"] for output in outputs} <= {"stream", "execute_result"}        # no errors
    assert sum("image/png" in output.get("data", ()) for output in outputs) == 2 and NOTEBOOK.stat().st_size < 300_000
    text = NOTEBOOK.read_text()
    assert not re.search(r'[" (](/|[A-Z]:\\\\)\w+/', re.sub(r'"image/png": ".*"', "", text))     # no absolute path
