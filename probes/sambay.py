"""What to watch in a trained sambay.py."""
import torch
import torch.nn.functional as F

from nanodepth.record import watch


def stats(model, idx):
    """What the mechanism does on idx (B, T), for the log: {name: [a number per layer]}."""
    mixers = [(block.attn, kind) for block, kind in zip(model.blocks, model.config.mixers)]
    mambas = [layer for layer, kind in mixers if kind == "mamba"]
    gmus = [layer for layer, kind in mixers if kind == "gmu"]
    raw = watch(model, idx, [layer.w_dt for layer in mambas] + [layer.w_gate for layer in gmus])
    steps = [F.softplus(dt + layer.dt_bias).mean().item() for dt, layer in zip(raw, mambas)]
    gate = F.silu if model.config.gmu == "silu" else torch.sigmoid
    gates = [gate(g).abs().mean().item() for g in raw[len(mambas):]]
    return {"dt": steps, "memory_gate": gates} if gates else {"dt": steps}
