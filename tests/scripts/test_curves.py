"""curves.py: systems, intervals and tokens saved against numbers by hand."""
import json
import math
import os

import pytest
from analysis import ROOT, read, write_run

from nanodepth import curves


def labels(*runs):
    return {name: [run["seed"] for run in some] for name, some in curves.systems(read(*runs)).items()}


def test_student_quantiles():
    stats = pytest.importorskip("scipy.stats")
    quantiles = [stats.t.ppf(0.975, n) for n in range(1, 300)]
    assert curves.T95 == pytest.approx(quantiles[:30], abs=6e-4)
    assert [curves.t95(n) for n in range(1, 300)] == pytest.approx(quantiles, abs=3e-3)


# -------------------------------------------------------------------------------------------------------- runs, systems


def test_a_system_has_the_name_that_its_run_says(tmp_path):
    a = write_run(tmp_path / "a", [5, 4])
    b = write_run(tmp_path / "b", [5, 4], seed=1, options={"out": "x", "micro_batch": 1, "threads": 1})
    c = write_run(tmp_path / "c", [5, 4], system=f"{ROOT} n_layer=3 gate=headwise", options={"muon_lr": 0.01})
    d = write_run(tmp_path / "d", [5, 4], system="mine n_layer=3")
    assert labels(a, b, c, d) == {ROOT: [0, 1], f"{ROOT} n_layer=3 gate=headwise": [0], "mine n_layer=3": [0]}
    assert labels(c, d) == {f"{ROOT} gate=headwise": [0], "mine": [0]}              # without what all share
    assert labels(c) == {f"{ROOT} n_layer=3 gate=headwise": [0]}
    config = json.loads((b / "config.json").read_text())
    del config["system"]                                                            # an older run
    (b / "config.json").write_text(json.dumps(config))
    assert labels(a, b) == {ROOT: [0, 1]}


def test_what_was_trained_differently_is_another_system(tmp_path):
    a, b, c = (write_run(tmp_path / f"{x}", [5, 4], seed=seed, options={"muon_lr": x, **more})
               for x, seed, more in ((0.01, 0, {"decay_frac": 0.2}), (0.02, 0, {"decay_frac": 0.2}), (0.03, 1, {})))
    d = write_run(tmp_path / "d", [5, 4], model="mine", options={"muon_lr": 0.04})
    assert labels(a, b, c, d) == {f"{ROOT} muon_lr=0.01": [0], f"{ROOT} muon_lr=0.02": [0], f"{ROOT} muon_lr=0.03": [1],
                                  "mine": [0]}                      # an older run lacks newer options
    assert labels(b, d) == {ROOT: [0], "mine": [0]}
    e, f = (write_run(tmp_path / f"m{x}", [5, 4], model="mine", options={"my_lr": x}) for x in (None, 0.04))
    assert labels(e, f) == {"mine my_lr=None": [0], "mine my_lr=0.04": [0]}          # also an option of your own


def test_the_baseline(tmp_path):
    """gpt, else any; of several the one as long as most systems, with the fewest options."""
    runs = read(*(write_run(tmp_path / f"{model}{n}", [9, 5, 4, 3][:n], 0, model, options={"max_steps": n})
                  for model, n in ((ROOT, 2), (ROOT, 3), ("x", 3), ("y", 4))))
    groups = curves.systems(runs)
    assert list(groups) == [f"{ROOT} max_steps=2", f"{ROOT} max_steps=3", "x", "y"]
    assert curves.find_baseline(groups) == f"{ROOT} max_steps=3"
    some = groups["x"]
    assert curves.find_baseline(dict.fromkeys(("x", f"{ROOT} gate=headwise", "y"), some)) == f"{ROOT} gate=headwise"
    assert curves.find_baseline(dict.fromkeys((f"{ROOT} gate=headwise", ROOT), some)) == ROOT
    assert curves.find_baseline(dict.fromkeys("xy", some)) == "x"


def test_what_the_losses_are_means_over(tmp_path):
    run, = read(write_run(tmp_path / "run", [5, 4]))
    usual = "1,000 tokens in sequences of 256 of data with fingerprint f"
    assert curves.validated_on(run) == usual
    run["config"]["options"]["final_eval_tokens"] = 1000                            # what it is without the option
    assert curves.validated_on(run) == usual
    run["config"]["options"] |= {"final_eval_tokens": 7000, "eval_tokens": 10, "seq_len": 8000}
    run["config"]["data"]["fingerprint"] = "other"
    assert curves.validated_on(run) == (
        "10 tokens (7,000 at the end) in sequences of 8,000 of data with fingerprint other")


def test_of_equal_runs_the_newest_counts(tmp_path):
    runs = {name: curves.read_log(write_run(tmp_path / name, [5, 4], seed=int(name == "s"))) for name in "absc"}
    for age, name in enumerate("basc"):
        os.utime(tmp_path / name / "log.jsonl", ns=(0, 10 ** 9 * (9 - age)))                    # b is the newest
    assert curves.systems(list(runs.values())) == {ROOT: [runs["b"], runs["s"]]}


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"options": {"seed": 1}}'])
def test_what_is_no_run(tmp_path, text):
    run = write_run(tmp_path / "r", [5.0, 4.0])
    (run / "config.json").write_text(text)
    with pytest.raises(ValueError, match="is not the folder of a run"):
        curves.read_log(run)


# ---------------------------------------------------------------------------------------------------- curves, intervals


def test_seeds_are_paired_and_one_seed_has_no_interval(tmp_path):
    base = read(*(write_run(tmp_path / f"b{s}", [9, s], s) for s in (1, 2, 3)))
    some = read(*(write_run(tmp_path / f"a{s}", [9, s + gap], s) for s, gap in ((3, 0.5), (2, 0.7), (7, 100))))
    half = 12.706 * math.sqrt(0.02) / math.sqrt(2)
    assert curves.interval(curves.gaps(some, base, 1000)) == (pytest.approx(0.6), pytest.approx(half))
    assert curves.interval(curves.gaps(some[:1], base, 1000)) == (pytest.approx(0.5), None)
    assert curves.interval(curves.gaps(some[2:], base, 1000)) == (None, None)
    assert curves.interval(curves.gaps(some, base, 77)) == (None, None)
    lone = curves.summarise({"x": some[2:], ROOT: base}, ROOT)
    assert list(lone) == [ROOT, "x"]
    assert lone["x"]["difference"] is None


def test_only_losses_after_equal_tokens_are_compared(tmp_path):
    base = read(*(write_run(tmp_path / f"b{s}", [9, 5, 3 + s], s) for s in (0, 1)))
    more = read(*(write_run(tmp_path / f"m{s}", [9, 5, 4, 2], s) for s in (0, 1)))
    late = read(write_run(tmp_path / "l0", [9, 4, 1], 0), write_run(tmp_path / "l1", [9, 4], 1))
    rows = curves.summarise({ROOT: base, "more": more, "late": late}, ROOT)
    assert rows["more"]["difference"] is None and rows["more"]["loss"] == 2
    assert rows["late"]["loss"] == 4 and rows["late"]["loss_sd"] == 0               # as of what both seeds have
    assert rows["late"]["tokens"] == 1000
    assert rows[ROOT]["loss"] == 3.5


def test_losses_on_other_validation_tokens_are_no_points_of_the_curve(tmp_path):
    """final_eval_tokens: the last losses are only differences."""
    base, some = read(*(write_run(tmp_path / name, losses, eval_tokens=[7, 7, 7, 70])
                        for name, losses in (("b", [9, 5, 4, 3.5]), ("s", [9, 4, 3, 3.2]))))
    rows = curves.summarise({ROOT: [base], "x": [some]}, ROOT)
    assert rows["x"]["difference"] == pytest.approx(-0.3) and rows["x"]["loss"] == 3.2 and rows["x"]["tokens"] == 3000
    assert rows["x"]["curve"] == [(0, 9), (1000, 4), (2000, 3)]


@pytest.mark.parametrize("last", [math.nan, math.inf])
def test_a_seed_that_diverged(tmp_path, last):
    """Its loss is not finite, as train.py logs it before it stops: deviations are unknown, and nothing fails."""
    logs = read(*(write_run(tmp_path / f"{seed}", [5.0, loss], seed) for seed, loss in ((0, 4.0), (1, last))))
    row = curves.summarise(curves.systems(logs), ROOT)[ROOT]
    assert math.isnan(row["loss_sd"]) and math.isnan(curves.interval([1.0, last])[1])
    assert curves.deviation([1.0, 3.0]) == pytest.approx(math.sqrt(2))
