"""The repository's scripts as processes that start in milliseconds: forked from one that has imported torch already.

    scripts = Scripts()
    done = scripts.run("train.py", "--max_steps", 2)
    scripts.server.communicate()                            # ends it

done has returncode, stdout and stderr. A file outside of the repository finds torch and nothing of ours.
"""
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[2]
MEMORY = 16 * 2 ** 30           # bytes of addresses for a script: too large a model is an error and no dead machine


def within(script, main, *words):
    """The exit code of a script's main(argv) in this process; prints the error line as the script would."""
    from nanodepth.cli import exit_code
    try:
        return main([*map(str, words)])
    except SystemExit as e:
        return e.code
    except Exception as e:
        return exit_code(script, e)


class Scripts:
    def __init__(self):
        env = {"OMP_NUM_THREADS": "1", **os.environ, "HTTPS_PROXY": "http://127.0.0.1:9",
               "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1", "TIKTOKEN_CACHE_DIR": "/nonexistent"}
        self.server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       text=True, env=env)

    def run(self, script, *words, cwd=ROOT, seconds=600, PYTHONPATH=None):
        order = {"script": str(script), "words": [str(w) for w in words], "cwd": str(cwd), "seconds": seconds,
                 "path": [PYTHONPATH] if PYTHONPATH else []}
        self.server.stdin.write(json.dumps(order) + "\n")
        self.server.stdin.flush()
        return SimpleNamespace(**json.loads(self.server.stdout.readline()))


def child(order, out, err):
    """To the script this process looks like `python SCRIPT WORDS`."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    signal.alarm(order["seconds"])
    if not Path("/dev/nvidiactl").exists():                     # CUDA reserves more addresses than that when it starts
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    os.chdir(order["cwd"])
    path = ROOT / order["script"]
    if not path.is_relative_to(ROOT):
        for name in [name for name in sys.modules if name.split(".")[0] in ("models", "muon", "nanodepth", "probes")]:
            del sys.modules[name]
    sys.path[:2] = [str(path.parent), *order["path"]]
    sys.argv = [str(path), *order["words"]]
    code = 1
    try:
        runpy.run_path(str(path), run_name="__main__")
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 255)


def serve():
    sys.path.insert(0, str(ROOT))
    import torch.distributed  # noqa: F401
    import torch.nn.parallel  # noqa: F401

    import data_prep  # noqa: F401
    import models
    import nanodepth.inside  # noqa: F401
    for name in models.names():
        models.module(name)
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        order = json.loads(line)
        if order["script"].endswith("bench.py"):
            import bench  # noqa: F401  (with the whole compiler)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            pid = os.fork()
            if pid == 0:
                child(order, out.fileno(), err.fileno())
            code, texts = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        replies.write(json.dumps({"returncode": code, "stdout": texts[0], "stderr": texts[1]}) + "\n")


if __name__ == "__main__":
    serve()
