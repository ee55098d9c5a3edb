"""Probes of sambay.py."""
import math


def costs(c, T):
    """Counts only keys inside the window; sambay.py computes all scores and masks them."""
    d, E, N, kv = c.d_model, 2 * c.d_model, c.d_state, c.n_kv_head * c.d_head
    cross = 2 * d * d + d * {"none": 0, "elementwise": d, "headwise": c.n_head}[c.gate]
    full, gains = cross + 2 * d * kv, c.d_head * c.qk_norm
    matrices = {"mamba": 3 * d * E + 2 * E * math.ceil(d / 16) + 2 * E * N, "window": full, "full": full,
                "gmu": 2 * d * E, "cross": cross}
    vectors = {"mamba": E * (N + 7), "window": 2 * gains, "full": 2 * gains, "gmu": 0, "cross": gains}
    mixing = {"mamba": E * (7 * N + 11), "window": 4 * d * min(c.window, T), "full": 4 * d * T, "gmu": E,
              "cross": 4 * d * T}
    params = sum(matrices[mixer] + vectors[mixer] for mixer in c.mixers) - c.n_layer * (full + vectors["full"])
    flops = sum(2 * matrices[mixer] + mixing[mixer] for mixer in c.mixers) - c.n_layer * (2 * full + mixing["full"])
    return params, flops, c.mixers.count("gmu") * E
