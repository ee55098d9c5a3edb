"""results/gpu/day.sh, the script for a GPU."""
import os
import re
import subprocess
from pathlib import Path

import pytest

compare = pytest.importorskip("compare")         # a copy of the repository may be without results/


def test_a_day_on_a_gpu(tmp_path):
    """With a python3 that does nothing or fails: all pieces, once; one that failed, when asked."""
    python, day = tmp_path / "python3", Path(compare.__file__).parent / "gpu" / "day.sh"
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
