"""SAS (arXiv:2507.07694) and its form by projections: equations in float64, initial values, neutral settings."""
import pytest
import torch
from reference import (  # noqa: F401  (float64: autouse)
    add, compare, float64, heads, linear, mlp_sublayer, norm, rope, setup, sigmoid, softmax)

import models
from nanodepth import record
from nanodepth.devices import flops_per_token
from small import near


def affine(p, name, u):
    return linear(p, name, u) + p[name + ".bias"]


def relu(u):
    return u * (u > 0)


def conv(p, name, x):
    """out[o][d] = b[o] + sum_i sum_t w[o, i, t] x[i][d + t - (kernel - 1) / 2], with zeros beyond the ends of x[i]."""
    w, b = p[name + ".weight"], p[name + ".bias"]
    edge = torch.zeros((w.size(2) - 1) // 2)
    x = [torch.cat([edge, u, edge]) for u in x]
    D = len(x[0]) - 2 * len(edge)
    return [b[o] + sum(w[o, i, t] * u[t:t + D] for i, u in enumerate(x) for t in range(w.size(2)))
            for o in range(len(w))]


def simulate(p, c, name, x, features=True):
    """S groups of len(x) heads, from one token's heads x."""
    if c.simulation == "projection":
        w = p[name + ".weight"]
        return [[u @ w[s, h] for h, u in enumerate(x)] for s in range(c.n_sim)]
    cnn = f"{name}.0" if features else name
    y = conv(p, f"{cnn}.expand", x)
    y = add(y, conv(p, f"{cnn}.refine", [relu(u) for u in y]))
    if features:
        y = [affine(p, f"{name}.1.expand", u) for u in y]
        y = [u + affine(p, f"{name}.1.refine", relu(u)) for u in y]
    return [y[s * len(x):(s + 1) * len(x)] for s in range(c.n_sim)]


def attend(p, c, at, a):
    q, k, v, gates = [], [], [], []                                                 # [token][group][head]
    for t, u in enumerate(a):
        for name, out, n in (("q", q, c.n_head), ("k", k, c.n_kv_head)):
            groups = simulate(p, c, f"{at}.sim_{name}", heads(linear(p, f"{at}.w{name}", u), n))
            normed = [[norm(p, f"{at}.{name}_norm", z, c) if c.qk_norm else z for z in group] for group in groups]
            out.append([[rope(z, t, c) for z in group] for group in normed])
        values = heads(linear(p, f"{at}.wv", u), c.n_kv_head)
        v.append([values] * c.n_sim if c.simulation == "projection"
                 else simulate(p, c, f"{at}.sim_v", values, features=False))
        gates.append([torch.ones(1)] * c.n_head if c.gate == "none"
                     else [sigmoid(z) for z in heads(linear(p, f"{at}.gate", u), c.n_head)])
    out, share = [], c.n_head // c.n_kv_head
    for t in range(len(a)):
        groups = []
        for s in range(c.n_sim):
            y = []
            for h in range(c.n_head):
                weights = softmax([torch.dot(q[t][s][h], k[j][s][h // share]) / c.d_sim ** 0.5 for j in range(t + 1)])
                head = gates[t][h] * sum(w * v[j][s][h // share] for j, w in enumerate(weights))
                y.append(p[f"{at}.sim_gate"][s, h] * head if c.simulation == "projection" else head / c.n_sim)
            groups.append(linear(p, f"{at}.wo", torch.cat(y)))          # wo reads every group by itself
        out.append(sum(groups))
    return out


def sas(p, c, x):
    for n in range(c.n_layer):
        at = f"blocks.{n}"
        x = add(x, attend(p, c, f"{at}.attn", [norm(p, f"{at}.attn_norm", u, c) for u in x]))
        x = add(x, mlp_sublayer(p, c, at, x))
    return x


OWN = dict(n_layer=2, n_sim=2, d_sim=12, kernel=3, simulation="convolution")
PROJECTION = dict(simulation="projection")
CASES = [dict(), dict(tie_embeddings=True, qk_norm=False, z_loss=0.0), dict(n_kv_head=4, gate="elementwise"),
         dict(gate="headwise"), dict(n_sim=3, kernel=5, n_layer=1), dict(n_sim=1, d_sim=8, kernel=1),
         dict(n_kv_head=1, d_sim=14), PROJECTION, dict(PROJECTION, qk_norm=False, n_sim=3),
         dict(PROJECTION, n_kv_head=4, d_sim=8, gate="elementwise"),
         dict(PROJECTION, n_sim=1, gate="headwise", tie_embeddings=True)]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_equations_of_sas(options):
    compare(sas, *setup("sas", **{**OWN, **options}))


def make_neutral(model):
    with torch.no_grad():
        for key, p in model.named_parameters():
            if ".sim_gate" in key:                                                  # any numbers with the sum 1
                p.copy_(torch.randn_like(p).softmax(0))
            elif key.endswith(("sim_q.weight", "sim_k.weight")):
                p.copy_(torch.eye(p.size(-1)).expand_as(p))
            elif key.endswith("1.expand.weight"):
                p.copy_(torch.eye(len(p)))
            elif ".sim_" in key:
                p.zero_()
            if key.endswith(("0.expand.weight", "sim_v.expand.weight")):            # head n of every group is head n
                for s in range(model.config.n_sim):
                    for n in range(p.size(1)):
                        p[s * p.size(1) + n, n, p.size(2) // 2] = 1.0


@pytest.mark.parametrize("options", [
    dict(n_sim=1), dict(n_sim=2, kernel=5), dict(n_sim=3, n_kv_head=4, gate="elementwise"),
    dict(kernel=1, qk_norm=False, gate="headwise"), PROJECTION,
    dict(PROJECTION, n_sim=3, n_kv_head=1, qk_norm=False, gate="elementwise")], ids=str)
@torch.no_grad()
def test_copies_are_gpt(options):
    model, _, _, idx, _ = setup("sas", **{**OWN, "d_sim": 8, **options})
    base = setup("gpt", **{key: x for key, x in options.items() if key in ("n_kv_head", "gate", "qk_norm")},
                 n_layer=2)[0]
    missing = model.load_state_dict(base.state_dict(), strict=False)
    assert not missing.unexpected_keys and all(".sim_" in key for key in missing.missing_keys)
    assert (model(idx)[0] - base(idx)[0]).abs().max() > 1e-3
    make_neutral(model)
    assert (model(idx)[0] - base(idx)[0]).abs().max() < 1e-12


@pytest.mark.parametrize("options", [dict(), PROJECTION], ids=str)
@torch.no_grad()
def test_only_distances_count(options):
    """Positions shifted for all tokens: the same logits, as rotation comes after the maps."""
    model, _, _, idx, _ = setup("sas", **{**OWN, **options, "max_len": 12})
    before = model(idx)[0]
    model.cos, model.sin = model.cos.roll(-5, 0), model.sin.roll(-5, 0)
    assert (model(idx)[0] - before).abs().max() < 1e-9
    model.sin = -model.sin.flip(-1)
    assert (model(idx)[0] - before).abs().max() > 1e-3


@pytest.mark.parametrize("options", [dict(), PROJECTION], ids=str)
@torch.no_grad()
def test_the_cache_holds_what_was_simulated(options):
    model, _, _, idx, _ = setup("sas", **{**OWN, **options})
    cache = models.module("sas").Cache(model, 2, 9)
    assert cache.k[0].shape == (2, 4, 9, 12) and cache.v[1].shape == (2, 4, 9, 8)   # 2 groups of 2 key/value heads
    full = model(idx)[0]
    parts = [model(idx[:, t:t + n], cache=cache)[0] for t, n in ((0, 3), (3, 1), (4, 1), (5, 2))]
    assert (torch.cat(parts, dim=1) - full).abs().max() < 1e-10
    assert cache.k[0][:, :, 6].abs().min() > 0 and (cache.k[0][:, :, 7:] == 0).all()


def test_projections_are_one_graph():
    model, _, _, idx, targets = setup("sas", **{**OWN, **PROJECTION})
    want = model(idx, targets)[1]
    model.compile(fullgraph=True, backend="aot_eager")
    got = model(idx, targets)[1]
    got.backward()
    assert (got - want).abs() < 1e-12 and model.blocks[0].attn.sim_gate.grad.abs().min() > 0


@torch.no_grad()
def test_initial_values():
    """The maps are uniform within 1 / sqrt(inputs), as PyTorch would make them; every group has the same share."""
    model = models.build("sas", vocab_size=31, n_layer=1, n_head=8, n_kv_head=4, d_model=512)
    drawn = [(key, p) for key, p in model.named_parameters() if ".sim_" in key]
    assert len(drawn) == 2 * 8 + 4
    for key, p in drawn:
        module, ours = model.get_submodule(key.rpartition(".")[0]), p.clone()
        module.reset_parameters()
        bound = module.weight[0].numel() ** -0.5
        for found in (ours, p):
            assert 0.75 * bound < found.abs().max() <= bound, key
            if p.numel() > 1000:
                assert found.std() == pytest.approx(bound / 3 ** 0.5, rel=0.05), key
                assert abs(found.mean()) < 0.05 * bound, key
    model = models.build("sas", vocab_size=31, n_layer=1, n_head=4, d_model=128, simulation="projection")
    attn = model.blocks[0].attn
    assert (attn.sim_gate == 1 / 3).all() and attn.sim_gate.shape == (3, 4) and attn.sim_v is None
    for p in (attn.sim_q.weight, attn.sim_k.weight):
        assert 0.99 * 32 ** -0.5 < p.abs().max() <= 32 ** -0.5 and p.shape == (3, 4, 32, 48)


def test_sizes():
    for d_model, n_head, d_sim in ((768, 12, 96), (160, 5, 48), (24, 4, 10), (8, 4, 4)):
        assert models.module("sas").Config(n_head=n_head, d_model=d_model).d_sim == d_sim
    with torch.device("meta"):
        model, base = models.build("sas"), models.build("gpt")
    extra = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in base.parameters())
    heads, features = 12 * 36 * 5 + 36 + 36 * 36 * 5 + 36, 64 * 96 + 96 + 96 * 96 + 96
    assert extra == 12 * (3 * heads + 2 * features + 2 * (96 - 64)) == 687_648


@pytest.mark.parametrize("options", [
    dict(), dict(n_sim=2, d_sim=20, kernel=3), dict(qk_norm=False, n_kv_head=4),
    dict(gate="elementwise", n_sim=1, kernel=1), PROJECTION, dict(PROJECTION, n_sim=2, d_sim=20, gate="headwise"),
    dict(PROJECTION, qk_norm=False)], ids=str)
def test_costs(options):
    """Parameters exactly; FLOPs without the aggregation, and without values, which training keeps as wide as keys."""
    shape = dict(vocab_size=50, n_layer=4, n_head=4, n_kv_head=2, d_model=64, d_ff=128, max_len=64)
    model = models.build("sas", **{**shape, **options})
    c = model.config
    base = models.build("gpt", **shape | dict(n_kv_head=c.n_kv_head, gate=c.gate, qk_norm=c.qk_norm))
    params, flops, read = models.module("sas").costs(c, 64)
    assert params == sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in base.parameters())
    padding, mean = 2 * 64 * c.n_sim * c.n_head * (c.d_sim - c.d_head), c.n_sim * c.d_model
    uncounted = mean * (1 + (c.simulation == "projection"))
    assert flops_per_token(model, 64) - flops_per_token(base, 64) == flops + 4 * (padding - uncounted) and read == 0
    fewer = 4 * 2 * 32 * (c.n_sim * c.n_head * (c.d_sim + c.d_head) - 2 * c.d_model)
    assert models.module("sas").costs(c, 32)[1] == flops - fewer


def test_feature_maps_are_matrices_of_muon():
    import muon
    for options in (dict(), PROJECTION):
        model = models.build("sas", vocab_size=31, n_layer=1, n_head=4, d_model=32, **options)
        chosen = {id(p) for p in muon.split_params(model)[0]}
        names = {key.removeprefix("blocks.0.attn.") for key, p in model.named_parameters() if id(p) in chosen
                 and ".sim_" in key}
        assert names == (set() if options
                         else {f"sim_{s}.1.{part}.weight" for s in "qk" for part in ("expand", "refine")})


@torch.no_grad()
def test_stats():
    """Rank: (sum of the eigenvalues)^2 / sum of their squares, of the heads' products; copies do not count."""
    for options in (dict(), PROJECTION):
        model, _, _, idx, _ = setup("sas", **{**OWN, **options})
        found = record.stats("sas", model, idx)
        assert list(found) == ["sim_q_rank", "sim_k_rank"] + ["sim_v_rank"] * (not options)
        for name, ranks in found.items():
            for block, rank in zip(model.blocks, ranks, strict=True):
                x = record.watch(model, idx, [getattr(block.attn, name.removesuffix("_rank"))])[0].double()
                values = torch.linalg.svdvals(x).square()
                near(rank, (values.sum(-1) ** 2 / values.square().sum(-1)).mean())
                assert 1 < rank < min(x.shape[-2:])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = record.stats("sas", model.float(), idx)
        for name, ranks in half.items():                                            # the sums stay in fp32
            assert ranks == pytest.approx(found[name], rel=0.01)
            assert any(r != torch.tensor(r).bfloat16().item() for r in ranks)
    ranks = []
    for n_sim in (1, 3):
        model = setup("sas", **{**OWN, "d_sim": 8, "n_sim": n_sim})[0]
        base = setup("gpt", n_layer=2)[0]
        model.load_state_dict(base.state_dict(), strict=False)
        make_neutral(model)
        ranks.append(record.stats("sas", model, idx))
    for name in ("sim_q_rank", "sim_v_rank"):
        near(ranks[0][name], ranks[1][name])
