"""Hyper-Connections against their equations in float64, one number at a time, and properties that the papers state.

arXiv:2409.19606 (static, dynamic), arXiv:2512.24880 (manifold-constrained) and arXiv:2601.05732 (lite). The sublayers
are those of reference.py.
"""
from itertools import permutations
from math import factorial

import pytest
import torch
import torch._inductor.config
from reference import (  # noqa: F401  (float64: autouse)
    COMMON, compare, float64, own_groups, rms, setup, sigmoid, softmax, sublayer)

import models
from nanodepth.devices import flops_per_token
from small import near

KINDS = ("static", "dynamic", "manifold", "lite", "identity")
OWN = dict(connection="dynamic", n_streams=3, tanh=True, sinkhorn_steps=20)


# ---------------------------------------------------------------------------------------------------------------------
# One token: X is a list of n vectors; H_pre and H_post are lists of numbers, H_res[i][s] is a list of lists.


def tanh(x):
    return 1 - 2 / (torch.exp(2 * x) + 1)


def layer_norm(x, c):
    centred = x - x.sum() / len(x)
    return centred / torch.sqrt((centred * centred).sum() / len(x) + c.norm_eps)


def doubly_stochastic(Z, steps):
    """Sinkhorn: exponentials; then columns, then rows are divided by their sums, `steps` times."""
    n = len(Z)
    top = max(max(row) for row in Z)
    P = [[torch.exp(z - top) for z in row] for row in Z]
    for _ in range(steps):
        columns = [sum(P[i][s] for i in range(n)) for s in range(n)]
        P = [[P[i][s] / columns[s] for s in range(n)] for i in range(n)]
        P = [[p / sum(row) for p in row] for row in P]
    return P


def mean_permutation(z, n):
    """Convex combination of all permutations, in lexicographic order: the k-th puts orders[k][i] in the place of i."""
    weights, orders = softmax(z), list(permutations(range(n)))
    return [[sum(w for w, order in zip(weights, orders, strict=True) if order[i] == s) for s in range(n)]
            for i in range(n)]


def maps(p, c, at, X):
    """H_pre, H_post, H_res of the connection `at` at one token. Row s of its parameters belongs to stream s: first the
    entry of H_pre, second that of H_post, then H_res[0][s], H_res[1][s], ...; lite: the permutations' weights."""
    n, eye = c.n_streams, [[float(i == s) for s in range(c.n_streams)] for i in range(c.n_streams)]
    if c.connection in ("static", "dynamic"):
        a = p[f"{at}.static"]
        pre, post = [a[s, 0] for s in range(n)], [a[s, 1] for s in range(n)]
        res = [[a[s, 2 + i] for s in range(n)] for i in range(n)]
        if c.connection == "dynamic":
            W, (s_alpha, s_beta) = p[f"{at}.dynamic"], p[f"{at}.scale"]
            for s in range(n):
                x = layer_norm(X[s], c)
                z = [torch.dot(x, W[:, j]) for j in range(2 + n)]
                z = [tanh(u) for u in z] if c.tanh else z
                pre[s] = pre[s] + s_alpha * z[0]
                post[s] = post[s] + s_beta * z[1]
                for i in range(n):
                    res[i][s] = res[i][s] + s_alpha * z[2 + i]
        return pre, post, res
    u, b, phi, alpha = rms(torch.cat(X), c), p[f"{at}.bias"], p[f"{at}.phi"], p[f"{at}.alpha"]
    width = b.shape[1]

    def z(s, j):
        """Entry (s, j): column s * width + j of the nC x (n * width) matrix, whose rows are the streams in order."""
        column = torch.cat([phi[stream][:, s * width + j] for stream in range(n)])
        return alpha[min(j, 2)] * torch.dot(u, column) + b[s, j]

    pre, post = [sigmoid(z(s, 0)) for s in range(n)], [2 * sigmoid(z(s, 1)) for s in range(n)]
    if width == 2:
        return pre, post, eye
    if c.connection == "lite":
        return pre, post, mean_permutation([z(s, j) for s in range(n) for j in range(2, width)], n)
    return pre, post, doubly_stochastic([[z(s, 2 + i) for s in range(n)] for i in range(n)], c.sinkhorn_steps)


def hyperconnections(p, c, x):
    n, streams = c.n_streams, [[u] * c.n_streams for u in x]
    for k in range(2 * c.n_layer):
        at = f"blocks.{k // 2}.{('attn', 'mlp')[k % 2]}_connection"
        H = [maps(p, c, at, X) for X in streams]
        h = [sum(pre[s] * X[s] for s in range(n)) for X, (pre, _, _) in zip(streams, H)]
        y = sublayer(p, c, k + 1, h)
        streams = [[sum(res[i][s] * X[s] for s in range(n)) + post[i] * out for i in range(n)]
                   for X, (_, post, res), out in zip(streams, H, y)]
    return [sum(X) for X in streams]


# ---------------------------------------------------------------------------------------------------------------------


def build(**options):
    torch.manual_seed(0)
    return models.build("hyperconnections", **{**COMMON, **OWN, **options})


def randomised(**options):
    return setup("hyperconnections", **{**OWN, **options})[0]


def tokens(*shape):
    return torch.randint(29, shape, generator=torch.Generator().manual_seed(1))


def connections(model):
    return [m for block in model.blocks for m in (block.attn_connection, block.mlp_connection)]


CASES = [dict(connection=kind) for kind in KINDS] + [dict(connection=kind, n_streams=1) for kind in KINDS] + [
    dict(tanh=False),
    dict(n_streams=5, gate="elementwise", n_layer=1), dict(connection="static", gate="headwise", tie_embeddings=True),
    dict(connection="manifold", sinkhorn_steps=1),
    dict(connection="manifold", sinkhorn_steps=2, n_streams=2, n_kv_head=4), dict(connection="manifold", n_layer=1),
    dict(connection="lite", n_streams=4), dict(connection="lite", n_streams=2, gate="headwise"),
    dict(connection="identity", qk_norm=False, z_loss=0.0)]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_equations_of_hyperconnections(options):
    compare(hyperconnections, *setup("hyperconnections", **{**OWN, **options}))


def test_every_entry_of_the_parameters_gets_a_gradient():
    """Also the last column of each map, and of the maps of the first and the last sublayer."""
    for kind in KINDS:
        model = randomised(connection=kind)
        model(tokens(2, 6), tokens(2, 6).roll(1, 1))[1].backward()
        for key, q in model.named_parameters():
            if "_connection" in key:
                columns = q.grad.abs().flatten(0, -2).amax(0) if q.ndim > 1 else q.grad.abs()
                assert (columns > 1e-10).all(), (kind, key, columns)


@pytest.mark.parametrize("connection, parts", [
    ("dynamic", ("static", "dynamic", "scale")), ("manifold", ("bias", "phi", "alpha")),
    ("lite", ("bias", "phi", "alpha"))])
def test_groups(connection, parts):
    mixing = {f"blocks.{kind}_connection.{part}" for kind in ("attn", "mlp") for part in parts}
    assert own_groups(build(connection=connection)) == (set(), mixing)


def test_initial_values():
    eye = torch.eye(3)
    for kind in KINDS:
        model = build(connection=kind)
        for k, m in enumerate(connections(model)):
            if kind in ("static", "dynamic"):
                assert torch.equal(m.static, torch.cat((eye[k % 3, :, None], torch.ones(3, 1), eye), dim=1))
            else:
                assert torch.equal(m.bias[:, :2], torch.stack((2 * eye[k % 3] - 1, torch.zeros(3)), dim=1))
                assert m.bias.size(1) == ({"manifold": 5, "lite": 4}.get(kind, 2) if 0 < k < 5 else 2)
                first = torch.tensor([[0.0, -8.0], [-8.0, -8.0], [-8.0, -8.0]])     # of 3! permutations the identity
                start = first if kind == "lite" else 8 * eye - 8
                assert m.bias.size(1) == 2 or torch.equal(m.bias[:, 2:], start)
                assert (m.phi == 0).all() and (m.alpha == 0.01).all()
            if kind == "dynamic":
                assert (m.dynamic == 0).all() and (m.scale == 0.01).all()
            elif kind == "static":
                assert m.dynamic is None and m.scale is None
            else:
                assert not hasattr(m, "dynamic")


@pytest.mark.parametrize("kind", KINDS)
def test_the_favourite_stream_breaks_the_symmetry(kind):
    """At the start all streams are equal, their gradients are not. With a uniform H_pre they are."""
    for uniform in (False, True):
        model = build(connection=kind, zero_init=False)
        if uniform:
            with torch.no_grad():
                for m in connections(model):
                    (m.static if kind in ("static", "dynamic") else m.bias)[:, 0] = 0.5
        model(tokens(2, 6), tokens(2, 6).roll(1, 1))[1].backward()
        for m in connections(model)[:-1]:                              # the head treats all alike
            grad = (m.static if kind in ("static", "dynamic") else m.bias).grad[:, 1]
            assert ((grad - grad.mean()).abs().max() < 1e-9 * grad.abs().max()) == uniform


@pytest.mark.parametrize("kind", ["manifold", "lite"])
@torch.no_grad()
def test_manifold_starts_as_gpt_with_any_doubly_stochastic_map_and_any_reading(kind):
    model = build(connection=kind, zero_init=False, norm_eps=1e-14)
    for m in connections(model):
        m.bias[:, 0].normal_()
        m.bias[:, 2:].normal_()
    base = models.build("gpt", **{**COMMON, "norm_eps": 1e-14})
    base.load_state_dict(model.state_dict(), strict=False)
    torch.testing.assert_close(model(tokens(2, 6))[0], base(tokens(2, 6))[0], rtol=0, atol=1e-9)
    connections(model)[2].bias[:, 1].normal_()                         # what is written does matter
    assert (model(tokens(2, 6))[0] - base(tokens(2, 6))[0]).abs().max() > 1e-4


@torch.no_grad()
def test_sinkhorn_is_doubly_stochastic():
    sinkhorn, draw = models.module("hyperconnections").sinkhorn, torch.Generator().manual_seed(0)
    z = torch.randn(500, 4, 4, generator=draw)
    H = sinkhorn(z, 20)
    rows, columns = (H.sum(-1) - 1).abs(), (H.sum(-2) - 1).abs()
    assert (H > 0).all() and rows.max() < 1e-12 and columns.max() < 1e-4 and columns.median() < 1e-9
    assert torch.linalg.matrix_norm(H, 2).max() < 1 + 1e-4             # it makes nothing longer
    product = torch.eye(4)
    for h in H:
        product = h @ product
    assert (product.sum(-2) - 1).abs().max() < 1e-3 and (product.sum(-1) - 1).abs().max() < 1e-9
    shifted = z + torch.randn(500, 4, 1, generator=draw) + torch.randn(500, 1, 4, generator=draw)
    assert (sinkhorn(shifted, 100) - sinkhorn(z, 100)).abs().max() < 1e-9   # exp(z) is scaled by rows and columns
    assert (sinkhorn(1000 * torch.eye(4)[[2, 0, 3, 1]], 20) == torch.eye(4)[[2, 0, 3, 1]]).all()
    assert sinkhorn(z.float(), 20).dtype == torch.float32


@pytest.mark.parametrize("size", [1, 30, 300, 3000])
def test_sinkhorn_of_any_size_is_finite_in_fp32(size):
    """Rows that all want one column underflow as exp(z) in fp32; forward and backward against float64."""
    sinkhorn, draw = models.module("hyperconnections").sinkhorn, torch.Generator().manual_seed(0)
    z = size * torch.randn(200, 4, 4, generator=draw)
    z[:100, :, 0] += 3 * size
    grad = torch.randn(200, 4, 4, generator=draw)
    found = []
    for x in (z.clone(), z.float()):
        H = sinkhorn(x.requires_grad_(), 20)
        H.backward(grad.to(x.dtype))
        near(H.sum(-1), torch.ones(200, 4), size=z.abs().max(), dtype=x.dtype)
        found.append((H.detach(), x.grad))
    for wide, narrow in zip(*found):
        near(narrow, wide, size=z.abs().max())


def test_compiled_gradients_of_manifold():
    """With inductor and four maps: the memory of one must not be reused before its backward."""
    model, idx, found = randomised(connection="manifold", sinkhorn_steps=1, n_layer=3), tokens(4, 8), []
    with torch._inductor.config.patch({"cpp.simdlen": 1}):              # scalar kernels, a third faster to make
        for forward in (model, torch.compile(model, fullgraph=True)):
            model.zero_grad()
            forward(idx, idx.roll(-1, 1))[1].backward()
            found.append({key: p.grad for key, p in model.named_parameters()})
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)


@torch.no_grad()
def test_the_map_of_lite_is_doubly_stochastic():
    for n in (2, 3, 4):
        model, seen = randomised(connection="lite", n_streams=n), []
        connections(model)[1].register_forward_hook(lambda m, inputs, maps: seen.append(maps[2]))
        model(tokens(2, 6))
        H = seen[0]
        assert H.shape == (2, 6, n, n) and (H > 0).all() and (H[0, 0] - H[1, 1]).abs().max() > 1e-4
        assert (H.sum(-1) - 1).abs().max() < 1e-14 and (H.sum(-2) - 1).abs().max() < 1e-14


@torch.no_grad()
def test_the_first_and_last_doubly_stochastic_map_would_change_nothing():
    model = randomised(connection="manifold")
    before, every = model(tokens(2, 6))[0], connections(model)
    H = models.module("hyperconnections").sinkhorn(torch.randn(2, 6, 3, 3), 200)
    for m, changes in ((every[0], False), (every[-1], False), (every[3], True)):
        hook = m.register_forward_hook(lambda m, inputs, maps: (*maps[:2], H))
        assert ((model(tokens(2, 6))[0] - before).abs().max() > 1e-3) == changes
        hook.remove()


@torch.no_grad()
def test_identity_is_manifold_with_an_identity():
    """Logits far below those of the diagonal, and the other columns shared."""
    manifold = randomised(connection="manifold")
    identity = randomised(connection="identity")
    for a, b in zip(connections(manifold), connections(identity)):
        width = a.bias.size(1)
        b.bias.copy_(a.bias[:, :2]), b.alpha.copy_(a.alpha[:2])
        b.phi.copy_(a.phi.unflatten(-1, (3, width))[..., :2].flatten(-2))
        a.phi.view(3, -1, 3, width)[..., 2:] = 0
        a.bias[:, 2:] = 1000 * torch.eye(3)[:, :width - 2]
    identity.load_state_dict({key: q for key, q in manifold.state_dict().items() if "_connection" not in key},
                             strict=False)
    torch.testing.assert_close(manifold(tokens(2, 6))[0], identity(tokens(2, 6))[0], rtol=0, atol=1e-10)


def test_parameter_counts_of_the_papers():
    def extra(**options):
        with torch.device("meta"):
            shape = dict(n_layer=16, d_model=2048, n_head=16, d_ff=8192, vocab_size=50304)
            sizes = [sum(p.numel() for p in m.parameters()) for m in (
                models.build("hyperconnections", **shape, **options), models.build("gpt", **shape))]
        return sizes[0] - sizes[1]

    assert round(extra() / 1000) == 394                                # DHC x4 in OLMo-1B: a norm without parameters
    for n in (1, 2, 4, 8):
        assert extra(n_streams=n) == 32 * (2048 * (n + 2) + n * (n + 2) + 2)
        assert extra(n_streams=n, connection="static") == 32 * n * (n + 2)
    # 30 sublayers with an H_res; the first and the last have none
    for n in (2, 4):
        whole, without = (n * 2048 * (2 * n + m) + 2 * n + m + 2 for m in (n * n, 0))
        assert extra(n_streams=n, connection="manifold") == 30 * (whole + 1) + 2 * without
        assert extra(n_streams=n, connection="identity") == 32 * without
        logits = factorial(n) + 2 * n                                  # mHC-lite's H_res is made from n C to n! numbers
        assert extra(n_streams=n, connection="lite") == 30 * ((n * 2048 + 1) * logits + 3) + 2 * without


def test_maps_are_fp32_under_autocast():
    """And streams are bf16. In bf16 the maps would round what tanh adds to a 1, at most 0.01, to one of two values."""
    for kind in KINDS:
        model = randomised(connection=kind).float()
        seen = []
        hooks = [m.register_forward_hook(lambda m, inputs, maps: seen.append(
            ({H.dtype for H in maps if H is not None}, {x.dtype for x in inputs[0]}))) for m in connections(model)]
        with torch.autocast("cpu", torch.bfloat16):
            model(tokens(2, 6))
        assert seen == [({torch.float32}, {torch.bfloat16})] * len(hooks)


@pytest.mark.parametrize("options", [dict(connection=kind, n_streams=n, n_layer=n_layer) for kind in KINDS
                                     for n, n_layer in ((1, 3), (2, 1), (4, 3))], ids=str)
def test_costs(options):
    """Parameters and FLOPs of the maps are counted; the FLOPs of mixing, 2 C per entry of the maps, no counter sees."""
    model = build(**options)
    c = model.config
    base = models.build("gpt", **{**COMMON, "n_layer": c.n_layer})
    params, flops, read = models.module("hyperconnections").costs(c, 6)
    assert params == sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in base.parameters())
    entries = sum(c.n_streams ** 2 + 2 * c.n_streams if p.size(1) > 2 else p.numel()
                  for key, p in model.named_parameters() if key.endswith(("static", "bias")))
    assert flops_per_token(model, 6) - flops_per_token(base, 6) == flops - 2 * entries * c.d_model
    assert read == 2 * c.n_layer * (c.n_streams - 1) * c.d_model
