"""results/publish.py: tables in pages; and the script for a GPU."""
import os
import re
import subprocess

import pytest

publish = pytest.importorskip("publish")         # a copy of the repository may be without results/


def test_a_day_on_a_gpu(tmp_path):
    """results/gpu/day.sh with a python3 that does nothing or fails: all pieces, once; one that failed, when asked."""
    python, day = tmp_path / "python3", publish.TOP / "results" / "gpu" / "day.sh"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SIZE": "tiny", "OUT_DIR": str(tmp_path / "out"),
           "RUNS": str(tmp_path / "runs")}

    def call(code, *only, **more):
        python.write_text(f"#!/bin/sh\nexit {code}\n")
        python.chmod(0o755)
        done = subprocess.run(["bash", day, *only], capture_output=True, text=True, env={**env, **more}, timeout=240)
        assert done.returncode == 0, done.stderr
        return set(re.findall(rf"^== (\S+): exit {code} after", done.stdout, re.M)), done.stdout.splitlines()[-1]

    def ended(how):
        return {path.stem for path in (tmp_path / "out").glob(f"*.{how}")}

    end = f"all pieces tried; results in {tmp_path / 'out'}"
    assert "no time left before machine: call again" in call(0, LIMIT="0")[1]
    failed, last = call(1)
    assert last == end and len(failed) > 15 and ended("failed") == failed and ended("ok") == {"machine"}
    assert call(0) == (set(), end)
    for name in failed:
        (tmp_path / "out" / f"{name}.failed").unlink()
    assert call(0, "^rates$") == ({"rates"}, end) and call(0)[0] == failed - {"rates"}
    assert ended("ok") == {"machine", *failed}


def test_fill(tmp_path):
    readme = tmp_path / "a.md"
    readme.write_text("one\n<!-- x -->\nold\n<!-- end -->\ntwo\n<!-- y -->\nkept\n<!-- end -->\n")
    publish.fill(readme, x=publish.markdown(["a", "b"], [["1", "\\2"]]), missing="nowhere")
    new = "| a | b |\n| --- | --- |\n| 1 | \\2 |\n"
    assert readme.read_text() == f"one\n<!-- x -->\n{new}<!-- end -->\ntwo\n<!-- y -->\nkept\n<!-- end -->\n"
