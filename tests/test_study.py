"""results/study-cpu: statistics, tables and choice of rates, by hand."""
import json
import math
import re
import runpy
import shutil
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from analysis import write_run

RESULTS = Path(__file__).parent.parent / "results"
sys.path.insert(0, str(RESULTS))
pytest.importorskip("publish")                   # a copy of the repository may be without results/


@pytest.fixture(scope="module")
def report():
    return runpy.run_path(str(RESULTS / "study-cpu" / "report.py"))


@pytest.fixture(scope="module")
def study():
    return runpy.run_path(str(RESULTS / "study-cpu" / "study.py"))


def test_noise_of_the_study_is_that_of_a_randomised_block_design(report):
    losses = {"gpt": {0: 4.0, 1: 4.3, 2: 4.2}, "one": {0: 3.9, 1: 4.25, 2: 4.0}, "two": {0: 4.1, 1: 4.2, 2: 4.3}}
    table = [list(at.values()) for at in losses.values()]
    center = statistics.mean(sum(table, []))
    rest = [x - statistics.mean(row) - statistics.mean(column) + center
            for row in table for x, column in zip(row, zip(*table))]
    sd, degrees = report["noise"](losses)
    assert degrees == 4 and sd == pytest.approx(math.sqrt(sum(x * x for x in rest) / 4))
    value, half = report["difference"](losses, "one", "gpt")
    assert value == pytest.approx(-0.35 / 3) and half == pytest.approx(2.776 * sd * math.sqrt(2 / 3))
    assert report["gap"](losses, "one") == (f"{value:+.4f} ± {half:.4f}", -1 if abs(value) > half else 0)
    assert report["difference"](losses, "four", "gpt") is None and report["gap"](losses, "gpt") == ("", None)
    losses |= {"four": {7: 3.8}, "five": {8: 3.9}}                          # no run beside them, so no difference
    assert report["difference"](losses, "four", "gpt") is report["difference"](losses, "four", "five") is None
    assert report["difference"](losses, "one", "gpt") == (pytest.approx(value), pytest.approx(half))


def test_a_seed_of_two_systems_tells_something_of_the_third(report):
    """Least squares by hand: seeds 0 and 1 give one - gpt with variance 1 (of a run's), two - gpt with 1, covariance
    1/2; seed 2 gives one - gpt with variance 2. Together one - gpt has the weights 2 : 1 and the variance 2/3, and
    two - gpt moves by half of what one - gpt moves, a sixth of the difference of its values; variance 1 - 1/4 + 1/6.
    """
    losses = {"gpt": {0: 4.0, 1: 4.3, 2: 4.2}, "one": {0: 3.9, 1: 4.25, 2: 4.0}, "two": {0: 4.1, 1: 4.2}}
    sd, degrees = report["noise"](losses)
    assert degrees == 3
    for name, wanted, variance in (("one", (2 * -0.075 - 0.2) / 3, 2 / 3), ("two", 0 + (-0.2 - -0.075) / 6, 11 / 12)):
        value, half = report["difference"](losses, name, "gpt")
        assert value == pytest.approx(wanted) and half == pytest.approx(3.182 * sd * math.sqrt(variance), rel=1e-3)
    losses["three"] = {0: 3.8}                      # one run: its mean takes it, yet its difference has an interval
    assert report["noise"](losses) == (pytest.approx(sd), 3)
    assert report["difference"](losses, "one", "gpt")[0] == pytest.approx((2 * -0.075 - 0.2) / 3)
    assert report["difference"](losses, "three", "gpt")[1] > 3.182 * sd


def test_coverage_by_hand(report):
    """Every system with the deviation of its own residuals, scaled so that they are all of the noise together."""
    losses = {"gpt": {0: 4.0, 1: 4.3, 2: 4.2}, "one": {0: 3.9, 1: 4.25, 2: 4.0}, "two": {0: 4.1, 1: 4.2, 2: 4.3}}
    rows, columns = [statistics.mean(at.values()) for at in losses.values()], [4.0, 4.25, 12.5 / 3]
    squares = {name: sum((x - row - column + statistics.mean(rows)) ** 2 for x, column in zip(at.values(), columns))
               for (name, at), row in zip(losses.items(), rows)}
    for a, b in (("one", "gpt"), ("two", "one")):
        sd = math.sqrt((squares[a] + squares[b]) / 3 / 3 * 9 / 4)           # nine losses, four degrees of freedom
        wanted = 2 * statistics.NormalDist().cdf(report["difference"](losses, a, b)[1] / sd) - 1
        assert report["coverage"](losses, a, b) == pytest.approx(wanted)
    losses = {name: losses[name] for name in ("gpt", "one")}                # two have the same residuals
    found = report["coverage"](losses, "one", "gpt")
    assert found == pytest.approx(2 * statistics.NormalDist().cdf(4.303) - 1, rel=1e-4)


def test_noise_needs_two_systems_with_two_seeds(report):
    assert report["noise"]({"gpt": {0: 4.0, 1: 4.3}}) == (None, 0)
    assert report["gap"]({"gpt": {0: 4.0}, "one": {0: 3.9}}, "one") == ("-0.1000", None)


@pytest.fixture
def saved(report, tmp_path, monkeypatch):
    """make(systems, bench rows, runs {name: (step, losses)}) writes them; then the saving table's rows are returned."""
    def make(systems, times, runs):
        for name, (step, *losses) in runs.items():
            write_run(tmp_path / "logs" / name, [9, losses[0]], int(name[-1]), step=step, options={"max_steps": step})
            for others in losses[1:]:
                (tmp_path / "logs" / name / "copying.json").write_text(json.dumps({"others": others, "repeated": 1.0}))
        (tmp_path / "bench.json").write_text(json.dumps({"models": [
            {"model": model, "against": against, "step_ratio": [x, 0.01]} for model, against, x in times]}))
        monkeypatch.setitem(report["speeds"].__globals__, "HERE", tmp_path)
        monkeypatch.setitem(report["speeds"].__globals__, "SYSTEMS", systems)
        return report["saving_table"](report["groups"](systems=systems)).splitlines()[2:]

    return make


def test_saving_by_hand(saved, report):
    """gpt has 4.0 and 3.5 after one and two lengths: 3.75 wants sqrt(2). slow takes twice gpt's time per step; gated is
    timed against gated gpt, which takes 1.25 times as long as gpt; nothing timed is said of new.
    """
    times = (("gpt", "gpt", 1.0), ("slow", "gpt", 0.5), ("gpt:gate=elementwise", "gpt", 0.8),
             ("gpt:gate=elementwise", "gpt:gate=elementwise", 1.0), ("gated", "gpt:gate=elementwise", 0.5))
    systems = {"gpt": "gpt", "gpt-g": "gpt --gate elementwise", "gated": "gated", "slow": "slow", "new": "new"}
    rows = saved(systems, times, {
        "gpt-seed0": (400, 4.0, 5.0), "gpt-2000-seed0": (800, 3.5, 4.0), "slow-seed0": (400, 3.75, 4.25),
        "gated-seed0": (400, 4.1, 5.1), "new-seed0": (400, 3.4)})
    assert report["speeds"]() == pytest.approx({"gpt": 1, "gpt-g": 0.8, "slow": 0.5, "gated": 0.4})
    assert rows == ["| `gated` | < 1.00 | < 1.00 | 2.50 | < 0.40 | < 0.40 |",
                    "| `slow` | 1.41 | 1.68 | 2.00 | 0.71 | 0.84 |",
                    "| `new` | > 2.00 |  |  |  |  |"]


def test_saving_has_the_interval_of_the_loss_and_seeds_that_all_lengths_have(saved):
    """Two seeds of gpt at its length and of a system, which is 0.49 below; one of gpt at twice the length, 1 below.

    What a mean per system and one per seed leave over is 0.005 each of four times, with one degree of freedom: a run's
    standard deviation is 0.01, half of the interval of two pairs 12.706 * 0.01 = 0.127.
    """
    rows = saved({"gpt": "gpt", "one": "one"}, (("gpt", "gpt", 1.0), ("one", "gpt", 1.0)), {
        "gpt-seed0": (400, 4.0), "gpt-seed1": (400, 4.02), "gpt-2000-seed0": (800, 3.0),
        "one-seed0": (400, 3.5), "one-seed1": (400, 3.54)})
    low, high = 2 ** (0.49 - 0.1271), 2 ** (0.49 + 0.1271)
    interval = f"1.40 ({low:.2f} to {high:.2f})"
    assert rows == [f"| `one` | {interval} |  | 1.00 | {interval} |  |"]


def test_the_better_rate_of_the_plain_recipe(report, study, tmp_path, monkeypatch):
    """By the first seed, where both rates have ended; a rate that is not one of the study's does not count."""
    monkeypatch.setitem(report["logs"].__globals__, "HERE", tmp_path)
    for system, seed, rate, loss in (("gpt", 0, 0.002, 4.0), ("gpt", 0, 0.004, 3.9), ("gpt", 1, 0.004, 4.1),
                                     ("gpt", 0, 0.001, 3.0), ("gpt-gated", 0, 0.002, 3.0)):
        write_run(tmp_path / "logs" / study["plain_run"](system, seed, rate).name, [9, loss], seed, step=9,
                  options={"max_steps": 9})
    assert report["final"](report["plain_groups"]()) == {"gpt": {0: 3.9, 1: 4.1}}


def test_signs(report):
    """Below gpt outside of the noise is -1, and holds."""
    losses = {"gpt": {0: 4.0, 1: 4.1}, "low": {0: 3.0, 1: 3.101}, "high": {0: 5.0, 1: 5.1}}
    assert [report["gap"](losses, name)[1] for name in ("low", "high")] == [-1, 1]


def test_columns(report, monkeypatch):
    """Kinds of runs are stood for by a number, gated gpt's difference to gpt."""
    names = report["claims_table"].__globals__

    def losses(gap):
        return {"gpt": {0: 4.0}, "gpt-gated": {0: 4.0 + gap}}

    monkeypatch.setitem(names, "final", losses)
    monkeypatch.setitem(names, "others", lambda gap: losses(10 * gap))
    monkeypatch.setitem(names, "groups", lambda suffix, systems: {"-layers6": -0.3, "-layers24": -0.4}[suffix])
    monkeypatch.setitem(names, "DEEP", ("gpt", "gpt-gated"))
    row = report["claims_table"](-0.1, -0.2).splitlines()[2]
    assert [cell.strip() for cell in row.split("|")[3:7]] == ["-0.1000", "-1.0000", "-0.2000", "-2.0000"]

    def cells(table):
        return [cell.strip() for cell in table.splitlines()[3].split("|")[2:-1]]

    assert cells(report["baseline_table"](-0.1, -0.2)) == ["-0.1000", "-1.0000", "-0.2000", "-2.0000", "3.8000", "1"]
    assert cells(report["depth_table"](-0.1)) == ["-0.3000", "-3.0000", "-0.1000", "-1.0000", "-0.4000", "-4.0000"]


def test_points_of_the_picture(report, monkeypatch):
    """Left of zero is below gpt; systems stand in the table's order, a strong recipe's point above the plain one's."""
    pytest.importorskip("matplotlib")
    names = report["gaps_picture"].__globals__
    monkeypatch.setitem(names, "final", lambda gap: {"gpt": {0: 4.0}, "low": {0: 4.0 + gap}, "high": {0: 4.0 - gap}})
    monkeypatch.setitem(names, "others", lambda gap: {"gpt": {0: 5.0}, "low": {0: 5.0 + 2 * gap}})

    class Runs(float):                                                          # stands for runs whose gap it is
        def __iter__(self):
            return iter(("gpt", "low", "high"))

    fig = report["gaps_picture"](Runs(-0.25), Runs(-0.5))
    points = [[line.get_xydata().round(9).tolist() for line, *_ in ax.containers] for ax in fig.axes]
    assert points == [[[[-0.25, -0.15], [0.25, 0.85]], [[-0.5, 0.15], [0.5, 1.15]]],
                      [[[-0.5, -0.15]], [[-1.0, 0.15]]]]
    low, high = fig.axes[0].get_ylim()
    assert low > high and [t.get_text() for t in fig.axes[0].get_yticklabels()] == ["low", "high"]


def test_the_rates_of_the_lowest_loss(study, monkeypatch):
    """First the triples that all systems try, then two more around the best of them."""
    losses = {(0.005, 0.024, 0.002): 3, (0.01, 0.024, 0.002): 2, (0.01, 0.024, 0.0005): 1}
    monkeypatch.setitem(study["best_rates"].__globals__, "train", lambda run, args: losses.get(run.rates, 9))
    mixing = next(name for name in study["SYSTEMS"] if study["mixes"](name))
    assert not study["mixes"]("gpt")
    assert study["best_rates"](mixing, None) == (0.01, 0.024, 0.0005)


def test_what_a_plain_run_gets(study, monkeypatch, tmp_path):
    seen, publish = [], study["publish"]
    monkeypatch.setattr(publish, "final_loss", lambda path: 1.0 if seen else None)
    monkeypatch.setattr(publish, "train", lambda folder, *words, **options: seen.append((words, options)))
    monkeypatch.setattr(publish, "publish", lambda *args: None)
    args = SimpleNamespace(out=tmp_path, logs=tmp_path, data="d", steps=1000)
    study["train"](study["Run"]("x", "gpt-gated", 3, (0.5,)), args)
    (words, options), = seen
    assert list(words) == ["gpt", "--gate", "elementwise", "--preset", "study", *study["PLAIN"].split()]
    assert options == dict(data="d", seed=3, max_steps=1000, eval_every=250, adamw_lr=0.5)


def test_what_the_stages_run(study, data, monkeypatch):
    """All runs of a queue, in order; the better rate of the plain recipe gets the second seed."""
    seen, names = [], study["main"].__globals__
    monkeypatch.setitem(names, "best_rates", lambda system, args: (0.01, 0.02, 0.004))
    monkeypatch.setitem(names, "train", lambda run, args: seen.append(run) or -run.rates[0])
    other = study["STRONG_ONLY"][0]
    monkeypatch.setattr(sys, "argv", ["study.py", "--systems", "gpt", other, "--data", str(data)])
    study["main"]()
    assert [run.name for run in seen] == [
        *(f"{system}-seed{seed}" for seed in range(3) for system in ("gpt", other)),
        *(f"gpt-{steps}-seed{seed}" for seed in range(3) for steps in (500, 1500, 2000)), "gpt-half-seed0",
        *(f"gpt-layers{n}-seed{seed}" for seed in range(2) for n in (6, 24)),
        "plain-gpt-0.002-seed0", "plain-gpt-0.004-seed0", "plain-gpt-0.004-seed1"]
    by = {run.name: run for run in seen}
    assert by["gpt-half-seed0"].rates == (0.005, 0.01, 0.002) and by["plain-gpt-0.004-seed1"].rates == (0.004,)
    assert by["gpt-500-seed2"].part == 0.5 and by["gpt-layers24-seed1"].more == {"n_layer": 24}
    assert {run.rates for name, run in by.items() if not re.search("half|plain", name)} == {(0.01, 0.02, 0.004)}


def test_an_own_study(report, study, data, tmp_path, monkeypatch, capsys):
    """Runs and logs in a folder of their own, whose table is printed; logs of other data or steps are refused."""
    publish, logs = study["publish"], tmp_path / "logs"
    mine = next(name for name in study["models"].names() if name not in study["SYSTEMS"])

    def train(folder, model, *words, seed, max_steps, **options):
        write_run(folder, [5, 3 + seed], seed, step=max_steps, model=model,
                  options={"max_steps": max_steps})

    def queue(steps):
        monkeypatch.setattr(sys, "argv", ["study.py", "--systems", "gpt", mine, "--data", str(data), "--logs",
                                          str(logs), "--steps", str(steps), "--stages", "main", "--seeds", "2"])
        study["main"]()

    monkeypatch.setattr(publish, "train", train)
    monkeypatch.setattr(publish, "publish", lambda folder, to, *paths: shutil.copytree(folder, to))
    for fingerprint, steps, said in (("f", 8, None), ("f", 8, None), ("f", 12, "not of 3 steps"), ("g", 8, "other")):
        monkeypatch.setattr(publish.shards, "Data", lambda folder: SimpleNamespace(fingerprint=fingerprint))
        if said:
            with pytest.raises(SystemExit, match=said):
                queue(steps)
        else:
            queue(steps)
    assert len(list((tmp_path / "study").iterdir())) == len(list(logs.iterdir())) == 16
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["report.py", str(logs)])
    report["main"]()
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[:4] for row in rows] == [["| `gpt`", "2", "3.5000", ""],
                                                      [f"| `{mine}`", "2", "3.5000", "+0.0000 ± 0.0000"]]
