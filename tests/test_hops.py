"""results/reasoning-depth/hops.py: its documents against a walk along the arrows, its scores against known answers."""
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "results" / "reasoning-depth"))
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


def test_scores(monkeypatch):
    """A model that answers every question as if it were for one arrow: right for k = 1 only."""
    def model(idx):
        logits = torch.zeros(*idx.shape, 257)
        for b, row in enumerate(idx.tolist()):
            to = dict(zip(row[1:1 + 2 * hops.NODES:2], row[2:2 + 2 * hops.NODES:2]))
            for t, token in enumerate(row):
                logits[b, t, to.get(token, 0)] = 1.0
        return logits, None

    monkeypatch.setattr(hops.runs, "load", lambda run, device: (model, {"options": {"dtype": "fp32"}}))
    assert hops.score("anything", 40) == [100.0] + [0.0] * (hops.HOPS - 1)


def test_only_first_questions_count(monkeypatch):
    """A model that copies the answer of an equal question before, and else knows nothing."""
    def model(idx):
        logits = torch.zeros(*idx.shape, 257)
        for b, row in enumerate(idx.tolist()):
            at = range(1 + 2 * hops.NODES, len(row) - 1, 3)
            known = {}
            for t in at:
                logits[b, t + 1, known.get((row[t], row[t + 1]), 256)] = 1.0
                if t + 2 < len(row):
                    known[row[t], row[t + 1]] = row[t + 2]
        return logits, None

    monkeypatch.setattr(hops.runs, "load", lambda run, device: (model, {"options": {"dtype": "fp32"}}))
    assert hops.score("anything", 40) == [0.0] * hops.HOPS


def test_table():
    lines = [{"system": s, "seed": i, "k=1": 99.0 + i, "k=2": 20.0, "loss": 1.0 + i} for s in "ab" for i in (0, 1)]
    rows = hops.table(lines).splitlines()
    assert rows[2] == "| `a` | 2 | 99.5 (99, 100) | 20.0 (20, 20) | 1.500 |" and len(rows) == 4
