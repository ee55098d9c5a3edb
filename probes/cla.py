"""What cla.py saves, and when it is gpt.py."""


def costs(c, T):
    """wk, wv and the gains of k_norm of the layers without keys and values are saved; nothing more is read."""
    n = sum(max(0, layer - c.own) % c.share > 0 for layer in range(c.n_layer))
    matrices = 2 * n * c.d_model * c.n_kv_head * c.d_head
    return -matrices - n * c.qk_norm * c.d_head, -2 * matrices, 0


def neutral(model):
    """Nothing to set. ValueError for settings that are never the baseline's."""
    if model.config.share > 1:
        raise ValueError("layers without keys and values are no layers of gpt.py")
