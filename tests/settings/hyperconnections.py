"""What the generic tests run of hyperconnections.py beside its defaults."""
CASES = [
    dict(connection="static", n_streams=2), dict(tanh=False, n_streams=1),
    dict(connection="manifold", sinkhorn_steps=3), dict(connection="lite", n_streams=3),
    dict(connection="identity", n_streams=2),
]
NEUTRAL = [
    dict(connection="static", n_streams=2, norm_eps=1e-12), dict(connection="dynamic", n_streams=1, norm_eps=1e-12),
    dict(connection="dynamic", n_streams=4, norm_eps=1e-12), dict(connection="manifold", n_streams=1, norm_eps=1e-12),
    dict(connection="manifold", n_streams=3, norm_eps=1e-12), dict(connection="lite", norm_eps=1e-12),
    dict(connection="identity", n_streams=4, norm_eps=1e-12),
]
BAD = [
    dict(connection="x"), dict(n_streams=0), dict(connection="static", tanh=False), dict(sinkhorn_steps=0),
    dict(connection="lite", n_streams=7),
]
CHANGED = ("z.tanh()", "z.sin()")
