"""results/value-gates/features.py: classes of tokens, gates and features against loops, a dictionary that is known."""
import pytest
import torch
from analysis import double, random_model, tokens  # noqa: F401

import models
import probes

features = pytest.importorskip("features")       # a copy of the repository may be without results/
GATED = [name for name in models.names() if hasattr(probes.find(name), "value_gates")]
WORDS = {"semantic": [b"the", b" Paris", b"ing", b"x1", b"'s", "caf\u00e9".encode()],
         "functional": [b"7", b" 1984", "\u00e9".encode(), b"\xe2\x80", b" \xd0", "\u4e2d".encode()],
         "structural": [b" ", b"\n\n", b"(", b' "', b"==", "\u2013".encode(), b"\x00"]}


def test_classes_of_tokens():
    assert {kind: {features.class_of(token) for token in words} for kind, words in WORDS.items()} == {
        kind: {kind} for kind in WORDS}


@pytest.mark.parametrize("name", GATED)
def test_gates_by_token(name):
    model = random_model(name)
    batches = [tokens(seed=seed)[0] for seed in range(3)]
    gates = list(features.value_gates(model).values())
    count, gate = features.gates_by_token(model, gates, batches, 97)
    for layer, module in enumerate(gates):
        seen = [[] for _ in range(97)]
        for idx in batches:
            alpha = features.watch(model, idx, [module])[0].detach().mean(-1)
            for token, x in zip(idx.flatten().tolist(), alpha.flatten().tolist()):
                seen[token].append(x)
        assert count.tolist() == list(map(len, seen))
        assert gate[layer].tolist() == pytest.approx([sum(x) / max(1, len(x)) for x in seen])


def test_first_values_are_those_of_the_tokens():
    """What sees other tokens is refused."""
    model, idx = random_model("gpt"), tokens()[0]
    table = features.first_values(model, 97)
    v = features.watch(model, idx, [model.blocks[0].attn.wv])[0]
    assert torch.allclose(table[idx], v, rtol=0, atol=1e-12)
    model.blocks[0].attn_norm.register_forward_hook(lambda m, inputs, y: y + y.mean(1, keepdim=True))
    with pytest.raises(SystemExit, match="more than the token"):
        features.first_values(model, 97)


def test_the_autoencoder_finds_sums_of_two():
    """Values made of two of 24 directions: two active features explain more of them than one."""
    g = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(24, 16, generator=g), dim=1)
    v = torch.stack([directions[a] + directions[b] for a in range(24) for b in range(a)])
    count = torch.arange(1.0, len(v) + 1)
    a, explained = features.fit(v, count, 2, 800, batch=256)
    assert a.shape == (len(v), 256) and ((a > 0).sum(1) <= 2).all() and explained > 0.75
    assert features.fit(v, count, 1, 800, batch=256)[1] < explained - 0.05


def test_classes_of_features():
    """12 tokens, 3,000 times; the class of a feature by its strongest ten, and none if it is too rare or too dense."""
    kinds = torch.tensor([0] * 6 + [1] * 6)
    count = torch.tensor([1.0] * 11 + [2989])
    a = torch.zeros(12, 3)
    a[:11, 0] = torch.tensor([9, 9, 9, 9, 9, 9, 8, 8, 0.5, 0.1, 0.1])        # six of ten: no class
    a[6:11, 1] = 1.0                                                         # five times: too rare
    a[11, 2] = 1.0                                                           # too dense
    assert features.classified(a, count, kinds).tolist() == [-1] * 3
    count[:11] = 2.0
    assert features.classified(a, count, kinds).tolist() == [-1, 1, -1]


def test_means_by_class():
    gate = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])                  # two layers, three tokens
    weights = torch.tensor([[1.0, 0.0, 5.0], [3.0, 0.0, 5.0], [0.0, 2.0, 0.0]])
    found = features.by_class(gate, weights, torch.tensor([0, 0, -1]))
    assert found == {"semantic": [pytest.approx((0.75 + 2.0) / 2), pytest.approx((0.75 + 0.0) / 2)]}
