"""attnres.py against its paper's equations in float64, arXiv:2603.15031."""
import pytest
import torch
from reference import GATED, compare, float64, rms, setup, show, softmax, sublayer  # noqa: F401  (float64: autouse)


def read(p, c, l, sources):
    """h_l = sum_s softmax_s( w_l . RN(v_s) ) v_s at every position; reader 0 has one source and no query."""
    if l == 0:
        return sources[0]
    w, out = p["depth_attention.query"][l - 1], []
    for t in range(len(sources[0])):
        alpha = softmax([torch.dot(w, rms(v[t], c)) for v in sources])
        out.append(sum(a * v[t] for a, v in zip(alpha, sources)))
    return out


def attnres(p, c, x, read=read):
    v = [x]
    for l in range(2 * c.n_layer):
        v.append(sublayer(p, c, l + 1, read(p, c, l, v)))
    return read(p, c, 2 * c.n_layer, v)


@pytest.mark.parametrize("options", [*GATED, dict(n_layer=1)], ids=show)
def test_equations(options):
    compare(attnres, *setup("attnres", **options))
