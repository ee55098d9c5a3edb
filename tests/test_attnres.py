"""attnres.py against its paper's equations in float64, arXiv:2603.15031."""
import pytest
import torch
from measure import SMALL, dtypes_read, extra, mixing_flops
from reference import (  # noqa: F401  (float64: autouse)
    GATED, add, compare, depends_on_every_parameter, float64, own_groups, rms, setup, show,
    softmax, sublayer,
)
from small import combined

import models

OWN = dict(block_size=1, key_norm=True, additive=False)
CASES = GATED + [dict(block_size=S) for S in (2, 3, 4, 6)] + [dict(key_norm=False), dict(block_size=4, key_norm=False)]


def score(p, c, l, u):
    """w_l . RN(u), reader l = 2 .. 2L + 1; the first reader has one source and no query."""
    return torch.dot(p["depth_attention.query"][l - 2], rms(u, c) if c.key_norm else u)


def read(p, c, l, sources):
    """h_l = sum_s softmax_s(score) v_s at every position."""
    if l == 1:
        return sources[0]
    out = []
    for t in range(len(sources[0])):
        alpha = softmax([score(p, c, l, v[t]) for v in sources])
        out.append(sum(a * v[t] for a, v in zip(alpha, sources)))
    return out


def attnres(p, c, x):
    """Block form: embedding, sums of finished blocks, running sum of the own block."""
    done, partial = [x], None
    for l in range(1, 2 * c.n_layer + 1):
        v = sublayer(p, c, l, read(p, c, l, done + ([] if partial is None else [partial])))
        partial = v if partial is None else add(partial, v)
        if l % c.block_size == 0:
            done, partial = done + [partial], None
    return read(p, c, 2 * c.n_layer + 1, done + ([] if partial is None else [partial]))


def delta(p, c, x):
    """Delta Attention Residuals: an ordinary residual stream; a reader adds to it what it attends to."""
    stream, v = x, [x]
    for l in range(1, 2 * c.n_layer + 1):
        h = add(stream, read(p, c, l, v)) if l > 1 else stream
        v.append(sublayer(p, c, l, h))
        stream = add(stream, v[l])
    return stream


@pytest.mark.parametrize("options", CASES, ids=show)
def test_equations(options):
    compare(attnres, *setup("attnres", **{**OWN, **options}))


@pytest.mark.parametrize("options", GATED + [dict(key_norm=False), dict(n_layer=1)], ids=show)
def test_equations_of_delta_attention_residuals(options):
    compare(delta, *setup("attnres", **{**OWN, "additive": True, **options}))


def test_reference_depends_on_every_parameter():
    depends_on_every_parameter(delta, *setup("attnres", **{**OWN, "additive": True}))
    depends_on_every_parameter(attnres, *setup("attnres", **OWN))


@pytest.mark.parametrize("block_size, whole", [(1, 9), (3, 3), (8, 2)])
def test_costs(block_size, whole):
    """One product per whole source, of 8 readers; the reads are what the readers see."""
    (parameters, flops, read), counted = extra("attnres", block_size=block_size)
    model, seen = models.build("attnres", **SMALL, block_size=block_size), []
    model.depth_attention.register_forward_hook(lambda module, inputs, output: seen.append(output.size(-1)))
    model(torch.zeros(1, 4, dtype=torch.long))
    assert counted == (parameters, 2 * 8 * whole * 64) and parameters == 2 * 4 * 64 and len(seen) == 2 * 4
    assert flops == (2 * sum(seen) + 2 * 8 * whole + 2 * (9 - whole) + 3 * 9) * 64
    assert read == sum(S - 1 for S in seen) * 64


def test_costs_of_delta_attention_residuals():
    """The head reads all 9 sources and weighs none of them."""
    (parameters, flops, read), counted = extra("attnres", additive=True)
    assert counted == (parameters, 2 * 7 * 9 * 64) and parameters == (2 * 4 - 1) * 64
    assert flops == (3 * sum(range(2, 9)) + 2 * 7 * 9 + 3 * 9) * 64 and read == sum(range(1, 9)) * 64


@pytest.mark.parametrize("options, products, residual", [
    (dict(), 9 * 8, 0), (dict(key_norm=False), 9 * 8, 0), (dict(block_size=3), 3 * 8, 2 + 2 + 1),
    (dict(additive=True), 9 * 7, 9 + 7)], ids=str)
def test_counted_flops(options, products, residual):
    """All operations on vectors of length C, beside the products with w.

    What is in no sentence on costs is the residual sum, which gpt has too: into running sums of blocks; additive adds
    up 9 sources for the head, and the mean to each of 7 sums.
    """
    counted, said = mixing_flops("attnres", **options)
    assert counted + 2 * products * 192 == said + residual * 192


@pytest.mark.parametrize("block_size", [1, 3])
def test_states_are_bf16_under_autocast(block_size):
    assert dtypes_read("attnres", block_size=block_size) == {torch.bfloat16}
    assert dtypes_read("attnres", additive=block_size == 1) == {torch.bfloat16}


def test_initial_values():
    model = models.build("attnres", vocab_size=31, n_layer=3, n_head=4, d_model=32, max_len=8)
    assert (model.depth_attention.query == 0).all()


def test_groups():
    assert own_groups(setup("attnres", **OWN)[0]) == (set(), {"depth_attention.query"})


def test_with_hyper_connections_as_docs_combine_them():
    """One stream of numbers that keep all, read all and write all is the residual sum: the additive form."""
    model, p, c, idx, targets = setup("attnres", **{**OWN, "additive": True, "norm_eps": 1e-12})
    mine = combined("Manifold-constrained")
    both = mine.Model(mine.Config(**{k: v for k, v in vars(c).items() if k not in OWN}, connection="static",
                                  n_streams=1)).double()
    query = model.depth_attention.query                     # of readers 1 ... 2L - 1; of reader 0 there is none
    own = {key: x for key, x in model.state_dict().items() if "depth_attention" not in key}
    with torch.no_grad():
        missing = both.load_state_dict(own, strict=False).missing_keys
        assert {key.split(".")[-1] for key in missing} == {"query", "static"}
        both.blocks[0].query[1] = query[0]
        for block, rows in zip(both.blocks[1:], query[1:].split(2)):
            block.query.copy_(rows)
    assert torch.allclose(both(idx)[0], model(idx)[0], rtol=0, atol=1e-9)
