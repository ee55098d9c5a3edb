"""Probes of cla.py."""


def costs(c, T):
    """Layers without keys and values save wk, wv and the gains of k_norm; nothing more is read."""
    n = sum(max(0, layer - c.own) % c.share > 0 for layer in range(c.n_layer))
    matrices = 2 * n * c.d_model * c.n_kv_head * c.d_head
    return -matrices - n * c.qk_norm * c.d_head, -2 * matrices, 0


def neutral(model):
    """Nothing to set. ValueError for options with which it never equals the baseline."""
    if model.config.share > 1:
        raise ValueError("gpt.py has no layers without keys and values")
