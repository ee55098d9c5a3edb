"""attnres.py and attnres_block.py (arXiv:2603.15031), mhar.py (arXiv:2607.27230) and attnres_delta.py
(arXiv:2605.18855) against their papers' equations in float64.
"""
import torch
from reference import GATED, add, equations, float64, heads, rms, setup, softmax, sublayer  # noqa: F401
from small import combined


def read(p, c, l, sources):
    """h_l[i] = sum_s softmax_s( w_l[i] . RN(v_s)[i] ) v_s[i] at every position, for the slices i of vectors; one slice
    unless there are heads. Reader 0 has one source and no query.
    """
    if l == 0:
        return sources[0]
    n, out = getattr(c, "n_depth_head", 1), []
    w = heads(p["depth_attention.query"][l - 1], n)
    for t in range(len(sources[0])):
        keys, values = [heads(rms(v[t], c), n) for v in sources], [heads(v[t], n) for v in sources]
        slices = []
        for i in range(n):
            alpha = softmax([torch.dot(w[i], key[i]) for key in keys])
            slices.append(sum(a * value[i] for a, value in zip(alpha, values)))
        out.append(torch.cat(slices))
    return out


def attnres(p, c, x):
    """Sources: the embedding, the sums of the finished blocks, the running sum of the own block unless it is empty."""
    finished, running = [x], []
    for l in range(2 * c.n_layer):
        v = sublayer(p, c, l + 1, read(p, c, l, finished + running))
        running = [add(running[0], v) if running else v]
        if (l + 1) % getattr(c, "block_size", 1) == 0:
            finished, running = finished + running, []
    return read(p, c, 2 * c.n_layer, finished + running)


def delta(p, c, x):
    """An ordinary residual stream; a sublayer reads it plus what it attends to."""
    stream, v = x, [x]
    for l in range(2 * c.n_layer):
        v.append(sublayer(p, c, l + 1, add(stream, read(p, c, l, v)) if l else stream))
        stream = add(stream, v[-1])
    return stream


test_equations = equations(attnres, "attnres", [*GATED, dict(n_layer=1)])
# of 6 sublayers: blocks of one are the full form, blocks of 4 leave one unfinished, blocks of 7 are one
test_equations_of_blocks = equations(attnres, "attnres_block", [dict(block_size=n) for n in (1, 3, 4, 7)] + GATED[1:],
                                     block_size=4)
test_equations_of_heads = equations(attnres, "mhar", [dict(n_depth_head=n) for n in (1, 2)] + GATED
                                    + [dict(n_depth_head=32)], n_depth_head=8)
# sublayer 0 reads v_0 in the loops, as in the official code, and 2 v_0 in ours: the same but for norm_eps
test_equations_of_delta = equations(delta, "attnres_delta", [*GATED, dict(n_layer=1)], norm_eps=1e-16)


def test_with_hyper_connections_as_docs_combine_them():
    """One stream that keeps all, is read and written to is the residual sum: attnres_delta."""
    model, _, c, idx, _ = setup("attnres_delta", norm_eps=1e-12)
    mine = combined("Hyper-connections with")
    both = mine.Model(mine.Config(**vars(c), dynamic=False, n_streams=1)).double()
    query = model.depth_attention.query                     # of sublayers 1 .. 2L-1; sublayer 0 has one source
    own = {key: x for key, x in model.state_dict().items() if "depth_attention" not in key}
    with torch.no_grad():
        missing = both.load_state_dict(own, strict=False).missing_keys
        assert {key.split(".")[-1] for key in missing} == {"query", "static"}
        both.blocks[0].query[1] = query[0]
        for block, rows in zip(both.blocks[1:], query[1:].split(2)):
            block.query.copy_(rows)
    assert torch.allclose(both(idx)[0], model(idx)[0], rtol=0, atol=1e-9)
