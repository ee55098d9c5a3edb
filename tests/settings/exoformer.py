"""What the generic tests run of exoformer.py beside its defaults."""
CASES = [
    dict(anchor="first_layer", granularity="headwise"), dict(mixing="dynamic"),
    dict(mixing="dynamic", anchor="first_layer", granularity="scalar", mix_streams="vg", norm_streams="none"),
    dict(gate="none", mix_streams="qkv", norm_streams="qk"),
]
NEUTRAL = [
    dict(), dict(mixing="dynamic", granularity="headwise"), dict(anchor="first_layer", granularity="scalar"),
    dict(gate="none", mix_streams="qkv"),
]
BAD = [
    dict(gate="headwise"), dict(gate="none"), dict(mix_streams="qq"), dict(mix_streams="qk", norm_streams="v"),
    dict(anchor="first_layer", n_layer=1),
]
CHANGED = ("self.lambda_anchor[s]", "self.lambda_anchor[s].tanh()")
