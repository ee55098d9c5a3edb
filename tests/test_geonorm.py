"""GeoNorm (arXiv:2601.22095): its equations in float64, and their geometry."""
import math

import pytest
import torch
from measure import mixing_flops
from reference import attend, add, compare, float64, mlp, norm, project, rms, setup  # noqa: F401  (float64: autouse)

import models
from nanodepth import record
from nanodepth.devices import flops_per_token
from small import near

SPHERE = ("geodesic", "unprojected")


def decay(c, l):
    """Of layer l, counting from 0."""
    return {"none": 1, "harmonic": 1 / (l + 1), "sqrt": 1 / math.sqrt(l + 1), "linear": (c.n_layer - l) / c.n_layer,
            "geometric": c.decay_rate ** l}[c.decay]


def bounded(theta, seen):
    """theta between -pi/4 and pi/4; notes whether that changed it."""
    seen.append(bool(theta.abs() > math.pi / 4))
    return math.pi / 4 * torch.sign(theta) if seen[-1] else theta


def move(c, scale, l, x, g, seen):
    """One token's state x after the output g of a sublayer in layer l."""
    if c.update == "unprojected":
        theta = scale * decay(c, l) * g.norm() / x.norm()
        y = torch.cos(theta) * x + torch.sin(theta) * x.norm() * g / g.norm()
        return y * x.norm() / y.norm()
    v = g - torch.dot(x, g) / torch.dot(x, x) * x
    theta = bounded(scale * decay(c, l) * bounded(v.norm() / x.norm(), seen[0]), seen[1])
    return torch.cos(theta) * x + torch.sin(theta) * x.norm() * v / v.norm()


def geonorm(p, c, x, seen=([], [])):
    if c.update in SPHERE:
        x = [rms(u, c) for u in x]
    for l in range(c.n_layer):
        at = f"blocks.{l}"
        a = [norm(p, f"{at}.attn_norm", u, c) for u in x]
        x = [move(c, p[f"{at}.attn_geodesic.scale"], l, u, g, seen)
             for u, g in zip(x, attend(p, c, at, project(p, c, at, a, a, a)))]
        x = [move(c, p[f"{at}.mlp_geodesic.scale"], l, u, mlp(p, at, norm(p, f"{at}.mlp_norm", u, c)), seen) for u in x]
    return x


def post_norm(p, c, x):
    """x <- norm(x + f(x)), from a normed embedding; the last norm is the final one, which the caller applies."""
    norms = [f"blocks.{l}.{name}" for l in range(c.n_layer) for name in ("attn_norm", "mlp_norm")]
    x = [norm(p, norms[0], u, c) for u in x]
    for l in range(c.n_layer):
        at = f"blocks.{l}"
        x = add(x, attend(p, c, at, project(p, c, at, x, x, x)))
        x = [norm(p, norms[2 * l + 1], u, c) for u in x]
        x = add(x, [mlp(p, at, u) for u in x])
        if l < c.n_layer - 1:
            x = [norm(p, norms[2 * l + 2], u, c) for u in x]
    return x


DEFAULT = dict(update="geodesic", decay="sqrt", decay_rate=0.9)
BASE = [dict(), dict(tie_embeddings=True, qk_norm=False, z_loss=0.0), dict(n_kv_head=4, gate="elementwise"),
        dict(gate="headwise")]
CASES = [dict(update=update, **o) for update in SPHERE for o in BASE + [
    dict(decay="none"), dict(decay="harmonic", n_layer=4), dict(decay="linear"),
    dict(decay="geometric", decay_rate=0.7)]]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_equations_of_geonorm(options):
    """Outputs small and large against the state, scales of either sign: some tokens are at the bounds of theta."""
    model, p, *rest = setup("geonorm", **{**DEFAULT, **options})
    scales = iter([1.4, -1.8, 0.6, 1.1, 0.9, -0.7, 1.3, 1.2])
    with torch.no_grad():
        for key, q in model.named_parameters():
            if key.endswith("scale"):
                q.fill_(next(scales))
            elif key.split(".")[-2] in ("wo", "w_down"):
                q.mul_(0.25)
            p[key].copy_(q)
    seen = ([], [])
    compare(lambda *args: geonorm(*args, seen), model, p, *rest)
    if options["update"] == "geodesic":
        assert all({True, False} == set(bound) for bound in seen)


@pytest.mark.parametrize("options", BASE, ids=str)
def test_equations_of_post_norm(options):
    compare(post_norm, *setup("geonorm", **{**DEFAULT, "update": "post_norm", **options}))


@pytest.mark.parametrize("options", [dict(), dict(gate="headwise", tie_embeddings=True, z_loss=0.0)], ids=str)
def test_pre_norm_is_gpt(options):
    model, _, _, idx, targets = setup("geonorm", **{**DEFAULT, "update": "pre_norm", **options})
    base = setup("gpt", **options)[0]
    base.load_state_dict(model.state_dict())
    for ours, other in zip(model(idx, targets), base(idx, targets)):
        assert torch.equal(ours, other)


# ------------------------------------------------------------------------------------------------------------- geometry


def step(update="geodesic", scale=1.0, layer=2, dtype=torch.float64, **options):
    geonorm = models.module("geonorm")
    found = geonorm.Geodesic(geonorm.Config(n_layer=8, update=update, **options), layer).to(dtype)
    torch.nn.init.constant_(found.scale, scale)
    return found


def state_and_output(size, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    x, g = (torch.randn(2, 5, 48, generator=draw, dtype=dtype) for _ in range(2))
    return x / x.norm(dim=-1, keepdim=True) * 48 ** 0.5, g * size


@pytest.mark.parametrize("size", [1e-9, 1e-4, 0.1, 1.0, 30.0])
@pytest.mark.parametrize("update", SPHERE)
@torch.no_grad()
def test_the_norm_is_kept(update, size):
    for dtype in (torch.float64, torch.float32):
        x, g = state_and_output(size, dtype)
        y = step(update, dtype=dtype)(x, g)
        near(y.double().norm(dim=-1), x.double().norm(dim=-1), dtype=dtype, times=100)
    x, g = state_and_output(size, torch.bfloat16)
    y = step(update, dtype=torch.float32)(x, g)                                     # computed in fp32, rounded once
    wanted = step(update, dtype=torch.float32)(x.float(), g.float())
    assert y.dtype == torch.bfloat16 and torch.equal(y, wanted.bfloat16())
    # a bf16 output in an fp32 state: autocast
    mixed = step(update, dtype=torch.float32)(x.float(), g)
    assert mixed.dtype == torch.float32 and torch.equal(mixed, wanted)


@torch.no_grad()
def test_the_state_turns_by_theta_in_the_plane_of_state_and_output():
    x, g = state_and_output(0.5)
    y, radius = step(decay="linear")(x, g), 48 ** 0.5
    for b in range(2):
        for t in range(5):
            e = x[b, t] / radius
            v = g[b, t] - torch.dot(e, g[b, t]) * e
            assert abs(torch.dot(v, e)) < 1e-12
            n = v / v.norm()
            angle = math.atan2(torch.dot(y[b, t], n), torch.dot(y[b, t], e))
            assert angle == pytest.approx(6 / 8 * v.norm().item() / radius, rel=1e-12)  # layer 2 of 8
            assert (y[b, t] - torch.dot(y[b, t], n) * n - torch.dot(y[b, t], e) * e).norm() < 1e-12


@torch.no_grad()
def test_bounds():
    x, g = state_and_output(50.0)
    cos = torch.cosine_similarity
    for scale, quarter in ((1.0, 1), (0.5, 0.5), (3.0, 1), (-0.5, -0.5), (-3.0, -1)):
        y = step(scale=scale, decay="none")(x, g)
        v = g - (x * g).sum(-1, keepdim=True) / 48 * x
        assert torch.allclose(cos(x, y, -1), torch.full((2, 5), math.cos(quarter * math.pi / 4)))
        assert torch.allclose(cos(v, y, -1), torch.full((2, 5), math.sin(quarter * math.pi / 4)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("update", SPHERE)
def test_no_output_is_the_identity_and_its_derivative_is_the_projection(update, dtype):
    x = state_and_output(1.0, dtype)[0][:1, :1].requires_grad_()
    zero, found = torch.zeros_like(x), step(update, scale=1.5, dtype=dtype, decay="harmonic")
    near(found(x, zero), x, dtype=dtype)
    by_x, by_g = torch.autograd.functional.jacobian(found, (x, zero))
    e = x.detach().double().flatten() / x.detach().double().norm()
    near(by_g.view(48, 48), 1.5 / 3 * (torch.eye(48) - torch.outer(e, e)), size=1, dtype=dtype)
    near(by_x.view(48, 48), torch.eye(48), size=1, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("update", SPHERE)
def test_gradients_near_no_output_are_those_at_no_output(update, dtype):
    """Outputs that are tiny, zero for one token, or along the state: continuous and finite."""
    found, weight = step(update, dtype=dtype), torch.randn(48, dtype=dtype)
    x, g = state_and_output(1.0, dtype)
    grads = []
    for size in (0.0, 1e-30, 1e-12, 1e-8, 1e-6, 1e-4):
        small = (g * size).requires_grad_()
        (found(x, small) @ weight).sum().backward()
        grads.append(small.grad)
        assert found.scale.grad.isfinite()
    for grad in grads[1:]:
        assert (grad - grads[0]).abs().max() < 1e-3
    assert grads[0].abs().max() > 0.1
    along = (0.3 * x).requires_grad_()
    y = found(x, along)
    y.sum().backward()
    assert along.grad.isfinite().all()
    near(y, x, dtype=dtype, times=100)


@torch.no_grad()
def test_small_steps_are_those_of_pre_norm_and_the_projected_sum_is_third_order_away():
    x, g = state_and_output(1.0)
    v = g - (x * g).sum(-1, keepdim=True) / 48 * x
    found = step(scale=0.8, decay="none")
    error, gap = [], []
    for size in (1e-2, 5e-3):
        y = found(x, size * g)
        error.append((y - (x + 0.8 * size * v)).norm())
        # and its projection, as in post-norm
        euclidean = x + 0.8 * size * v
        gap.append((y - euclidean / euclidean.norm(dim=-1, keepdim=True) * 48 ** 0.5).norm())
    assert error[0] / error[1] == pytest.approx(4, rel=1e-2) and gap[0] / gap[1] == pytest.approx(8, rel=1e-2)


def test_the_unprojected_formula_leaves_the_sphere_without_its_projection():
    """On the unit sphere cos(theta) x + sin(theta) g / |g| has norm 1 only if <x, g> = 0; the step restores it."""
    x, g = state_and_output(0.5)
    u, alpha = x / x.norm(dim=-1, keepdim=True), 0.7 * 0.9 ** 2 / 48 ** 0.5         # scale decay(2) / sqrt(d_model)
    theta = alpha * g.norm(dim=-1, keepdim=True)
    raw = theta.cos() * u + theta.sin() * g / g.norm(dim=-1, keepdim=True)
    assert (raw.norm(dim=-1) - 1).abs().max() > 1e-3
    y = step("unprojected", scale=0.7, decay="geometric")(x, g)
    assert torch.allclose(y, raw / raw.norm(dim=-1, keepdim=True) * 48 ** 0.5, rtol=1e-12)


@pytest.mark.parametrize("kind, wanted", [
    ("none", [1, 1, 1, 1]), ("harmonic", [1, 1 / 2, 1 / 3, 1 / 4]), ("sqrt", [1, 2 ** -0.5, 3 ** -0.5, 0.5]),
    ("linear", [1, 0.75, 0.5, 0.25]), ("geometric", [1, 0.8, 0.64, 0.512])])
def test_decays_and_initial_values(kind, wanted):
    model = models.build("geonorm", vocab_size=31, n_layer=4, n_head=2, d_model=16, decay=kind, decay_rate=0.8)
    for block, decay in zip(model.blocks, wanted, strict=True):
        for found in (block.attn_geodesic, block.mlp_geodesic):
            assert found.decay == pytest.approx(decay) and found.scale.item() == 1
    stats = record.stats("geonorm", model, torch.arange(8)[None])
    assert stats["attn_step"] == stats["mlp_step"] == pytest.approx(wanted)
    near(stats["angle"], [0.0] * 4, size=1)


@pytest.mark.parametrize("update", ["pre_norm", "post_norm"])
def test_the_other_updates_have_gpts_parameters(update):
    shape = dict(vocab_size=31, n_layer=4, n_head=2, d_model=16)
    model, base = models.build("geonorm", update=update, **shape), models.build("gpt", **shape)
    shapes, base_shapes = ([(key, p.shape) for key, p in m.named_parameters()] for m in (model, base))
    assert shapes == base_shapes
    assert set(record.stats("geonorm", model, torch.arange(8)[None])) == {"angle"}


@pytest.mark.parametrize("update", SPHERE)
@torch.no_grad()
def test_every_state_of_a_model_lies_on_the_sphere(update):
    model, _, _, idx, _ = setup("geonorm", **{**DEFAULT, "update": update, "norm_eps": 1e-12})
    states = record.watch(model, idx, model.blocks)
    for x in states:                                                                # rounded to fp32
        near(x.double().norm(dim=-1), torch.full((2, 7), 32 ** 0.5))


@torch.no_grad()
def test_stats_angle():
    model, _, _, idx, _ = setup("geonorm", **DEFAULT)
    states = [model.embed(idx), *record.watch(model, idx, model.blocks)]
    wanted = [torch.cosine_similarity(a.double(), b.double(), -1).acos().mean().item()
              for a, b in zip(states, states[1:])]
    near(record.stats("geonorm", model, idx)["angle"], wanted, size=1)


def test_states_are_bf16_under_autocast():
    for update in (*SPHERE, "pre_norm", "post_norm"):
        model, _, _, idx, _ = setup("geonorm", **{**DEFAULT, "update": update})
        seen = []
        for block in model.float().blocks:
            block.register_forward_hook(lambda m, inputs, output: seen.extend((inputs[0].dtype, output.dtype)))
        with torch.autocast("cpu", torch.bfloat16):
            model(idx)
        assert set(seen) == {torch.bfloat16} and len(seen) == 2 * len(model.blocks)


@pytest.mark.parametrize("update, per_sublayer", dict(geodesic=9, unprojected=9, pre_norm=0, post_norm=0).items())
def test_costs(update, per_sublayer):
    """Parameters are counted; the FLOPs are of vectors, which no counter sees; only the newest state is read."""
    shape = dict(vocab_size=31, n_layer=4, n_head=2, d_model=16, max_len=8)
    model, base = models.build("geonorm", update=update, **shape), models.build("gpt", **shape)
    params, flops, read = models.module("geonorm").costs(model.config, 8)
    assert params == sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in base.parameters())
    if update in SPHERE:                                                            # and RN at the start
        counted, said = mixing_flops("geonorm", update=update)
        assert counted == said + 3 * 192
    assert flops == 8 * per_sublayer * 16 and flops_per_token(model, 8) == flops_per_token(base, 8) and read == 0
