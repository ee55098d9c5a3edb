"""results/reasoning-depth/hops.py: its documents against a walk along the arrows, its scores against known answers."""
import numpy as np
import pytest
import torch

hops = pytest.importorskip("hops")               # a copy of the repository may be without results/


def test_documents():
    rng = np.random.default_rng(0)
    for _ in range(20):
        eot, *tokens = hops.document(rng).tolist()
        arrows, questions = tokens[:2 * hops.NODES], tokens[2 * hops.NODES:]
        to = dict(zip(arrows[::2], arrows[1::2]))
        assert eot == 256 and len(to) == hops.NODES and set(to) == set(to.values()) and max(to) < 128
        for k, node, answer in zip(questions[::3], questions[1::3], questions[2::3], strict=True):
            assert 1 <= k - 128 <= hops.HOPS
            for _ in range(k - 128):
                node = to[node]
            assert node == answer
    assert len(questions) == 3 * hops.QUESTIONS


def one_arrow(row, t):
    """Answers every question as if it were for one arrow."""
    return dict(zip(row[1:1 + 2 * hops.NODES:2], row[2:2 + 2 * hops.NODES:2])).get(row[t], 0)


def copies(row, t):
    """Knows only the answers of equal questions before."""
    questions = range(1 + 2 * hops.NODES, t - 1, 3)
    return next((row[at + 2] for at in questions if row[at:at + 2] == row[t - 1:t + 1]), 256)


@pytest.mark.parametrize("answer, right", [(one_arrow, 100.0), (copies, 0.0)])
def test_scores(answer, right, monkeypatch):
    """Of models that are right for k = 1 alone, or for all questions but the first of each k."""
    def model(idx):
        logits = torch.zeros(*idx.shape, 257)
        for b, row in enumerate(idx.tolist()):
            for t in range(len(row)):
                logits[b, t, answer(row, t)] = 1.0
        return logits, None

    monkeypatch.setattr(hops.runs, "load", lambda run, device: (model, {"options": {"dtype": "fp32"}}))
    assert hops.score("anything", 40) == [right] + [0.0] * (hops.HOPS - 1)


def test_table():
    lines = [{"system": s, "seed": i, "k=1": 99.0 + i, "k=2": 20.0, "loss": 1.0 + i} for s in "ab" for i in (0, 1)]
    rows = hops.table(lines).splitlines()
    assert rows[2] == "| `a` | 2 | 99.5 (99, 100) | 20.0 (20, 20) | 1.500 |" and len(rows) == 4
