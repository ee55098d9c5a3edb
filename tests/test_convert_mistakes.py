"""convert.py: what it refuses, in one line, with nothing left behind."""
import json
import os
import sys

import pytest
import torch

import convert
import train
from forked import within
from nanodepth import runs
from published import FIRST, LLAMA, MAKE, QK_NORM, llama, mudd, obpm, off, save, tokenizer_json, trained


@pytest.fixture
def refused(capsys, tmp_path):
    """Calls convert.py, which must fail with exit code 2 and leave nothing behind; returns its one line."""
    def call(*words, out=tmp_path / "new" / "run"):
        before = sorted(tmp_path.rglob("*"))
        code = within("convert.py", convert.main, *words, "--out", out)
        said = capsys.readouterr()
        assert code == 2 and said.out == "" and said.err.count("\n") == 1 and len(said.err) < 600
        assert sorted(tmp_path.rglob("*")) == before
        return said.err
    return call


def each(layout, **settings):
    """Cases of one refused setting, which the message names."""
    return [(layout, {name: value}, name) for name, value in settings.items()]


REFUSED = [
    *each("exoformer", act_type="gelu", norm_pos="after", rmsnorm_use_weight=False, rmsnorm_use_bias=True, clip_qkv=8.0,
          yarn_enabled=True, logit_soft_cap=30.0, embedding_layer0_mix_enabled=True, anchor_delta_enabled=True,
          smear_gate_enabled=True, per_layer_backout=True),
    ("exoformer", dict(dynamic_mixing_enabled=True, dynamic_mixing_hidden_dim=8), "dynamic_mixing_hidden_dim 8"),
    ("exoformer", dict(FIRST, dynamic_mixing_enabled=True), "without decouple_anchor"),
    ("exoformer", off("query_res", "key_res"), "query_res_enabled False"),
    ("exoformer", dict(file="model1", gated_attention_enabled=False), "gated_attention_enabled False"),
    ("exoformer", off("q_residual_norm"), "norms of the anchors k, v, g cannot"),
    ("exoformer", dict(FIRST, qk_norm=False), "norms of the anchors v, g cannot"),
    ("exoformer", {}, "gpt2 has ids up to 50,256, the model only 260"),
    *each("muddformer", model_type="muddpythia", dense=False, dynamic_dense=False, dense_type="l", sepln=False,
          n_local_heads=1, tie_word_embeddings=True, round64=False, expand_last=False),
    *each("llama", model_type="qwen2", attention_bias=True, mlp_bias=True, head_dim=8, hidden_act="gelu",
          sliding_window=4096, quantization_config={"bits": 4}, partial_rotary_factor=0.5),
    *each("qwen3", model_type="llama", attention_bias=True, sliding_window=4096, head_dim=8),
    *each("gpt2", model_type="gpt_neo", activation_function="gelu", scale_attn_weights=False,
          scale_attn_by_inverse_layer_idx=True, add_cross_attention=True, quantization_config={"bits": 4}),
    *each("pythia", model_type="gptj", hidden_act="gelu_fast", use_parallel_residual=False, attention_bias=False,
          rotary_pct=1.0, quantization_config={"bits": 4}),
    ("pythia", dict(num_attention_heads=8), "d_model 32")]


@pytest.mark.parametrize("layout, changes, said", REFUSED)
def test_settings_that_our_models_do_not_have(layout, changes, said, refused, tmp_path):
    assert said in refused(layout, save(layout, tmp_path / "source", *MAKE[layout](**changes)))


@pytest.mark.parametrize("key, value, said", [
    ("n_layer", 10 ** 12, "n_layer must be at least 1"), ("n_layer", "three", "n_layer must be int"),
    ("n_layer", None, "the source has no n_layer"), ("n_head", 3, "n_head 3"), ("dim", 16.0, "d_model must be int"),
    ("vocab_size", True, "vocab_size must be int"), ("norm_eps", "small", "norm_eps must be float"),
    ("vocab_size", 38, "by its config it must be (38, 16)")])
def test_junk_in_a_config(key, value, said, refused, tmp_path):
    config, tensors = mudd()
    config |= {key: value, "n_local_heads": -1}
    assert said in refused("muddformer", save("muddformer", tmp_path / "source", config, tensors))


class Payload:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize("layout", MAKE)
def test_damaged_checkpoints(layout, refused, monkeypatch, tmp_path):
    config, tensors = MAKE[layout]()
    monkeypatch.chdir(tmp_path)
    place = {"exoformer": "transformer.layers.1.mlp.fc1.weight", "muddformer": "layers.1.ffn_norm.weight",
             "llama": "model.layers.1.mlp.up_proj.weight", "qwen3": "model.layers.1.self_attn.q_norm.weight",
             "gpt2": "h.1.ln_2.weight", "pythia": "gpt_neox.layers.1.attention.query_key_value.bias"}[layout]
    cases = {
        f"the tensor {place} is missing": {key: t for key, t in tensors.items() if key != place},
        "no place for 1 of its tensors: extra.bias": tensors | {"extra.bias": torch.ones(3)},
        f"{place} is (5, 3)": tensors | {place: torch.ones(5, 3)},
        "torch.int8": tensors | {place: tensors[place].to(torch.int8)},
        "tensors or plain values": tensors | {place: Payload()}}
    for i, (said, broken) in enumerate(cases.items()):
        assert said in refused(layout, save(layout, tmp_path / str(i), config, broken))
    good = save(layout, tmp_path / "good", config, tensors)
    file = good if good.is_file() else good / "pytorch_model.bin"
    whole = file.read_bytes()
    for content in (whole[:len(whole) // 2], b"", b"junk"):
        file.write_bytes(content)
        assert "cannot be read" in refused(layout, good)


@pytest.mark.parametrize("changes", [{}, FIRST])
def test_a_norm_that_the_flags_do_not_know(changes, refused, tmp_path):
    config, tensors = obpm(**changes)
    g, v = (f"transformer.layers.0.attn.{s}_res_norm.weight" if changes else f"anchor_{s}_norm.weight" for s in "gv")
    without = save("exoformer", tmp_path / "a", config, {key: t for key, t in tensors.items() if key != v})
    assert f"{v} is missing" in refused("exoformer", without)
    unasked = save("exoformer", tmp_path / "b", config | QK_NORM, tensors)
    assert f"no place for 2 of its tensors: {g}, {v}" in refused("exoformer", unasked)


def test_other_mistakes(refused, monkeypatch, tmp_path):
    folder = save("llama", tmp_path / "llama", *llama())
    assert "model_type 'llama'" in refused("gpt2", folder)
    assert "invalid choice" in refused("bert", folder)
    assert "ids up to 50,256, the model only 37" in refused("llama", folder, "--tokenizer", "gpt2")
    assert "nowhere" in refused("llama", folder, "--tokenizer", "nowhere")
    assert "nowhere/config.json cannot be read" in refused("llama", tmp_path / "nowhere")
    assert "Is a directory" in refused("exoformer", folder)
    (folder / "tokenizer.json").write_text(tokenizer_json({"</s>": 0, "beyond": 37}))
    assert "tokenizer.json has ids up to 37, the model only 37" in refused("llama", folder)
    (folder / "tokenizer.json").write_text("[1")
    assert "not a tokenizer.json" in refused("llama", folder)
    (folder / "tokenizer.json").unlink()
    assert "--tokenizer gpt2" in refused("llama", folder)
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "missing.bin"}}')
    assert "missing.bin" in refused("llama", folder, "--tokenizer", "byte")
    for text in ("[1]", "{", '{"model_type": "llama"}', "\xff"):
        (folder / "config.json").write_text(text)
        refused("llama", folder, "--tokenizer", "byte")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "pytorch_model.bin.index.json").unlink()
    (folder / "model.safetensors").write_bytes(b"")
    assert "pip install safetensors" in refused("llama", folder)
    for file in folder.iterdir():
        file.name != "config.json" and file.unlink()
    assert "has no weights (*.safetensors" in refused("llama", folder)


def test_what_cannot_be_exported(refused, monkeypatch, tmp_path):
    pytest.importorskip("safetensors.torch")
    good = trained(tmp_path / "good")
    assert "blocks.N.attn.gate" in refused("export-qwen3", trained(tmp_path / "gated", gate="headwise"))
    assert "with it export-qwen3" in refused("export-llama", good / "ckpt.pt")                  # is the run
    assert "without QK norm it is export-llama" in refused("export-qwen3", trained(tmp_path / "plain", qk_norm=False))
    assert "a run of gpt3: only runs of gpt" in refused("export-llama", trained(tmp_path / "gpt3", "gpt3"))
    assert "ckpt.pt does not exist" in refused("export-qwen3", tmp_path / "nowhere")
    assert "--tokenizer" in refused("export-qwen3", good, "--tokenizer", "gpt2")
    assert "'gone'" in refused("export-qwen3", trained(tmp_path / "tokens", tokenizer="gone"))
    load = runs.load

    def more(folder):
        model, run = load(folder)
        model.blocks[0].scale = torch.nn.Parameter(torch.ones(1))
        return model, run

    with monkeypatch.context() as patch:
        patch.setattr(runs, "load", more)
        assert "Qwen3ForCausalLM has other parameters than this run" in refused("export-qwen3", good)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert "pip install safetensors" in refused("export-qwen3", good)


def test_existing_out_and_a_full_disk(refused, monkeypatch, tmp_path):
    source = save("llama", tmp_path / "llama", *llama())
    (tmp_path / "folder").mkdir(), (tmp_path / "file").write_text("mine")
    for layout in ("llama", "export-llama"):
        for name in ("folder", "file"):
            assert "exists: choose another --out" in refused(layout, source, out=tmp_path / name)
    assert f"{tmp_path}/file: File exists" in refused("llama", source, out=tmp_path / "file" / "run")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    (tmp_path / "new").mkdir()
    assert "No space left" in refused("llama", source)


def test_a_converted_run_is_not_resumed(capsys, tmp_path):
    convert.convert("llama", save("llama", tmp_path / "llama", *llama()), tmp_path / "run")
    assert within("train.py", train.main, "--resume", tmp_path / "run") == 2
    assert capsys.readouterr().err.endswith(f"start a new run with --init_from {tmp_path / 'run'}\n")
