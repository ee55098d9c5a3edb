"""attnres_block.py against its paper's equations in float64, arXiv:2603.15031."""
import pytest
from reference import GATED, add, compare, float64, setup, show, sublayer  # noqa: F401  (float64: autouse)
from test_attnres import read


def blocks(p, c, x):
    """Sources: the embedding, the sums of the finished blocks, the running sum of the own block unless it is empty."""
    finished, running = [x], None
    for l in range(2 * c.n_layer):
        v = sublayer(p, c, l + 1, read(p, c, l, finished + ([] if running is None else [running])))
        running = v if running is None else add(running, v)
        if (l + 1) % c.block_size == 0:
            finished, running = finished + [running], None
    return read(p, c, 2 * c.n_layer, finished + ([] if running is None else [running]))


@pytest.mark.parametrize("options", [dict(block_size=n) for n in (1, 3, 4, 7)] + GATED[1:], ids=show)
def test_equations(options):
    """Of 6 sublayers: blocks of one are the full form, blocks of 4 leave one unfinished, blocks of 7 are one."""
    compare(blocks, *setup("attnres_block", **{"block_size": 4, **options}))
