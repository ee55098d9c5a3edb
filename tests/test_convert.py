"""convert.py: a published checkpoint is the same function as our model, both ways."""
import base64
import json
import os

import pytest
import torch

import convert
from nanodepth import runs
from published import (
    FIRST, GPT2, IDX, LLAMA, NO_NORM, PYTHIA, QK_NORM, QWEN3, RES, gpt2, gpt2_logits, llama, llama_logits, mudd,
    mudd_logits, obpm, obpm_logits, pythia, pythia_logits, qwen3, save, trained)
from small import wide


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


CASES = [("exoformer", obpm, obpm_logits, *case) for case in [
    (dict(), "exoformer", dict(granularity="elementwise", norms="qkvg", gate="elementwise", d_ff=24)),
    (dict(residual_mode="scalar", qk_norm=False, mlp_hidden_dim=40, **NO_NORM), "exoformer",
     dict(granularity="scalar", norms="none", qk_norm=False, d_ff=20)),
    (dict(smear_gate_enabled=True, per_layer_backout=True, weight_tying=True, **QK_NORM), "exoformer",
     dict(tie_embeddings=True, norms="qk")),
    (dict(dynamic_mixing_enabled=True, residual_mode="headwise"), "exoformer_dynamic",
     dict(granularity="headwise", norms="qkvg")),
    (dict(FIRST), "nuresformer", dict(granularity="elementwise", norms="qkvg")),
    (dict(FIRST, residual_mode="scalar", **QK_NORM), "nuresformer", dict(granularity="scalar", norms="qk")),
    (dict(file="model2"), "nuresformer", dict(norms="qkvg")),
    (dict(file="model1", residual_mode="headwise"), "nuresformer", dict(granularity="headwise", norms="none")),
    (dict(FIRST, file="model1", **QK_NORM), "nuresformer", dict(norms="none")),
    (dict(RES, dynamic_mixing_enabled=True), "gpt", dict(gate="elementwise")),
    (dict(RES, **FIRST, file="model1", gated_attention_enabled=False), "gpt", dict(gate="none", d_ff=24))]]
CASES += [("muddformer", mudd, mudd_logits, *case) for case in [
    (dict(), "muddformer", dict(qk_norm=True, d_ff=300, pre_post_norm=False)),
    (dict(n_layer=16, use_qk_norm=False, n_local_heads=-1), "muddformer", dict(qk_norm=False))]]
CASES += [("llama", llama, llama_logits, *case) for case in [
    (dict(), "gpt", dict(n_kv_head=2, qk_norm=False, norm_eps=1e-5)),
    (dict(num_key_value_heads=None, rope_theta=None, rope_parameters=dict(rope_type="default", rope_theta=300.0)),
     "gpt", dict(n_kv_head=4, rope_theta=300.0)),
    (dict(tie_word_embeddings=True, rope_scaling=dict(type="default")), "gpt", dict(tie_embeddings=True))]]
CASES += [("qwen3", qwen3, llama_logits, *case) for case in [
    (dict(), "gpt", dict(n_kv_head=2, qk_norm=True)), (dict(tie_word_embeddings=True), "gpt", dict(qk_norm=True))]]
CASES += [("gpt2", gpt2, gpt2_logits, *case) for case in [
    (dict(), "gpt3", dict(tie_embeddings=True, norm_eps=1e-5, d_ff=64, max_len=16)),
    (dict(at="transformer.", n_inner=40, tie_word_embeddings=False), "gpt3", dict(tie_embeddings=False, d_ff=40))]]
CASES += [("pythia", pythia, pythia_logits, *case) for case in [
    (dict(), "pythia", dict(norm_eps=1e-5, d_ff=48, rope_theta=500)),
    (dict(tie_word_embeddings=True, rope_parameters=dict(rope_theta=300.0, partial_rotary_factor=0.25)), "pythia",
     dict(tie_embeddings=True, rope_theta=300.0))]]


@pytest.mark.parametrize("layout, make, logits, changes, name, fields", CASES, ids=lambda x: x if isinstance(x, str)
                         else "")
def test_same_function(layout, make, logits, changes, name, fields, tmp_path, float64):
    torch.set_default_dtype(torch.float32)
    config, tensors = make(**changes)
    for key in {"smear_lambda", "backout_lambdas"} & set(tensors):
        tensors[key].zero_()
    convert.convert(layout, save(layout, tmp_path / "source", config, tensors), tmp_path / "run")
    torch.set_default_dtype(torch.float64)                                          # exact rotary tables
    model, run = runs.load(tmp_path / "run")
    assert run["model"] == name and {key: run["model_config"][key] for key in fields} == fields
    assert run == json.loads((tmp_path / "run" / "config.json").read_text()) and run["converted"]["config"] == config
    more = dict(file=changes["file"]) if "file" in changes else {}
    with torch.no_grad():
        expected = logits(config, {key: t.double() for key, t in tensors.items()}, **more)
        torch.testing.assert_close(model(IDX)[0], expected, rtol=0, atol=1e-9)


def same_logits(run, loaded):
    with wide(), torch.no_grad():
        ours, theirs = runs.load(run)[0], type(loaded)(loaded.config).eval()        # made anew: tables in float64
        theirs.load_state_dict(loaded.state_dict())
        found, wanted = ours(IDX)[0], theirs(IDX).logits
    assert wanted.std() > 1 and wanted.dtype == torch.float64
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


CLASSES = [
    ("gpt2", "GPT2", GPT2), ("gpt2", "GPT2", dict(GPT2, n_inner=24, tie_word_embeddings=False)),
    ("pythia", "GPTNeoX", PYTHIA), ("pythia", "GPTNeoX", dict(PYTHIA, tie_word_embeddings=True)),
    ("llama", "Llama", LLAMA), ("qwen3", "Qwen3", QWEN3)]


@pytest.mark.parametrize("layout, family, config", CLASSES, ids=lambda x: x if isinstance(x, str) else "")
def test_transformers_own_classes(layout, family, config, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**{**config, "vocab_size": 300})
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    torch.manual_seed(2)
    for name, p in theirs.named_parameters():
        torch.nn.init.normal_(p, float(p.ndim == 1 and name.endswith("weight")), 0.3)
    theirs.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 1
    convert.convert(layout, tmp_path / "source", tmp_path / "run", "byte")
    same_logits(tmp_path / "run", theirs)


def test_what_the_run_folder_holds(tmp_path):
    convert.convert("exoformer", save("exoformer", tmp_path / "exo", *obpm()), tmp_path / "a" / "run")
    checkpoint = runs.read_checkpoint(tmp_path / "a" / "run")
    assert (checkpoint["step"], checkpoint["tokens"], checkpoint["tokenizer"]) == (12, 345, "gpt2")
    assert all(t.dtype == torch.float32 and t.is_contiguous() for t in checkpoint["model"].values())
    assert os.listdir(tmp_path / "a") == ["run"]
    assert sorted(os.listdir(tmp_path / "a" / "run")) == ["ckpt.pt", "config.json"]
    source = save("llama", tmp_path / "llama", *llama(vocab_size=300, tie_word_embeddings=True))
    convert.convert("llama", source, tmp_path / "b")
    assert runs.read_checkpoint(tmp_path / "b")["tokenizer"] == "tokenizer.json"
    assert (tmp_path / "b" / "tokenizer.json").read_text() == "{}"
    state = runs.read_checkpoint(tmp_path / "b")["model"]
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()      # stored once
    convert.convert("llama", source, tmp_path / "c", "byte")
    assert runs.read_checkpoint(tmp_path / "c")["tokenizer"] == "byte"
    assert not (tmp_path / "c" / "tokenizer.json").exists()
    ranks = b"".join(b"%s %d\n" % (base64.b64encode(bytes([i])), i) for i in range(256))
    (tmp_path / "mine").write_bytes(ranks)
    convert.convert("llama", source, tmp_path / "d", str(tmp_path / "mine"))
    assert (tmp_path / "d" / "tokenizer.tiktoken").read_bytes() == ranks


@pytest.mark.parametrize("layout, make, keys, found", [
    ("muddformer", mudd, {"norm_eps": 1e-6, "rope_base": 10000.0}, ("norm_eps", "rope_theta")),
    ("llama", llama, {"rope_theta": 10000.0}, ("rope_theta",))])
def test_what_a_config_may_leave_out(layout, make, keys, found, tmp_path):
    """The published classes have these defaults."""
    config, tensors = make()
    config = {key: value for key, value in config.items() if key not in keys}
    convert.convert(layout, save(layout, tmp_path / layout, config, tensors), tmp_path / "run")
    ours = runs.read_checkpoint(tmp_path / "run")["config"]["model_config"]
    assert [ours[name] for name in found] == list(keys.values())


def test_shards_prefixes_and_harmless_tensors(tmp_path):
    config, tensors = llama(tie_word_embeddings=True)
    inv_freq = "model.layers.0.self_attn.rotary_emb.inv_freq"
    more = {"lm_head.weight": tensors["model.embed_tokens.weight"].clone(), inv_freq: torch.ones(2)}
    folder = save("llama", tmp_path / "llama", config, tensors)
    assert convert.convert("llama", folder, tmp_path / "a").endswith("parameters")
    (folder / "pytorch_model.bin").unlink()
    torch.save(dict(list(tensors.items())[::2]) | more, folder / "pytorch_model-00001-of-00002.bin")
    torch.save(dict(list(tensors.items())[1::2]), folder / "pytorch_model-00002-of-00002.bin",
               _use_new_zipfile_serialization=False)                        # as before torch 1.6
    torch.save({"other": torch.ones(1)}, folder / "pytorch_model_old.bin")
    index = {name: f"pytorch_model-0000{i % 2 + 1}-of-00002.bin" for i, name in enumerate(tensors)}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": index}))
    assert f"not needed: lm_head.weight, {inv_freq}" in convert.convert("llama", folder, tmp_path / "b")
    a, b = (runs.read_checkpoint(tmp_path / name)["model"] for name in "ab")
    assert all(torch.equal(a[key], b[key]) for key in a)


def test_buffers_and_copies_of_published_files(tmp_path):
    """Masks and rotary frequencies that old versions of transformers stored, and a tied head beside its embedding."""
    for layout, make, head, embed, buffers in [
            ("gpt2", gpt2, "lm_head.weight", "wte.weight", ["h.0.attn.bias", "h.1.attn.masked_bias"]),
            ("pythia", pythia, "embed_out.weight", "gpt_neox.embed_in.weight", [
                "gpt_neox.layers.0.attention." + name for name in ("bias", "masked_bias", "rotary_emb.inv_freq")])]:
        config, tensors = make(tie_word_embeddings=True)
        more = {head: tensors[embed].clone(), **{name: torch.ones(1, 1, 4, 4) for name in buffers}}
        source = save(layout, tmp_path / layout, config, tensors | more)
        line = convert.convert(layout, source, tmp_path / f"{layout}-1")
        assert line.endswith(f"; not needed: {', '.join(sorted(more))}")
        more[head] += 1
        with pytest.raises(ValueError, match=f"no place for 1 of its tensors: {head}"):
            convert.convert(layout, save(layout, tmp_path / f"{layout}-2", config, tensors | more), tmp_path / "no")


def test_safetensors(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    folder = save("llama", tmp_path / "llama", *(made := llama()))
    safetensors.save_file(made[1], folder / "model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"not read")
    convert.convert("llama", folder, tmp_path / "run")
    assert torch.equal(runs.read_checkpoint(tmp_path / "run")["model"]["embed.weight"],
                       made[1]["model.embed_tokens.weight"])


@pytest.mark.parametrize("layout, changes", [
    ("llama", dict(qk_norm=False)), ("llama", dict(qk_norm=False, n_kv_head=2, tie_embeddings=True, rope_theta=300.0)),
    ("qwen3", dict()), ("qwen3", dict(n_kv_head=1, tie_embeddings=True, norm_eps=1e-4, d_ff=40, rope_theta=300.0))])
def test_export_is_the_same_function_and_comes_back(layout, changes, tmp_path):
    transformers, run = pytest.importorskip("transformers"), trained(tmp_path / "run", **changes)
    line = convert.export(f"export-{layout}", run, tmp_path / "a" / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "out").eval()
    assert type(theirs).__name__ in line and line.endswith("parameters; without its tokenizer (byte)")
    assert theirs.config.eos_token_id == theirs.config.bos_token_id == 256 and theirs.dtype == torch.float32
    assert f"{sum(p.numel() for p in theirs.parameters()):,} parameters" in line
    same_logits(run, theirs)
    convert.convert(layout, tmp_path / "a" / "out", tmp_path / "back", "byte")
    back, before = runs.read_checkpoint(tmp_path / "back"), runs.read_checkpoint(run)
    assert back["model"].keys() == before["model"].keys()
    assert all(torch.equal(back["model"][key], t) for key, t in before["model"].items())
    assert {**before["config"]["model_config"], "zero_init": True} == back["config"]["model_config"]
    assert os.listdir(tmp_path / "a") == ["out"]
    assert sorted(os.listdir(tmp_path / "a" / "out")) == ["config.json", "model.safetensors"]
    assert len({file.stat().st_mode for file in (tmp_path / "a" / "out").iterdir()}) == 1


def test_padding_ids_are_not_exported(tmp_path):
    transformers, run = pytest.importorskip("transformers"), trained(tmp_path / "run", qk_norm=True)
    checkpoint = torch.load(run / "ckpt.pt", weights_only=True)
    checkpoint["config"]["n_vocab"] = 257
    torch.save(checkpoint, run / "ckpt.pt")
    convert.export("export-qwen3", run, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert theirs.config.vocab_size == 257
    assert torch.equal(theirs.lm_head.weight, checkpoint["model"]["head.weight"][:257])


def test_an_exported_tokenizer(tmp_path):
    """A tokenizer.json goes along, and transformers reads text by it alone: not by what Llama or Qwen3 add."""
    transformers = pytest.importorskip("transformers")
    line = convert.export("export-qwen3", trained(tmp_path / "gpt2", tokenizer="gpt2"), tmp_path / "a")
    assert line.endswith("without its tokenizer (gpt2)")
    assert json.loads((tmp_path / "a" / "config.json").read_text())["eos_token_id"] == 50256
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    vocab = {c: i for i, c in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "12", "</s>", "<s>"])}
    tokenizer = Tokenizer(BPE(vocab, [("1", "2")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    for layout, qk_norm in (("llama", False), ("qwen3", True)):
        run, out = trained(tmp_path / layout, tokenizer="tokenizer.json", qk_norm=qk_norm), tmp_path / f"{layout}-out"
        tokenizer.save(str(run / "tokenizer.json"))
        assert convert.export(f"export-{layout}", run, out).endswith("parameters")
        assert json.loads((out / "config.json").read_text())["eos_token_id"] == vocab["</s>"]
        theirs = transformers.AutoTokenizer.from_pretrained(out)
        assert theirs("it's 12").input_ids == tokenizer.encode("it's 12").ids and 256 in theirs("it's 12").input_ids
