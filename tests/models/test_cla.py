"""cla.py against its equations in float64, arXiv:2405.12981, and the size of its cache."""
import pytest
from reference import add, attend, equations, float64, mlp_sublayer, norm, project, queries  # noqa: F401

import models


def cla(p, c, x):
    made = {}                                   # the streams of the layers with keys and values
    for n in range(c.n_layer):
        at, m = f"blocks.{n}", n
        while m > c.own and (m - c.own) % c.share:
            m -= 1
        a = [norm(p, f"{at}.attn_norm", u, c) for u in x]
        if m == n:
            made[n] = project(p, c, at, a)
        x = add(x, attend(p, c, at, {**made[m], **queries(p, c, at, a)}, of=f"blocks.{m}"))
        x = add(x, mlp_sublayer(p, c, at, x))
    return x


test_equations = equations(cla, "cla", [
    dict(), dict(n_layer=5, own=1), dict(n_layer=5, share=4, n_kv_head=1, gate="headwise"),
    dict(n_layer=2, qk_norm=False, gate="elementwise"), dict(share=3, n_kv_head=4, tie_embeddings=True)],
    share=2, own=0)


@pytest.mark.parametrize("L, options, makers", [
    (4, dict(), [0, 2]), (12, dict(share=12), [0]), (5, dict(own=1), [0, 1, 3]),
    (20, dict(own=1), [0, *range(1, 20, 2)]), (20, dict(own=9, share=10), [*range(10), 19])])
def test_the_cache(L, options, makers):
    """Layers that only read have no keys and values in the cache.

    The last two are CLA2-KeepEnds and CLA2-DenseFront of the paper's table 1, with 11 such layers of 20.
    """
    model = models.build("cla", vocab_size=31, n_layer=L, n_head=4, n_kv_head=2, d_model=32, **options)
    cache = models.module("cla").Cache(model, 3, 50)
    assert sorted(cache.k) == sorted(cache.v) == makers
    assert all(t.shape == (3, 2, 50, 8) for held in (cache.k, cache.v) for t in held.values())
