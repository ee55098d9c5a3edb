"""speedrun.py against its equations in float64, one token's vector at a time."""
from itertools import cycle

import pytest
import torch
from measure import dtypes_read, extra
from reference import (  # noqa: F401  (float64: autouse)
    GATED, add, attend, compare, depends_on_every_parameter, float64, heads, mlp_sublayer, norm, own_groups, project,
    setup, show, sigmoid)

import models
from nanodepth import record

OWN = dict(value_embed=True, lambdas=True, skip="unet")
CASES = GATED + [dict(skip="backout"), dict(skip="none"), dict(n_layer=4), dict(n_layer=5), dict(n_layer=2),
                 dict(lambdas=False), dict(value_embed=False), dict(n_layer=4, skip="backout", n_kv_head=4),
                 dict(value_embed=False, lambdas=False, n_layer=4), dict(d_model=12, n_head=2, n_kv_head=1)]


def speedrun(p, c, x, ids):
    """ids: the token at each position; the blocks with a table are L, L - 2, L - 4, .."""
    X, last = [x], c.n_layer
    for i in range(1, last + 1):
        at, opposite = f"blocks.{i - 1}", last + 1 - i
        if c.skip == "unet" and opposite < i:                       # the blocks above the middle, upwards
            weight = p["skips"][[j for j in range(1, last + 1) if last + 1 - j < j].index(i)]
            x = [u + weight * v for u, v in zip(x, X[opposite])]
        if c.lambdas:
            x = [p["resid"][i - 1] * u + p["x0"][i - 1] * e for u, e in zip(x, X[0])]
        a = [norm(p, f"{at}.attn_norm", u, c) for u in x]
        S = project(p, c, at, a, a, a)
        if c.value_embed and i in range(last, 0, -2):
            for t, token in enumerate(ids):
                own = heads(p[f"{at}.attn.value_embed.weight"][token], c.n_kv_head)
                for h in range(c.n_kv_head):
                    z = sum(w * y for w, y in zip(p[f"{at}.attn.value_gate.weight"][h], a[t][:12]))
                    S["v"][t][h] = S["v"][t][h] + 2 * sigmoid(z) * own[h]
        x = add(x, attend(p, c, at, S))
        x = add(x, mlp_sublayer(p, c, at, x))
        X.append(x)
    return [u - p["backout"] * v for u, v in zip(x, X[last // 2 + 1])] if c.skip == "backout" else x


def on(idx):
    """speedrun() on the rows of idx in turn, as reference_logits goes through them."""
    rows = cycle(idx.tolist())
    return lambda p, c, x: speedrun(p, c, x, next(rows))


@pytest.mark.parametrize("options", CASES, ids=show)
def test_equations(options):
    model, p, c, idx, targets = setup("speedrun", **{**OWN, **options})
    compare(on(idx), model, p, c, idx, targets)


def test_reference_depends_on_every_parameter():
    model, p, c, idx, _ = setup("speedrun", **OWN)
    depends_on_every_parameter(on(idx[:1, :3]), model, p, c, idx, None)


def test_groups():
    model = setup("speedrun", **OWN)[0]
    assert own_groups(model) == ({"blocks.attn.value_gate.weight"}, {"resid", "x0", "skips"})
    assert own_groups(setup("speedrun", **{**OWN, "skip": "backout"})[0])[1] == {"resid", "x0", "backout"}


def test_tables_are_in_every_other_block_and_the_last():
    for L, expected in ((1, [0]), (4, [1, 3]), (5, [0, 2, 4])):
        with torch.device("meta"):
            model = models.build("speedrun", n_layer=L, skip="none")
        assert [i for i, block in enumerate(model.blocks) if block.attn.value_embed is not None] == expected


def test_initial_values():
    """Gates are 1, and the residual stream is gpt.py's but for the skips; tables start as wv does."""
    torch.manual_seed(0)
    model = models.build("speedrun", vocab_size=256, n_layer=4, n_head=4, d_model=64)
    assert model.resid.tolist() == [1.0] * 4 and model.x0.tolist() == [0.0] * 4 and model.skips.tolist() == [1.0] * 2
    assert models.build("speedrun", n_layer=3, n_head=2, d_model=16, vocab_size=9, skip="backout").backout == 0.2
    attn = model.blocks[1].attn
    assert (attn.value_gate.weight == 0).all() and attn.value_gate.weight.shape == (4, 12)
    assert abs(attn.value_embed.weight.std() / attn.wv.weight.std() - 1) < 0.05
    stats = record.stats("speedrun", model, torch.zeros(1, 4, dtype=torch.long))
    assert stats == {"resid": [1.0] * 4, "x0": [0.0] * 4, "skips": [1.0] * 2, "value_gate": [1.0] * 2}


@pytest.mark.parametrize("options, reads", [
    (dict(), 2 * 32 + 3 * 64 + 2 * 64), (dict(value_embed=False, skip="none"), 3 * 64),
    (dict(lambdas=False, skip="backout"), 2 * 32 + 64), (dict(value_embed=False, lambdas=False, n_layer=5), 2 * 64)],
    ids=str)
def test_costs(options, reads):
    """The products of the gates are counted; values, scalars and skips are two FLOPs per number each, or three."""
    (parameters, flops, read), (n, products) = extra("speedrun", **options)
    L, gates = options.get("n_layer", 4), 2 if options.get("value_embed", True) else 0
    skips = {"unet": L // 2, "backout": 1, "none": 0}[options.get("skip", "unet")]
    assert parameters == n and products == gates * 2 * 12 * 2 and read == reads
    scalars = 3 * L * 64 if options.get("lambdas", True) else 0
    assert flops - products == gates * 2 * 32 + scalars + 2 * 64 * skips


@pytest.mark.parametrize("skip", ["unet", "backout"])
def test_states_are_bf16_under_autocast(skip):
    assert dtypes_read("speedrun", skip=skip) == {torch.bfloat16, torch.int64}      # and blocks read the token ids


@torch.no_grad()
def test_without_its_switches_it_is_gpt():
    model, _, _, idx, _ = setup("speedrun", value_embed=False, lambdas=False, skip="none")
    base = setup("gpt")[0]
    base.load_state_dict(model.state_dict())
    assert torch.equal(model(idx)[0], base(idx)[0])


@torch.no_grad()
def test_values_of_a_table_reach_the_tokens_behind():
    """What a token brings is read by its own position and later ones, also where the embedding is the same."""
    model, _, _, idx, _ = setup("speedrun", **OWN)
    before = model(idx)[0]
    model.embed.weight[28], idx = model.embed.weight[idx[0, 3]], idx.clone()
    idx[0, 3] = 28
    changed = (model(idx)[0] - before).abs().amax(-1) > 1e-6
    assert changed[0].tolist() == [False] * 3 + [True] * 4 and not changed[1].any()
