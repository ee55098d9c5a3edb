"""convert.py: a published checkpoint is the same function as our model, both ways."""
import json
import os

import pytest
import torch

import convert
from folders import ranks_file
from nanodepth import runs
from published import (
    GPT2, IDX, LLAMA, MAKE, NO_NORM, PYTHIA, QK_NORM, QWEN3, RES, llama, mudd, mudd_logits, obpm, obpm_logits, save,
    theirs, tokenizer_json, trained)
from small import wide

PAPERS = [("exoformer", obpm, obpm_logits, *case) for case in [
    (dict(), "exoformer", dict(granularity="elementwise", norms="qkvg", gate="elementwise", d_ff=24)),
    (dict(residual_mode="scalar", qk_norm=False, mlp_hidden_dim=40, **NO_NORM), "exoformer",
     dict(granularity="scalar", norms="none", qk_norm=False, d_ff=20)),
    (dict(weight_tying=True, **QK_NORM), "exoformer", dict(tie_embeddings=True, norms="qk")),
    (dict(dynamic_mixing_enabled=True, residual_mode="headwise"), "exoformer_dynamic",
     dict(granularity="headwise", norms="qkvg")),
    (dict(file="model2"), "nuresformer", dict(norms="qkvg")),
    (dict(file="model1", residual_mode="headwise"), "nuresformer", dict(granularity="headwise", norms="none")),
    (dict(file="model1", **QK_NORM), "nuresformer", dict(norms="none")),
    (dict(RES, dynamic_mixing_enabled=True), "gpt", dict(gate="elementwise")),
    (dict(RES, file="model1", gated_attention_enabled=False), "gpt", dict(gate="none", d_ff=24))]]
PAPERS += [("muddformer", mudd, mudd_logits, *case) for case in [
    (dict(), "muddformer", dict(qk_norm=True, d_ff=300, pre_post_norm=False)),
    (dict(n_layer=16, n_local_heads=-1, use_qk_norm=None, norm_eps=None, rope_base=None), "muddformer",
     dict(qk_norm=False, norm_eps=1e-6, rope_theta=10000.0))]]


def converted(layout, source, out):
    """Our run of a published checkpoint; of ExoFormer with a tokenizer that is small enough."""
    convert.convert(layout, source, out, "byte" if layout == "exoformer" else None)
    return runs.read_checkpoint(out)


@pytest.mark.parametrize("layout, make, logits, changes, name, fields", PAPERS)
def test_papers_checkpoints_are_the_same_function(layout, make, logits, changes, name, fields, tmp_path):
    config, tensors = make(**changes)
    run = converted(layout, save(layout, tmp_path / "source", config, tensors), tmp_path / "run")["config"]
    assert run["model"] == name and {key: run["model_config"][key] for key in fields} == fields
    assert run == json.loads((tmp_path / "run" / "config.json").read_text()) and run["converted"]["config"] == config
    more = dict(file=changes["file"]) if "file" in changes else {}
    with wide(), torch.no_grad():
        expected = logits(config, {key: t.double() for key, t in tensors.items()}, **more)
        torch.testing.assert_close(runs.load(tmp_path / "run")[0](IDX)[0], expected, rtol=0, atol=1e-9)


def same_logits(run, loaded):
    with wide(), torch.no_grad():
        ours, wide_one = runs.load(run)[0], type(loaded)(loaded.config).eval()      # made anew: tables in float64
        wide_one.load_state_dict(loaded.state_dict())
        found, wanted = ours(IDX)[0], wide_one(IDX).logits
    assert wanted.std() > 0.5 and wanted.dtype == torch.float64
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


THETA = dict(rope_type="default", rope_theta=300.0)


@pytest.mark.parametrize("layout, config", [
    ("gpt2", GPT2), ("gpt2", dict(GPT2, n_inner=24, tie_word_embeddings=False)), ("pythia", PYTHIA),
    ("pythia", dict(PYTHIA, tie_word_embeddings=True, rope_parameters=dict(rope_theta=300.0))),
    ("llama", LLAMA), ("llama", dict(LLAMA, num_key_value_heads=None, rope_parameters=THETA)),
    ("llama", dict(LLAMA, tie_word_embeddings=True, rope_scaling=dict(type="default"))),
    ("llama", dict(LLAMA, sliding_window=3, use_sliding_window=False)), ("qwen3", dict(QWEN3, sliding_window=3)),
    ("qwen3", {key: value for key, value in dict(QWEN3, sliding_window=3).items() if key != "use_sliding_window"}),
    ("qwen3", {key: value for key, value in QWEN3.items() if key != "rope_theta"}),
    ("qwen3", dict(QWEN3, tie_word_embeddings=True, rope_scaling=THETA, rope_parameters=dict(THETA, rope_theta=5.0)))])
def test_transformers_own_classes(layout, config, tmp_path):
    """Our reading of the config.json as it is, not as transformers would write it again; the weights in shards."""
    model = theirs(layout, config)
    model.save_pretrained(tmp_path / "source", max_shard_size="4KB")
    (tmp_path / "source" / "config.json").write_text(json.dumps(config))
    (tmp_path / "source" / "tokenizer.json").write_text(tokenizer_json({"</s>": 0}))
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 1
    convert.convert(layout, tmp_path / "source", tmp_path / "run")
    same_logits(tmp_path / "run", model)


def test_the_index_says_which_files_count(tmp_path):
    """As transformers reads a folder that still has shards of an older save, which had more of them."""
    transformers, source = pytest.importorskip("transformers"), tmp_path / "source"
    model = theirs("llama", LLAMA)
    model.save_pretrained(tmp_path / "old", max_shard_size="3KB")
    for parameter in model.parameters():
        parameter.data += 0.25
    model.save_pretrained(source, max_shard_size="6KB")
    (source / "config.json").write_text(json.dumps(LLAMA))
    (source / "tokenizer.json").write_text(tokenizer_json({"</s>": 0}))
    for file in (tmp_path / "old").glob("*.safetensors"):
        file.rename(source / file.name)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters()))
    convert.convert("llama", source, tmp_path / "run")
    same_logits(tmp_path / "run", loaded)
    index = source / "model.safetensors.index.json"
    named = min(json.loads(index.read_text())["weight_map"].values())
    (source / named).unlink()
    with pytest.raises(ValueError, match=f"{source} lacks {named}, which {index.name} names"):
        convert.convert("llama", source, tmp_path / "no")


def test_what_the_run_folder_holds(tmp_path):
    checkpoint = converted("exoformer", save("exoformer", tmp_path / "exo", *obpm()), tmp_path / "a" / "run")
    assert (checkpoint["step"], checkpoint["config"]["tokenizer"]) == (12, "byte")
    assert all(t.dtype == torch.float32 and t.is_contiguous() for t in checkpoint["model"].values())
    assert os.listdir(tmp_path / "a") == ["run"]
    assert sorted(os.listdir(tmp_path / "a" / "run")) == ["ckpt.pt", "config.json"]
    source = save("llama", tmp_path / "llama", *llama(vocab_size=300, tie_word_embeddings=True))
    state = converted("llama", source, tmp_path / "b")["model"]
    assert (tmp_path / "b" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()      # stored once
    ranks = ranks_file(tmp_path / "mine", [bytes([i]) for i in range(256)])
    convert.convert("llama", source, tmp_path / "d", str(ranks))
    assert (tmp_path / "d" / "tokenizer.tiktoken").read_bytes() == ranks.read_bytes()
    assert not (tmp_path / "d" / "tokenizer.json").exists()


@pytest.mark.parametrize("layout, bos, eos, before, wanted", [
    ("llama", 1, [2, 3], "<s>", {"bos": 1, "eos": [2, 3], "begin": [1]}), ("llama", None, None, None, {"begin": []}),
    ("qwen3", 1, 3, None, {"begin": []}), ("gpt2", 99, 99, None, {"begin": []})])
def test_where_a_text_begins_and_ends(layout, bos, eos, before, wanted, tmp_path):
    """A Llama's bos and eos are its config.json's; other models' texts begin and end with end-of-text."""
    source = save(layout, tmp_path / "source", *MAKE[layout](bos_token_id=bos, eos_token_id=eos))
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<|end|>": 3}
    (source / "tokenizer.json").write_text(tokenizer_json(words, before))
    run = converted(layout, source, tmp_path / "run")["config"]
    assert {key: run[key] for key in ("bos", "eos", "begin") if key in run} == wanted


@pytest.mark.parametrize("layout, head, embed, buffers", [
    ("llama", "lm_head.weight", "model.embed_tokens.weight", ["model.layers.0.self_attn.rotary_emb.inv_freq"]),
    ("gpt2", "lm_head.weight", "wte.weight", ["h.0.attn.bias", "h.1.attn.masked_bias"]),
    ("pythia", "embed_out.weight", "gpt_neox.embed_in.weight", [
        "gpt_neox.layers.0.attention." + name for name in ("bias", "masked_bias", "rotary_emb.inv_freq")])])
def test_buffers_and_copies_of_published_files(layout, head, embed, buffers, tmp_path):
    """Masks and rotary frequencies that old versions of transformers stored, and a tied head beside its embedding."""
    config, tensors = MAKE[layout](tie_word_embeddings=True)
    plain = save(layout, tmp_path / "plain", config, tensors)
    assert convert.convert(layout, plain, tmp_path / "a").endswith("parameters")
    more = {head: tensors[embed].clone(), **{name: torch.ones(1, 1, 4, 4) for name in buffers}}
    source = save(layout, tmp_path / "more", config, tensors)
    (source / "pytorch_model.bin").unlink()
    torch.save(dict(list(tensors.items())[::2]) | more, source / "pytorch_model-00001-of-00002.bin")
    torch.save(dict(list(tensors.items())[1::2]), source / "pytorch_model-00002-of-00002.bin",
               _use_new_zipfile_serialization=False)                        # as before torch 1.6
    torch.save({"other": torch.ones(1)}, source / "optimizer.bin")
    assert convert.convert(layout, source, tmp_path / "b").endswith(f"; not needed: {', '.join(sorted(more))}")
    a, b = (runs.read_checkpoint(tmp_path / name)["model"] for name in "ab")
    assert all(torch.equal(a[key], b[key]) for key in a)
    other = save(layout, tmp_path / "other", config, tensors | more | {head: tensors[embed] + 1})
    with pytest.raises(ValueError, match=f"no place for 1 of its tensors: {head}"):
        convert.convert(layout, other, tmp_path / "no")


@pytest.mark.parametrize("layout, changes", [
    ("llama", dict(qk_norm=False, n_kv_head=2, tie_embeddings=True, rope_theta=300.0)), ("qwen3", dict(n_vocab=257)),
    ("qwen3", dict(n_kv_head=1, tie_embeddings=True, norm_eps=1e-4, d_ff=40, rope_theta=300.0))])
def test_export_is_the_same_function_and_comes_back(layout, changes, tmp_path):
    """n_vocab: later ids are padding, which is not exported."""
    transformers, n = pytest.importorskip("transformers"), changes.pop("n_vocab", None)
    run = trained(tmp_path / "run", n_vocab=n, **changes)
    line = convert.export(f"export-{layout}", run, tmp_path / "a" / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "out").eval()
    assert type(loaded).__name__ in line and line.endswith("parameters; without its tokenizer (byte)")
    assert loaded.config.eos_token_id == loaded.config.bos_token_id == 256 and loaded.dtype == torch.float32
    assert f"{sum(p.numel() for p in loaded.parameters()):,} parameters" in line
    convert.convert(layout, tmp_path / "a" / "out", tmp_path / "back", "byte")
    same_logits(tmp_path / "back", loaded)
    back, before = runs.read_checkpoint(tmp_path / "back"), runs.read_checkpoint(run)
    assert back["model"].keys() == before["model"].keys()
    assert all(torch.equal(back["model"][key], t[:n] if key in ("embed.weight", "head.weight") else t)
               for key, t in before["model"].items())
    assert {**before["config"]["model_config"], "zero_init": True, "vocab_size": n or 260} == (
        back["config"]["model_config"])
    assert os.listdir(tmp_path / "a") == ["out"]
    assert sorted(os.listdir(tmp_path / "a" / "out")) == ["config.json", "model.safetensors"]
    assert len({file.stat().st_mode for file in (tmp_path / "a" / "out").iterdir()}) == 1


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
        ids = transformers.AutoTokenizer.from_pretrained(out)("it's 12").input_ids
        assert ids == tokenizer.encode("it's 12").ids and vocab["12"] in ids
