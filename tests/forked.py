"""The repository's scripts as processes that start in milliseconds: forked from one that has imported torch already.

    with Scripts() as scripts:
        done = scripts.run("train.py", "--max_steps", 2)

done has returncode (None: too slow), stdout and stderr. "-m models" runs a module. Scripts("--alone") knows nothing but
torch: it runs a file as if it were in an empty folder.
"""
import json
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent


def within(script, main, *words):
    """The exit code of a script's main(argv) in this process; prints the error line as the script would."""
    from nanodepth.cli import UserError, exit_code
    try:
        return main([*map(str, words)])
    except SystemExit as e:
        return e.code
    except UserError as e:
        return exit_code(script, e)


class Scripts:
    def __init__(self, *flags):
        env = {"OMP_NUM_THREADS": "1", **os.environ, "HTTPS_PROXY": "http://127.0.0.1:9",
               "TIKTOKEN_CACHE_DIR": "/nonexistent"}
        self.server = subprocess.Popen([sys.executable, __file__, *flags], stdin=subprocess.PIPE,
                                       stdout=subprocess.PIPE, text=True, env=env)
        self.turn = threading.Lock()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.stdin.close()
        self.server.wait()

    def run(self, script, *words, cwd=ROOT, seconds=600, PYTHONPATH=None):
        """Runs one script at a time; calls from several threads wait."""
        with self.turn:
            path = script if str(script).startswith("-m ") else str(ROOT / script)
            order = {"script": path, "words": [str(w) for w in words], "cwd": str(cwd),
                     "seconds": seconds, "path": PYTHONPATH}
            self.server.stdin.write(json.dumps(order) + "\n")
            self.server.stdin.flush()
            return SimpleNamespace(**json.loads(self.server.stdout.readline()))


def child(order, out, err):
    """To the script this process looks like `python SCRIPT WORDS`."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    # Too much memory is an error and does not stop the machine. CUDA reserves more addresses than that when it starts.
    if "cpu" in order["words"] or not Path("/dev/nvidiactl").exists():
        resource.setrlimit(resource.RLIMIT_AS, (16 * 2 ** 30, 16 * 2 ** 30))
    os.chdir(order["cwd"])
    script = order["script"]
    module = script.removeprefix("-m ") if script.startswith("-m ") else None
    sys.path[:1] = [str(ROOT if module else Path(script).parent)] + [order["path"]] * (order["path"] is not None)
    sys.argv = [script, *order["words"]]
    code = 1
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 255)


def prepare():
    """Imports what the scripts import."""
    sys.path.insert(0, str(ROOT))
    import torch.distributed  # noqa: F401
    import torch.nn.parallel  # noqa: F401

    import data_prep  # noqa: F401
    import models
    import muon  # noqa: F401
    import nanodepth.record  # noqa: F401
    for name in models.names():
        models.module(name)


def serve():
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        order = json.loads(line)
        if order["script"].endswith("bench.py"):
            import nanodepth.timing  # noqa: F401  (with the whole compiler)
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            pid = os.fork()
            if pid == 0:
                child(order, out.fileno(), err.fileno())
            until, status = time.monotonic() + order["seconds"], (0, 0)
            while status[0] == 0 and time.monotonic() < until:
                status = os.waitpid(pid, os.WNOHANG)
                time.sleep(0.002)
            code = os.waitstatus_to_exitcode(status[1]) if status[0] else None
            if code is None:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        replies.write(json.dumps({"returncode": code, "stdout": texts[0], "stderr": texts[1]}) + "\n")


if __name__ == "__main__":
    if "--alone" in sys.argv:
        import torch  # noqa: F401
    else:
        prepare()
    serve()
