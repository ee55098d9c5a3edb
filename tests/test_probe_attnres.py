"""probes of attnres.py, attnres_block.py, attnres_delta.py and mhar.py against what the models read."""
import math
from itertools import product

import pytest
import torch
from analysis import average, double, numbers, passed, random_model, tokens  # noqa: F401

import probes


def test_what_several_heads_read_is_no_sum_of_outputs():
    assert numbers(random_model("mhar"))["depth"] == {}


@pytest.mark.parametrize("name, options", [("attnres", {}), ("attnres_block", dict(block_size=4)),
                                           ("attnres_delta", {}), ("mhar", dict(n_depth_head=2))], ids=str)
def test_stats_against_loops(name, options):
    """Of each head, where there are several, its weights make its slice of what the reader reads."""
    model = random_model(name, **options)
    found, queries = probes.stats(name, model, tokens()[0]), model.depth_attention.query
    outputs, n, size = passed(model).outputs, options.get("n_depth_head", 1), options.get("block_size", 1)
    assert len(found["entropy"]) == len(found["newest"]) == len(queries) == (5 if name == "attnres_delta" else 6)
    for l, w in enumerate(queries, start=1):
        sources = [outputs[0], *(sum(outputs[s:min(s + size, l + 1)]) for s in range(1, l + 1, size))]
        entropies, newest = [], []
        for b, t, i in product(range(2), range(12), range(n)):
            part = slice(i * 32 // n, (i + 1) * 32 // n)
            scores = [torch.dot(w[part], (v[b, t] / v[b, t].square().mean().sqrt())[part]).item() for v in sources]
            row = [math.exp(x) / sum(map(math.exp, scores)) for x in scores]
            entropies.append(-sum(a * math.log(a) for a in row))
            newest.append(row[-1])
        assert found["entropy"][l - 1] == pytest.approx(average(entropies), rel=1e-4)
        assert found["newest"][l - 1] == pytest.approx(average(newest), rel=1e-4)
