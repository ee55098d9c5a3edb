"""What the README states about the code is true."""
import json
import re
import runpy
from dataclasses import fields
from pathlib import Path

import settings
import torch
from analysis import random_model, tokens

import models
from nanodepth import command, curves, timing
from nanodepth.presets import PRESETS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCS = {path.stem: path.read_text() for path in (ROOT / "docs").glob("*.md")}


ROWS = re.findall(r"^\| `(\w+)` \| .*\[\d{4}\.\d{5}\]", README, re.M)


def test_one_page():
    lines = README.splitlines()
    assert len(lines) <= 190 and max(map(len, lines)) <= 120
    assert all(len(text.splitlines()) <= 150 for page, text in DOCS.items() if page != "notes")
    for paper in re.findall(r"\[(\d{4}\.\d{5})\]", README):
        assert f"\n[{paper}]: https://arxiv.org/abs/{paper}\n" in README


def test_speeds_are_those_of_their_file():
    text = (ROOT / "results" / "bench" / "README.md").read_text()
    for row in json.loads((ROOT / "results" / "bench" / "cpu.json").read_text())["models"]:
        cells = r" \| \S+ \| {:.3f} ±{:.3f} \|".format(*row["ratio"])
        assert row["model"] == row["against"] or re.search(rf"^\| `{row['model']}`{cells}", text, re.M), row["model"]


def test_sizes_of_all_models():
    """The table is made by a command, and is of the day it was made: it names all models, in rows as they are made."""
    sizes = runpy.run_path(str(ROOT / "results" / "sizes.py"))
    text, (*_, n, more, _) = (ROOT / "results" / "sizes.md").read_text(), sizes["row"](models.names()[1])
    assert {name for name in models.names() if settings.belongs(name)} <= set(re.findall(r"^\| `(\w+)`", text, re.M))
    with torch.device("meta"):
        base, own = (sum(p.numel() for p in models.build(name).parameters()) for name in models.names()[:2])
    assert text.startswith(sizes["TEXT"]) and (n, more) == (f"{own:,}", f"{own - base:+,}")


def test_options_that_a_resumed_run_may_change():
    said = DOCS["training"].split("Options\nhold, but for")[1].split("\n\n")[0]
    assert {*re.findall(r"--(\w+)", said), "resume", "data", "max_steps"} == command.MAY_CHANGE


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
                found += len(flags)
    assert found > 50


def test_models_presets_and_files_are_named():
    assert set(ROWS) >= {name for name in models.names() if settings.belongs(name)}
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


def test_what_many_gpus_hold_and_send():
    shapes = {"450M": PRESETS["exo-450m"], "1.4B": PRESETS["mudd-1.4b"],
              "7B": dict(n_layer=32, d_model=4096, n_head=32, d_ff=11008, vocab_size=50304)}
    known = {f.name for f in fields(models.module("gpt").Config)}
    for label, shape in shapes.items():
        with torch.device("meta"):
            model = models.build("gpt", **{key: value for key, value in shape.items() if key in known})
        for world in (1, 8, 64):
            muon, adamw = (timing.across(model, world, optimizer, "bf16") for optimizer in ("muon", "adamw"))
            numbers = [muon["held"], adamw["held"], adamw["held"] / world, muon["gradients"], muon["updates"]]
            row = " | ".join([label, str(world), *(f"{x / 2 ** 30:.1f}" for x in numbers)])
            assert f"| {row} |" in DOCS["many-gpus"]


def test_tables_of_the_small_study_are_those_of_its_logs():
    study = ROOT / "results" / "study-small"
    logs, text = sorted((study / "logs").iterdir()), (study / "README.md").read_text()
    groups = curves.systems([curves.read_log(run) for run in logs])
    order = [line.split("`")[1] for line in text.splitlines() if line.startswith("| `")][:len(groups)]
    table = curves.table(curves.summarise({label: groups[label] for label in order}, "gpt"), "gpt")
    assert table in text
    assert runpy.run_path(str(study / "study.py"))["claims"](logs) in text


def test_tables_of_the_study_are_those_of_its_logs():
    study = ROOT / "results" / "study-cpu"
    report = runpy.run_path(str(study / "report.py"))
    strong = report["groups"]()
    text = (study / "README.md").read_text()
    assert report["main_table"](strong) in text and report["heads_table"]() in (study / "copying.md").read_text()
    assert report["claims_table"](strong, report["plain_groups"]()) in text
    assert report["front_table"](strong) in README
    assert all(report["rates_table"](name) in (study / "rates.md").read_text() for name in report["TRIES"])


def test_table_of_the_longer_texts_is_that_of_its_losses():
    folder = ROOT / "results" / "length"
    rows = [json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines()]
    table = runpy.run_path(str(folder / "length.py"))["table"](rows)
    assert table in (folder / "README.md").read_text()


def test_what_copying_heads_read():
    """The table is that of its numbers, and a cut changes a model's loss, layer by layer, only while it is active."""
    study = ROOT / "results" / "study-cpu"
    copying, words = (runpy.run_path(str(study / f"{name}.py")) for name in ("copying", "study"))
    found = json.loads((study / "cuts.json").read_text())
    assert copying["table"](found) in (study / "copying.md").read_text() and found.keys() == copying["CUTS"].keys()
    for system, cuts in copying["CUTS"].items():
        name, *options = words["SYSTEMS"][system].split()
        model, (idx, targets) = random_model(name, **dict(zip((x[2:] for x in options[::2]), options[1::2]))), tokens()
        losses = {}
        with torch.no_grad():
            whole = model(idx, targets)[1].item()
            for layer, cut in cuts(model).items():
                with cut:
                    losses[layer] = model(idx, targets)[1].item()
            assert model(idx, targets)[1].item() == whole
        assert list(map(str, losses)) == list(found[system])[1:len(losses) + 1]
        assert len({whole, *losses.values()}) == len(losses) + 1, system
