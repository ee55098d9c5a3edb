"""results/: statistics and tables of studies by hand, and what the queue runs."""
import json
import math
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import models
from nanodepth import curves

RESULTS = Path(__file__).parents[2] / "results"
compare = pytest.importorskip("compare")         # a copy of the repository may be without results/


def test_a_difference_in_words():
    losses = {"gpt": {0: 4.0, 1: 4.3}, "one": {0: 3.9, 1: 4.25}, "far": {7: 3.8}, "lone": {0: 4.1}}
    value, half = curves.difference(losses, "one", "gpt")
    assert compare.gap(losses, "one") == (f"{value:+.4f} ± {half:.4f}", -1 if abs(value) > half else 0)
    assert compare.gap({"gpt": {0: 4.0}, "one": {0: 3.9}}, "one") == ("-0.1000", None)
    assert compare.gap(losses, "far") == compare.gap(losses, "gpt") == ("", None)


def test_pages_are_those_of_their_runs():
    report = runpy.run_path(str(RESULTS / "study" / "report.py"))
    runs, speed = compare.read(RESULTS / "study"), compare.speeds(RESULTS / "study")
    text = report["README"].read_text()
    assert text == report["front"](text, report["ends"](runs), speed)
    tiny = (RESULTS / "tiny-cpu" / "README.md").read_text()
    for run in compare.table(RESULTS / "tiny-cpu" / "runs.csv"):
        name = "gpt --gate elementwise" if run["run"] == "gpt-gated" else run["run"]
        assert f"\n| `{name}` | {run['parameters']:,} | {run['bpb']:.4f} |\n" in tiny, name
    for page, parts in report["tables"](runs, speed).items():
        for name, table in parts.items():
            assert f"<!-- {name} -->\n{table}\n<!-- end -->" in (RESULTS / "study" / page).read_text(), (page, name)


def test_the_queue(data, tmp_path, monkeypatch, capsys):
    """Scales by seed 0 until the loss rises, then all seeds at the best, from stage to stage; the table of it. A second
    call has nothing to do; a longer stage goes on from the last checkpoint that is left."""
    study, made = runpy.run_path(str(RESULTS / "study" / "study.py")), []
    fingerprint, other = study["Data"](data).fingerprint, list(study["SYSTEMS"])[1]

    def train(folder, system, seed, scale, rates, steps, before, args):
        loss = {1: 4.0, 0.5: 3.5, 0.25: 3.6}[scale] + 0.1 * seed - (system != "gpt")
        made.append((folder.name, before and before.name))
        numbers = dict(zip(("muon_lr", "adamw_lr", "mix_lr"), rates), loss=loss, others=loss, share=0.1)
        line = dict.fromkeys(study["COLUMNS"]) | numbers | {
            "run": folder.name, "system": system, "seed": seed, "scale": scale, "steps": steps, "data": fingerprint}
        args.results.add(line, [{"kind": "val", "step": steps, "loss": loss}])
        (folder / "before_decay").mkdir(parents=True)

    monkeypatch.setitem(study["trunk"].__globals__, "train_stage", train)
    monkeypatch.setitem(study["trunk"].__globals__, "forked", lambda work, *args: work(*args))
    monkeypatch.setitem(study["trunk"].__globals__, "ended", lambda code: code or 0)

    def queue(systems, steps, seeds):
        words = ["--data", data, "--results", tmp_path, "--out", tmp_path / "runs"]
        study["main"]([*map(str, words), "--systems", *systems, "--steps", *map(str, steps), "--seeds", str(seeds)])

    for _ in range(2):
        queue(["gpt", other], [500, 1000], 2)
    scales = [(f"{{}}-x{scale}-seed0-{steps}", before and f"{{}}-x{scale}-seed0-{before}")
              for scale in ("1", "0.5", "0.25") for steps, before in ((500, None), (1000, 500))]
    second = [("{}-x0.5-seed1-500", None), ("{}-x0.5-seed1-1000", "{}-x0.5-seed1-500")]
    assert made == [(name.format(system), before and before.format(system)) for stages in (scales, second)
                    for system in ("gpt", other) for name, before in stages]
    for left, steps in (("gpt-x0.5-seed0-500", 1500), (None, 2000)):
        for checkpoint in (tmp_path / "runs").glob("gpt-x0.5-seed0-*/before_decay"):
            if checkpoint.parent.name != left:
                checkpoint.rmdir()
        queue(["gpt"], [steps, 500, 1000], 1)                               # in any order
        assert made.pop() == (f"gpt-x0.5-seed0-{steps}", left)
    for share, column in (("", "others"), ("0.14", "others"), ("0.52", "loss")):
        assert study["publish"].criterion({"share": share}) == column
    assert study["best_scale"]("gpt", 1000, SimpleNamespace(scales=[0.5])) == 0.5          # waits for no other process
    assert len(made) == 16 and len(compare.read(tmp_path)) == 18 and compare.read(tmp_path)[1]["val"] == [
        {"run": "gpt-x1-seed0-1000", "kind": "val", "step": 1000, "loss": 4.0}]
    capsys.readouterr()
    compare.main([str(tmp_path)])
    tables = capsys.readouterr().out.split("steps\n\n")[1:]
    assert f"\n| `{other}` | 2 | 2.5500 | -1.0000 ± 0.0000 |" in tables[1]
    own = next(name for name in models.names() if name not in study["SYSTEMS"])
    queue([own], [500, 4000], 1)
    assert made[-1] == (f"{own}-x0.5-seed0-4000", f"{own}-x0.5-seed0-500")


def test_jobs_are_forked(data, tmp_path):
    """Two systems at a time, each in two stages, for real; a stage that fails ends the study with its last line."""
    def study(*words):
        shape = "--n_layer 1 --d_model 16 --n_head 1 --seq_len 16 --batch_tokens 64 --eval_tokens 64 --device cpu"
        return subprocess.run([sys.executable, RESULTS / "study" / "study.py", "--data", data, "--results", tmp_path,
                               "--jobs", "2", "--seeds", "1", "--scales", "1", "--no-compile", *shape.split(), *words],
                              capture_output=True, text=True)

    names = ["gpt", next(name for name in models.names() if name != "gpt")]
    done = study("--systems", *names, "--steps", "5", "10")
    assert done.returncode == 0, done.stderr
    found = {run["run"]: run for run in compare.read(tmp_path)}
    assert set(found) == {f"{name}-x1-seed0-{steps}" for name in names for steps in (5, 10)}
    assert all(run["val"][-1]["step"] == run["steps"] and math.isfinite(run["others"]) for run in found.values())
    failed = study("--systems", "gpt", "--steps", "20", "--seq_len", "100000", "--results", tmp_path / "new")
    assert failed.returncode == 2 and "add --max_len 100000" in failed.stderr.splitlines()[-1]
    refused = study("--systems", "gpt", "--mix_lr", "0.01")
    assert refused.returncode == 2 and "--mix_lr: this script sets the learning rates" in refused.stderr
    for words, said in ((("--seq_len", "32"), "seq_len 16, 32"),
                        (("--factors", "2", "1", "1", "--optimizer", "adamw"),
                         "optimizer muon, adamw, muon_lr 0.007, 0.014"),
                        (("--d_ff", "32"), "d_ff 64, 32")):
        refused = study("--systems", "gpt", "--steps", "5", "10", "20", *words)
        assert re.search(rf"gpt-x1-seed0-\d+ was trained with .*\({said}", refused.stderr), refused.stderr
        assert refused.returncode == 2
        shutil.rmtree(tmp_path / "runs", ignore_errors=True)                # what the results say is enough
    assert study("--systems", "gpt", "--steps", "5", "10", "--d_ff", "32", "--ignore", "d_ff").returncode == 0


def test_the_page_of_a_study(tmp_path, monkeypatch):
    """Made-up runs: gpt falls by 1 when the tokens double, the system is 0.5 ahead and takes 1.25 times as long. So gpt
    needs sqrt(2) times the tokens.
    """
    report = runpy.run_path(str(RESULTS / "study" / "report.py"))
    study, name = runpy.run_path(str(RESULTS / "study" / "study.py")), list(report["SYSTEMS"])[1]
    results = study["Results"](tmp_path)
    (tmp_path / "speed.csv").write_text(f"system,speed\ngpt,1.0\n{name},0.8\n")
    for system, ahead in (("gpt", 0.0), (name, 0.5)):
        for seed in range(3):
            for steps in (500, 1000, 2000):
                vals = [(n, 9 - math.log2(n / 250) - ahead + 0.1 * seed) for n in range(250, steps + 1, 250)]
                line = dict.fromkeys(study["COLUMNS"]) | {
                    "run": f"{system}-{seed}-{steps}", "system": system, "scale": 1, "seed": seed, "steps": steps,
                    "loss": vals[-1][1], "others": vals[-1][1] - 1, "repeated": 1.0, "tokens": 4096 * steps}
                results.add(line, [{"kind": "val", "step": n, "tokens": 4096 * n, "loss": loss} for n, loss in vals])
    at, speed = report["ends"](compare.read(tmp_path)), compare.speeds(tmp_path)
    with torch.device("meta"):
        size, base = (sum(p.numel() for p in models.build(x, vocab_size=4096, n_layer=12, d_model=128, n_head=4,
                                                          max_len=256).parameters()) for x in (name, "gpt"))
    row = [cell.strip() for cell in report["leads_table"](at, speed).splitlines()[2].strip("|").split("|")]
    needed = 2 ** 0.5
    lead = "-0.5000 ± 0.0000"
    assert row == [f"`{name}`", f"{size / base - 1:+.1%}", lead, lead, lead, lead, "1.25", f"{needed / 1.25:.2f}"]
    more = {**at, 4000: {"gpt": [{**run, "tokens": 4096 * 4000} for run in at[2000]["gpt"]]}}  # only gpt went on
    head, _, line = report["leads_table"](more, speed).splitlines()
    assert "| at 16.4M | all targets, at 8.2M |" in head and f"| {lead} |  | {lead} |" in line
    along = report["leads"](report["along"](at[1000]))
    assert [(n / 4096, round(lead, 9), round(half, 9)) for n, lead, half in along[name]] == [
        (n, -0.5, 0) for n in (250, 500, 750, 1000)]
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "argv", ["report.py", "--results", str(tmp_path)])
    (tmp_path / "README.md").write_text("<!-- leads -->\n<!-- end -->\n")
    report["main"]()
    names = [[text.get_text() for text in report["leads_picture"](lengths).axes[0].texts]
             for lengths in (at, more)]
    assert names == [[name], [name]] and report["leads_picture"]({500: {"gpt": at[500]["gpt"]}}) is None
    assert (tmp_path / "leads.png").stat().st_size > 10_000 and f"| `{name}` |" in (tmp_path / "README.md").read_text()


def test_a_leg_in_both_files(tmp_path):
    """A finished run becomes its line and its rows: validations, every tenth step. The same stage again replaces it."""
    study, folder = runpy.run_path(str(RESULTS / "study" / "study.py")), tmp_path / "gpt-x1-seed0-20"
    folder.mkdir()
    options = {"max_steps": 20, "seed": 0, "muon_lr": 0.1, "adamw_lr": 0.2, "mix_lr": 0.3}
    (folder / "config.json").write_text(json.dumps({
        "options": options, "data": {"fingerprint": "f"}, "git": None, "cpu": "a, b", "gpu": None,
        "versions": {"torch": "2"}}))
    rows = [{"kind": "train", "step": i, "ms": 10.0 + i} for i in range(1, 21)]
    rows.append({"kind": "val", "step": 20, "tokens": 80, "loss": math.inf, "bpb": math.inf})        # it diverged
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for killed in (False, False, True):                             # between the writing of the two files
        if killed:
            (tmp_path / "runs.csv").unlink()
        study["Results"](tmp_path).add(*study["summary"](folder, "gpt", 1.0))
    (run,) = compare.read(tmp_path)
    assert [row["step"] for row in run["train"]] == [10, 20] and len(run["val"]) == 1
    assert (run["loss"], run["others"], run["ms"], run["cpu"], run["seed"]) == (math.inf, None, 21, "a  b", 0)
    assert compare.groups([run]) == {}


def test_tokens_that_a_baseline_needs():
    """Losses 4.0, 3.5, 3.2 after 1, 2, 4 million tokens: halfway between two losses lies sqrt(2) times the first."""
    needed_by = runpy.run_path(str(RESULTS / "study" / "report.py"))["tokens_needed"]
    ends = [(4e6, 3.2), (1e6, 4.0), (2e6, 3.5)]                                     # in any order
    for loss, needed in ((4.0, 1e6), (3.75, 1e6 * math.sqrt(2)), (3.5, 2e6), (3.35, 2e6 * math.sqrt(2)), (3.2, 4e6)):
        assert needed_by(ends, loss) == pytest.approx(needed, rel=1e-12), loss
    assert needed_by(ends, 4.0001) is None and needed_by(ends, 3.1999) is None
    assert needed_by([], 3.0) is None and needed_by([(1e6, 3.0)], 3.0) == pytest.approx(1e6)
    ends = [(1e6, 4.0), (2e6, 3.0), (4e6, 3.5), (8e6, 2.5), (16e6, math.nan)]       # with noise, and one that diverged
    assert needed_by(ends, 3.25) == pytest.approx(1e6 * 2 ** 0.75)       # the first of three answers
    assert needed_by(ends, 2.75) == pytest.approx(4e6 * 2 ** 0.75)
    assert needed_by(ends, 2.4) is None


def test_no_run_is_left_out_in_silence(tmp_path, capsys):
    """A seed that diverged; no seed 0; another best scale at a shorter length; no gpt; a system of two kinds."""
    results = runpy.run_path(str(RESULTS / "study" / "study.py"))["Results"](tmp_path)

    def add(system, scale, seed, steps, loss, d_ff=64):
        config = {"model": "gpt", "model_config": {"d_ff": d_ff}, "options": {"muon_lr": scale, "max_steps": steps},
                  "versions": {"torch": "2"}, "data": {"fingerprint": "f"}}
        line = dict.fromkeys([*compare.TEXTS, "repeated"]) | {
            "run": f"{system}-x{scale}-seed{seed}-{steps}", "system": system, "scale": scale, "seed": seed,
            "steps": steps, "loss": loss, "others": loss, "share": 0.1, "tokens": steps, "bpb": 1, "ms": 1,
            "muon_lr": scale, "adamw_lr": 1, "mix_lr": 1}
        results.add(line, [{"kind": "ran", "step": 0, "config": config}])

    for scale, short, long in ((1, 5.0, 4.5), (0.5, 5.1, 4.4)):             # the longer runs chose 0.5
        add("mine", scale, 1, 500, short), add("mine", scale, 1, 1000, long)
    for seed in (2, 3):
        add("mine", 0.5, seed, 500, 5.0 + seed / 10), add("mine", 0.5, seed, 1000, 4.4 + seed / 10)
    for seed, loss, d_ff in ((1, 4.8, 64), (2, 4.9, 64), (3, math.inf, 64), (4, 4.2, 128)):
        add("other", 1, seed, 1000, loss, d_ff)
    compare.main([str(tmp_path)])
    out, said = capsys.readouterr()
    short, long = out.split("1,000 steps\n")
    assert "difference to mine (95%)" in long and f"| `mine` | 3 | {(5.1 + 5.2 + 5.3) / 3:.4f} |" in short
    assert "| `mine` | 3 |" in long and "| `other` | 2 | 4.8500 |" in long
    assert "| `other (d_ff 64, 128)` | 1 | 4.2000 |" in long
    assert said.splitlines() == ["left out: mine-x1-seed1-500 was not best (scale 1)",
                                 "left out: mine-x1-seed1-1000 was not best (scale 1)",
                                 "left out: other-x1-seed3-1000 diverged (scale 1)"]
    compare.main([str(tmp_path), "--ignore", "d_ff", "--baseline", "other"])
    out = capsys.readouterr().out
    assert "difference to other (95%)" in out and "| `other` | 3 |" in out and "other has no run of this length" in out


def test_shapes_and_sums_by_hand():
    """An idea's lead in another shape, and the lead of two ideas minus the sum of theirs, with exact numbers."""
    report = runpy.run_path(str(RESULTS / "study" / "report.py"))
    name = report["GATED"][0]
    lead = {"gpt": 0, name: -0.3, "gpt-gated": -0.2, f"{name}-gated": -0.4, "gpt-wide-stream": -0.1,
            f"{name}-8x160": -0.25}
    losses = {system: {seed: 4 + at + seed / 8 for seed in range(2)} for system, at in lead.items()}
    cells = [row.strip("| ").split(" | ") for table in ("shapes", "sums") for row in
             report[f"{table}_table"](losses).splitlines()[2:]]
    zero = " ± 0.0000"
    assert cells == [
        [f"`{name}`", "gpt", f"-0.3000{zero}", f"-0.1500{zero}", f"+0.1500{zero}", "2"],
        [f"`{name}`", f"-0.3000{zero}", f"-0.4000{zero}", f"-0.2000{zero}", f"+0.1000{zero}", "2"]]
    noisy = {system: {seed: x + (0.01 if (system == "gpt") == (seed == 0) else -0.01) for seed, x in at.items()}
             for system, at in losses.items()}
    sd = math.sqrt(2 * ((1 / 60) ** 2 + 5 * (1 / 300) ** 2) / 5)            # what is left of gpt's and the others' 0.01
    found = curves.difference(noisy, (f"{name}-gated", "gpt"), (name, "gpt-gated"))
    half = 2.571 * sd * math.sqrt(4 / 2)                                    # four systems, each the mean of two seeds
    assert found == (pytest.approx(0.1), pytest.approx(half, rel=1e-3))
