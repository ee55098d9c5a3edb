"""Short versions of endurance.py and fuzz.py."""
import pytest

import endurance
import fuzz
import models
from small import finish, flags, start


@pytest.mark.parametrize("n, names", [(2, models.names()[:1]), pytest.param(
    8, [models.names()[0], models.names()[-1]], marks=pytest.mark.full)])
def test_kills(tmp_path, n, names):
    """SIGKILL at random moments: every checkpoint is there, and the end equals that of the undisturbed run."""
    assert endurance.kills(n, 0, tmp_path, names).total() >= n


@pytest.mark.full
def test_ranks(tmp_path):
    """Two processes, and runs that go from one to two and from two to one: equal losses up to rounding.

    Without weight decay: where a gradient is only rounding, its sign decides whether cautious decay takes place.
    """
    losses = endurance.ranks(tmp_path, models.names(), d_model=32, d_ff=64, weight_decay=0.0)
    assert len(losses) == 4 * len(models.names()) and max(losses.values()) < 1e-9, losses


@pytest.mark.full
def test_a_lost_rank_stops_the_others(tmp_path):
    data, two = endurance.prepare(tmp_path), tmp_path / "whole"
    finish(start("train.py", *flags(**endurance.RUN, data=data, out=two), ranks=2))
    endurance.lost_rank(tmp_path, 1, data, two)


@pytest.mark.full
def test_fuzz(tmp_path):
    counts, reports = fuzz.fuzz(320, 7, tmp_path)
    assert sum(counts.values()) == 320 and not reports, "\n".join(reports)
