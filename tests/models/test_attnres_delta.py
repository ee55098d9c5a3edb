"""attnres_delta.py against its paper's equations in float64, arXiv:2605.18855."""
import pytest
import torch
from reference import GATED, add, compare, float64, setup, show, sublayer  # noqa: F401  (float64: autouse)
from small import combined
from test_attnres import read


def delta(p, c, x):
    """An ordinary residual stream; a sublayer reads it plus what it attends to."""
    stream, v = x, [x]
    for l in range(2 * c.n_layer):
        v.append(sublayer(p, c, l + 1, add(stream, read(p, c, l, v)) if l else stream))
        stream = add(stream, v[-1])
    return stream


@pytest.mark.parametrize("options", [*GATED, dict(n_layer=1)], ids=show)
def test_equations(options):
    """Sublayer 0 reads v_0 in the loops, as in the official code, and 2 v_0 in ours: the same but for norm_eps."""
    compare(delta, *setup("attnres_delta", norm_eps=1e-16, **options))


def test_with_hyper_connections_as_docs_combine_them():
    """One stream that keeps all, is read and written to is the residual sum: attnres_delta."""
    model, _, c, idx, _ = setup("attnres_delta", norm_eps=1e-12)
    mine = combined("Hyper-connections with")
    both = mine.Model(mine.Config(**vars(c), dynamic=False, n_streams=1)).double()
    query = model.depth_attention.query                     # of sublayers 1 .. 2L-1; sublayer 0 has one source
    own = {key: x for key, x in model.state_dict().items() if "depth_attention" not in key}
    with torch.no_grad():
        missing = both.load_state_dict(own, strict=False).missing_keys
        assert {key.split(".")[-1] for key in missing} == {"query", "static"}
        both.blocks[0].query[1] = query[0]
        for block, rows in zip(both.blocks[1:], query[1:].split(2)):
            block.query.copy_(rows)
    assert torch.allclose(both(idx)[0], model(idx)[0], rtol=0, atol=1e-9)
