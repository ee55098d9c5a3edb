"""Parameter counts against the papers, exactly where they give digits, and the presets' arithmetic; on meta."""
from dataclasses import fields

import pytest
import torch

import models
import train
from nanodepth.presets import PRESETS


def count(preset, name="gpt", **flags):
    """Parameters of a preset's model, as train.py would build it on data with the paper's vocabulary."""
    names = {f.name for f in fields(models.module(name).Config)}
    with torch.device("meta"):
        model = models.build(name, **{k: v for k, v in PRESETS[preset].items() if k in names} | flags)
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("preset, name, flags, want, precision", [
    ("exo-450m", "gpt", dict(n_layer=32, gate="none"), 453_581_824, 0),                 # Base Transformer
    ("exo-450m", "gpt", {}, 452_526_720, 0),                                            # Gated Attention
    ("exo-450m", "exoformer", {}, 456_958_848, 0),                                      # E-Exo
    ("exo-450m", "exoformer_dynamic", {}, 457_437_928, 0),                              # dynamic E-Exo
    ("exo-1b", "gpt", {}, 1_007_528_448, 0), ("exo-1b", "exoformer_dynamic", {}, 1.01815e9, 1e-4),
    *(("mudd-1.4b", "pythia", dict(zip(("n_layer", "d_model", "n_head", "d_ff", "vocab_size"), (*sizes, 50304))), n, 0)
      for sizes, n in (((24, 2048, 16, 8192), 1_414_647_808), ((32, 2560, 32, 10240), 2_775_208_960))),    # as released
    ("mudd-405m", "muddmoe", {}, 1.85e9, 0.027),                                        # "1.8B"
    *((preset, "gpt", {}, millions * 1e6, 0.05e6 / (millions * 1e6)) for preset, millions in {
        "sat-130m": 128.4, "sat-340m": 334.8, "sat-760m": 766.4, "sat-1.3b": 1298.8, "sat-757m-thin": 757.0,
        "mudd-405m": 411.6, "mudd-834m": 834.5, "mudd-1.4b": 1439.8}.items()),
    ("mudd-797m-deep", "gpt", {}, 797e6, 0.005), ("mudd-1.34b-deep", "gpt", {}, 1.34e9, 0.005)])    # by their names
def test_parameters_of_the_papers(preset, name, flags, want, precision):
    assert abs(count(preset, name, **flags) - want) <= precision * want


@pytest.mark.parametrize("tokens, presets", {
    5e9: "sat-130m", 7.08e9: "mudd-405m", 10e9: "exo-450m sat-340m", 15e9: "mudd-834m mudd-797m-deep",
    20e9: "exo-1b sat-760m sat-757m-thin", 26e9: "mudd-1.4b mudd-1.34b-deep", 30e9: "sat-1.3b"}.items())
def test_tokens_of_the_papers(tokens, presets):
    """And every model takes every preset, in train.py too."""
    for preset in presets.split():
        for name in models.names()[list(PRESETS).index(preset) % 5::5]:
            opt, config, _ = train.parse(["--model", name, "--preset", preset])
            assert abs(opt.max_steps * opt.batch_tokens / tokens - 1) < 5e-4 and opt.batch_tokens % opt.seq_len == 0
            assert config["max_len"] == opt.seq_len and count(preset, name) > 1e8
            assert opt.schedule == "wsd" or abs(opt.warmup_steps / opt.max_steps - 0.01) < 1e-3        # 1% of the steps


def test_every_preset_key_is_an_option():
    known = {f.name for cls in (train.Options, *(models.module(name).Config for name in models.names()))
             for f in fields(cls)}
    for name, preset in PRESETS.items():
        assert set(preset) <= known, name
