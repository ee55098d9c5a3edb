"""geonorm.py against its equations in float64, arXiv:2601.22095, and their geometry."""
import math

import pytest
import torch
from reference import GATED, compare, float64, rms, setup, show, sublayer  # noqa: F401  (float64: autouse)
from small import near

import models


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
        for k, part in ((1, "attn"), (2, "mlp")):
            scale = p[f"blocks.{l}.{part}_geodesic.scale"]
            x = [move(scale, l, u, g, seen) for u, g in zip(x, sublayer(p, c, 2 * l + k, x))]
    return x


@pytest.mark.parametrize("name, options", [("geonorm", options) for options in GATED + [dict(n_layer=4)]], ids=show)
def test_equations(name, options):
    """Outputs small and large against the stream, scales of either sign: some tokens are at the bounds of theta."""
    model, p, *rest = setup(name, **options)
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


def step(scale=1.0, layer=2, dtype=torch.float64):
    found = models.module("geonorm").Geodesic(layer).to(dtype)
    torch.nn.init.constant_(found.scale, scale)
    return found


def stream_and_output(size, dtype=torch.float64):
    draw = torch.Generator().manual_seed(0)
    x, g = (torch.randn(2, 5, 48, generator=draw, dtype=dtype) for _ in range(2))
    return x / x.norm(dim=-1, keepdim=True) * 48 ** 0.5, g * size


@pytest.mark.parametrize("size", [1e-9, 0.1, 30.0])
@torch.no_grad()
def test_the_norm_is_kept(size):
    """In fp32; a bf16 stream is moved in fp32 and rounded once."""
    x, g = stream_and_output(size, torch.bfloat16)
    moved, rounded = (step(dtype=torch.float32)(*inputs) for inputs in ((x.float(), g.float()), (x, g)))
    assert (moved.norm(dim=-1) / x.float().norm(dim=-1) - 1).abs().max() < 1e-6
    assert torch.equal(rounded, moved.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-12, 1e-8, 1e-4])
def test_small_outputs_give_the_identity_and_its_derivative_is_the_projection(size, dtype):
    """Exact without an output, and continuous there."""
    x, g = (u[:1, :1] for u in stream_and_output(size, dtype))
    found, e = step(1.5, 8, dtype), x.double().flatten() / x.double().norm()
    by_x, by_g = (J.view(48, 48) for J in torch.autograd.functional.jacobian(found, (x, g)))
    eps = 16 * torch.finfo(dtype).eps
    off = dict(rtol=0, atol=1e-3 if size else eps, check_dtype=False)
    torch.testing.assert_close(found(x, g), x, rtol=eps, atol=3 * size)
    torch.testing.assert_close(by_g, 0.5 * (torch.eye(48) - torch.outer(e, e)), **off)
    torch.testing.assert_close(by_x, torch.eye(48), **off)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_output_along_the_stream_moves_nothing(dtype):
    x, found = stream_and_output(1.0, dtype)[0], step(dtype=dtype)
    g = (0.3 * x).requires_grad_()
    y = found(x, g)
    y.square().sum().backward()
    assert g.grad.isfinite().all() and found.scale.grad.isfinite()
    near(y, x, dtype=dtype, times=100)


def test_initial_values():
    model = setup("geonorm")[0]
    model.init_weights()
    assert all(block.mlp_geodesic.scale == block.attn_geodesic.scale == 1 for block in model.blocks)
