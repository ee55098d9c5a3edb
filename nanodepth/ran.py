"""What ran: all that decides the losses of a run but its seed. Runs that differ in it are different systems.

It is in config.json: the options, the model's Config, the content of the data and of --init_from, the torch version,
and a digest of each file of code. The code is that which was imported, also if somebody has edited the file since: from
the moment that nanodepth is imported, the source text of every module of this repository is kept when Python reads it.
"""
import ast
import hashlib
import subprocess
import sys
import zlib
from importlib.machinery import SourceFileLoader
from importlib.util import resolve_name
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DECIDE = "train.py", "nanodepth/data.py", "nanodepth/devices.py", "nanodepth/scoring.py"
HARMLESS = ("data_prep.py", "models/__init__.py", "probes/__init__.py", *(f"nanodepth/{name}.py" for name in (
    "__init__ benchmarks cli curves inside pictures presets ran runs texts tokenizers".split())))   # change no loss
FREE = {"seed", "preset", "data", "init_from", "out", "resume", "device", "threads", "compile", "deterministic",
        "micro_batch", "eval_every", "eval_tokens", "final_eval_tokens", "save_every", "wandb"}     # change no loss
texts = {}                                              # {file: its source text when it was imported, in bytes}


def keep_texts():
    """From now on Python imports our modules from their source text, never from a .pyc, and the text is kept. That of
    the running script is read now.
    """
    plain = SourceFileLoader.get_code

    def get_code(loader, name):
        file = place(loader.path)
        if not is_ours(file):
            return plain(loader, name)
        texts[file] = source = loader.get_data(loader.path)
        return loader.source_to_code(source, loader.path)

    SourceFileLoader.get_code = get_code
    main = getattr(sys.modules["__main__"], "__file__", None)
    if main and Path(main).is_file():
        texts[place(main)] = Path(main).read_bytes()


def is_ours(file):
    """Whether a file is in this repository, and not in an environment there, such as venv/lib/python3.12/."""
    return ROOT in file.parents and not any(part.startswith("python3.") for part in file.relative_to(ROOT).parts)


def place(file):
    """The absolute path of a file, which itself may be a link."""
    return Path(file).parent.resolve() / Path(file).name


# ---------------------------------------------------------------------------------------------------------------- code


def files(module, script=None):
    """[file]: those of this repository that decide what a run of this model module computes: also what it imports, and
    what muon.py and the script that trains import. script: train.py's module, or that of a copy of it.
    """
    own, usual = file_of(script), ROOT / "train.py"
    if not is_ours(own) or usual.is_file() and digest(text(own)) == digest(text(usual)):
        own = usual
    found = [own if file == "train.py" else ROOT / file for file in DECIDE]
    parts = [script, *(sys.modules.get(file[:-3].replace("/", ".")) for file in DECIDE)]
    used = [x for part in parts if is_ours(file_of(part)) for x in imported(part)
            if file_of(x) not in (*found, file_of(script), *(ROOT / name for name in HARMLESS))]
    return list(dict.fromkeys([*found, *closure([*used, sys.modules.get("muon"), module])]))


def closure(left):
    """[file]: those of this repository that these modules are in, and all that they import; without an __init__.py that
    is empty or in HARMLESS.
    """
    found = []
    while left:
        module = left.pop()
        file = file_of(module)
        if file in found or not is_ours(file):
            continue
        if file.name != "__init__.py" or text(file).strip() and file.relative_to(ROOT).as_posix() not in HARMLESS:
            found.append(file)
            left += imported(module)
    return found


def file_of(module):
    """Its file; if it has none, the repository itself, which is no file of ours."""
    file = place(getattr(module, "__file__", None) or ROOT)
    return file if file in texts or file.is_file() else ROOT


def imported(module):
    """[module]: those of this repository that a module imports, or whose classes its own are made from."""
    names = [base.__module__ for x in vars(module).values() if isinstance(x, type) for base in x.__mro__]
    file, package = file_of(module), getattr(module, "__package__", None)
    for node in ast.walk(ast.parse(text(file))) if file.suffix == ".py" else ():
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            start = resolve_name("." * node.level + (node.module or ""), package)
            names += [start, *(f"{start}.{alias.name}" for alias in node.names)]
    names += [name[:i] for name in names for i, x in enumerate(name) if x == "."]          # packages
    found = [sys.modules[name] for name in dict.fromkeys(names) if name in sys.modules]
    return [x for x in found if is_ours(file_of(x))]


def text(file):
    """The source text of a file as it was imported; else as it is now."""
    return texts[file] if file in texts else file.read_bytes()


def digest(source):
    """A short hash of source text (bytes) without docstrings, comments and blank lines; the same in every Python."""
    def plain(x):                                       # what is empty is left out: which fields there are has changed
        if isinstance(x, ast.AST):
            return type(x).__name__, *((name, plain(y)) for name, y in ast.iter_fields(x) if y not in (None, []))
        return [plain(y) for y in x] if isinstance(x, list) else x

    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, False) is not None:
            node.body[:1] = [] if node.body[1:] else [ast.Pass()]
    return hashlib.sha256(repr(plain(tree)).encode()).hexdigest()[:12]


def code(module, script=None):
    """{file, relative to the repository: digest() of what was imported} of files()."""
    return digests(files(module, script))


def digests(files):
    """{file, relative to the repository: digest() of what was imported, of other than Python of its bytes}."""
    return {file.relative_to(ROOT).as_posix(): digest(text(file)) if file.suffix == ".py" else
            hashlib.sha256(text(file)).hexdigest()[:12] for file in files}


def git_state():
    """{"commit", "dirty"} of the repository that this file is in; None without git."""
    def git(*words):
        done = subprocess.run(("git", *words), cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
        return done.stdout.strip()
    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.CalledProcessError):
        return None


def checksum(model):
    """A short hash of the model's weights and buffers."""
    found = 0
    for x in model.state_dict().values():
        found = zlib.crc32(x.cpu().float().numpy().tobytes(), found)
    return f"{found:08x}"


def copy(code, folder):
    """Writes these files, as they were imported, into the folder, each where it is in the repository."""
    for file in code:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(text(ROOT / file))


# ----------------------------------------------------------------------------------------------------------------- runs


def what(config):
    """{name: value} of all that decides a run's losses but its seed, from its config.json."""
    return {"model": config["model"], **config["model_config"],
            **{name: x for name, x in config["options"].items() if name not in FREE},
            "data": config["data"]["fingerprint"], "begins_with": config.get("begins_with"),
            "torch": config["versions"]["torch"], **config.get("code", {})}


def part(config):
    """The part of a config.json that what() and differences() look at: without paths, in a study's log."""
    names = "model", "model_config", "defaults", "code", "versions", "begins_with"
    return {**{name: config[name] for name in names if name in config},
            "options": {name: x for name, x in config["options"].items() if name not in FREE},
            "data": {"fingerprint": config["data"]["fingerprint"]}}


def differences(a, b, ignore=()):
    """{name: (value in a, value in b)}: how two runs differ, from their config.json; {} for runs of one system.

    An option that one of them lacks had the default that it has in the other. ignore: names that do not count; "code"
    stands for every file of code.
    """
    own, other = what(a), what(b)
    pairs = {name: (own.get(name, b.get("defaults", {}).get(name)), other.get(name, a.get("defaults", {}).get(name)))
             for name in {**own, **other}}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1] and name not in ignore
            and not (name.endswith(".py") and "code" in ignore)}


def in_words(found):
    """differences() as text: "muon.py, d_ff 192, 512"."""
    return ", ".join(name if name.endswith(".py") else f"{name} {a}, {b}" for name, (a, b) in found.items())
