"""Short versions of endurance.py and fuzz.py."""
import pytest
import settings

import endurance
import fuzz
import models


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(data folder, an undisturbed run of gpt on it)."""
    folder = tmp_path_factory.mktemp("whole")
    data = endurance.prepare(folder)
    return data, endurance.Undisturbed("gpt", data, folder).run


@pytest.mark.parametrize("n, names", [(2, models.names()[:1]), pytest.param(
    8, [models.names()[0], models.names()[-1]], marks=pytest.mark.full)])
def test_kills(tmp_path, n, names):
    """SIGKILL at random moments: every checkpoint and the end equal those of the undisturbed run."""
    counts = endurance.kills(n, 0, tmp_path, names)
    assert counts["chains"] >= len(names) and sum(counts.values()) - counts["chains"] >= n


def test_ranks(tmp_path):
    """1, 2 and 4 processes, and a run that goes from 2 to 1 to 2: equal losses up to rounding, bytes as computed."""
    small = dict(d_model=32, d_ff=64, max_steps=12)
    own = {name: {"weight_decay": 0.0} for name in models.names() if settings.of(name, "ROUNDED_DECAY", False)}
    measured = [name for name in models.names() if name not in own][-1:]
    losses, sizes = endurance.ranks(tmp_path, models.names(), "float64", measured, own, **small)
    assert len(losses) == 4 * len(models.names()) and len(sizes) == 4
    assert all(max(differences) < 1e-9 for _, _, *differences in losses), losses
    for name, world, what, formula, measured in sizes:
        most = 0.01 if what == "sent per step" else 0.08                        # Python and DDP hold some more
        assert 0 <= measured / formula - 1 < most, (name, world, what, formula, measured)


def test_a_lost_rank_stops_the_others(tmp_path, whole):
    data, _ = whole
    two = tmp_path / "whole"
    endurance.finish(endurance.start("train.py", *endurance.flags(**endurance.RUN, data=data, out=two), ranks=2))
    endurance.lost_rank(tmp_path, 1, data, two)


def test_two_processes_on_one_folder(tmp_path, whole):
    endurance.two_processes(tmp_path, *whole)


def test_full_disk():
    if endurance.in_namespace("disk") is None:
        pytest.skip("this machine does not let a user mount a disk")


def test_fuzz(tmp_path):
    counts, reports = fuzz.fuzz(320, 7, tmp_path)
    assert sum(counts.values()) == 320 and not reports, "\n".join(reports)
