from settings import filled
from torch import nn

CASES = [dict(n_sim=2, d_sim=8, kernel=1, n_kv_head=4, gate="headwise"),
         dict(n_sim=1, d_sim=14, n_kv_head=4, qk_norm=False)]
NEUTRAL = [dict(d_sim=8), dict(n_sim=2, d_sim=8, kernel=5, gate="headwise"),
           dict(n_sim=3, d_sim=8, n_kv_head=4, qk_norm=False)]
BAD = [dict(n_sim=0), dict(d_sim=6), dict(d_sim=9), dict(kernel=4), dict(kernel=-1)]
MUON = {f"blocks.attn.sim_{s}.1.{part}.weight" for s in "qk" for part in ("expand", "refine")}
MIXES = {f"blocks.attn.sim_{s}.{part}.{kind}" for s in ("q.0", "k.0", "v") for part in ("expand", "refine")
         for kind in ("weight", "bias")}


def neutral(model):
    filled(refine=0.0, expand=0.0)(model)
    for name, p in model.named_parameters():
        if name.endswith("expand.weight"):
            nn.init.eye_(p) if p.ndim == 2 else nn.init.dirac_(p, groups=model.config.n_sim)
