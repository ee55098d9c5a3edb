"""DAPE V2 (arXiv:2410.04798): its equations in float64, shortened texts, texts longer than in training."""
import math

import pytest
import torch
from reference import (  # noqa: F401
    add, compare, float64, linear, mlp_sublayer, norm, own_groups, project, reference_logits, rope, setup, sigmoid,
    softmax)

import models
from nanodepth import record
from nanodepth.devices import flops_per_token

LOG2_SLOPES = {4: [-2, -4, -6, -8], 6: [-2, -4, -6, -8, -1, -3],
               12: [-1, -2, -3, -4, -5, -6, -7, -8, -0.5, -1.5, -2.5, -3.5]}


def at_least_a_hundredth(x):
    """The value is clamped, the gradient is not."""
    return x if x > 0.01 else x - x.detach() + 0.01


def distance_bias(p, c, at, distance):
    """P, the position bias of all heads (H,), or None."""
    if c.position == "kerple":
        b, a = ([at_least_a_hundredth(u) for u in p[f"{at}.score_bias.position.{name}"].flatten()] for name in "pa")
        return torch.stack([-b[h] * torch.log(1 + a[h] * distance) for h in range(c.n_head)])
    if c.position == "alibi":
        return torch.tensor([-distance * 2.0 ** e for e in LOG2_SLOPES[c.n_head]])
    return None


def along_keys(p, c, at, S, P, columns):
    """D of one query from its S and P: lists over its keys of (H,) -> list of (H,). U ends after `columns`."""
    r = c.kernel // 2
    w1, b1, w2 = (p[f"{at}.score_bias.delta.{name}"] for name in ("conv_in.weight", "conv_in.bias", "conv_out.weight"))
    Z = {j: S[j] if P is None else torch.cat((S[j], P[j])) for j in range(len(S))}

    def U(j):
        if not 0 <= j < columns:
            return torch.zeros(len(b1))
        u = b1 + sum(w1[:, :, 0, t] @ Z[j + t - r] for t in range(c.kernel) if j + t - r in Z)
        return torch.stack([x if x > 0 else x / 100 for x in u])

    return [sum(w2[:, :, 0, t] @ U(j + t - r) for t in range(c.kernel)) for j in range(len(S))]


def along_heads(p, c, at, S, P):
    w, r = p[f"{at}.score_bias.delta.conv.weight"].flatten(), c.kernel // 2
    A = S if P is None else add(S, P)
    return [torch.stack([sum(w[t] * a[h + t - r] for t in range(c.kernel) if 0 <= h + t - r < c.n_head)
                         for h in range(c.n_head)]) for a in A]


def weights(p, c, at, q, k, t, columns):
    """Attention of query t over keys 0 .. t: [H lists]."""
    group, D = c.n_head // c.n_kv_head, c.d_model // c.n_head
    S = [torch.stack([torch.dot(q[t][h], k[j][h // group]) / math.sqrt(D) for h in range(c.n_head)])
         for j in range(t + 1)]
    P = [distance_bias(p, c, at, t - j) for j in range(t + 1)]
    P = None if P[0] is None else P
    if c.kernel == 0:
        A = S
    else:
        A = add(S, along_keys(p, c, at, S, P, columns) if c.conv == "keys" else along_heads(p, c, at, S, P))
    A = A if P is None else add(A, P)
    return [softmax([a[h] for a in A]) for h in range(c.n_head)]


def attend(p, c, at, S, columns, seen):
    def ready(s, t, h):
        u = norm(p, f"{at}.{s}_norm", S[s][t][h], c) if c.qk_norm else S[s][t][h]
        return rope(u, t, c) if c.position == "rope" else u

    T, group, out = len(S["q"]), c.n_head // c.n_kv_head, []
    q, k = ([[ready(s, t, h) for h in range(n)] for t in range(T)] for s, n in (("q", c.n_head), ("k", c.n_kv_head)))
    for t in range(T):
        w = weights(p, c, at, q, k, t, columns or T + c.kernel)
        seen.append(w)
        y = [sum(w[h][j] * S["v"][j][h // group] for j in range(t + 1)) for h in range(c.n_head)]
        out.append(linear(p, f"{at}.wo",
                          torch.cat(y if c.gate == "none" else [u * sigmoid(g) for u, g in zip(y, S["g"][t])])))
    return out


def dape(p, c, x, columns=None, seen=None):
    """columns: None, or how many columns U has: as in the authors' code if there are len(x)."""
    for n in range(c.n_layer):
        at = f"blocks.{n}"
        a = [norm(p, f"{at}.attn_norm", u, c) for u in x]
        x = add(x, attend(p, c, f"{at}.attn", project(p, c, at, a, a, a), columns, [] if seen is None else seen))
        x = add(x, mlp_sublayer(p, c, at, x))
    return x


KEYS = dict(n_layer=2, position="kerple", conv="keys", kernel=3, width=5)
HEADS = dict(n_layer=2, position="kerple", conv="heads", kernel=3)
CASES = [
    KEYS, HEADS, *(dict(form, position=x) for form in (KEYS, HEADS) for x in ("alibi", "rope", "none")),
    dict(n_layer=2, kernel=0, conv="keys", position="kerple"),
    dict(n_layer=2, kernel=0, conv="keys", position="none", n_kv_head=2), dict(KEYS, kernel=1),
    dict(KEYS, kernel=5, width=1), dict(KEYS, position="rope", kernel=7, n_kv_head=4), dict(HEADS, kernel=1),
    dict(HEADS, kernel=7, gate="headwise"),
    dict(KEYS, gate="elementwise", tie_embeddings=True, qk_norm=False, z_loss=0.0),
    dict(KEYS, position="alibi", n_head=6, d_model=36, n_kv_head=3),
    dict(HEADS, position="none", n_kv_head=1, qk_norm=False)]


def show(options):
    return "-".join(f"{k}={v}" for k, v in options.items())


@pytest.mark.parametrize("options", CASES, ids=show)
def test_equations_of_dape(options):
    compare(dape, *setup("dape", **options))


@pytest.mark.parametrize("options", [KEYS, dict(HEADS, position="rope"), dict(KEYS, position="none", kernel=5)],
                         ids=show)
@torch.no_grad()
def test_the_probes_see_the_attention(options):
    model, p, c, idx, _ = setup("dape", **options)
    maps, seen = [], []
    with record.SeeAttention(maps.append):
        model(idx[:1])
    dape(p, c, [p["embed.weight"][i] for i in idx[0].tolist()], seen=seen)
    assert len(maps) == 2
    for layer, A in enumerate(maps):
        for t in range(7):
            for h in range(4):
                assert A[0, h, t].tolist() == pytest.approx([w.item() for w in seen[7 * layer + t][h]]
                                                            + [0.0] * (6 - t), abs=1e-12)


@pytest.mark.parametrize("options",
                         [*CASES[:10], dict(KEYS, kernel=5), dict(KEYS, position="none", kernel=9),
                          dict(HEADS, kernel=7)], ids=show)
@torch.no_grad()
def test_a_text_cut_anywhere_has_the_same_logits(options):
    model, _, _, idx, _ = setup("dape", **options)
    full = model(idx)[0]
    for t in range(1, 7):
        torch.testing.assert_close(model(idx[:, :t])[0], full[:, :t], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", [1, 3, 5])
@torch.no_grad()
def test_the_authors_form_differs_at_the_end_of_a_text_alone(kernel):
    model, p, c, idx, _ = setup("dape", **{**KEYS, "kernel": kernel, "n_layer": 1})
    logits = model(idx)[0]
    theirs = reference_logits(lambda p, c, x: dape(p, c, x, columns=len(x)), p, c, idx)
    inside = 7 - kernel // 2
    torch.testing.assert_close(logits[:, :inside], theirs[:, :inside], rtol=0, atol=1e-12)
    assert ((logits - theirs).abs().amax((0, 2))[inside:] > 1e-4).all()


@torch.no_grad()
def test_without_convolutions():
    """RoPE alone is gpt.py; no positions at all leave only the mask, also with the cache."""
    model, _, c, idx, _ = setup("dape", position="rope", kernel=0)
    base = models.build("gpt", **{key: value for key, value in vars(c).items() if key not in ("position", "kernel")})
    base.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(idx)[0], base(idx)[0], rtol=0, atol=1e-12)
    plain = setup("dape", position="none", kernel=0)[0]
    assert record.stats("dape", plain, idx) == {}
    cache = models.module("dape").Cache(plain, 2, 9)
    logits = torch.cat([plain(part, cache=cache)[0] for part in idx.split((4, 1, 2), dim=1)], dim=1)
    torch.testing.assert_close(logits, plain(idx)[0], rtol=0, atol=1e-12)


@torch.no_grad()
def test_longer_texts_need_max_len_alone():
    for options in CASES[:10]:
        short, _, _, idx, _ = setup("dape", **options, max_len=7)
        long = setup("dape", **options, max_len=28)[0]
        long.load_state_dict(short.state_dict())
        assert torch.equal(long(idx)[0], short(idx)[0])
        again = long(idx.repeat(1, 4))[0]
        torch.testing.assert_close(again[:, :7], short(idx)[0], rtol=0, atol=1e-12)
        assert again.isfinite().all()


@torch.no_grad()
def test_a_bias_of_delta_would_change_nothing():
    model, _, _, idx, _ = setup("dape", **KEYS)
    before = model(idx)[0]
    for block in model.blocks:
        block.attn.score_bias.delta.conv_out.bias = torch.nn.Parameter(torch.randn(4))
    torch.testing.assert_close(model(idx)[0], before, rtol=0, atol=1e-12)


@torch.no_grad()
def test_room_in_the_cache_changes_nothing():
    """The zeros of the cache beyond its tokens are the columns that follow the keys."""
    model, _, _, idx, _ = setup("dape", **{**KEYS, "kernel": 5})
    for room in (7, 8, 9):
        cache = models.module("dape").Cache(model, 2, room)
        logits = torch.cat([model(part, cache=cache)[0] for part in idx.split((4, 1, 2), dim=1)], dim=1)
        torch.testing.assert_close(logits, model(idx)[0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("options", [
    dict(), dict(kernel=5), dict(position="rope", n_kv_head=4), dict(conv="heads"), dict(conv="heads", position="none"),
    dict(kernel=0), dict(kernel=0, position="none")], ids=show)
@pytest.mark.parametrize("T", [128, 129, 300])
def test_blocks_of_queries_are_the_whole_attention(options, T):
    """attend_in_blocks() equals attend_at_once(), in outputs and all gradients; blocks of 128 at these T."""
    dape = models.module("dape")
    c = dape.Config(**{**dict(n_head=4, d_model=32, n_kv_head=2), **options})
    torch.manual_seed(0)
    score_bias, (q, k, v) = dape.ScoreBias(c), torch.randn(3, 2, 4, T, 8, requires_grad=True)
    for p in score_bias.parameters():
        torch.nn.init.normal_(p)
    results = []
    for attend in (dape.attend_in_blocks, dape.attend_at_once):
        y = attend(q, k, v, torch.ones(T, T, dtype=torch.bool).tril(), score_bias)
        wanted = [q, k, v, *score_bias.parameters()]
        results.append((y, *torch.autograd.grad((y * torch.sin(torch.arange(8.0))).sum(), wanted)))
    for got, want in zip(*results):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


def test_blocks():
    """They partition the queries; at most 8, of at least 128; 56% of all pairs of a query and a key from 1,024 on."""
    blocks = models.module("dape").query_blocks
    for T in (1, 5, 127, 128, 129, 256, 512, 1000, 1024, 2048, 4097):
        found = blocks(T)
        assert [t for a, b in found for t in range(a, b)] == list(range(T)) and len(found) <= 8
        assert all(b - a >= 128 for a, b in found[:-1])
    assert blocks(128) == [(0, 128)] and len(blocks(1024)) == 8
    assert sum((b - a) * b for a, b in blocks(2048)) / 2048 ** 2 == 0.5625


@pytest.mark.parametrize("options", [
    dict(), dict(position="rope", kernel=5, width=7), dict(position="alibi"), dict(conv="heads"), dict(kernel=0),
    dict(position="none", n_kv_head=4, qk_norm=False), dict(conv="heads", kernel=5, gate="headwise"),
    dict(kernel=0, position="none")], ids=show)
def test_costs(options):
    """Parameters exactly; FLOPs: 2 (kernel // 2) columns of hidden more, and the scores a second time."""
    shape = dict(vocab_size=50, n_layer=4, n_head=4, n_kv_head=2, d_model=64, d_ff=128, max_len=256)
    model, costs = models.build("dape", **{**shape, **options}), models.module("dape").costs
    c = model.config
    base = models.build("gpt", **shape | dict(n_kv_head=c.n_kv_head, gate=c.gate, qk_norm=c.qk_norm))
    params, flops, read = costs(c, 64)
    assert params == sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in base.parameters())
    channels = c.n_head * (2 if c.position in ("kerple", "alibi") else 1)
    columns = 4 * 2 * c.width * c.kernel * channels * 2 * (c.kernel // 2) if c.conv == "keys" and c.kernel else 0
    scores = 4 * 2 * 64 * 64 * (c.kernel > 0)
    assert flops_per_token(model, 64) - flops_per_token(base, 64) == flops + columns + scores
    assert costs(c, 32)[1:] == (flops / 2, read / 2) and costs(c, 128)[1:] == (2 * flops, 2 * read)
    assert costs(c, 256)[1:] == (3 * flops, 3 * read)                               # two blocks: 3 / 4 of all pairs


@torch.no_grad()
def test_neutral_in_all_forms():
    for options in (dict(), dict(kernel=5), dict(conv="heads"), dict(kernel=0)):
        model, _, c, idx, _ = setup("dape", position="rope", **options)
        base = models.build("gpt",
                            **{key: x for key, x in vars(c).items() if key not in ("position", "kernel", "conv")})
        base.load_state_dict(model.state_dict(), strict=False)
        models.module("dape").neutral(model)
        assert (model(idx)[0] - base(idx)[0]).abs().max() < 1e-12
    with pytest.raises(ValueError, match="position=rope"):
        models.module("dape").neutral(setup("dape", **KEYS)[0])


def test_initial_values():
    model = models.build("dape", vocab_size=31, n_layer=2, n_head=12, d_model=48)
    for block in model.blocks:
        bias = block.attn.score_bias
        for w, fan_in in ((bias.delta.conv_in.weight, 24 * 3), (bias.delta.conv_in.bias, 24 * 3),
                          (bias.delta.conv_out.weight, 32 * 3)):
            assert 0.8 * fan_in ** -0.5 < w.abs().max() <= fan_in ** -0.5
            assert abs(w.std() * math.sqrt(3 * fan_in) - 1) < 0.3 and abs(w.mean()) < 0.3 * fan_in ** -0.5
        assert bias.position.p.min() >= 0 and 1 < bias.position.p.max() <= 2
        assert bias.position.a.min() >= 0 and 0.5 < bias.position.a.max() <= 1
    assert not torch.equal(model.blocks[0].attn.score_bias.position.p, model.blocks[1].attn.score_bias.position.p)
    one = models.build("dape", vocab_size=31, n_layer=50, n_head=2, d_model=8, conv="heads", position="rope")
    filters = torch.stack([block.attn.score_bias.delta.conv.weight.flatten() for block in one.blocks])
    assert 0.9 * 3 ** -0.5 < filters.abs().max() <= 3 ** -0.5


@pytest.mark.parametrize("conv, parts",
                         [("keys", ("conv_in.weight", "conv_in.bias", "conv_out.weight")), ("heads", ("conv.weight",))])
def test_groups(conv, parts):
    at = "blocks.attn.score_bias"
    assert own_groups(setup("dape", conv=conv)[0]) == (set(), {f"{at}.position.a", f"{at}.position.p"}
                                                       | {f"{at}.delta.{part}" for part in parts})


def test_slopes_of_alibi():
    powers = {1: [-8], 2: [-4, -8], 3: [-4, -8, -2], 8: [-1, -2, -3, -4, -5, -6, -7, -8]}
    for H, slopes in {**LOG2_SLOPES, **powers}.items():
        P = models.module("dape").AlibiBias(H)(torch.tensor([[0, 1, 5]]))
        assert P.flatten(1).tolist() == [pytest.approx([0.0, -2.0 ** e, -5 * 2.0 ** e]) for e in slopes]


def test_a_clamped_head_can_come_back():
    bias = models.module("dape").KerpleBias(2)
    with torch.no_grad():
        bias.p.copy_(torch.tensor([-1.0, 0.5])[:, None, None])
        bias.a.copy_(torch.tensor([0.3, -2.0])[:, None, None])
    P = bias(torch.tensor([[3]]))
    assert P.flatten().tolist() == pytest.approx([-0.01 * math.log(1.9), -0.5 * math.log(1.03)])
    P.sum().backward()
    assert bias.p.grad.flatten().tolist() == pytest.approx([-math.log(1.9), -math.log(1.03)])
    assert bias.a.grad.flatten().tolist() == pytest.approx([-0.01 * 3 / 1.9, -0.5 * 3 / 1.03])


@torch.no_grad()
def test_stats():
    model, _, _, idx, _ = setup("dape", **KEYS)
    deltas = []
    for block in model.blocks:
        block.attn.score_bias.delta.register_forward_hook(lambda module, inputs, output: deltas.append(output))
    found = record.stats("dape", model, idx)
    for n, block in enumerate(model.blocks):
        sds = [deltas[n][b, h, t, :t + 1].std(correction=0).item() for b in range(2) for h in range(4)
               for t in range(7)]
        assert found["delta"][n] == pytest.approx(sum(sds) / len(sds))
        w = block.attn.score_bias.delta.conv_in.weight.square()
        assert found["neighbours"][n] == pytest.approx(((w[..., 0].sum() + w[..., 2].sum()) / w.sum()).item())
        assert found["kerple_p"][n] == pytest.approx(block.attn.score_bias.position.p.mean().item())
        assert found["kerple_a"][n] == pytest.approx(block.attn.score_bias.position.a.mean().item())
    assert set(record.stats("dape", setup("dape", n_layer=2, kernel=0)[0], idx)) == {"kerple_p", "kerple_a"}
    one = setup("dape", **dict(HEADS, position="none", kernel=1))[0]
    assert set(record.stats("dape", one, idx)) == {"delta", "neighbours"}
    assert record.stats("dape", one, idx)["neighbours"] == [0.0, 0.0]
