"""curves.py: systems, intervals and tokens saved against numbers by hand."""
import math
import os
from pathlib import Path

import pytest
from analysis import ROOT, write_run

from nanodepth import curves


def test_student_quantiles():
    stats = pytest.importorskip("scipy.stats")
    quantiles = [stats.t.ppf(0.975, n) for n in range(1, 300)]
    assert curves.T95 == pytest.approx(quantiles[:30], abs=6e-4)
    assert [curves.t95(n) for n in range(1, 300)] == pytest.approx(quantiles, abs=3e-3)


def test_systems_are_named_by_what_differs(tmp_path, monkeypatch):
    def labels(*runs):
        return {label: len(some) for label, some in curves.systems([curves.read_log(run) for run in runs]).items()}
    a = write_run(tmp_path / "a", [5, 4])
    b = write_run(tmp_path / "b", [5, 4], seed=1, options={
        "out": "x", "preset": "mine", "micro_batch": 1, "threads": 1, "tensorboard": True, "sample_every": 5})
    c = write_run(tmp_path / "c", [5, 4], config={"gate": "elementwise"}, options={"muon_lr": 0.01})
    d = write_run(tmp_path / "d", [5, 4], options={"muon_lr": 0.01})
    e = write_run(tmp_path / "e", [5, 4], model="hacked")
    assert labels(a, b, c, e) == {ROOT: 2, f"{ROOT} gate=elementwise": 1, "hacked": 1}
    assert labels(a, d) == {f"{ROOT} muon_lr=0.005": 1, f"{ROOT} muon_lr=0.01": 1}
    shape = dict(vocab_size=97, n_layer=2, n_head=4, d_model=32, d_ff=128)
    f = write_run(tmp_path / "f", [5, 4], config={**shape, "n_kv_head": 4})         # its default, as train.py writes it
    g = write_run(tmp_path / "g", [5, 4], config={**shape, "n_kv_head": 2})
    h = write_run(tmp_path / "h", [5, 4], config={**shape, "n_kv_head": 4, "my_new_option": 1})   # the file has grown
    assert labels(g, f) == {ROOT: 1, f"{ROOT} n_kv_head=2": 1}
    assert labels(f, h) == {ROOT: 1, f"{ROOT} my_new_option=1": 1}
    filled = {**shape, "n_kv_head": 4, "z_loss": 0.0}                               # z_loss came later
    i = write_run(tmp_path / "i", [5, 4], seed=1, config=filled, options={"final_lr_frac": 0.1})
    assert labels(f, i) == {ROOT: 2}
    monkeypatch.setattr(curves, "label", lambda *args: "x")                         # nothing is lost
    assert labels(a, b, d) == {"x": 2, "x (2)": 1}


def test_published_runs_are_what_they_were():
    """Three seeds of a system are one system, though an option came between them."""
    logs = Path(__file__).parent.parent / "results" / "study-cpu" / "logs"
    for kind in (ROOT, f"{ROOT}-gated"):
        assert len(curves.systems([curves.read_log(logs / f"{kind}-seed{seed}") for seed in range(3)])) == 1


def test_the_baseline_is_as_long_as_most(tmp_path):
    runs = [curves.read_log(write_run(tmp_path / f"{model}{n}", [9, 5, 4, 3][:n], 0, model, options={"max_steps": n}))
            for model, n in ((ROOT, 2), (ROOT, 3), ("x", 3), ("y", 4))]
    groups = curves.systems(runs)
    assert list(groups) == [f"{model} max_steps={n}" for model, n in ((ROOT, 2), (ROOT, 3), ("x", 3), ("y", 4))]
    assert curves.find_baseline(groups) == f"{ROOT} max_steps=3"
    assert curves.find_baseline(curves.systems(runs[::3])) == f"{ROOT} max_steps=2"
    rows = curves.summarise(groups, f"{ROOT} max_steps=3")
    assert [row["difference"] for row in rows.values()] == [0, None, 0, None]


def test_the_same_seed_twice(tmp_path):
    a, b = (curves.read_log(write_run(tmp_path / name, [5, 4])) for name in "ab")
    with pytest.raises(ValueError, match="a and .*b are the same system with the same seed: leave one out"):
        curves.systems([a, b])


def test_what_others_are_compared_with(tmp_path):
    some = [curves.read_log(write_run(tmp_path / "run", [5, 4]))]
    groups = dict.fromkeys(("x", f"{ROOT} gate=none", "y"), some)
    assert curves.find_baseline(groups) == f"{ROOT} gate=none"
    assert curves.find_baseline({**groups, ROOT: some}) == ROOT
    assert curves.find_baseline(dict.fromkeys("xy", some)) == "x"


@pytest.mark.parametrize("name, value, said", [
    ("data", "other123456", ["d, sequences of 256 tokens, fingerprint f",
                             "d, sequences of 256 tokens, fingerprint other123"]),
    ("eval_tokens", 7, ["d, sequences of 256 tokens, eval_tokens 1,000",
                        "d, sequences of 256 tokens, eval_tokens 7"]),
    ("final_eval_tokens", 7, ["d, sequences of 256 tokens, eval_tokens 1,000",
                              "d, sequences of 256 tokens, eval_tokens 1,000 (7 at the end)"]),
    ("seq_len", 8000, ["d, sequences of 256 tokens", "d, sequences of 8,000 tokens"])])
def test_runs_that_cannot_be_compared_are_apart(tmp_path, name, value, said):
    a, b, c = (curves.read_log(write_run(tmp_path / run, [5, 4], seed=seed)) for seed, run in enumerate("abc"))
    assert curves.comparable([a, b, c]) == [("d, sequences of 256 tokens", [a, b, c])]
    b["config"]["options"]["final_eval_tokens"] = 1000                              # what it is without the option
    assert len(curves.comparable([a, b, c])) == 1
    if name == "data":
        a["config"]["data"]["fingerprint"] = value
    else:
        a["config"]["options"][name] = value
    assert curves.comparable([a, b, c]) == [(said[0], [b, c]), (said[1], [a])]      # the largest group first
    assert curves.comparable([a, b]) == [(said[1], [a]), (said[0], [b])]            # of equal ones the first given


def test_runs_of_other_paths_and_lengths(tmp_path):
    a, b = (curves.read_log(write_run(tmp_path / run, [5, 4], options={"max_steps": steps, "eval_every": steps}))
            for run, steps in (("a", 100), ("b", 200)))
    assert len(curves.comparable([a, b])) == 1
    assert list(curves.systems([a, b])) == [f"{ROOT} max_steps=100", f"{ROOT} max_steps=200"]
    b["config"]["data"].update(path="e", fingerprint="g")
    assert [heading for heading, _ in curves.comparable([a, b])] == [f"{x}, sequences of 256 tokens" for x in "de"]


def test_of_equal_runs_the_newest_counts(tmp_path):
    for i, name in enumerate(("a", "m", "b", "s", "c")):
        write_run(tmp_path / name, [5, 4], seed=int(name == "s"), model="x" if name == "m" else ROOT,
                  options={"out": name, "eval_every": i})
    runs = {name: curves.read_log(tmp_path / name) for name in ("a", "m", "b", "s", "c")}
    for age, name in enumerate(("b", "m", "a", "s", "c")):
        os.utime(tmp_path / name / "log.jsonl", ns=(0, 10 ** 9 * (9 - age)))                    # b is the newest
    kept, left_out = curves.newest(list(runs.values()))
    assert kept == [runs[name] for name in "mbs"]
    assert left_out == [(str(tmp_path / "c"), str(tmp_path / "b")), (str(tmp_path / "a"), str(tmp_path / "b"))]
    assert set(curves.systems(kept)) == {ROOT, "x"}
    other = dict(runs["a"], config={**runs["a"]["config"], "data": {"path": "d", "fingerprint": "other"}})
    assert curves.newest([runs["b"], other]) == ([runs["b"], other], [])                    # trained on other data


def test_seeds_are_paired_and_one_seed_has_no_interval(tmp_path):
    def read(*runs):
        return [curves.read_log(run) for run in runs]
    base = read(*(write_run(tmp_path / f"b{s}", [9, s], s) for s in (1, 2, 3)))
    some = read(*(write_run(tmp_path / f"a{s}", [9, s + gap], s) for s, gap in ((3, 0.5), (2, 0.7), (7, 100))))
    half = 12.706 * math.sqrt(0.02) / math.sqrt(2)
    assert curves.interval(curves.gaps(some, base, 1000)) == (pytest.approx(0.6), pytest.approx(half))
    assert curves.interval(curves.gaps(some[:1], base, 1000)) == (pytest.approx(0.5), None)
    assert curves.interval(curves.gaps(some[2:], base, 1000)) == (None, None)
    assert curves.interval(curves.gaps(some, base, 77)) == (None, None)
    lone = curves.summarise({"x": some[2:], ROOT: base}, ROOT)
    assert list(lone) == [ROOT, "x"]
    assert lone["x"]["tokens_to_baseline"] is None and "| - | not reached |" in curves.table(lone, ROOT)


def test_only_losses_after_equal_tokens_are_compared(tmp_path):
    base = [curves.read_log(write_run(tmp_path / f"b{s}", [9, 5, 3 + s], s)) for s in (0, 1)]
    more = [curves.read_log(write_run(tmp_path / f"m{s}", [9, 5, 4, 2], s)) for s in (0, 1)]
    late = [curves.read_log(write_run(tmp_path / "l0", [9, 4, 1], 0)),
            curves.read_log(write_run(tmp_path / "l1", [9, 4], 1))]
    rows = curves.summarise({ROOT: base, "more": more, "late": late}, ROOT)
    assert rows["more"]["difference"] is None and rows["more"]["loss"] == 2
    assert rows["late"]["loss"] == 4 and rows["late"]["loss_sd"] == 0               # as of what both seeds have
    assert rows["late"]["tokens"] == 1000
    assert rows[ROOT]["loss"] == 3.5 and rows["more"]["tokens_to_baseline"] == 2250


def test_losses_on_other_validation_tokens_are_no_points_of_the_curve(tmp_path):
    """final_eval_tokens: the last losses are differences and no crossings; and a run whose eval_tokens changed."""
    usual, more = {"eval_tokens": [7] * 4}, {"eval_tokens": [7, 7, 7, 70]}
    base = [curves.read_log(write_run(tmp_path / "b", [9, 5, 4, 3.5], 0, **more))]
    some = [curves.read_log(write_run(tmp_path / "s", [9, 4, 3, 3.2], 0, **more))]
    rows = curves.summarise({ROOT: base, "x": some}, ROOT)
    assert rows["x"]["difference"] == pytest.approx(-0.3) and rows["x"]["loss"] == 3.2 and rows["x"]["tokens"] == 3000
    assert rows["x"]["curve"] == [(0, 9), (1000, 4), (2000, 3)]
    assert rows["x"]["tokens_to_baseline"] is None and "not reached" not in curves.table(rows, ROOT)
    base = [curves.read_log(write_run(tmp_path / "c", [9, 5, 4, 3.5], 0, **usual))]
    rows = curves.summarise({ROOT: base, "x": some}, ROOT)
    assert rows["x"]["difference"] is None and rows["x"]["tokens_to_baseline"] == pytest.approx(1500)
    changed = [curves.read_log(write_run(tmp_path / "d", [8, 4, 3, 2], 0, eval_tokens=[9, 7, 7, 7]))]
    assert curves.curve(changed) == [(1000, 4), (2000, 3), (3000, 2)] and curves.gaps(changed, base, 0) == []


def test_a_last_line_that_was_cut_off_does_not_count(tmp_path):
    run = write_run(tmp_path / "r", [5.0, 4.0])
    with open(run / "log.jsonl", "a") as f:
        f.write('{"kind": "val", "st')
    assert [row["loss"] for row in curves.read_log(run)["val"]] == [5.0, 4.0]


def test_rows_of_older_logs(tmp_path):
    run = write_run(tmp_path / "r", [5.0, 4.0])
    with open(run / "log.jsonl", "a") as f:
        f.write('{"kind": "train", "tok_s": 7.0}\n{"kind": "val", "tokens": 9, "loss": 3.0}\n')
    found = curves.read_log(run)
    assert found["train"][-2:] == [{"tok_s": 1000.0, "tokens": 50, "loss": 1.0}, {"tok_s": 7.0}]
    assert found["val"][-1] == {"tokens": 9, "loss": 3.0}
    for options in ({"seed": "1"}, {"eval_tokens": None}, {"final_eval_tokens": "all"}):
        broken = write_run(tmp_path / str(options), [5.0, 4.0], options=options)
        with pytest.raises(ValueError, match="is not the folder of a run"):
            curves.read_log(broken)


def test_training_losses_are_smoothed_and_paired():
    def run(seed, losses):
        return {"seed": seed, "train": [{"tok_s": 1.0, "tokens": 10 * i, "loss": y} for i, y in enumerate(losses)]}
    some = [run(0, [4.0, 2.0, 1.0]), run(1, [6.0, 4.0, 2.0, 9.0])]
    assert curves.training(some) == [(0, 5.0), (10, 3.0), (20, 1.5)]                # ten rows and fewer: as they are
    assert curves.training(some, [run(1, [1.0, 1.0]), run(7, [0.0])]) == [(0, 5.0), (10, 3.0)]
    assert curves.training(some, [run(7, [0.0])]) == []
    long = run(0, [float(i % 2) for i in range(20)])
    assert curves.training([long]) == [(10 * i + 5, 0.5) for i in range(19)]
    old = {"seed": 1, "train": [{"tok_s": 1.0}]}
    assert curves.training([old]) == curves.training([old, long]) == curves.training(some[1:], [old]) == []


# --------------------------------------------------------------------------------------------------------- tokens saved


@pytest.mark.parametrize("last", [math.nan, math.inf])
def test_a_seed_that_diverged(tmp_path, last):
    """Its loss is not finite, as train.py logs it before it stops: deviations are unknown, and nothing fails."""
    logs = [curves.read_log(write_run(tmp_path / f"{seed}", [5.0, loss], seed)) for seed, loss in ((0, 4.0), (1, last))]
    row = curves.summarise(curves.systems(logs), ROOT)[ROOT]
    assert math.isnan(row["loss_sd"]) and math.isnan(curves.interval([1.0, last])[1])
    assert curves.deviation([1.0, 3.0]) == pytest.approx(math.sqrt(2))


def test_tokens_that_a_baseline_needs():
    """Losses 4.0, 3.5, 3.2 after 1, 2, 4 million tokens: halfway between two losses lies sqrt(2) times the first."""
    ends = [(4e6, 3.2), (1e6, 4.0), (2e6, 3.5)]                                     # in any order
    for loss, needed in ((4.0, 1e6), (3.75, 1e6 * math.sqrt(2)), (3.5, 2e6), (3.35, 2e6 * math.sqrt(2)), (3.2, 4e6),
                         (3.875, 1e6 * 2 ** 0.25), (3.3, 2e6 * 2 ** (2 / 3))):
        assert curves.tokens_needed(ends, loss) == pytest.approx(needed, rel=1e-12), loss
    assert curves.tokens_needed(ends, 4.0001) is None and curves.tokens_needed(ends, 3.1999) is None
    assert curves.tokens_needed([], 3.0) is None and curves.tokens_needed([(1e6, 3.0)], 2.9) is None
    assert curves.tokens_needed([(1e6, 3.0)], 3.0) == pytest.approx(1e6)


def test_tokens_needed_on_a_curve_with_noise():
    ends = [(1e6, 4.0), (2e6, 3.0), (4e6, 3.5), (8e6, 2.5), (16e6, math.nan)]
    assert curves.tokens_needed(ends, 3.25) == pytest.approx(1e6 * 2 ** 0.75)       # the first of three answers
    assert curves.tokens_needed(ends, 2.75) == pytest.approx(4e6 * 2 ** 0.75)
    assert curves.tokens_needed(ends, 2.4) is None                                  # a run that diverged is no end
    assert curves.tokens_needed([(1e6, 4.0), (2e6, math.nan), (4e6, 3.0)], 3.5) == pytest.approx(2e6)
