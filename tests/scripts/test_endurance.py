"""Short versions of endurance.py and fuzz.py."""
import pytest

import endurance
import fuzz
import models


@pytest.mark.parametrize("n, names", [(2, models.names()[:1]), pytest.param(
    8, [models.names()[0], models.names()[-1]], marks=pytest.mark.full)])
def test_kills(tmp_path, n, names):
    """SIGKILL at random moments: every checkpoint is there, and the end equals that of the undisturbed run."""
    assert endurance.kills(n, 0, tmp_path, names).total() >= n + len(names)


@pytest.mark.full
def test_ranks(tmp_path):
    """1, 2 and 4 processes, and a run that goes from 2 to 1 to 2: equal losses up to rounding.

    Without weight decay: where a gradient is only rounding, its sign decides whether cautious decay takes place.
    """
    losses = endurance.ranks(tmp_path, models.names(), "float64", d_model=32, d_ff=64, weight_decay=0.0)
    assert len(losses) == 3 * len(models.names())
    assert all(max(differences) < 1e-9 for _, _, *differences in losses), losses


@pytest.mark.full
def test_a_lost_rank_stops_the_others(tmp_path):
    data, two = endurance.prepare(tmp_path), tmp_path / "whole"
    endurance.finish(endurance.start("train.py", *endurance.flags(**endurance.RUN, data=data, out=two), ranks=2))
    endurance.lost_rank(tmp_path, 1, data, two)


@pytest.mark.full
def test_fuzz(tmp_path):
    counts, reports = fuzz.fuzz(320, 7, tmp_path)
    assert sum(counts.values()) == 320 and not reports, "\n".join(reports)
