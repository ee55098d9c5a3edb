"""results/: statistics and tables of studies by hand, and what the queue runs."""
import fcntl
import json
import lzma
import math
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import models
from nanodepth.cli import UserError

RESULTS = Path(__file__).parents[2] / "results"
compare = pytest.importorskip("compare")         # a copy of the repository may be without results/


def load(script):
    return runpy.run_path(str(RESULTS / "study" / script))


def test_pages_are_those_of_their_runs():
    report = load("report.py")
    runs = compare.apart(compare.read(RESULTS / "study"), report["IGNORED"])
    assert all(run["scale"] == 1 and run["val"] and "(" not in run["system"] for run in runs)   # other rates: rates.csv
    for page, text in report["pages"](runs).items():
        assert page.read_text() == text, page
    with pytest.raises(UserError, match="is not one of study.py"):
        compare.main([str(RESULTS / "tiny-cpu")])
    tiny = (RESULTS / "tiny-cpu" / "README.md").read_text()
    for run in compare.table(RESULTS / "tiny-cpu" / "runs.csv"):
        name = "gpt --gate elementwise" if run["run"] == "gpt-gated" else run["run"]
        assert f"\n| `{name}` | {run['parameters']:,} | {run['bpb']:.4f} |\n" in tiny, name


def test_the_queue(data, tmp_path, monkeypatch, capsys):
    """Seed 0 at all scales, then all seeds at the best, from stage to stage; the table of it. A second call has nothing
    to do; a longer stage goes on from the last checkpoint that is left. Stages that fail stop no others.
    """
    study, made, out = load("study.py"), tmp_path / "made", tmp_path / "runs"
    fingerprint, other = study["data"].Data(data).fingerprint, list(study["SYSTEMS"])[1]

    def train(words):
        folder = Path(words[words.index("--out" if "--out" in words else "--resume") + 1])
        before = (folder / "ckpt.pt").read_text() if folder.exists() else None
        with made.open("a") as file:
            file.write(f"{folder.name} {before}\n")
        (folder / "before_decay").mkdir(parents=True)
        (folder / "before_decay" / "ckpt.pt").write_text(folder.name)
        return 0

    def summary(folder, system, scale):
        assert "seed2" not in folder.name
        seed, steps = (int(word.strip("sed")) for word in folder.name.split("-")[-2:])
        loss = {1: 4.0, 0.5: 3.5, 0.25: 3.6}[scale] + 0.1 * seed - (system != "gpt")
        line = dict(run=folder.name, system=system, scale=scale, seed=seed, steps=steps, loss=loss, others=loss,
                    share=0.1, data=fingerprint)
        return dict.fromkeys(study["COLUMNS"], 0) | line, [{"kind": "val", "step": steps, "loss": loss}]

    monkeypatch.setattr(study["train"], "main", train)
    monkeypatch.setitem(study["work"].__globals__, "summary", summary)

    def queue(systems, steps, seeds):
        made.write_text("")
        words = "--data", data, "--results", tmp_path, "--systems", *systems, "--steps", *steps, "--seeds", seeds
        assert study["main"](list(map(str, words))) == (1 if seeds == 3 else None)
        return [tuple(line.split()) for line in made.read_text().splitlines()]

    scales = [(f"{{}}-x{scale}-seed0-{steps}", before and f"{{}}-x{scale}-seed0-{before}")
              for scale in ("1", "0.5", "0.25") for steps, before in ((500, None), (1000, 500))]
    second = [("{}-x0.5-seed1-500", None), ("{}-x0.5-seed1-1000", "{}-x0.5-seed1-500")]
    assert queue(["gpt", other], [500, 1000], 2) == [
        (name.format(system), str(before and before.format(system))) for stages in (scales, second)
        for system in ("gpt", other) for name, before in stages]
    assert queue(["gpt", other], [500, 1000], 2) == []
    failed = ["gpt-x0.5-seed2-500", f"{other}-x0.5-seed2-500"]
    assert [name for name, _ in queue(["gpt", other], [500, 1000], 3)] == failed
    assert "gpt-x0.5-seed2-500: failed with code 1" in capsys.readouterr().err
    for left, steps in (("gpt-x0.5-seed0-500", 1500), (None, 2000)):
        for checkpoint in out.glob("gpt-x0.5-seed0-*/before_decay"):
            if checkpoint.parent.name != left:
                shutil.rmtree(checkpoint)
        assert queue(["gpt"], [steps, 500, 1000], 1) == [(f"gpt-x0.5-seed0-{steps}", str(left))]        # in any order
    runs = compare.read(tmp_path)
    assert len(runs) == 18 and runs[1]["val"] == [
        {"run": "gpt-x1-seed0-1000", "kind": "val", "step": 1000, "loss": 4.0}]
    compare.main([str(tmp_path)])
    tables = capsys.readouterr().out.split("steps\n\n")[1:]
    assert f"\n| `{other}` | 2 | 2.5500 | -1.0000 ± 0.0000 |" in tables[1]
    for share, best in ((None, 0.5), (0.14, 0.5), (0.52, 1)):               # on which targets is a scale the best?
        assert compare.best_scales([{"system": "a", "scale": scale, "steps": 1, "seed": 0, "share": share,
                                     "loss": 4 - scale, "others": 4 + scale} for scale in (1, 0.5)]) == {"a": best}
    assert compare.best_scales([                                            # one that diverges later is not the best
        {"system": "a", "scale": scale, "steps": steps, "seed": 0, "share": share, "loss": loss, "others": others}
        for scale, steps, loss, others, share in ((1, 500, 5, 5, 0.1), (0.5, 500, 6, 6, 0.1), (0.5, 900, 5, 5, 0.1),
                                                  (1, 900, math.inf, None, None))]) == {"a": 0.5}
    monkeypatch.setattr(fcntl, "flock", mock := Mock(side_effect=(BlockingIOError, None)))       # waits for a lock
    assert queue(["gpt"], [500], 1) == [] and mock.call_count == 2
    assert capsys.readouterr().out.startswith("waiting for another study.py")


def test_jobs_are_forked(data, tmp_path):
    """Two systems at a time, each in two stages, for real; a stage that fails ends the study with its last line; and
    what is refused, from what the results say.
    """
    words = ("--n_layer 1 --d_model 16 --n_head 1 --seq_len 16 --batch_tokens 64 --eval_tokens 64 --device cpu "
             f"--jobs 2 --seeds 1 --scales 1 --no-compile --data {data} --results {tmp_path} --systems gpt").split()
    script, name = [sys.executable, RESULTS / "study" / "study.py"], next(x for x in models.names() if x != "gpt")
    done = subprocess.run([*script, *words, name, "--steps", "5", "10"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {run["run"]: run for run in compare.read(tmp_path)}
    assert set(found) == {f"{system}-x1-seed0-{steps}" for system in ("gpt", name) for steps in (5, 10)}
    assert all(run["val"][-1]["step"] == run["steps"] and math.isfinite(run["others"]) for run in found.values())
    failed = subprocess.run([*script, *words, "--steps", "20", "--seq_len", "100000", "--results", tmp_path / "new"],
                            capture_output=True, text=True)
    assert failed.returncode == 2 and "add --max_len 100000" in failed.stderr.splitlines()[-1]
    shutil.rmtree(tmp_path / "runs")
    study = load("study.py")["main"]
    for more, said in (("--mix_lr 0.01", "this script sets it"), ("--model=gpt", "--model: this script sets it"),
                       ("--seq_len 32", "seq_len 16, 32"),
                       ("--factors 2 1 1 --optimizer adamw", "optimizer muon, adamw, muon_lr 0.007, 0.014")):
        with pytest.raises(UserError, match=said):
            study([*words, "--steps", "5", "10", "20", *more.split()])
    assert study([*words, "--steps", "5", "10", "--d_ff", "32", "--ignore", "d_ff"]) is None


def test_the_page_of_a_study():
    """Made-up runs: gpt falls by 1 when the tokens double, the system is 0.5 ahead and takes 1.25 times as long. So gpt
    needs sqrt(2) times the tokens.
    """
    report, runs = load("report.py"), []
    name = report["MAIN"][2]                                                # a model
    for system, ahead in (("gpt", 0.0), (name, 0.5)):
        for seed in range(3):
            for steps in (500, 1000, 2000, 4000)[:4 if system == "gpt" else 3]:
                vals = [{"step": n, "loss": 9 - math.log2(max(n, 1) / 250) - ahead + 0.1 * seed}
                        for n in range(0, steps + 1, 250)]
                runs.append({"system": system, "scale": 1, "seed": seed, "steps": steps, "share": 0.1, "val": vals,
                             "loss": vals[-1]["loss"], "others": vals[-1]["loss"] - 1})
    at = report["ends"](runs)
    with torch.device("meta"):
        size, base = (sum(p.numel() for p in models.build(x, vocab_size=4096, n_layer=12, d_model=128, n_head=4,
                                                          max_len=256).parameters()) for x in (name, "gpt"))
    head, _, row = (line.strip("| ").split(" | ") for line in report["leads_table"](at, {name: 0.8}).splitlines())
    lead, needed = "-0.5000 ± 0.0000", 2 ** 0.5
    assert row == [f"`{name}`", f"{size / base - 1:+.1%}", lead, lead, "", lead, "1.25", f"{needed / 1.25:.2f}"]
    assert head[2:6] == ["at 4.1M", "at 8.2M", "at 16.4M", "all targets, at 8.2M"]


def test_a_leg_in_both_files(tmp_path):
    """A finished run becomes its line and its rows: validations, every tenth step. The same stage again replaces it."""
    study, folder = load("study.py"), tmp_path / "gpt-x1-seed0-20"
    folder.mkdir()
    options = {"max_steps": 20, "muon_lr": 0.1, "adamw_lr": 0.2, "mix_lr": 0.3}
    (folder / "config.json").write_text(json.dumps({
        "model": "gpt", "model_config": {}, "options": options | {"seed": 0, "out": "a"}, "git": None,
        "data": {"fingerprint": "f"}, "cpu": "a, b", "gpu": None, "versions": {"torch": "2"}}))
    rows = [{"kind": "train", "step": i, "ms": 10.0 + i} for i in range(1, 21)]
    rows.append({"kind": "val", "step": 20, "tokens": 80, "loss": None, "bpb": None})                # it diverged
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for killed in (False, False, True):                             # between the writing of the two files
        if killed:
            (tmp_path / "runs.csv").unlink()
        study["add"](tmp_path, *study["summary"](folder, "gpt", 1.0))
    (run,) = compare.read(tmp_path)
    logs = [json.loads(row) for row in lzma.open(tmp_path / "logs.jsonl.xz")]
    assert [(row["kind"], row["step"]) for row in logs] == [("ran", 0), ("train", 10), ("train", 20), ("val", 20)]
    assert (run["loss"], run["others"], run["ms"], run["cpu"], run["seed"]) == (math.inf, None, 21, "a  b", 0)
    assert run["config"]["options"] == options and compare.ends([run]) == {}


def test_no_run_is_left_out_in_silence(tmp_path, capsys):
    """A seed that diverged; no seed 0; another best scale at a shorter length; no gpt; a system of two kinds; a
    run validated on fewer tokens.
    """
    write = load("study.py")["add"]

    def add(system, scale, seed, steps, loss, d_ff=64, eval_tokens=99, **options):
        options |= {"muon_lr": scale, "max_steps": steps}
        config = {"model": "gpt", "model_config": {"d_ff": d_ff}, "options": options,
                  "versions": {"torch": "2"}, "data": {"fingerprint": "f"}}
        line = dict.fromkeys([*compare.TEXTS, "repeated"]) | {
            "run": f"{system}-x{scale}-seed{seed}-{steps}", "system": system, "scale": scale, "seed": seed,
            "steps": steps, "loss": loss, "others": loss, "share": 0.1, "tokens": steps, "bpb": 1, "ms": 1,
            "muon_lr": scale, "adamw_lr": 1, "mix_lr": 1}
        write(tmp_path, line, [{"kind": "ran", "step": 0, "config": config},
                               {"kind": "val", "step": steps, "loss": loss, "eval_tokens": eval_tokens}])

    for scale, short, long in ((1, 5.0, 4.5), (0.5, 5.1, 4.4)):             # the longer runs chose 0.5
        add("mine", scale, 1, 500, short), add("mine", scale, 1, 1000, long)
    for seed in (2, 3):
        add("mine", 0.5, seed, 500, 5.0 + seed / 10), add("mine", 0.5, seed, 1000, 4.4 + seed / 10)
    for seed, loss, d_ff in ((1, 4.8, 64), (2, 4.9, 64), (3, math.inf, 64), (4, 4.2, 128)):
        add("other", 1, seed, 1000, loss, d_ff)
    add("third", 1, 1, 1000, 4.1, eval_tokens=9, seq_len=64)
    compare.main([str(tmp_path)])
    out, said = capsys.readouterr()
    short, long = out.split("1,000 steps\n")
    assert "difference to mine (95%)" in long and f"| `mine` | 3 | {(5.1 + 5.2 + 5.3) / 3:.4f} |" in short
    assert "| `mine` | 3 |" in long and "| `other` | 2 | 4.8500 |" in long
    assert "| `other (d_ff 64, 128)` | 1 | 4.2000 |" in long
    assert "| `third (eval_tokens 99, 9)` | 1 | 4.1000 |" in long
    assert said.splitlines() == ["left out: mine-x1-seed1-500 was not best (scale 1)",
                                 "left out: mine-x1-seed1-1000 was not best (scale 1)",
                                 "left out: other-x1-seed3-1000 diverged (scale 1)",
                                 *(f"learning rates were tried at scales [1] for {name}, [0.5, 1] for mine"
                                   for name in ("other", "other (d_ff 64, 128)", "third (eval_tokens 99, 9)")),
                                 "third (eval_tokens 99, 9) and mine differ in more than the idea: seq_len 64, None"]
    compare.main([str(tmp_path), "--ignore", "d_ff", "--baseline", "other"])
    out = capsys.readouterr().out
    assert "difference to other (95%)" in out and "| `other` | 3 |" in out


def test_shapes_and_sums_by_hand():
    """An idea's lead and claim in another shape, and the lead of two ideas minus the sum of theirs, exactly."""
    report = load("report.py")
    name = report["MAIN"][2]                                                # a model
    lead = {"gpt": 0, name: -0.3, "gpt-gated": -0.2, f"{name}-gated": -0.4, "gpt-wide-stream": -0.1,
            f"{name}-8x160": -0.25}
    losses = {system: {seed: 4 + at + seed / 8 for seed in range(2)} for system, at in lead.items()}
    claims = report["claims_table"]({"there": (losses, "-8x160", "gpt-wide-stream")})
    made = report["shapes_table"](losses, "8x160"), report["sums_table"](losses), claims
    zero, cells = " ± 0.0000", [row.strip("| ").split(" | ") for table in made for row in table.splitlines()[2:]]
    assert cells == [
        [f"`{name}`", "gpt", f"-0.3000{zero}", f"-0.1500{zero}", f"+0.1500{zero}", "2"],
        [f"`{name}`", f"-0.3000{zero}", f"-0.4000{zero}", f"-0.2000{zero}", f"+0.1000{zero}", "2"],
        [f"`{name}` below `gpt`", "MUDDFormer, figure 3", f"-0.1500{zero}: holds"]]
    one = {"gpt": {0: 4.0}, name: {0: 3.9}}                                 # no interval, and none to itself
    assert [compare.gap(one, system) for system in one] == ["", "-0.1000"]
