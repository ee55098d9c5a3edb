"""geonorm.py against its equations in float64, arXiv:2601.22095, and their geometry."""
import math

import pytest
import torch
from measure import dtypes_read, mixing_flops
from reference import (  # noqa: F401  (float64: autouse)
    GATED, attend, compare, float64, mlp, norm, own_groups, project, rms, setup, show,
)

import models
from nanodepth import record
from small import near


def bounded(theta, seen):
    """theta between -pi/4 and pi/4; notes whether that changed it."""
    seen.append(bool(theta.abs() > math.pi / 4))
    return math.pi / 4 * torch.sign(theta) if seen[-1] else theta


def move(scale, l, x, g, seen):
    """One token's stream x after the output g of a sublayer in layer l = 0, 1, ..."""
    v = g - torch.dot(x, g) / torch.dot(x, x) * x
    theta = bounded(scale / math.sqrt(l + 1) * bounded(v.norm() / x.norm(), seen[0]), seen[1])
    return torch.cos(theta) * x + torch.sin(theta) * x.norm() * v / v.norm()


def geonorm(p, c, x, seen=([], [])):
    x = [rms(u, c) for u in x]
    for l in range(c.n_layer):
        at = f"blocks.{l}"
        a = [norm(p, f"{at}.attn_norm", u, c) for u in x]
        x = [move(p[f"{at}.attn_geodesic.scale"], l, u, g, seen)
             for u, g in zip(x, attend(p, c, at, project(p, c, at, a, a, a)))]
        x = [move(p[f"{at}.mlp_geodesic.scale"], l, u, mlp(p, at, norm(p, f"{at}.mlp_norm", u, c)), seen) for u in x]
    return x


@pytest.mark.parametrize("options", GATED + [dict(n_layer=4)], ids=show)
def test_equations(options):
    """Outputs small and large against the stream, scales of either sign: some tokens are at the bounds of theta."""
    model, p, *rest = setup("geonorm", **options)
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
    assert all({True, False} == set(bound) for bound in seen)


# ------------------------------------------------------------------------------------------------------------- geometry


def step(scale=1.0, layer=2, dtype=torch.float64):
    found = models.module("geonorm").Geodesic(layer).to(dtype)
    torch.nn.init.constant_(found.scale, scale)
    return found


def stream_and_output(size, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    x, g = (torch.randn(2, 5, 48, generator=draw, dtype=dtype) for _ in range(2))
    return x / x.norm(dim=-1, keepdim=True) * 48 ** 0.5, g * size


@pytest.mark.parametrize("size", [1e-9, 1e-4, 0.1, 1.0, 30.0])
@torch.no_grad()
def test_the_norm_is_kept(size):
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 1e-6)):
        x, g = stream_and_output(size, dtype)
        assert (step(dtype=dtype)(x, g).norm(dim=-1) / x.norm(dim=-1) - 1).abs().max() < tolerance
    x, g = stream_and_output(size, torch.bfloat16)
    wanted = step(dtype=torch.float32)(x.float(), g.float())                        # computed in fp32, rounded once
    y, mixed = step(dtype=torch.float32)(x, g), step(dtype=torch.float32)(x.float(), g)
    assert y.dtype == torch.bfloat16 and torch.equal(y, wanted.bfloat16())
    assert mixed.dtype == torch.float32 and torch.equal(mixed, wanted)              # a bf16 output: autocast


@torch.no_grad()
def test_the_stream_turns_by_theta_in_the_plane_of_stream_and_output():
    x, g = stream_and_output(0.5)
    y, radius = step(layer=3)(x, g), 48 ** 0.5
    for b in range(2):
        for t in range(5):
            e = x[b, t] / radius
            v = g[b, t] - torch.dot(e, g[b, t]) * e
            assert abs(torch.dot(v, e)) < 1e-12
            n = v / v.norm()
            angle = math.atan2(torch.dot(y[b, t], n), torch.dot(y[b, t], e))
            assert angle == pytest.approx(0.5 * v.norm().item() / radius, rel=1e-12)
            assert (y[b, t] - torch.dot(y[b, t], n) * n - torch.dot(y[b, t], e) * e).norm() < 1e-12


@torch.no_grad()
def test_bounds():
    x, g = stream_and_output(50.0)
    for scale, quarter in ((1.0, 1), (0.5, 0.5), (3.0, 1), (-0.5, -0.5), (-3.0, -1)):
        y, v = step(scale, layer=0)(x, g), g - (x * g).sum(-1, keepdim=True) / 48 * x
        for u, wanted in ((x, math.cos), (v, math.sin)):
            cosines = torch.cosine_similarity(u, y, -1)
            assert torch.allclose(cosines, torch.full((2, 5), wanted(quarter * math.pi / 4)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_output_is_the_identity_and_its_derivative_is_the_projection(dtype):
    x = stream_and_output(1.0, dtype)[0][:1, :1].requires_grad_()
    zero, found = torch.zeros_like(x), step(1.5, dtype=dtype, layer=8)
    near(found(x, zero), x, dtype=dtype)
    by_x, by_g = torch.autograd.functional.jacobian(found, (x, zero))
    e = x.detach().double().flatten() / x.detach().double().norm()
    near(by_g.view(48, 48), 1.5 / 3 * (torch.eye(48) - torch.outer(e, e)), size=1, dtype=dtype)
    near(by_x.view(48, 48), torch.eye(48), size=1, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_near_no_output_are_those_at_no_output(dtype):
    """Outputs that are tiny, zero, or along the stream: continuous and finite."""
    found, weight = step(dtype=dtype), torch.randn(48, dtype=dtype)
    x, g = stream_and_output(1.0, dtype)
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
    x, g = stream_and_output(1.0)
    v = g - (x * g).sum(-1, keepdim=True) / 48 * x
    error, gap = [], []
    for size in (1e-2, 5e-3):
        y, euclidean = step(0.8, layer=0)(x, size * g), x + 0.8 * size * v
        error.append((y - euclidean).norm())
        # and its projection, as in post-norm
        gap.append((y - euclidean / euclidean.norm(dim=-1, keepdim=True) * 48 ** 0.5).norm())
    assert error[0] / error[1] == pytest.approx(4, rel=1e-2) and gap[0] / gap[1] == pytest.approx(8, rel=1e-2)


# ---------------------------------------------------------------------------------------------------------------- model


def test_initial_values_and_groups():
    model = setup("geonorm")[0]
    assert own_groups(model) == (set(), {f"blocks.{name}_geodesic.scale" for name in ("attn", "mlp")})
    model.init_weights()
    assert all(block.mlp_geodesic.scale == block.attn_geodesic.scale == 1 for block in model.blocks)


@torch.no_grad()
def test_every_stream_of_a_model_lies_on_the_sphere():
    model, _, _, idx, _ = setup("geonorm", norm_eps=1e-12)
    streams = record.watch(model, idx, model.blocks)
    assert all(torch.allclose(x.norm(dim=-1), torch.tensor(32 ** 0.5, dtype=x.dtype), rtol=1e-6) for x in streams)


def test_costs():
    """The counter does not see the subtraction in v, one per sublayer; RN at the start is not of the steps."""
    counted, said = mixing_flops("geonorm")
    assert said == counted + 2 * 4 * 192 - 3 * 192


def test_states_are_bf16_under_autocast():
    assert dtypes_read("geonorm") == {torch.bfloat16}
