"""analyze.py, the script: its files, its messages and its mistakes."""
import json
import math
import os

import pytest
import torch
from analysis import ROOT, write_run

import analyze
import models
import probes
import small
from nanodepth import inside, runs
from nanodepth.data import run_data

# the baseline, a model with several streams, and one whose probes have numbers of their own
NAMES = [ROOT, *(next(x for x in models.names() if hasattr(probes.find(x), what)) for what in ("streams", "numbers"))]
SMALL = {**small.SMALL, "seq_len": 32, "batch_tokens": 64, "max_steps": 3, "warmup_steps": 1, "eval_every": 1}


def test_table_against_numbers_by_hand(tmp_path, capsys):
    base = [[5.0, 4.0, 3.0], [5.0, 4.2, 3.2], [5.0, 4.1, 3.1]]
    mine = [[5.0, 3.4, 2.8], [5.0, 3.7, 3.1], [5.0, 3.4, 2.8]]
    runs = [write_run(tmp_path / f"b{s}", x, s) for s, x in enumerate(base)]
    runs += [write_run(tmp_path / f"m{s}", x, s, "mine", 500.0, peak=2 ** 31) for s, x in enumerate(mine)]
    analyze.main(["curves", *map(str, reversed(runs)), "--out", str(tmp_path / "out")])
    text = (tmp_path / "out" / "curves.md").read_text()
    # gaps -0.2, -0.1, -0.3: their standard deviation is 0.1, and 4.3027 * 0.1 / sqrt(3) = 0.2484
    assert text in capsys.readouterr().out and text.split("\n", 2)[2].startswith(
        f"| `{ROOT}` | 3 | 2,000 | 3.1000 ± 0.1000 | - | 1,000 ± 0 eager | 1.00 |\n"
        "| `mine` | 3 | 2,000 | 2.9000 ± 0.1732 | -0.2000 ± 0.2484 | 500 ± 0 eager | 2.00 |\n")
    assert (tmp_path / "out" / "curves.png").stat().st_size > 10_000


def test_a_mixed_folder(tmp_path, capsys):
    """Other data, batches and lengths, equal runs, what is no run, what diverged (null in the log, of older runs NaN or
    Infinity): notices, no error."""
    for name in "ab":
        write_run(tmp_path / name, [9, 5, 4.5], options={"max_steps": 200, "compile": True})
    write_run(tmp_path / "long", [9, 5, 4.5, 4, 3], gpu="H100")                     # compiles by default
    write_run(tmp_path / "other", [9, 2.5, 2], options={"seq_len": 64})
    write_run(tmp_path / "more", [9, 5, 4.25], model="more", options={"max_steps": 200, "batch_tokens": 60})
    write_run(tmp_path / "short", [9, 5, 4], 1, model="short", eval_tokens=[7, 7, 7])
    write_run(tmp_path / "dead", [9, 5, math.inf], model="dead")
    write_run(tmp_path / "early", [9, None], model="early")
    for seed, name in enumerate(("slow", "fast")):                                  # still in training
        write_run(tmp_path / name, [9, 5, 4][:2 + seed], seed, "slow", options={"max_steps": 900})
    write_run(tmp_path / "young", [9])
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "config.json").write_text("{")
    os.utime(tmp_path / "b" / "log.jsonl", ns=(0, 0))
    names, out = "other b a long more short young notes more dead early slow fast".split(), tmp_path / "out"
    given = [str(tmp_path / name) for name in names]
    assert analyze.main(["curves", *given, "--out", str(out)]) == 0
    base, rows = f"{ROOT} max_steps=200", json.loads((out / "curves.json").read_text())
    assert list(rows) == [base, f"{ROOT} max_steps=400", "more", "short", "dead", "early", "slow"]
    assert rows[base]["runs"] == [str(tmp_path / "a")] and rows["dead"]["curve"][2] == [2000, None, 1000]
    assert rows["dead"]["loss"] is rows["dead"]["difference"] is rows["early"]["loss"] is None
    assert rows[f"{ROOT} max_steps=400"]["difference"] is None and rows["more"]["difference"] == pytest.approx(-0.25)
    stdout, stderr = capsys.readouterr()
    assert stdout == (out / "curves.md").read_text() + f"{out / 'curves.png'}\n"
    assert [line.split(" | ")[-2] for line in stdout.splitlines()[2:5]] == 2 * ["1,000 compiled"] + ["1,000 eager"]
    assert "| `dead` | 1 | 2,000 | inf | - |" in stdout and "| `early` | 1 | 1,000 | nan | - |" in stdout
    for line, said in zip(stderr.splitlines(), [
            "left out: {}/young has only one validation", "left out: {}/notes is not the folder of a run",
            "left out: {}/other: validated on sequences of 64 of data with fingerprint f, other runs on ",
            "left out: {0}/b: {0}/a is a newer or finished run of the same system with the same seed",
            f"{ROOT} max_steps=400 and {base} ran differently (gpu)",
            f"{ROOT} max_steps=400 has trained on 4,000 tokens, {base} on 2,000: the table does not compare them",
            f"more and {base} differ in more than the idea: batch_tokens 60",
            f"more and {base} saw other batches (batch_tokens 60",
            f"short has seeds [1], {base} [0]: a seed that one lacks counts as far as other systems have it",
            f"short's last loss is on 7 tokens, {base}'s on 1,000: they cannot be compared",
            f"short and {base} saw other batches (no seed in common)",
            f"early and {base} differ in more than the idea: max_steps 100, 200",
            f"early has trained on 1,000 tokens, {base} on 2,000: the table does not compare them",
            f"slow and {base} differ in more than the idea: max_steps 900, 200",
            "no run of slow has finished", f"slow has seeds [0, 1], {base} [0]",
            "slow: not all seeds have losses after more than 1,000 tokens",
            "slow has trained on 1,000 tokens"], strict=True):
        assert line.startswith(f"analyze.py: {said.format(tmp_path)}"), line
    analyze.main(["curves", *given, "--out", str(out), "--baseline", "more"])
    assert list(json.loads((out / "curves.json").read_text()))[0] == "more"
    with pytest.raises(ValueError, match=f"no system 'x' among the runs: .* '{ROOT} max_steps=400', 'more'"):
        analyze.main(["curves", *given, "--out", str(tmp_path / "new"), "--baseline", "x"])
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def trained(data, scripts, tmp_path_factory):
    """A folder with short runs of NAMES, and what runs scripts in it."""
    folder = tmp_path_factory.mktemp("analyze")
    for name in NAMES:
        words = small.flags(**SMALL, model=name, data=data, out=name)
        assert scripts.run("train.py", *words, cwd=folder).returncode == 0
    return folder, scripts


def test_probe(trained, tmp_path):
    """Files of each model, with what measure() finds on the validation tokens."""
    folder, scripts = trained
    done = scripts.run("analyze.py", "probe", *reversed(NAMES), "--out", tmp_path / "o", "--tokens", "256",
                       "--batch_tokens", "128", "--device", "cpu", cwd=folder, seconds=300)
    assert done.returncode == 0 and not done.stderr, done.stderr
    drawn = [tmp_path / "o" / f"{name}.png" for name in ("layers", "depth")]
    assert done.stdout.splitlines()[len(NAMES):] == list(map(str, drawn))
    assert set((tmp_path / "o").iterdir()) == {*drawn, *(tmp_path / "o" / f"{name}.json" for name in NAMES)}
    for name in NAMES:
        found = json.loads((tmp_path / "o" / f"{name}.json").read_text())
        model, config = runs.load(folder / name)
        batches = list(run_data(folder / name, config).val_batches(256, 4, 32))         # 8 rows of 32: 256 tokens
        assert found.pop("run") == found.pop("model") == name and found.pop("step") == 3
        assert found.pop("data") == config["data"]["path"] and found.pop("seq_len") == 32
        assert found["depth_error"] < 64 * torch.finfo(torch.float32).eps and found["tokens"] == 256
        assert found == json.loads(json.dumps(inside.measure(model, batches, probes.find(name))))


def test_without_matplotlib_the_numbers_are_there(trained, tmp_path):
    folder, scripts = trained
    missing = "analyze.py: error: this needs a package that is missing: pip install matplotlib\n"
    (tmp_path / "matplotlib.py").write_text("raise ModuleNotFoundError(name='matplotlib')")
    for words in (["curves", ROOT], ["probe", ROOT, "--tokens", "64"]):
        done = scripts.run("analyze.py", *words, "--out", tmp_path / "o", cwd=folder, PYTHONPATH=str(tmp_path))
        assert done.returncode == 2 and done.stderr == missing
    assert {path.name for path in (tmp_path / "o").iterdir()} == {"curves.json", "curves.md", f"{ROOT}.json"}
    row, = json.loads((tmp_path / "o" / "curves.json").read_text()).values()
    assert 0.1 < row["peak_bytes"] / 2 ** 30 < 4
