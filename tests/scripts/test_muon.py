"""Muon against the SVD, against one-by-one updates, and by hand."""
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import muon
from small import near

pytestmark = pytest.mark.quick
LOW, HIGH = 0.84, 1.15                 # where five steps put singular values of at least 1e-3 of the Frobenius norm


def matrix(kind, seed=0):
    g = torch.Generator().manual_seed(seed)

    def orthogonal(rows, cols):
        return torch.linalg.qr(torch.randn(rows, cols, generator=g, dtype=torch.float64))[0]
    if kind == "ill-conditioned":      # singular values from 1 down to 2e-3 of the norm
        return orthogonal(48, 48) @ torch.diag(torch.logspace(0, -2.5, 48, dtype=torch.float64)) @ orthogonal(48, 48).T
    if kind == "rank-deficient":
        left, values = orthogonal(60, 7), torch.rand(7, generator=g, dtype=torch.float64) + 0.5
        return left @ torch.diag(values) @ orthogonal(40, 7).T
    rows, cols = dict(tall=(96, 24), wide=(24, 96), square=(64, 64), row=(1, 9), column=(9, 1))[kind]
    return torch.randn(rows, cols, generator=g, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["tall", "wide", "square", "row", "column", "ill-conditioned", "rank-deficient"])
@pytest.mark.parametrize("scale", [1e-3, 1e4])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_singular_values_and_polar_factor(kind, scale, dtype):
    """Of a step's update, also in bf16: there large singular directions land in a slightly wider band."""
    G, least, slack = (matrix(kind) * scale, 1.2e-3, 0) if dtype is None else (matrix(kind).float() * scale, 2e-2, 0.05)
    U, S, V = torch.linalg.svd(G.double(), full_matrices=False)
    p = nn.Parameter(torch.zeros_like(G))
    p.grad = G.clone()
    muon.Muon([p], lr=1.0, momentum=0.0, dtype=dtype).step()
    out = -p.detach().double() / max(1, G.size(0) / G.size(1)) ** 0.5
    inside = U.T @ out @ V.T
    values, seen = inside.diagonal(), S / S.square().sum().sqrt() > least
    assert p.dtype == G.dtype and seen.any()
    assert (values[seen] > LOW - slack).all() and (values[seen] < HIGH + slack).all()
    if dtype is None:
        torch.testing.assert_close(inside, torch.diag(values), atol=1e-3, rtol=0)       # same singular vectors as G
        assert (values[~seen].abs() < HIGH).all()
    if dtype is None and kind in ("tall", "wide"):                     # well conditioned: near the polar factor itself
        assert (out - U @ V).norm() / (U @ V).norm() < 0.15


def test_zero_and_tiny_gradients_stay_finite():
    for G in (torch.zeros(5, 3), torch.full((3, 5), 1e-30)):
        assert muon.polar_express(G).isfinite().all()
    for second_moment in (None, 0.95):
        p = nn.Parameter(torch.ones(2, 4, 6))                               # a stack whose first matrix has no gradient
        p.grad = torch.zeros_like(p)
        p.grad[1] = 1
        muon.Muon([p], lr=0.1, second_moment=second_moment).step()
        assert torch.equal(p[0], torch.ones(4, 6)) and p.isfinite().all()


@pytest.mark.parametrize("second_moment", [None, 0.9])
def test_a_stack_equals_one_by_one_and_the_definition(second_moment):
    """Three steps over mixed shapes, also stacks in one parameter, against a loop written from the definition."""
    shapes, g = [(8, 4), (4, 8), (8, 4), (6, 6), (8, 4), (3, 8, 4), (3, 4, 8)], torch.Generator().manual_seed(0)
    start = [torch.randn(s, generator=g, dtype=torch.float64) for s in shapes]
    grads = [[torch.randn(s, generator=g, dtype=torch.float64) for s in shapes] for _ in range(3)]
    for grad in (grad for step in grads for grad in step[5:]):
        grad *= torch.tensor([1.0, 0.01, 100.0])[:, None, None]
    stacked = [nn.Parameter(p.clone()) for p in start]
    opt = muon.Muon(stacked, lr=0.1, weight_decay=0.5, momentum=0.8, second_moment=second_moment)
    for step in grads:
        for p, grad in zip(stacked, step):
            p.grad = grad.clone()
        opt.step()

    for i, (*_, rows, cols) in enumerate(shapes):
        for p, *steps, found in zip(*(x.detach().view(-1, rows, cols)
                                      for x in (start[i], *(step[i] for step in grads), stacked[i]))):
            mean, square = torch.zeros_like(p), 0.0
            for grad in steps:
                mean = 0.8 * mean + 0.2 * grad
                u = muon.polar_express(0.2 * grad + 0.8 * mean)
                if second_moment is not None:
                    dim = 1 if rows >= cols else 0
                    square = 0.9 * square + 0.1 * (u ** 2).mean(dim, keepdim=True)
                    v = u / square.sqrt()
                    u = v * u.norm() / v.norm()
                u = u * math.sqrt(max(1, rows / cols))
                p = p - 0.1 * 0.5 * p * (u * p >= 0) - 0.1 * u
            torch.testing.assert_close(found, p, atol=1e-10, rtol=0)


@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_the_work_is_dealt_to_the_ranks(dtype, monkeypatch):
    """Every rank ends with the weights of a single process, if the ranks take their steps one after the other. 9 ranks
    are more than there are matrices."""
    def step():
        g, out = torch.Generator().manual_seed(0), []
        for shape in [(8, 8)] * 3 + [(6, 4)] + [(4, 10)] * 3:
            own = torch.float32 if dtype else torch.float64            # as Muon's dtype, another than the weights'
            out.append(nn.Parameter(torch.randn(shape, generator=g).to(own)))
            out[-1].grad = torch.randn(shape, generator=g).to(own)
        muon.Muon(out, 0.1, 0.1, second_moment=0.9, dtype=dtype).step()
        return out

    def gather(out, mine):
        sent[rank] = mine.clone()
        out.copy_(torch.cat([sent.get(r, torch.full_like(mine, math.nan)) for r in range(world)]))

    alone, made = step(), []
    monkeypatch.setattr(muon, "polar_express", lambda G, plain=muon.polar_express: (made.append(len(G)), plain(G))[1])
    for world in (2, 4, 9):
        sent = {}
        for every_share_is_there in (False, True):
            made.clear()
            for rank in range(world):
                monkeypatch.setattr(muon, "dist", SimpleNamespace(
                    is_initialized=lambda: True, get_world_size=lambda: world, get_rank=lambda: rank,
                    all_gather_single=gather))
                found = step()
                for p, q in zip(found, alone) if every_share_is_there else ():
                    near(p, q, size=1, dtype=p.dtype)
            assert sum(made) == 7 and max(made) <= -(-7 // world)


def test_momentum_schedule():
    at = [muon.momentum_at(s, 1000) for s in range(1000)]
    assert at[0] == 0.85 and at[50] == pytest.approx(0.9) and at[100] == at[500] == at[900] == pytest.approx(0.95)
    assert at[950] == pytest.approx(0.9) and all(0.85 <= m <= 0.95 + 1e-12 for m in at)
    assert [muon.momentum_at(s, 8) for s in range(7)] == at[:7]             # the start of a longer run


def test_which_parameters_are_matrices():
    """One that blocks share is one, a computed one none; a vector in a subclass of nn.Linear is no bias, but mixes."""
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    model.blocks[1].weight = model.blocks[0].weight
    model.blocks.append(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
    model.blocks[0].lam = nn.Parameter(torch.ones(4))
    matrices, rest = muon.split_params(model)
    assert [id(p) for p in matrices] == [id(model.blocks[0].weight)] and len(rest) == len(list(model.parameters())) - 1
    assert id(model.blocks[0].lam) in map(id, muon.mixing_params(model))
    assert id(model.blocks[0].bias) not in map(id, muon.mixing_params(model))
