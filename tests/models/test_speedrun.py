"""speedrun.py against its equations in float64, one token's vector at a time."""
import torch
from reference import (  # noqa: F401  (float64: autouse)
    add, attend, equations, float64, heads, mlp_sublayer, norm, project, sigmoid)

import models


def speedrun(p, c, x):
    """The blocks with a table are L, L - 2, L - 4, .."""
    X, last = [x], c.n_layer
    ids = [next(i for i, e in enumerate(p["embed.weight"]) if torch.equal(e, u)) for u in x]    # the tokens
    for i in range(1, last + 1):
        at, opposite = f"blocks.{i - 1}", last + 1 - i
        if c.skip == "unet" and opposite < i:                       # the blocks above the middle, upwards
            weight = p["skips"][[j for j in range(1, last + 1) if last + 1 - j < j].index(i)]
            x = [u + weight * v for u, v in zip(x, X[opposite])]
        if c.lambdas:
            x = [p["resid"][i - 1] * u + p["x0"][i - 1] * e for u, e in zip(x, X[0])]
        a = [norm(p, f"{at}.attn_norm", u, c) for u in x]
        S = project(p, c, at, a)
        if c.value_embed and i in range(last, 0, -2):
            for t, token in enumerate(ids):
                own = heads(p[f"{at}.attn.value_embed.weight"][token], c.n_kv_head)
                for h in range(c.n_kv_head):
                    z = sum(w * y for w, y in zip(p[f"{at}.attn.value_gate.weight"][h], a[t][:12]))
                    S["v"][t][h] = S["v"][t][h] + 2 * sigmoid(z) * own[h]
        x = add(x, attend(p, c, at, S))
        x = add(x, mlp_sublayer(p, c, at, x))
        X.append(x)
    return [u - p["backout"] * v for u, v in zip(x, X[last // 2 + 1])] if c.skip == "backout" else x


test_equations = equations(speedrun, "speedrun", [
    dict(), dict(n_layer=5, skip="backout", n_kv_head=4), dict(value_embed=False, lambdas=False, n_layer=4),
    dict(lambdas=False, skip="none", gate="elementwise"), dict(n_layer=2, qk_norm=False, gate="headwise"),
    dict(tie_embeddings=True, skip="backout"), dict(d_model=12, n_head=2, n_kv_head=1)],
    value_embed=True, lambdas=True, skip="unet")


def test_initial_values():
    """Gates are 1, and the residual stream is gpt.py's but for the skips; tables start as wv does."""
    torch.manual_seed(0)
    model = models.build("speedrun", vocab_size=256, n_layer=4, n_head=4, d_model=64)
    assert model.resid.tolist() == [1.0] * 4 and model.x0.tolist() == [0.0] * 4 and model.skips.tolist() == [1.0] * 2
    assert models.build("speedrun", n_layer=3, n_head=2, d_model=16, vocab_size=9, skip="backout").backout == 0.2
    attn = model.blocks[1].attn
    assert (attn.value_gate.weight == 0).all() and attn.value_gate.weight.shape == (4, 12)
    assert abs(attn.value_embed.weight.std() / attn.wv.weight.std() - 1) < 0.05
