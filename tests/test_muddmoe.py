"""muddmoe.py against loops in float64: arXiv:2502.12170, sections 2 and 3.2; it starts as kern.py."""
import pytest
import torch
from measure import dtypes_read, extra
from reference import (  # noqa: F401  (float64: autouse)
    add, attend, count, float64, norm, own_groups, project, reference_logits, reference_loss, setup, show,
)
from test_kern import balance, mixture
from test_muddpythia import aggregates

import models
from nanodepth.presets import PRESETS


def muddmoe(p, c, x, routed):
    """H = X^R + attn(X^Q, X^K, X^V), X_i = H + moe(H); `routed` gets per sequence and layer a list of (r, chosen)."""
    X, streams = [x], [x] * 4
    for i in range(1, c.n_layer + 1):
        at = f"blocks.{i - 1}"
        names = "q_in_norm", "k_in_norm", "v_in_norm"
        inputs = [[norm(p, f"{at}.{name}", u, c) for u in part] for name, part in zip(names, streams)]
        H = add(streams[3], attend(p, c, at, project(p, c, at, *inputs)))
        routed.append([])
        X.append(add(H, [mixture(p, c, f"{at}.mlp", norm(p, f"{at}.mlp_norm", u, c), routed[-1]) for u in H]))
        streams = aggregates(p, c, i, X)
    return streams[-1]


OWN = dict(d_ff=48, n_layer=3, router="softmax", n_expert=5, top_k=2, balance_loss=0.7)


@pytest.mark.parametrize("options", [
    dict(), dict(router="kern"), dict(gate="elementwise", tie_embeddings=True), dict(gate="headwise", n_kv_head=4),
    dict(n_layer=1, top_k=1)], ids=show)
def test_equations(options):
    """Logits, loss and the gradient of every parameter; in evaluation the loss has no balance loss."""
    model, p, c, idx, targets = setup("muddmoe", **{**OWN, **options})
    routed = []
    expected = reference_logits(lambda p, c, x: muddmoe(p, c, x, routed), p, c, idx)
    wanted = reference_loss(expected, targets, c.z_loss) + c.balance_loss * balance(routed)
    wanted.backward()
    logits, loss = model(idx, targets)
    loss.backward()
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-10)
    for key, q in model.named_parameters():
        torch.testing.assert_close(q.grad, p[key].grad, rtol=0, atol=1e-9,
                                   msg=lambda m, key=key: f"gradient of {key}: {m}")
        assert q.grad.abs().max() > 0, key
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(idx, targets)[1], reference_loss(expected, targets, 0.0), rtol=0,
                                   atol=1e-10)


def test_sizes_of_the_paper():
    """1.8B parameters, of which a token uses as many as the dense 405M has, and the router and connections."""
    size = {key: PRESETS["mudd-405m"][key] for key in ("n_layer", "d_model", "n_head", "d_ff", "vocab_size")}
    moe, dense = count("muddmoe", **size), count("gpt", **size)
    L, d = size["n_layer"], size["d_model"]
    sizes = [(4 * S if S <= L else S, 64 * (4 * S // 64 + 1)) for S in range(2, L + 2)]
    connections = sum(h * (d + k) + k for k, h in sizes) + 2 * d * L
    assert moe == dense + connections + L * (16 * d + 14 * 3 * d * 1408) and 1.8e9 < moe < 1.9e9


def test_initial_generators():
    model = models.build("muddmoe", vocab_size=31, n_layer=3, n_head=4, d_model=256, d_ff=64)
    assert abs(model.aggregate[1].w1.weight.std() * 16 - 1) < 0.1


def test_costs():
    """Beside kern.py: the counter sees matrix products only, the sums over depth are 2 FLOPs per weight and channel."""
    (parameters, flops, read), counted = extra("muddmoe")
    assert (parameters, flops - 2 * 64 * (8 + 12 + 16 + 5)) == counted and read == 64 * (1 + 2 + 3 + 4)


def test_states_are_bf16_under_autocast():
    assert dtypes_read("muddmoe") == {torch.bfloat16}


def test_groups():
    muon, adamw = own_groups(setup("muddmoe", **OWN)[0])
    assert muon == {f"blocks.mlp.experts.{key}.weight" for key in ("w_gate", "w_up", "w_down")}
    mixing = {f"aggregate.{key}" for key in ("a", "w1.weight", "w2.weight")}
    assert adamw == {"blocks.mlp.router.weight", *mixing}
