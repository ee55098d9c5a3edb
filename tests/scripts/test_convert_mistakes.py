"""convert.py: what it refuses, in one line, with nothing left behind."""
import pytest
import torch

import convert
from published import MAKE, QK_NORM, mudd, obpm, off, save, tokenizer_json
from small import Bomb


@pytest.fixture
def no(refused, tmp_path):
    """no(layout, source, ..): the line with which convert.py refuses, with nothing left behind."""
    return lambda *words, out=tmp_path / "new" / "run", **more: refused(
        "convert.py", *words, "--out", out, main=convert.main, **more)


def each(layout, **settings):
    """Cases of one refused setting, which the message names."""
    return [(layout, {name: value}, name) for name, value in settings.items()]


ROPE = [(dict(rope_scaling=dict(type="linear", factor=2.0)), "with type 'linear'"),
        (dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), "with rope_type 'llama3'"),
        (dict(rope_parameters=dict(rope_type="yarn", rope_theta=5.0)), "with rope_type 'yarn'"),
        (dict(rope_parameters=dict(full_attention=dict(rope_theta=5.0))), "with full_attention"),
        (dict(rope_parameters=dict(partial_rotary_factor=0.5)), "with partial_rotary_factor 0.5")]
REFUSED = [
    *each("exoformer", act_type="gelu", norm_pos="after", rmsnorm_use_weight=False, rmsnorm_use_bias=True, clip_qkv=8.0,
          yarn_enabled=True, logit_soft_cap=30.0, embedding_layer0_mix_enabled=True, anchor_delta_enabled=True,
          smear_gate_enabled=True, per_layer_backout=True),
    ("exoformer", dict(dynamic_mixing_enabled=True, dynamic_mixing_hidden_dim=8), "fc1.weight is (8, 16)"),
    ("exoformer", off("query_res", "key_res"), "query_res_enabled False"),
    ("exoformer", dict(file="model1", gated_attention_enabled=False), "gated_attention_enabled False"),
    ("exoformer", off("q_residual_norm"), "norms must be qkvg or qk or none, not 'kvg'"),
    ("exoformer", {}, "gpt2 has ids up to 50,256, the model only 260"),
    *each("muddformer", model_type="muddpythia", dense=False, dynamic_dense=False, dense_type="l", sepln=False,
          tie_word_embeddings=True, round64=False, expand_last=False),
    *each("gpt2", model_type="gpt_neo", activation_function="gelu", scale_attn_weights=False,
          scale_attn_by_inverse_layer_idx=True, add_cross_attention=True, quantization_config={"bits": 4}),
    *each("pythia", model_type="gptj", hidden_act="gelu_fast", use_parallel_residual=False, attention_bias=False,
          rotary_pct=1.0, quantization_config={"bits": 4}),
    ("pythia", dict(num_attention_heads=8), "d_model 32"),
    *((layout, rope, said) for layout in ("muddformer", "pythia") for rope, said in ROPE),
    ("muddformer", dict(n_layer=10 ** 12), "n_layer must be at least 1"),
    ("muddformer", dict(n_layer="three"), "n_layer must be int"), ("muddformer", dict(n_head=3), "n_head 3"),
    ("muddformer", dict(vocab_size=38), "by its config it must be (38, 16)")]


@pytest.mark.parametrize("layout, changes, said", REFUSED)
def test_settings_that_our_models_do_not_have(layout, changes, said, no, tmp_path):
    config, tensors = mudd() if layout == "muddformer" else MAKE[layout](**changes)
    assert said in no(layout, save(layout, tmp_path / "source", config | changes, tensors))


@pytest.mark.parametrize("layout, place", [
    ("exoformer", "transformer.layers.1.mlp.fc1.weight"), ("muddformer", "layers.0.attention_norm.weight"),
    ("pythia", "gpt_neox.layers.1.attention.query_key_value.bias")])
def test_damaged_checkpoints(layout, place, no, monkeypatch, tmp_path):
    config, tensors = MAKE[layout]()
    monkeypatch.chdir(tmp_path)
    cases = {
        place: {key: t for key, t in tensors.items() if key != place},                      # missing
        "no place for 1 of its tensors: extra.bias": tensors | {"extra.bias": torch.ones(3)},
        "is (5, 3)": tensors | {place: torch.ones(5, 3)},
        "torch.int8": tensors | {place: tensors[place].to(torch.int8)},
        "tensors or plain values": tensors | {place: Bomb()}}
    for i, (said, broken) in enumerate(cases.items()):
        assert said in no(layout, save(layout, tmp_path / str(i), config, broken))
    good = save(layout, tmp_path / "good", config, tensors)
    file = good if good.is_file() else good / "pytorch_model.bin"
    whole = file.read_bytes()
    for content in (whole[:len(whole) // 2], b"", b"junk"):
        file.write_bytes(content)
        assert "cannot be read" in no(layout, good)


def test_norms_that_the_flags_do_not_know(no, tmp_path):
    """Of anchors; and a NuResFormer of a newer file of the authors."""
    config, tensors = obpm()
    g, v = (f"anchor_{s}_norm.weight" for s in "gv")
    old, older = obpm(file="model1")
    newer = "transformer.layers.0.attn.v_res_norm.weight"
    newest = {key: value for key, value in old.items() if key != "anchor_delta_enabled"}
    for i, (settings, weights, said) in enumerate([
            (config, {key: t for key, t in tensors.items() if key != v}, f"{v} is missing"),
            (config | QK_NORM, tensors, f"no place for 2 of its tensors: {g}, {v}"),
            (old, older | {newer: torch.ones(8)}, f"no place for 1 of its tensors: {newer}"),
            (newest | QK_NORM, older, "normalises only its anchors qk")]):
        assert said in no("exoformer", save("exoformer", tmp_path / str(i), settings, weights))


def test_other_files_of_the_folder(no, tmp_path):
    folder = save("gpt2", tmp_path / "gpt2", *MAKE["gpt2"]())
    good = {file.name: file.read_bytes() for file in folder.iterdir()}
    beyond = "tokenizer.json has ids up to 37, the model only 37 ids: name its own"
    for file, text, said in [
            ("tokenizer.json", "[1", "not a tokenizer.json"),
            ("tokenizer.json", tokenizer_json({"</s>": 0, "beyond": 37}), beyond),
            ("tokenizer.json", tokenizer_json({"</s>": 0, "<|endoftext|>": 37}), beyond),
            ("tokenizer.json", None, "--tokenizer gpt2"),
            ("config.json", "[1]", "cannot be read"), ("config.json", "\xff", "cannot be read"),
            ("config.json", '{"model_type": "gpt2"}', f"{folder} has no vocab_size"),
            ("pytorch_model.bin", None, "has no weights (model.safetensors")]:
        (folder / file).unlink(missing_ok=True) if text is None else (folder / file).write_text(text)
        assert said in no("gpt2", folder)
        (folder / file).write_bytes(good[file]) if file in good else (folder / file).unlink()
    assert "model_type 'gpt2'" in no("pythia", folder)
    assert "invalid choice" in no("bert", folder)
    assert "ids up to 50,256, the model only 37" in no("gpt2", folder, "--tokenizer", "gpt2")
    assert "nowhere/config.json cannot be read" in no("gpt2", tmp_path / "nowhere")
    assert "Is a directory" in no("exoformer", folder)
    index = folder / "pytorch_model.bin.index.json"
    (folder / "pytorch_model.bin").unlink()
    for text, said in (('{"weight_map": {"a": "x.bin"}}', "x.bin cannot be read"), ("{}", "has no weight_map")):
        index.write_text(text)
        assert said in no("gpt2", folder)


def test_existing_out_and_a_full_disk(no, monkeypatch, tmp_path):
    source = save("gpt2", tmp_path / "gpt2", *MAKE["gpt2"]())
    (tmp_path / "folder").mkdir(), (tmp_path / "file").write_text("mine")
    for name in ("folder", "file"):
        assert "exists: choose another --out" in no("gpt2", source, out=tmp_path / name)
    assert "Not a directory" in no("gpt2", source, out=tmp_path / "file" / "run")

    def full(*args):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(torch, "save", full)
    (tmp_path / "new").mkdir()
    assert "No space left" in no("gpt2", source, code=1)
