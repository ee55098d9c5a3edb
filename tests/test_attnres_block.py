"""attnres_block.py against its paper's equations in float64, arXiv:2603.15031."""
import pytest
import torch
from measure import dtypes_read, extra, mixing_flops
from reference import (  # noqa: F401  (float64: autouse)
    GATED, add, compare, depends_on_every_parameter, float64, setup, show, sublayer,
)
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


@pytest.mark.parametrize("options", [dict(block_size=n) for n in (1, 2, 3, 4, 6, 7)] + GATED[1:], ids=show)
def test_equations(options):
    compare(blocks, *setup("attnres_block", **{"block_size": 4, **options}))


def test_reference_depends_on_every_parameter():
    depends_on_every_parameter(blocks, *setup("attnres_block", block_size=4))


def test_blocks_of_one_sublayer_are_the_full_form():
    block, _, _, idx, targets = setup("attnres_block", block_size=1)
    full = setup("attnres")[0]
    full.load_state_dict(block.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(block(idx, targets), full(idx, targets)))


@pytest.mark.parametrize("n, seen, sums", [(1, 36 + 9, 0), (3, 1 + 2 * 3 + 3 * 3 + 4 * 2, 5), (8, 1 + 2 * 8, 7)])
def test_costs(n, seen, sums):
    """Of 4 layers. seen: sources of the 9 readers; sums: additions into running sums, gpt's residual sum has 8."""
    (parameters, flops, read), counted = extra("attnres_block", block_size=n)
    assert counted == (parameters, 2 * 8 * 9 * 64) and parameters == 2 * 4 * 64
    assert flops == (2 * seen + 2 * 8 * 9 + 3 * 9) * 64 and read == (seen - 9) * 64
    counted, said = mixing_flops("attnres_block", block_size=n)
    assert counted + 2 * 9 * 8 * 192 == said + sums * 192


def test_states_are_bf16_under_autocast():
    assert dtypes_read("attnres_block", block_size=3) == {torch.bfloat16}
