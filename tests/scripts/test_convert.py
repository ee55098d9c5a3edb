"""convert.py: a published checkpoint is the same function as our model."""
import json
import os
import shutil

import pytest
import torch

import convert
from folders import ranks_file
from nanodepth import runs
from published import (
    GPT2, IDX, MAKE, NO_NORM, PYTHIA, QK_NORM, RES, mudd, mudd_logits, obpm, obpm_logits, save, theirs, tokenizer_json)
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


@pytest.mark.parametrize("layout, config", [
    ("gpt2", GPT2), ("gpt2", dict(GPT2, n_inner=24, tie_word_embeddings=False)), ("pythia", PYTHIA),
    ("pythia", dict(PYTHIA, tie_word_embeddings=True, rope_parameters=dict(rope_theta=300.0))),
    ("pythia", dict(PYTHIA, rope_scaling=dict(rope_type="default", rope_theta=300.0), rope_parameters=dict(
        rope_type="default", rope_theta=5.0)))])
def test_transformers_own_classes(layout, config, tmp_path):
    """Our reading of the config.json as it is, not as transformers would write it again; the weights in shards, beside
    those of an older save, which had more of them."""
    model, source = theirs(config), tmp_path / "source"
    model.save_pretrained(source, max_shard_size="4KB")
    type(model)(model.config).save_pretrained(tmp_path / "old", max_shard_size="2KB")
    n, old = len([*source.glob("*.safetensors")]), [*(tmp_path / "old").glob("*.safetensors")]
    for file in old:
        shutil.copy(file, source)
    assert 1 < n < len(old) == len([*source.glob("*.safetensors")]) - n                     # by other names
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer.json").write_text(tokenizer_json({"</s>": 0}))
    convert.convert(layout, source, tmp_path / "run")
    with wide(), torch.no_grad():
        ours, wide_one = runs.load(tmp_path / "run")[0], type(model)(model.config).eval()   # made anew: float64 tables
        wide_one.load_state_dict(model.state_dict())
        found, wanted = ours(IDX)[0], wide_one(IDX).logits
    assert wanted.std() > 0.5 and wanted.dtype == torch.float64
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)


def test_what_the_run_folder_holds(refused, tmp_path):
    checkpoint = converted("exoformer", save("exoformer", tmp_path / "exo", *obpm()), tmp_path / "a" / "run")
    assert (checkpoint["step"], checkpoint["config"]["tokenizer"]) == (12, "byte")
    assert all(t.dtype == torch.float32 and t.is_contiguous() for t in checkpoint["model"].values())
    assert os.listdir(tmp_path / "a") == ["run"]
    assert sorted(os.listdir(tmp_path / "a" / "run")) == ["ckpt.pt", "config.json"]
    source = save("gpt2", tmp_path / "gpt2", *MAKE["gpt2"](vocab_size=300))
    state = converted("gpt2", source, tmp_path / "b")["model"]
    assert (tmp_path / "b" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert state["embed.weight"].data_ptr() == state["head.weight"].data_ptr()      # stored once
    assert refused("train.py", "--resume", "b").endswith("start a new run with --init_from b\n")
    ranks = ranks_file(tmp_path / "mine", [bytes([i]) for i in range(256)])
    convert.convert("gpt2", source, tmp_path / "d", str(ranks))
    assert (tmp_path / "d" / "tokenizer.tiktoken").read_bytes() == ranks.read_bytes()
    assert not (tmp_path / "d" / "tokenizer.json").exists()


@pytest.mark.parametrize("layout, head, embed, buffers", [
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
    file = source / "pytorch_model.bin"
    torch.save(tensors | more, file, _use_new_zipfile_serialization=False)                      # as before torch 1.6
    assert convert.convert(layout, source, tmp_path / "b").endswith(f"; not needed: {', '.join(sorted(more))}")
    a, b = (runs.read_checkpoint(tmp_path / name)["model"] for name in "ab")
    assert all(torch.equal(a[key], b[key]) for key in a)
    other = save(layout, tmp_path / "other", config, tensors | more | {head: tensors[embed] + 1})
    with pytest.raises(ValueError, match=f"no place for 1 of its tensors: {head}"):
        convert.convert(layout, other, tmp_path / "no")
