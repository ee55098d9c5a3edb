"""Presets: named groups of options for train.py and bench.py, for shape and recipe. All other options keep defaults.

A field that the chosen model lacks is skipped; flags override. vocab_size is the paper's; data with more ids raise it.
Sources: EXO arXiv:2601.08131 and its training script, SAT arXiv:2605.03953 and its configs, MUDD arXiv:2502.12170.
"""
from nanodepth.cli import UserError

FINEWEB = dict(data="fineweb-edu", weight_decay=0.1, eval_tokens=10_485_760)
EXO = dict(FINEWEB, vocab_size=57601, rope_theta=5e5, z_loss=1e-5, gate="elementwise", seq_len=2048, max_len=2048,
           batch_tokens=262144, optimizer="muon", second_moment=0.95, schedule="wsd", warmup_steps=1000, decay_frac=0.2,
           eval_every=1000, final_eval_tokens=100_000_000)
PLAIN = dict(FINEWEB, zero_init=False, batch_tokens=524288, optimizer="adamw", schedule="cosine", eval_every=500)
SAT = dict(PLAIN, vocab_size=32000, tie_embeddings=True, seq_len=4096, max_len=4096)
MUDD = dict(PLAIN, vocab_size=50432, qk_norm=False, seq_len=2048, max_len=2048)
PRESETS = {
    "tiny": dict(
        n_layer=8, d_model=128, n_head=4, max_len=1024, data="stdlib", seq_len=256, batch_tokens=2048, max_steps=400,
        warmup_steps=20, muon_lr=0.007, adamw_lr=0.004, eval_every=50, eval_tokens=32768, final_eval_tokens=131072),
    "study": dict(                                                  # the setting of results/study-cpu, at gpt's rates
        n_layer=12, d_model=128, n_head=4, max_len=256, data="stdlib", seq_len=256, batch_tokens=4096, max_steps=1000,
        warmup_steps=30, muon_lr=0.007, adamw_lr=0.024, mix_lr=0.002, eval_every=250, eval_tokens=131072,
        save_every=100),
    "study-30m": dict(                                              # larger, for a GPU (results/gpu)
        FINEWEB, n_layer=12, d_model=448, n_head=7, max_len=1024, seq_len=1024, batch_tokens=98304, max_steps=1000,
        warmup_steps=60, muon_lr=0.007, adamw_lr=0.024, mix_lr=0.002, eval_every=100, eval_tokens=393216,
        save_every=200),
    "gpt2-124m": dict(
        FINEWEB, n_layer=12, d_model=768, n_head=12, d_ff=2048, vocab_size=50304, tie_embeddings=True, max_len=1024,
        seq_len=1024, batch_tokens=524288, max_steps=19073, warmup_steps=250, eval_every=250),
    "exo-450m": dict(
        EXO, n_layer=29, d_model=1024, n_head=16, d_ff=2048, muon_lr=1e-2, adamw_lr=3e-3, max_steps=38147),
    "exo-1b": dict(
        EXO, n_layer=32, d_model=1536, n_head=16, d_ff=3072, muon_lr=3e-3, adamw_lr=1e-3, max_steps=76293),
    "sat-130m": dict(
        SAT, n_layer=11, d_model=768, n_head=12, d_ff=3072, adamw_lr=2e-3, max_steps=9537, warmup_steps=96),
    "sat-340m": dict(
        SAT, n_layer=18, d_model=1024, n_head=16, d_ff=4096, adamw_lr=1.5e-3, max_steps=19074, warmup_steps=191),
    "sat-760m": dict(
        SAT, n_layer=19, d_model=1536, n_head=24, d_ff=6144, adamw_lr=1e-3, max_steps=38147, warmup_steps=382),
    "sat-757m-thin": dict(                                              # table 6, without a rate: we take sat-760m's
        SAT, n_layer=24, d_model=1536, n_head=16, d_ff=4352, adamw_lr=1e-3, max_steps=38147, warmup_steps=382),
    "sat-1.3b": dict(
        SAT, n_layer=24, d_model=2048, n_head=32, d_ff=5632, adamw_lr=8e-4, max_steps=57221, warmup_steps=573),
    "mudd-405m": dict(
        MUDD, n_layer=24, d_model=1024, n_head=16, d_ff=2816, adamw_lr=3e-4, max_steps=13500, warmup_steps=135),
    "mudd-834m": dict(
        MUDD, n_layer=24, d_model=1536, n_head=24, d_ff=4096, adamw_lr=2.5e-4, max_steps=28611, warmup_steps=287),
    "mudd-1.4b": dict(
        MUDD, n_layer=24, d_model=2048, n_head=32, d_ff=5632, adamw_lr=2e-4, max_steps=49592, warmup_steps=496),
    "mudd-797m-deep": dict(
        MUDD, n_layer=34, d_model=1280, n_head=20, d_ff=3392, adamw_lr=2.5e-4, max_steps=28611, warmup_steps=287,
        pre_post_norm=True),
    "mudd-1.34b-deep": dict(
        MUDD, n_layer=42, d_model=1536, n_head=24, d_ff=4096, adamw_lr=2e-4, max_steps=49592, warmup_steps=496,
        pre_post_norm=True),
}


def find(name):
    """The preset `name`: {option: value}. UserError if there is none."""
    if name not in PRESETS:
        raise UserError(f"no preset {name!r}: choose from {', '.join(PRESETS)}")
    return PRESETS[name]
