"""What the generic tests run of geonorm.py beside its defaults."""
CASES = [
    dict(update="unprojected", decay="geometric"), dict(update="post_norm"), dict(update="pre_norm", gate="headwise"),
    dict(decay="linear", gate="elementwise", tie_embeddings=True),
]
NEUTRAL = [
    dict(update="pre_norm"), dict(update="pre_norm", gate="headwise"),
]
BAD = [
    dict(update="x"), dict(decay="x"), dict(decay_rate=0.0), dict(decay_rate=1.5),
]
CHANGED = ("math.pi / 4", "math.pi / 6")
