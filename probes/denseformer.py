"""Probes of denseformer.py."""


def costs(c, T):
    """A parameter, a product and a sum per source of each Y_i; all sources except X_i are read once more."""
    earlier = [i // c.dilation for i in range(c.period, c.n_layer + 1, c.period)]   # sources of Y_i beside X_i
    n = sum(earlier) + len(earlier)
    return n, 2 * n * c.d_model, sum(earlier) * c.d_model


def neutral(model):
    """Nothing to set."""


def stats(model, idx):
    alphas = [average.alpha for average in model.average.values()]
    return {"on_last": [a[-1].item() for a in alphas],                          # weight of X_i; 1 at the start
            "on_earlier": [a[:-1].abs().sum().item() for a in alphas]}
