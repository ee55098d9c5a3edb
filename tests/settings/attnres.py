"""What the generic tests run of attnres.py beside its defaults."""
CASES = [
    dict(block_size=2), dict(block_size=4, key_norm=False), dict(block_size=6),
    dict(additive=True, gate="headwise"),
]
NEUTRAL = [
    dict(block_size=1, norm_eps=1e-12), dict(block_size=2, norm_eps=1e-12), dict(block_size=4, norm_eps=1e-12),
    dict(block_size=6, norm_eps=1e-12), dict(additive=True, norm_eps=1e-12),
]
BAD = [
    dict(block_size=0), dict(block_size=7), dict(block_size=2, additive=True),
]
CHANGED = ("torch.stack(scores, dim=-1).softmax(-1)", "torch.stack(scores, dim=-1).mul(2).softmax(-1)")
