"""What the tests of curves, records, pictures and probes share: small random models, and run folders made by hand."""
import json
from unittest.mock import patch

import pytest
import settings
import torch
import torch.nn.functional as F

import models
import probes
from nanodepth import curves, inside

SHAPE = dict(vocab_size=97, n_layer=3, n_head=4, n_kv_head=2, d_model=32, d_ff=64, max_len=48)
ROOT = models.names()[0]                            # the baseline of all


@pytest.fixture(autouse=True, scope="module")
def double():
    """Everything in float64, in the test files that import this: also what the code wants in fp32 or better."""
    torch.set_default_dtype(torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield
    torch.set_default_dtype(torch.float32)


def random_model(name, **options):
    """In eval mode, float64, with no parameter at its initial value."""
    torch.manual_seed(1)
    model = models.build(name, **settings.fitting(name, SHAPE) | options).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


def tokens(B=2, T=12, seed=0):
    """idx, targets (B, T)."""
    idx = torch.randint(96, (B, T + 1), generator=torch.Generator().manual_seed(seed))
    return idx[:, :-1], idx[:, 1:]


def numbers(model, batches=None):
    """inside.measure() with the model's own probes, by default on one batch of (2, 12) tokens."""
    return inside.measure(model, batches or [tokens()], probes.find(type(model).__module__.split(".")[-1]))


@torch.no_grad()
def passed(model):
    """The Record of a forward pass on tokens()."""
    with inside.recorded(model) as found:
        model(tokens()[0])
    return found


def average(values):
    """Mean of a tensor's or a list's numbers, one by one."""
    values = values.flatten().tolist() if isinstance(values, torch.Tensor) else list(values)
    return sum(values) / len(values)


@torch.no_grad()
def check_depth(model):
    """The depth matrices make what the sublayers and the head read from the outputs."""
    found, probe, idx = passed(model), probes.find(type(model).__module__.split(".")[-1]), tokens()[0]
    A = inside.depth_matrix(model, idx, found, probe)
    inputs = probe.streams(model, idx) if hasattr(probe, "streams") else {"x": found.reads[:-1:2]}
    outputs = torch.stack(found.outputs, dim=-2)                                    # (B, T, 2 L + 1, C)
    assert outputs.size(-2) == 2 * len(model.blocks) + 1 and outputs.abs().amax((0, 1, 3)).min() > 0
    assert (A["r"] @ outputs - torch.stack(found.reads, dim=-2)).abs().max() < 1e-9
    assert torch.equal(A["r"], A["r"].tril()) and (set(inputs) == set(A) if len(A) > 1 else set(inputs) == {"x"})
    for stream in set(A) & set(inputs):
        assert torch.equal(A[stream][..., 1::2, :], A["r"][..., 1::2, :])           # MLPs read r alone
        assert ((A[stream] @ outputs)[..., :-1:2, :] - torch.stack(inputs[stream], dim=-2)).abs().max() < 1e-9


@torch.no_grad()
def values_of(model):
    """The values that attention gets, (L, B, T, K, D), and each layer's own before any mixing."""
    with patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as attention:
        found = passed(model)
    mixed = torch.stack([call.args[2].transpose(1, 2) for call in attention.call_args_list])
    own = [F.linear(block.attn_norm(x), block.attn.wv.weight).unflatten(-1, (-1, model.config.d_head))
           for block, x in zip(model.blocks, found.reads[::2])]
    return mixed, torch.stack(own)


def read(*runs):
    return [curves.read_log(run) for run in runs]


def write_run(folder, losses, seed=0, model=ROOT, tok_s=1000.0, step=100, options=(), peak=2 ** 30, eval_tokens=(),
              shape=(), code=(), **more):
    """A run folder as train.py leaves it, without a checkpoint: validations at steps 0, 1, 2, .. times `step`."""
    folder.mkdir(parents=True)
    chosen = {"model": model, "preset": "tiny", "seed": seed, "out": str(folder), "seq_len": 256, "eval_tokens": 1000,
              "muon_lr": 0.005, "max_steps": (len(losses) - 1) * step, **dict(options)}
    (folder / "config.json").write_text(json.dumps({
        "model": model, "model_config": {"gate": "none", "n_layer": 2, **dict(shape)}, "options": chosen,
        "defaults": {"gate": "none"}, "code": {"muon.py": "1", f"models/{model}.py": "1", **dict(code)},
        "versions": {"torch": "2.13.0"}, "data": {"path": "d", "fingerprint": "f"}, **more}))
    rows = [{"kind": "val", "step": i * step, "tokens": i * step * 10, "loss": loss, "peak_bytes": peak}
            for i, loss in enumerate(losses)]
    for row, n in zip(rows, eval_tokens):
        row["eval_tokens"] = n
    rows += [{"kind": "train", "step": i, "tokens": i * 10, "loss": 1.0, "tok_s": tok_s * (3 if i == 1 else 1)}
             for i in range(1, 6)]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder
