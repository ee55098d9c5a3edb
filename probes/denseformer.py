"""Probes of denseformer.py."""


def stats(model, idx):
    alphas = [average.alpha for average in model.average.values()]
    return {"on_last": [a[-1].item() for a in alphas],                          # weight of X_i; 1 at the start
            "on_earlier": [a[:-1].abs().sum().item() for a in alphas]}
