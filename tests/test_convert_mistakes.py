"""convert.py: what it refuses, in one line, with nothing left behind."""
import json
import os
import sys

import pytest
import torch

import convert
import train
from forked import within
from nanodepth import layouts, runs
from nanodepth.cli import UserError
from published import FIRST, LLAMA, MAKE, QK_NORM, llama, mudd, obpm, off, save, trained


def refused(monkeypatch, capsys, tmp_path, *words):
    """The one line of a command that must fail with exit code 2 and leave nothing behind."""
    before = sorted(tmp_path.rglob("*"))
    code = within("convert.py", convert.main, *words, "--out", tmp_path / "new" / "run")
    said = capsys.readouterr()
    assert code == 2 and said.out == "" and said.err.count("\n") == 1 and len(said.err) < 600
    assert sorted(tmp_path.rglob("*")) == before
    return said.err


REFUSED = [("exoformer", dict([change]), change[0]) for change in dict(
    act_type="gelu", norm_pos="after", rmsnorm_use_weight=False, rmsnorm_use_bias=True, clip_qkv=8.0, yarn_enabled=True,
    logit_soft_cap=30.0, embedding_layer0_mix_enabled=True, anchor_delta_enabled=True, smear_gate_enabled=True,
    per_layer_backout=True).items()]
REFUSED += [("exoformer", dict(dynamic_mixing_enabled=True, dynamic_mixing_hidden_dim=8),
             "dynamic_mixing_hidden_dim 8"),
            ("exoformer", dict(FIRST, dynamic_mixing_enabled=True), "without decouple_anchor"),
            ("exoformer", off("query_res", "key_res"), "query_res_enabled False"),
            ("exoformer", dict(file="model1", gated_attention_enabled=False), "gated_attention_enabled False"),
            ("exoformer", off("q_residual_norm"), "norms of the anchors k, v, g cannot"),
            ("exoformer", dict(FIRST, qk_norm=False), "norms of the anchors v, g cannot")]
REFUSED += [("muddformer", dict([change]), change[0]) for change in dict(
    model_type="muddpythia", dense=False, dynamic_dense=False, dense_type="l", sepln=False, n_local_heads=1,
    tie_word_embeddings=True, round64=False, expand_last=False).items()]
REFUSED += [("llama", dict([change]), said) for *change, said in [
    ("model_type", "qwen2", "model_type 'qwen2'"),
    ("rope_scaling", dict(rope_type="llama3", factor=8.0), "rope_type 'llama3'"),
    ("rope_scaling", dict(type="linear", factor=2.0), "rope_type 'linear'"),
    ("rope_parameters", dict(rope_type="yarn"), "rope_type 'yarn'"),
    ("attention_bias", True, "attention_bias"), ("mlp_bias", True, "mlp_bias"), ("head_dim", 8, "head_dim 8"),
    ("hidden_act", "gelu", "hidden_act"), ("sliding_window", 4096, "sliding_window"),
    ("quantization_config", {"bits": 4}, "quantization_config")]]
REFUSED += [("qwen3", dict([change]), change[0]) for change in dict(
    model_type="llama", attention_bias=True, sliding_window=4096).items()]
REFUSED += [("qwen3", dict(head_dim=8), "head_dim 8")]
REFUSED += [("gpt2", dict([change]), change[0]) for change in dict(
    model_type="gpt_neo", activation_function="gelu", scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True,
    add_cross_attention=True, quantization_config={"bits": 4}).items()]
REFUSED += [("pythia", dict([change]), said) for *change, said in [
    ("model_type", "gptj", "model_type 'gptj'"), ("hidden_act", "gelu_fast", "hidden_act"),
    ("use_parallel_residual", False, "use_parallel_residual"), ("attention_bias", False, "attention_bias"),
    ("rotary_pct", 1.0, "rotary_pct 1.0"), ("rope_scaling", dict(type="linear", factor=2.0), "rope_type 'linear'"),
    ("rope_parameters", dict(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
    ("quantization_config", {"bits": 4}, "quantization_config"), ("num_attention_heads", 8, "d_model 32")]]


@pytest.mark.parametrize("layout, changes, said", REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_settings_that_our_models_do_not_have(layout, changes, said, monkeypatch, capsys, tmp_path):
    source = save(layout, tmp_path / "source", *MAKE[layout](**changes))
    assert said in refused(monkeypatch, capsys, tmp_path, layout, source)


JUNK = [("n_layer", 10 ** 12), ("n_layer", "three"), ("n_layer", None), ("n_head", 3), ("n_head", 0), ("dim", -16),
        ("dim", 16.0), ("vocab_size", True), ("norm_eps", "small"), ("block_size", [16]), ("dense_type", {}),
        ("vocab_size", 38)]


@pytest.mark.parametrize("key, value", JUNK)
def test_junk_in_a_config(key, value, monkeypatch, capsys, tmp_path):
    config, tensors = mudd()
    source = save("muddformer", tmp_path / "source", {**config, key: value}, tensors)
    refused(monkeypatch, capsys, tmp_path, "muddformer", source)


class Payload:
    def __reduce__(self):
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize("layout", MAKE)
def test_damaged_checkpoints(layout, monkeypatch, capsys, tmp_path):
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
        "is not a tensor": tensors | {place: "text"},
        "has no tensors": {},
        "more than tensors and plain values": tensors | {place: Payload()}}
    for i, (said, broken) in enumerate(cases.items()):
        assert said in refused(monkeypatch, capsys, tmp_path, layout, save(layout, tmp_path / str(i), config, broken))
    good = save(layout, tmp_path / "good", config, tensors)
    file = good if good.is_file() else good / "pytorch_model.bin"
    whole = file.read_bytes()
    for content in (whole[:len(whole) // 2], b"", b"junk"):
        file.write_bytes(content)
        assert "cannot be read" in refused(monkeypatch, capsys, tmp_path, layout, good)
    torch.save([1, 2], file)
    assert "holds a list" in refused(monkeypatch, capsys, tmp_path, layout, good)
    refused(monkeypatch, capsys, tmp_path, layout, tmp_path / "nowhere")
    refused(monkeypatch, capsys, tmp_path, layout, tmp_path / ("x" * 300))
    refused(monkeypatch, capsys, tmp_path, layout, "bad\0path")


@pytest.mark.parametrize("changes", [{}, FIRST])
def test_a_norm_that_the_flags_do_not_know(changes, monkeypatch, capsys, tmp_path):
    config, tensors = obpm(**changes)
    g, v = (f"transformer.layers.0.attn.{s}_res_norm.weight" if changes else f"anchor_{s}_norm.weight" for s in "gv")
    without = save("exoformer", tmp_path / "a", config, {key: t for key, t in tensors.items() if key != v})
    assert f"{v} is missing" in refused(monkeypatch, capsys, tmp_path, "exoformer", without)
    unasked = save("exoformer", tmp_path / "b", config | QK_NORM, tensors)
    assert f"no place for 2 of its tensors: {g}, {v}" in refused(monkeypatch, capsys, tmp_path, "exoformer", unasked)


def test_other_mistakes(monkeypatch, capsys, tmp_path):
    said = lambda *words: refused(monkeypatch, capsys, tmp_path, *words)
    folder = save("llama", tmp_path / "llama", *llama())
    assert "model_type 'llama'" in said("gpt2", folder)
    assert "invalid choice" in said("bert", folder)
    assert "37" in said("llama", folder, "--tokenizer", "gpt2")
    assert "nowhere" in said("llama", folder, "--tokenizer", "nowhere")
    assert "nowhere: no such file or folder: download" in said("llama", tmp_path / "nowhere")
    assert "lacks" not in said("exoformer", folder)                                 # a folder where a file is asked for
    (folder / "tokenizer.json").write_text("[1")
    assert "tokenizer.json cannot be read" in said("llama", folder)
    (folder / "tokenizer.json").unlink()
    assert "--tokenizer gpt2" in said("llama", folder)
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "missing.bin"}}')
    assert "missing.bin" in said("llama", folder, "--tokenizer", "byte")
    for text in ("[]", "{", '{"model_type": "llama"}', "\xff"):
        (folder / "config.json").write_text(text)
        said("llama", folder, "--tokenizer", "byte")
    config, tensors = obpm()
    assert "plain values" in said("exoformer",
                                  save("exoformer", tmp_path / "a", {**config, "note": torch.ones(2)}, tensors))
    assert "step" in said("exoformer", save("exoformer", tmp_path / "b", config, tensors, step="last"))
    torch.save({"model": tensors}, tmp_path / "no_args.pt")
    assert "model_args" in said("exoformer", tmp_path / "no_args.pt")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "pytorch_model.bin.index.json").unlink()
    (folder / "model.safetensors").write_bytes(b"")
    assert "pip install safetensors" in said("llama", folder)


def test_what_cannot_be_exported(monkeypatch, capsys, tmp_path):
    package = pytest.importorskip("safetensors.torch")
    said = lambda *words: refused(monkeypatch, capsys, tmp_path, *words)
    good = trained(tmp_path / "good")
    assert "gate 'headwise'" in said("export-qwen3", trained(tmp_path / "gated", gate="headwise"))
    assert "qk_norm True is not llama's: use export-qwen3" in said("export-llama", good)
    assert "use export-llama" in said("export-qwen3", trained(tmp_path / "plain", qk_norm=False))
    assert "a run of gpt3: only runs of gpt" in said("export-llama", trained(tmp_path / "gpt3", "gpt3"))
    assert "ckpt.pt does not exist" in said("export-qwen3", tmp_path / "nowhere")
    assert "use export-qwen3" in said("export-llama", good / "ckpt.pt")                 # is the run
    assert "--tokenizer" in said("export-qwen3", good, "--tokenizer", "gpt2")
    assert "'gone'" in said("export-qwen3", trained(tmp_path / "tokens", tokenizer="gone"))
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="exists"):
        convert.export("export-qwen3", good, tmp_path / "mine")
    assert os.listdir(tmp_path / "mine") == []
    load = runs.load

    def more(folder):
        model, run = load(folder)
        model.blocks[0].scale = torch.nn.Parameter(torch.ones(1))
        return model, run

    def fewer(folder):
        model, run = load(folder)
        model.blocks[1].attn.k_norm = torch.nn.Identity()
        return model, run

    with monkeypatch.context() as patch:
        for change, name in ((more, "blocks.0.scale"), (fewer, "blocks.1.attn.k_norm.weight")):
            patch.setattr(runs, "load", change)
            assert f"Qwen3ForCausalLM has other parameters than this run: {name}\n" in said("export-qwen3", good)

    def full(*args, **options):
        raise convert.safetensors().SafetensorError("I/O error: No space left on device")

    (tmp_path / "new").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(package, "save_file", full)
        assert "No space left" in said("export-qwen3", good)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert "pip install safetensors" in said("export-qwen3", good)


def test_existing_out_and_a_full_disk(monkeypatch, capsys, tmp_path):
    source = save("exoformer", tmp_path / "exo", *obpm())
    for name in ("folder", "file"):
        (tmp_path / "folder").mkdir(exist_ok=True), (tmp_path / "file").write_text("mine")
        with pytest.raises(ValueError, match="exists"):
            convert.convert("exoformer", source, tmp_path / name)
    assert os.listdir(tmp_path / "folder") == [] and (tmp_path / "file").read_text() == "mine"

    def full(*args):
        raise OSError(28, "No space left on device")

    out = tmp_path / "file" / "run"
    assert within("convert.py", convert.main, "exoformer", source, "--out", out) == 2
    assert capsys.readouterr().err == f"convert.py: error: {out.parent}: File exists\n"
    monkeypatch.setattr(torch, "save", full)
    (tmp_path / "new").mkdir()
    assert "No space left" in refused(monkeypatch, capsys, tmp_path, "exoformer", source)


def test_a_converted_run_is_not_resumed(capsys, tmp_path):
    convert.convert("exoformer", save("exoformer", tmp_path / "exo", *obpm()), tmp_path / "run")
    assert within("train.py", train.main, "--resume", tmp_path / "run") == 2
    assert capsys.readouterr().err.endswith(f"start a new run with --init_from {tmp_path / 'run'}\n")


def test_scaled_rotary_positions_in_either_place():
    """transformers takes rope_scaling before rope_parameters, so neither may hide the other."""
    plain, yarn = dict(rope_type="default", rope_theta=5.0), dict(rope_type="yarn", factor=4.0)
    assert layouts.rope_theta(dict(rope_parameters=plain)) == 5.0
    for config in (dict(rope_scaling=yarn, rope_parameters=plain), dict(rope_scaling=plain, rope_parameters=yarn)):
        with pytest.raises(UserError, match="rope_type 'yarn' cannot be converted"):
            layouts.rope_theta(config)
