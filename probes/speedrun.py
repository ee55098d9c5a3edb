"""Probes of speedrun.py."""
from probes import watch


def costs(c, T):
    """Of tables with their gates, scalars and skips. A token reads a row of each table, X_0, and the skips' sources."""
    C, L, values, n_gate = c.d_model, c.n_layer, c.n_kv_head * c.d_head, 12 * c.n_kv_head
    tables, skips = (L + 1) // 2 * c.value_embed, {"none": 0, "unet": L // 2, "backout": 1}[c.skip]
    parameters = tables * (c.vocab_size * values + n_gate) + 2 * L * c.lambdas + skips
    flops = tables * (2 * n_gate + 2 * values) + 3 * L * C * c.lambdas + 2 * skips * C
    return parameters, flops, tables * values + (L - 1) * C * c.lambdas + skips * C


def neutral(model):
    """Turns off tables, X_0 and skips."""
    for name, p in model.named_parameters():
        if name in ("resid", "x0", "skips", "backout") or name.endswith("value_embed.weight"):
            p.data.fill_(1.0 if name == "resid" else 0.0)


def stats(model, idx):
    gates = [block.attn.value_gate for block in model.blocks if block.attn.value_gate is not None]
    found = {name: p.flatten().tolist() for name, p in model.named_parameters(recurse=False)}
    means = [2 * z.sigmoid().mean().item() for z in watch(model, idx, gates)]
    return {**found, "value_gate": means} if gates else found
