"""What the options of a run reach: optimizers, batches, weights, precision, scores. Parts have their own tests."""
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import models
import muon
import settings
import train
from nanodepth import devices, runs, scoring
from nanodepth.data import Batches, Data
from nanodepth.devices import flops_per_token
from small import SMALL, flags, inside, rows

CPU = torch.device("cpu")
SIZE = {name: SMALL[name] for name in ("n_layer", "d_model", "n_head", "d_ff", "max_len")}


def test_options_reach_the_optimizers(data, tmp_path, monkeypatch, capsys):
    """Rates, decay, momentum and clipping of every group, as of the last of 12 steps; bf16; the figures of the log."""
    made, norms, passes, optimizers = [], [], set(), muon.optimizers
    name = next(name for name in models.names() if settings.of(name, "MIXES"))

    def clipped(*_):
        params = [p for optimizer in made for group in optimizer.param_groups for p in group["params"]]
        norms.append(math.sqrt(sum(p.grad.square().sum().item() for p in params)))

    def spy(model, *args):
        made.extend(optimizers(model, *args))
        made[0].register_step_pre_hook(clipped)
        model.register_forward_pre_hook(lambda *_: passes.add((model.training, torch.is_autocast_enabled("cpu"))))
        return made

    monkeypatch.setattr(muon, "optimizers", spy)
    words = flags(**{**SMALL, "max_steps": 12, "batch_tokens": 256, "dtype": "bf16"}, model=name, muon_lr=0.03,
                  adamw_lr=0.02, mix_lr=0.001, weight_decay=0.3, second_moment=0.9, grad_clip=0.01)
    monkeypatch.setattr(train, "peak_flops", lambda device: 1e9)
    assert inside(*words, *flags(data=data, out=tmp_path / "a")) == 0
    (matrices,), (usual, mixing) = (optimizer.param_groups for optimizer in made)
    assert (matrices["weight_decay"], matrices["second_moment"], made[0].dtype) == (0.3, 0.9, torch.bfloat16)
    assert [group["peak_lr"] for group in (matrices, usual, mixing)] == [0.03, 0.02, 0.001]
    scale = train.lr_scale(11, train.parse(words)[0])
    for group in (matrices, usual, mixing):
        assert group["lr"] == pytest.approx(group["peak_lr"] * scale)
    assert matrices["momentum"] == pytest.approx(muon.momentum_at(11, 12)) != 0.95
    assert norms == pytest.approx([0.01] * 12, rel=1e-3)
    assert passes == {(True, True), (False, True)}                                  # training and validation
    flops = 3 * flops_per_token(models.build(name, vocab_size=320, **SIZE), 16)
    for row in rows(tmp_path / "a"):
        assert row["grad_norm"] > 0.01 and row["tok_s"] == pytest.approx(256 / row["ms"] * 1000)
        assert row["mfu"] == pytest.approx(row["tok_s"] * flops / 1e9)
    assert f"{flops / 1e6:,.1f} MFLOPs/token" in capsys.readouterr().out


def test_flops(capsys):
    """2 per weight, and 4 T d for scores and values, without causal halving. Of a model that looks at its numbers there
    are none. Nothing is built or computed for them, at any size. Random numbers stay."""
    class Net(torch.nn.Module):
        def __init__(self, looks):
            super().__init__()
            self.config, self.w = looks, torch.nn.Parameter(torch.rand(4, 8))

        def forward(self, idx):
            x = idx.new_ones(1, 1, idx.size(1), 4, dtype=torch.float) @ self.w
            return self.w.max().item() if self.config else F.scaled_dot_product_attention(x, x, x, is_causal=True)

    assert flops_per_token(Net(False), 16) == 64 + 512 and not capsys.readouterr().err      # 2 x 4 x 8, and 4 x 16 x 8
    looks, state = Net(True), torch.get_rng_state()
    assert math.isnan(flops_per_token(looks, 16)) and torch.equal(torch.get_rng_state(), state)
    assert "FLOPs are not counted" in (line := capsys.readouterr().err) and "item()" in line and __name__ in line


def test_the_seed_is_of_batches_and_of_weights(data):
    ranks, folder = SimpleNamespace(rank=0, world=1, device=CPU), Data(data)
    options = [train.Options(batch_tokens=128, seq_len=16, seed=seed, compile=False) for seed in (7, 7, 8)]
    found = next(Batches(folder, options[0], ranks, torch.nn.Linear(1, 1)).train(3))
    assert all(map(torch.equal, found, folder.batch(3, 0, 8, 8, 16, 7)))
    a, b, c = (train.build_model(each, dict(SIZE), {}, folder, CPU).embed.weight for each in options)
    assert torch.equal(a, b) and not torch.equal(a, c)


def test_bits_per_byte_are_of_the_text():
    """By a loop over the targets. Those of no bytes (id 4) count for loss and ppl alone, padding (-1) for nothing."""
    torch.manual_seed(0)
    model = models.build("gpt", vocab_size=8, n_layer=1, n_head=1, d_model=16, z_loss=1.0, zero_init=False).double()
    model.eval()
    with torch.no_grad():
        model.head.weight.normal_()
    batches = [(torch.randint(5, (2, 4)), torch.tensor(rows)) for rows in (
        [[0, 1, 4, -1], [4, 2, 2, 1]], [[3, 3, 1, 0], [-1, -1, -1, -1]])]
    nats, of_text, n_bytes, widths = [], [], 0, [3, 2, 1, 1, 0, 5]
    for idx, targets in batches:
        for row, wanted in zip(model(idx)[0].log_softmax(-1), targets):
            for scores, t in zip(row, wanted[wanted >= 0]):
                nats.append(-scores[t].item())
                of_text.append(nats[-1] * (widths[t] > 0))
                n_bytes += widths[t]
    found = scoring.evaluate(model, batches, np.array(widths))
    assert found["loss"] == pytest.approx(np.mean(nats)) and found["ppl"] == pytest.approx(math.exp(np.mean(nats)))
    assert found["bpb"] == pytest.approx(sum(of_text) / math.log(2) / n_bytes)
    assert found["eval_tokens"] == len(nats) == 11 and found["eval_bytes"] == n_bytes
    unknown = scoring.evaluate(model, batches)
    assert unknown == {**found, "bpb": None, "eval_bytes": None}


def test_chips(monkeypatch):
    for chip, dtype in (({"avx512_bf16": True}, "bf16"), ({"amx_bf16": True}, "bf16"), ({"amx_bf16": False}, "fp32")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda chip=chip: chip)
        assert devices.choose_dtype(CPU, "auto") == dtype and devices.choose_dtype(CPU, "fp32") == "fp32"
    gpu = torch.device("cuda:1")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40 * 2 ** 30, 80 * 2 ** 30))
    for name, peak in (("NVIDIA H100 80GB HBM3", 989e12), ("NVIDIA H100 PCIe", 756e12), ("NVIDIA H200 NVL", None),
                       ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("Tesla T4", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert devices.peak_flops(gpu) == peak and devices.peak_flops(CPU) is None
    assert devices.in_words(gpu) == "cuda:1, Tesla T4, 40.0 of 80.0 GiB free"


def test_the_vocabulary_is_padded_unless_it_is_asked_for():
    data, options = SimpleNamespace(vocab_size=257), train.Options(seq_len=16)
    paper = {"vocab_size": 57601}
    for given, config, size in (({}, {}, 320), ({}, paper, 57664), (paper, paper, 57601)):
        model = train.build_model(options, {**config, **SIZE}, given, data, CPU)
        assert model.config.vocab_size == model.head.weight.size(0) == size


def test_the_log_is_cut_off_at_the_checkpoint(tmp_path):
    log, found = tmp_path / "log.jsonl", [{"kind": "train", "step": step} for step in (1, 2, 3)]
    log.write_text("".join(json.dumps(row) + "\n" for row in found) + '[1]\n{"kind": "tra')
    assert runs.log_rows(log, 2) == found[:2] and runs.log_rows(tmp_path / "none", 2) == []
