"""denseformer.py against its paper's equations in float64, arXiv:2402.02622."""
from reference import add, equations, float64, sublayer  # noqa: F401  (float64: autouse)


def denseformer(p, c, x):
    """X_i = block_i(Y_{i-1}); every period-th Y_i is a sum over the X_j with j = i modulo dilation."""
    X, Y = [x], x
    for i in range(1, c.n_layer + 1):
        H = add(Y, sublayer(p, c, 2 * i - 1, Y))
        X.append(add(H, sublayer(p, c, 2 * i, H)))
        Y = X[i]
        if i % c.period == 0:
            alpha, sources = p[f"average.{i}.alpha"], [j for j in range(i + 1) if j % c.dilation == i % c.dilation]
            assert len(alpha) == len(sources)
            Y = [sum(alpha[m] * X[j][t] for m, j in enumerate(sources)) for t in range(len(x))]
    return Y


# with period=2 and 5 layers the head reads the last output itself
test_equations = equations(denseformer, "denseformer", [
    dict(), dict(tie_embeddings=True, qk_norm=False, z_loss=0.0), dict(n_kv_head=4, gate="elementwise"),
    dict(dilation=3), dict(period=2, n_layer=5), dict(dilation=2, period=3, n_layer=7)], dilation=1, period=1)
