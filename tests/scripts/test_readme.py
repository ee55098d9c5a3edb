"""What the README states about the code is true."""
import difflib
import re
import runpy

import settings

import models
from nanodepth import runs
from nanodepth.presets import PRESETS
from small import ROOT

README = (ROOT / "README.md").read_text()
DOCS = {path.stem: path.read_text() for path in (ROOT / "docs").glob("*.md")}
LINKS = re.findall(r"\[`(\w+)`\]\((models/\S+\.py)\)", README)


def test_the_diff_of_an_idea():
    code = runpy.run_path(str(ROOT / "results" / "sizes.py"))["code"]
    old, new = (code(ROOT / name)[0] for name in re.findall(r"`diff (\S+) (\S+)` without docstrings", README)[0])
    lines = [re.sub(r"\s+# .*", "", line) for line in list(difflib.unified_diff(old, new, n=0, lineterm=""))[2:]]
    block = re.search(r"```diff\n(.*?)\n```", README, re.S)[1]
    assert block == "\n".join(line for line in lines if line[:2] != "@@")


def test_options_that_a_resumed_run_may_change():
    said = DOCS["training"].split("Only these may change")[1].split("\n\n")[0]
    assert {*re.findall(r"--(\w+)", said), "resume"} == runs.MAY_CHANGE


def test_flags_of_the_commands_exist(scripts):
    """Every flag of a command of ours in README and docs is one of its --help."""
    helps, found = {}, 0
    for page, text in {"README": README, **DOCS}.items():
        for script, words in re.findall(r"(?:python|per_node \d+) (\w+\.py)([^#;`|&\n]*)", text):
            first, model = words.split()[:1], re.search(r"--model (\w+)", words)
            key = script, *(first if script in ("data_prep.py", "analyze.py") else
                            ["--model", model[1]] if model and model[1] in models.names() else [])
            if flags := re.findall(r" (--[a-z]\w*)", words):
                helps[key] = helps.get(key) or scripts.run(*key, "--help").stdout
                assert not [flag for flag in flags if not re.search(rf"{flag}\b", helps[key])], (page, script + words)
                assert script != "train.py" or not re.search(r"--\w+ [A-Z]+ *\[", helps[key]), "an option has no text"
                found += len(flags)
    assert found > 50


def test_models_presets_and_files_are_named():
    assert set(LINKS) == {(name, models.path(name)) for name in models.names() if settings.belongs(name)}
    for name in PRESETS:
        assert f"`{name}`" in DOCS["training"]
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("results/**/*.md")]:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
        for path in re.findall(r"\]\((?!http|#)(.*?)(?:#.*?)?\)", text):
            assert (page.parent / path).exists(), (page.name, path)
    for page in DOCS:
        assert f"](docs/{page}.md)" in README


def test_install_lines_match_the_requirements():
    assert "pip install -r requirements.txt && python train.py\n" in README
    assert "\npip install -r requirements-dev.txt && python -m pytest -n 2 --dist loadfile\n" in README
    hard = {re.split(r"[=<>]", line)[0] for line in (ROOT / "requirements.txt").read_text().split()}
    assert hard == {"torch", "numpy", "tiktoken", "tqdm"}
    project = (ROOT / "pyproject.toml").read_text()
    assert set(re.findall(r'"(\w+)>=[\d.]+"', project.split("[project]")[1])) == hard
    for room in re.search(r"packages = \[(.*)\]", project)[1].split(", "):
        assert list((ROOT / room.strip('"').replace(".", "/")).glob("*.py"))
