"""convert.py: what it refuses, in one line, with nothing left behind."""
import json
from itertools import product

import pytest
import torch

import convert
from published import MAKE, QK_NORM, llama, mudd, obpm, off, save, tokenizer_json, trained
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
    *each("llama", model_type="qwen2", attention_bias=True, mlp_bias=True, head_dim=8, hidden_act="gelu",
          sliding_window=4096, quantization_config={"bits": 4}, partial_rotary_factor=0.5),
    *each("qwen3", model_type="llama", attention_bias=True, head_dim=8),
    *((name, dict(sliding_window=4096, use_sliding_window=True), "sliding_window 4096") for name in ("llama", "qwen3")),
    *each("gpt2", model_type="gpt_neo", activation_function="gelu", scale_attn_weights=False,
          scale_attn_by_inverse_layer_idx=True, add_cross_attention=True, quantization_config={"bits": 4}),
    *each("pythia", model_type="gptj", hidden_act="gelu_fast", use_parallel_residual=False, attention_bias=False,
          rotary_pct=1.0, quantization_config={"bits": 4}),
    ("pythia", dict(num_attention_heads=8), "d_model 32"),
    *((layout, rope, said) for layout in ("muddformer", "llama", "qwen3", "pythia") for rope, said in ROPE),
    *(("llama", {key: value}, f"{key} {value} of config.json is no id") for key, value in [
        ("bos_token_id", 37), ("bos_token_id", [1]), ("eos_token_id", [2, 37]), ("eos_token_id", [])]),
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


def test_files_that_may_be_of_two_saves(no, tmp_path):
    config, tensors = llama()
    folder = save("llama", tmp_path / "llama", config, tensors)
    torch.save({"model.norm.weight": torch.ones(16)}, folder / "pytorch_model-2.bin")
    index = folder / "pytorch_model.bin.index.json"
    for text, said in {'{"weight_map": {"a": "x.bin"}}': f"{folder} lacks x.bin, which {index.name} names: add them",
                       '{"weight_map": {"a": "pytorch_model-2.bin"}}': f"has pytorch_model.bin, and {index.name} names",
                       '{"weight_map": ["x.bin"]}': "must give the name of a file", "{}": f"{folder} has no weight_map",
                       '{"weight_map": {"a": 1}}': "must give the name of a file", "[": "cannot be read"}.items():
        index.write_text(text)
        assert said in no("llama", folder)
    index.unlink()
    (folder / "pytorch_model.bin").rename(folder / "pytorch_model-1.bin")
    assert f"model.norm.weight is in two files of {folder}, one is pytorch_model-2.bin" in no("llama", folder)


def test_other_files_of_the_folder(no, tmp_path):
    folder = save("llama", tmp_path / "llama", *llama())
    good = {file.name: file.read_bytes() for file in folder.iterdir()}
    begun = json.loads(tokenizer_json({"</s>": 0, "<s>": 1}, "<s>"))
    begun["post_processor"]["special_tokens"]["<s>"]["ids"] = [37]
    beyond = "tokenizer.json has ids up to 37, the model only 37 ids: name its own"
    special = folder / "tokenizer_config.json"
    for file, text, said in [
            ("tokenizer_config.json", '{"bos_token": "<s>"}', f"bos_token '<s>' of {special} is not in tokenizer.json"),
            ("tokenizer_config.json", '{"eos_token": {"content": 5}}', f"eos_token 5 of {special} is"),
            ("tokenizer_config.json", "[", "cannot be read"), ("tokenizer.json", "[1", "not a tokenizer.json"),
            ("tokenizer.json", tokenizer_json({"</s>": 0, "beyond": 37}), beyond),
            ("tokenizer.json", tokenizer_json({"</s>": 0, "<|endoftext|>": 37}), beyond),
            ("tokenizer.json", json.dumps(begun), beyond), ("tokenizer.json", None, "--tokenizer gpt2"),
            ("config.json", "[1]", "cannot be read"), ("config.json", "\xff", "cannot be read"),
            ("config.json", '{"model_type": "llama"}', f"{folder} has no vocab_size"),
            ("pytorch_model.bin", None, "has no weights (model.safetensors")]:
        (folder / file).unlink(missing_ok=True) if text is None else (folder / file).write_text(text)
        assert said in no("llama", folder)
        (folder / file).write_bytes(good[file]) if file in good else (folder / file).unlink()
    assert "model_type 'llama'" in no("gpt2", folder)
    assert "invalid choice" in no("bert", folder)
    assert "ids up to 50,256, the model only 37" in no("llama", folder, "--tokenizer", "gpt2")
    assert "nowhere/config.json cannot be read" in no("llama", tmp_path / "nowhere")
    assert "Is a directory" in no("exoformer", folder)


def test_what_cannot_be_exported(no, tmp_path):
    pytest.importorskip("safetensors.torch")
    good = trained(tmp_path / "good")
    assert "blocks.N.attn.gate" in no("export-qwen3", trained(tmp_path / "gated", gate="headwise"))
    assert "with it export-qwen3" in no("export-llama", good / "ckpt.pt")                  # is the run
    assert "without QK norm it is export-llama" in no("export-qwen3", trained(tmp_path / "plain", qk_norm=False))
    assert "a run of gpt3: only runs of gpt" in no("export-llama", trained(tmp_path / "gpt3", "gpt3"))
    assert "ckpt.pt does not exist" in no("export-qwen3", tmp_path / "nowhere")
    assert "--tokenizer" in no("export-qwen3", good, "--tokenizer", "gpt2")
    assert "'gone'" in no("export-qwen3", trained(tmp_path / "tokens", tokenizer="gone"))


def test_existing_out_and_a_full_disk(no, monkeypatch, tmp_path):
    source = save("llama", tmp_path / "llama", *llama())
    (tmp_path / "folder").mkdir(), (tmp_path / "file").write_text("mine")
    for layout, name in product(("llama", "export-llama"), ("folder", "file")):
        assert "exists: choose another --out" in no(layout, source, out=tmp_path / name)
    assert "Not a directory" in no("llama", source, out=tmp_path / "file" / "run")

    def full(*args):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(torch, "save", full)
    (tmp_path / "new").mkdir()
    assert "No space left" in no("llama", source, code=1)


def test_a_converted_run_is_not_resumed(refused, tmp_path):
    convert.convert("llama", save("llama", tmp_path / "llama", *llama()), tmp_path / "run")
    assert refused("train.py", "--resume", "run").endswith("start a new run with --init_from run\n")
