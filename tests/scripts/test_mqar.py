"""Associative recall (mqar): its data, and the scores of models whose answers are known."""
import math

import numpy as np
import pytest
import torch

import data_prep
import models
from nanodepth import harness, runs
from nanodepth.data import Data
from test_eval import save_run


def test_mqar_examples():
    rng = np.random.default_rng(0)
    for n in (4, 32):
        tokens = harness.mqar_example(rng, n, 256).tolist()
        first, second = (list(zip(half[::2], half[1::2])) for half in (tokens[1:1 + 2 * n], tokens[1 + 2 * n:]))
        assert tokens[0] == 256 and len(first) == len(second) == n
        assert sorted(first) == sorted(second) and first != second
        assert len({key for key, _ in first}) == n and all(key < 128 <= value < 256 for key, value in first)


class Recaller(torch.nn.Module):
    """Predicts after each token what followed it before: the oracle of associative recall."""

    def __init__(self, wrong=False):
        super().__init__()
        self.config, self.wrong = models.module("gpt").Config(257, max_len=128), wrong

    def forward(self, idx):
        logits = torch.zeros(*idx.shape, 257)
        for b, row in enumerate(idx.tolist()):
            seen = {}
            for t, token in enumerate(row):
                if token in seen and not (self.wrong and token % 2):                  # wrong: of odd keys
                    logits[b, t, seen[token]] = 1.0
                if t + 1 < len(row) and token not in seen:
                    seen[token] = row[t + 1]
        return logits, None


def test_mqar_scores(tmp_path, monkeypatch):
    config = {"tokenizer": "byte", "options": {"dtype": "fp32"}}
    monkeypatch.setattr(runs, "load", lambda run, device: (Recaller(), config))
    assert harness.mqar(tmp_path, "cpu", n_examples=40) == {
        f"MQAR {n}": {"value": 100.0, "stderr": 0.0} for n in (4, 8, 16)}
    monkeypatch.setattr(runs, "load", lambda run, device: (Recaller(wrong=True), config))
    value, error = harness.mqar(tmp_path, "cpu", n_examples=40)["MQAR 4"].values()
    rng = np.random.default_rng((1, 4))
    hits = [np.mean(harness.mqar_example(rng, 4, 256)[9::2] % 2 == 0) for _ in range(40)]     # even keys
    assert value == pytest.approx(100 * np.mean(hits))
    assert error == pytest.approx(100 * np.std(hits, ddof=1) / math.sqrt(40))


def test_mqar_needs_ids(tmp_path):
    with pytest.raises(ValueError, match="has 256 token ids, mqar needs 257"):
        harness.mqar(save_run(tmp_path / "run", "gpt", vocab_size=256), "cpu")


def test_mqar_data(tmp_path):
    meta = data_prep.prepare_mqar(tmp_path / "mqar", n_tokens=20_000)
    data = Data(tmp_path / "mqar")
    tokens = np.concatenate(data.shards["train"]).astype(int)
    starts = np.flatnonzero(tokens == 256)
    assert tokens[0] == 256 and len(starts) == meta["splits"]["train"]["documents"] and data.vocab_size == 257
    assert set(np.diff(starts)) == {33, 65, 129}                            # 1 + 2 n (1 + 3)
    assert data.n_train == meta["splits"]["train"]["tokens"] >= 20_000 > data.n_val >= 500
    for split, seed in (("train", 0), ("val", 1)):                          # results/eval.md was measured on these
        rng, made = np.random.default_rng((0, seed)), np.concatenate(data.shards[split])
        expected = [harness.mqar_example(rng, rng.choice((4, 8, 16)), 256, n_asked=3) for _ in range(5)]
        assert made[:sum(map(len, expected))].tolist() == np.concatenate(expected).tolist()
