"""curves.py: systems, intervals and tokens saved against numbers by hand."""
import json
import math
import os
import random
import statistics

import pytest
from analysis import ROOT, read, write_run

from nanodepth import curves
from nanodepth.cli import UserError

THREE = {"gpt": {0: 4.0, 1: 4.3, 2: 4.2}, "one": {0: 3.9, 1: 4.25, 2: 4.0}, "two": {0: 4.1, 1: 4.2, 2: 4.3}}


def labels(*runs):
    return {name: [run["seed"] for run in some] for name, some in curves.systems(read(*runs)).items()}


def test_student_quantiles():
    stats = pytest.importorskip("scipy.stats")
    quantiles = [stats.t.ppf(0.975, n) for n in range(1, 300)]
    assert curves.T95 == pytest.approx(quantiles[:30], abs=6e-4)
    assert [curves.t95(n) for n in range(1, 300)] == pytest.approx(quantiles, abs=3e-3)


# -------------------------------------------------------------------------------------------------------- runs, systems


def test_a_system_is_its_runs_but_for_the_seed(tmp_path):
    """What differs makes another system, and is in its name; what changes no loss does not."""
    count = iter(range(100))

    def run(seed=0, **how):
        return write_run(tmp_path / str(next(count)), [5, 4], seed, **how)

    a, b = run(), run(1, options={"out": "x", "micro_batch": 1, "threads": 1})
    gated, mine = run(shape={"gate": "headwise"}, options={"muon_lr": 0.01}), run(model="mine", shape={"n_layer": 3})
    assert labels(a, b, mine) == {ROOT: [0, 1], "mine": [0]}
    assert labels(a, gated, mine) == {f"{ROOT} muon_lr=0.005": [0], f"{ROOT} gate=headwise muon_lr=0.01": [0],
                                      "mine": [0]}                          # gate=none is the default
    assert labels(gated) == {ROOT: [0]}
    data, torch = run(1, data={"fingerprint": "g"}), run(1, versions={"torch": "2.11.0"})
    assert labels(a, data, torch) == {f"{ROOT} data=f torch=2.13.0": [0], f"{ROOT} data=g torch=2.13.0": [1],
                                      f"{ROOT} data=f torch=2.11.0": [1]}


def test_edited_code_is_another_system(tmp_path):
    """Named by its day; --ignore puts them together."""
    first = write_run(tmp_path / "a", [5, 4], 0, began="2026-01-01 10:00:00")
    edited = write_run(tmp_path / "b", [5, 4], 1, began="2026-01-02 10:00:00", code={"muon.py": "2"})
    unknown = write_run(tmp_path / "c", [5, 4], 1, code={f"models/{ROOT}.py": "2"})
    assert labels(first, edited) == {f"{ROOT} of 2026-01-01 10:00:00": [0], f"{ROOT} of 2026-01-02 10:00:00": [1]}
    assert labels(first, unknown) == {f"{ROOT} of 2026-01-01 10:00:00": [0], f"{ROOT} of an unknown day": [1]}
    twin = write_run(tmp_path / "d", [5, 4], 1, began="2026-01-02 10:00:00", code={"muon.py": "3"})
    assert len(labels(first, edited, twin)) == 3                            # begun in one second
    for names in (["muon.py"], ["code"]):
        assert list(map(len, curves.systems(read(first, edited), names).values())) == [2]
    assert curves.otherwise(curves.systems(read(first, edited)), *labels(first, edited)) == "muon.py"
    mine = write_run(tmp_path / "m", [5, 4], model="mine", shape={"window": 4}, options={"muon_lr": 1},
                     code={"train.py": "3"})
    found = curves.systems(read(first, mine))
    assert curves.otherwise(found, "mine", ROOT) == "muon_lr 1, 0.005, train.py"
    assert curves.otherwise(found, "mine", ROOT, ["train.py"]) == "muon_lr 1, 0.005"


def test_what_else_than_the_idea_differs(tmp_path):
    """Also if only the baseline's name says it, in a file that both models import, and in an option that only the
    baseline has, not at its default.
    """
    mine = write_run(tmp_path / "mine", [5, 4], model="mine", shape={"window": 4},
                     code={f"models/{ROOT}.py": "2", "models/own.py": "1", "own/kit.py": "1"})
    plain = write_run(tmp_path / "plain", [5, 4], options={"muon_lr": 1}, shape={"z_loss": 0.1, "later": 0})
    wide = write_run(tmp_path / "wide", [5, 4], shape={"n_layer": 3, "z_loss": 0.1, "later": 0})
    for run in (plain, wide):
        config = json.loads((run / "config.json").read_text())
        (run / "config.json").write_text(json.dumps(config | {"defaults": {"gate": "none", "z_loss": 0, "later": 0}}))
    found = curves.systems(read(mine, plain, wide))
    names = list(found)
    assert names == ["mine", f"{ROOT} n_layer=2 muon_lr=1", f"{ROOT} n_layer=3 muon_lr=0.005"]
    assert curves.otherwise(found, "mine", names[1]) == f"muon_lr 0.005, 1, models/{ROOT}.py, z_loss 0, 0.1"
    assert curves.otherwise(found, "mine", names[2]) == f"n_layer 2, 3, models/{ROOT}.py, z_loss 0, 0.1"
    assert curves.otherwise(found, names[2], names[1]) == ""                # their names say it
    for name, copy in zip(names, ("a.py", "b.py")):                         # copies of train.py
        found[name][0]["config"]["code"] = {copy: "1", "muon.py": "1", f"{copy[0]}/kit.py": "1"}
    assert curves.otherwise(found, "mine", names[1]) == "muon_lr 0.005, 1, a.py, z_loss 0, 0.1, b.py"


def test_what_else_than_the_model_changes_its_speed(tmp_path):
    a, b = read(*(write_run(tmp_path / str(seed), [5, 4], seed, gpu="H100", ranks=1) for seed in (0, 1)))
    other, = read(write_run(tmp_path / "other", [5, 4], options={"micro_batch": 1}, gpu="H100", ranks=8))
    assert curves.elsewhere([a, b], [b]) == "" and curves.elsewhere([a], [b, other]) == "ranks, micro_batch"


def test_longer_runs_have_no_noise_of_their_own(tmp_path):
    """They begin as the shorter ones, so their losses where those end say nothing more."""
    def runs(name, *losses, longer=()):
        return read(*(write_run(tmp_path / f"{name}{i}", [9, x, *longer], i) for i, x in enumerate(losses)))

    groups = {ROOT: runs("a", 4.0, 4.3, 4.2), "one": runs("b", 3.9, 4.25, 4.0)}
    wanted = curves.summarise(groups, ROOT)["one"]["difference_95"]
    again = {f"{name} long": runs(f"{name[0]}l", *(run["val"][1]["loss"] for run in some), longer=[3, 2])
             for name, some in groups.items()}
    assert curves.summarise(groups | again, ROOT)["one"]["difference_95"] == pytest.approx(wanted)
    other = {"other long": read(write_run(tmp_path / "o", [9, 4, 3], model="other"))}
    found = {"other": read(write_run(tmp_path / "s", [9, 4], model="other", step=50)), **again, **groups, **other}
    again[f"{ROOT} long"][0]["config"]["code"]["muon.py"] += ", from step 900 2"
    assert set(curves.beside(found, 1000, 1000, ROOT, "one long")) == {ROOT, "one long", *other}


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


def test_runs_that_cannot_be_averaged_are_named(tmp_path):
    """Of one seed the newest finished one counts; beside finished runs none that diverged or stopped early."""
    made = {name: write_run(tmp_path / name, losses, seed, options={"max_steps": 200}) for name, losses, seed in (
        ("a", [5, 4, 3], 0), ("b", [5, 4, 3], 0), ("s", [5, 4, 3], 1), ("dead", [5, 4, math.nan], 2),
        ("young", [5, 4], 3), ("again", [5, 4], 0))}
    for age, name in enumerate(("again", *"bas")):
        os.utime(tmp_path / name / "log.jsonl", ns=(0, 10 ** 9 * (9 - age)))                    # the newest comes first
    kept, said = curves.usable(curves.systems(read(*made.values())))
    assert [run["run"] for run in kept[ROOT]] == [str(made["b"]), str(made["s"])]
    assert said == [*(f"{made[old]}: {made[new]} is a newer or finished run of the same system with the same seed"
                      for old, new in (("again", "a"), ("a", "b"))),
                    f"{made['dead']}: diverged: its loss at step 200 is not finite, other runs of {ROOT} have finished",
                    f"{made['young']}: stopped at step 100 of 200, other runs of {ROOT} have finished"]
    alone = curves.systems(read(made["young"]))
    assert curves.usable(alone) == (alone, [])                              # still training: as far as it is


# ---------------------------------------------------------------------------------------------------- curves, intervals


def test_noise_is_that_of_a_randomised_block_design():
    table = [list(at.values()) for at in THREE.values()]
    rest = [x - statistics.mean(row) - statistics.mean(column) + statistics.mean(sum(table, []))
            for row in table for x, column in zip(row, zip(*table))]
    sd = math.sqrt(sum(x * x for x in rest) / 4)                            # of one run, with 4 degrees of freedom
    value, half = curves.difference(THREE, "one", "gpt")
    assert value == pytest.approx(-0.35 / 3) and half == pytest.approx(2.776 * sd * math.sqrt(2 / 3))
    losses = THREE | {"four": {7: 3.8}, "five": {8: 3.9}}                   # no run beside them, so no difference
    assert curves.difference(losses, "four", "gpt") == curves.difference(losses, "four", "five") == (None, None)
    assert curves.difference(losses, "one", "gpt") == (pytest.approx(value), pytest.approx(half))
    assert curves.difference({"one": {1: 2.0}, "gpt": {1: 1.5}}, "one", "gpt") == (pytest.approx(0.5), None)


def test_a_seed_of_two_systems_tells_something_of_the_third():
    """Least squares by hand: seeds 0 and 1 give one - gpt with variance 1 (of a run's), two - gpt with 1, covariance
    1/2; seed 2 gives one - gpt with variance 2. Together one - gpt has the weights 2 : 1 and the variance 2/3, and
    two - gpt moves by half of what one - gpt moves, a sixth of the difference of its values; variance 1 - 1/4 + 1/6.
    """
    losses = {**THREE, "two": {0: 4.1, 1: 4.2}}
    sd = curves.difference(losses, "one", "gpt")[1] / 3.182 / math.sqrt(2 / 3)
    for name, wanted, variance in (("one", (2 * -0.075 - 0.2) / 3, 2 / 3), ("two", 0 + (-0.2 - -0.075) / 6, 11 / 12)):
        value, half = curves.difference(losses, name, "gpt")
        assert value == pytest.approx(wanted) and half == pytest.approx(3.182 * sd * math.sqrt(variance), rel=1e-3)
    losses["three"] = {0: 3.8}                      # one run: its mean takes it, yet its difference has an interval
    assert curves.difference(losses, "one", "gpt")[1] == pytest.approx(3.182 * sd * math.sqrt(2 / 3))
    assert curves.difference(losses, "three", "gpt")[1] > 3.182 * sd


def test_only_losses_on_equal_tokens_are_compared(tmp_path):
    """After as many training tokens, on as many validation tokens: final_eval_tokens sets the last losses apart."""
    def runs(name, *losses, tokens=()):
        return read(*(write_run(tmp_path / f"{name}{i}", x, i, eval_tokens=tokens) for i, x in enumerate(losses)))

    rows = curves.summarise({ROOT: runs("b", [9, 5, 3], [9, 5, 4]), "more": runs("m", [9, 5, 4, 2], [9, 5, 4, 2]),
                             "late": runs("l", [9, 4, 1], [9, 4])}, ROOT)
    assert rows["more"]["difference"] is None and rows["more"]["loss"] == 2 and rows[ROOT]["loss"] == 3.5
    assert rows["late"]["tokens"] == 1000 and rows["late"]["loss"] == 4 and rows["late"]["loss_sd"] == 0    # of both
    last = {ROOT: runs("B", [9, 5, 4, 3.5], tokens=[7, 7, 7, 70]), "x": runs("X", [9, 4, 3, 3.2], tokens=[7, 7, 7, 70]),
            "long": runs("L", [9, 4, 3, 2.5, 2], tokens=[7, 7, 7, 7, 70])}
    row = curves.summarise(last, ROOT)["x"]
    assert row["difference"] == pytest.approx(-0.3) and row["loss"] == 3.2 and row["tokens"] == 3000
    assert row["curve"] == [(0, 9, 7), (1000, 4, 7), (2000, 3, 7), (3000, 3.2, 70)]
    assert curves.losses(last, 3000, 70) == {ROOT: {0: 3.5}, "x": {0: 3.2}}
    with pytest.raises(UserError, match="X0, .*Y0: no validations on as many tokens in common"):
        curves.curve([*last["x"], *runs("Y", [9, 5], tokens=[8, 8])])


def test_deviations():
    """A loss that is not finite, as train.py logs it before it stops, has none, and nothing fails."""
    assert curves.deviation([1.0, 3.0]) == pytest.approx(math.sqrt(2)) and curves.deviation([1.0]) is None
    assert all(math.isnan(curves.deviation([4.0, last])) for last in (math.nan, math.inf))


# ------------------------------------------------------------------------------------------------------ batch by batch


def test_training_losses_of_one_seed_are_compared_batch_by_batch(tmp_path):
    """By loops: the mean over the seeds, then over each window of steps, and the error of that."""
    draw = random.Random(0).gauss
    hard = {seed: [draw(5, 0.4) for _ in range(30)] for seed in (0, 1, 2)}                  # each batch's own loss
    gain = {seed: [0.01 * i + draw(0, 0.01) for i in range(30 - seed)] for seed in (0, 1)}
    base = read(*(write_run(tmp_path / f"b{s}", [9, 5], s) for s in hard))
    some = read(*(write_run(tmp_path / f"a{s}", [9, 5], s, "mine") for s in gain))
    for run in base + some:
        values = hard[run["seed"]] if run in base else [x - y for x, y in zip(hard[run["seed"]], gain[run["seed"]])]
        run["train"] = [{"step": i, "tokens": 10 * i, "loss": loss} for i, loss in enumerate(values, 1)]
    found = curves.along(some, base, 8)
    gaps = [-(x + y) / 2 for x, y in zip(gain[0], gain[1])]                                 # 29 steps that both have
    assert len(found) == 29 - 8 + 1
    for i, (tokens, value, error) in enumerate(found):
        part = gaps[i:i + 8]
        assert tokens == pytest.approx(10 * statistics.mean(range(i + 1, i + 9)))
        assert value == pytest.approx(statistics.mean(part))
        assert error == pytest.approx(statistics.stdev(part) / 8 ** 0.5)
    assert curves.along(some, base, 30) == []


@pytest.mark.parametrize("how, why", [
    (dict(options={"muon_lr": 3, "max_steps": 7}, code={"muon.py": "2"}), ""), (dict(seed=1), "no seed in common"),
    (dict(options={"batch_tokens": 9, "seq_len": 4}), "seq_len 256, 4, batch_tokens 50, 9"),
    (dict(data={"fingerprint": "g"}, code={"nanodepth/data.py": "2"}), "data f, g, nanodepth/data.py")], ids=str)
def test_which_runs_see_the_same_batches(tmp_path, how, why):
    def run(name, options={}, code={}, **more):
        return write_run(tmp_path / name, [9, 5], options={"batch_tokens": 50, **options},
                         code={"nanodepth/data.py": "1", **code}, **more)
    base, some = read(run("a"), run("b", **how))
    assert curves.other_batches([base], [some]) == why
    assert bool(curves.along([some], [base], 2)) == (not why)
