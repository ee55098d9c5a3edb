"""torch.compile: one graph in forward and backward, one for the decoding step, and the numbers of eager execution.

By aot_eager, which traces forward and backward as inductor does and runs the graphs without generating code: every
sixth model, with `--full` all settings of all, and inductor's code of every model.
"""
import pytest
import settings
import torch
import torch._inductor.config
from settings import of, show
from torch._dynamo.testing import CompileCounter
from test_models import CASES, build, every_model, seeded, tokens

import models

AOT = [pytest.param(*case, marks=[pytest.mark.full] * bool(case[1])) for case in CASES]


@pytest.fixture(autouse=True)
def forget():
    """torch keeps only a few compiled versions of a function."""
    torch._dynamo.reset()


def shallow(name, options):
    """In float64, with two layers where Config allows it."""
    try:
        return build(name, {"n_layer": of(name, "SHALLOW", 2), **options}).double()
    except ValueError:
        return build(name, options).double()


def compare(name, options, backend):
    """Loss and gradients."""
    model = shallow(name, options).train()
    idx, targets = tokens(2, 8), tokens(2, 8).roll(1, 1)

    def loss_and_gradients(forward):
        model.zero_grad()
        torch.manual_seed(0)
        loss = forward(idx, targets)[1]
        loss.backward()
        return loss.detach(), {key: p.grad for key, p in model.named_parameters() if p.grad is not None}

    want = loss_and_gradients(lambda *batch: seeded(model, *batch))
    model.compile(fullgraph=True, dynamic=False, backend=backend)
    torch.testing.assert_close(loss_and_gradients(model), want, atol=1e-9, rtol=1e-9)


@pytest.mark.quick
@pytest.mark.sparse
@pytest.mark.parametrize("name, options", AOT, ids=show)
def test_one_graph_forward_and_backward(name, options):
    compare(name, options, "aot_eager")


@pytest.mark.quick
@pytest.mark.sparse
@every_model
def test_one_graph_to_decode(name):
    """The first token reads an empty cache; the next ones need no new graph."""
    settings.need(name, models.module(name), "Cache")
    model, idx = shallow(name, {}), tokens(2, 5)
    full, cache, graphs = model(idx)[0], models.module(name).Cache(model, 2, 8), CompileCounter()
    step = torch.compile(model.forward, fullgraph=True, backend=graphs)
    with torch.no_grad():
        parts = [step(idx[:, t:t + 1].clone(), cache=cache)[0] for t in range(5)]
    torch.testing.assert_close(torch.cat(parts, dim=1), full, atol=1e-9, rtol=0)
    assert graphs.frame_count == 1


@pytest.mark.full
@every_model
def test_inductor(name):
    """Scalar kernels, a third faster to make; test_train.py compiles runs with vectors, in the default run too."""
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        compare(name, {}, "inductor")
    settings.need(name, models.module(name).Model, "generate")
    model, idx = shallow(name, {}), tokens(2, 8)
    eager = [*model.generate(idx, 4, temperature=0)]
    model.compile(fullgraph=True)
    assert torch.equal(torch.cat([*model.generate(idx, 4, temperature=0)]), torch.cat(eager))
