"""convert.py on small checkpoints in each published layout, against plain float64 forwards on their tensors."""
import base64
import json
import math
import os
import sys

import pytest
import torch
import torch.nn.functional as F

import convert
import models
import train
from forked import within
from nanodepth import runs

OBPM = dict(block_size=16, vocab_size=37, n_layer=3, n_head=2, n_embd=16, mlp_hidden_dim=None, mlp_ratio=3.0,
            weight_tying=False, act_type="swiglu", rope_theta=500.0, rmsnorm_eps=1e-6, rmsnorm_use_weight=True,
            rmsnorm_use_bias=False, norm_pos="before", qk_norm=True, clip_qkv=None, yarn_enabled=False,
            logit_soft_cap=None, smear_gate_enabled=False, per_layer_backout=False, value_res_enabled=True,
            query_res_enabled=True, key_res_enabled=True, gate_res_enabled=True, residual_mode="elementwise",
            gated_attention_enabled=True, decouple_anchor=True, q_residual_norm_enabled=True,
            k_residual_norm_enabled=True, v_residual_norm_enabled=True, g_residual_norm_enabled=True,
            embedding_layer0_mix_enabled=False, dynamic_mixing_enabled=False, dynamic_mixing_hidden_dim=16)
MUDD = dict(model_type="muddformer", block_size=16, vocab_size=37, n_layer=4, n_head=2, n_local_heads=2, dim=16,
            head_dim=8, intermediate_size=300, rope_base=500, norm_eps=1e-6, use_qk_norm=True, dense=True,
            dynamic_dense=True, dense_type="qkvr", sepln=True, round64=True, expand_last=True, stack_hidden=False,
            tie_word_embeddings=False)
LLAMA = dict(model_type="llama", vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16, rms_norm_eps=1e-5,
             rope_theta=500.0, hidden_act="silu", tie_word_embeddings=False, rope_scaling=None, attention_bias=False,
             mlp_bias=False)
QWEN3 = dict(LLAMA, model_type="qwen3", head_dim=4, use_sliding_window=False)
GPT2 = dict(model_type="gpt2", vocab_size=37, n_positions=16, n_embd=16, n_layer=2, n_head=4, n_inner=None,
            activation_function="gelu_new", layer_norm_epsilon=1e-5)
PYTHIA = dict(model_type="gpt_neox", vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
              num_attention_heads=2, max_position_embeddings=16, layer_norm_eps=1e-5, hidden_act="gelu",
              rotary_pct=0.25, rotary_emb_base=500, use_parallel_residual=True, tie_word_embeddings=False)
IDX = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(0))


def off(*names):
    return {f"{name}_enabled": False for name in names}


RES, FIRST = off("query_res", "key_res", "value_res", "gate_res"), dict(decouple_anchor=False)


# ------------------------------------------------------------------------------------- the published tensors, random


def draw(shapes):
    """{name: tensor} of these shapes, bf16 for a part, to be exact in fp32."""
    g = torch.Generator().manual_seed(1)
    out = {}
    for i, (name, shape) in enumerate(shapes.items()):
        scale, centre = (0.3, 1.0) if "norm" in name else (0.4, 0.5) if "lambda" in name else (0.5, 0.0)
        t = centre + scale * torch.randn(shape, generator=g)
        out[name] = t.bfloat16() if i % 2 else t
    return out


def obpm(**changes):
    """(model_args, tensors) with the names of ExoFormer's authors; `file` is the generation of their model file."""
    file = changes.pop("file", "model")
    c = {**OBPM, **changes}
    if file != "model":
        c |= dict(anchor_delta_enabled=False, dynamic_mixing_enabled=True)
    d, H, V = c["n_embd"], c["n_head"], c["vocab_size"]
    D, hidden, gated = d // H, c["mlp_hidden_dim"] or int(d * c["mlp_ratio"]), c["gated_attention_enabled"]
    streams, full = "qkvg" if gated else "qkv", dict(q="query", k="key", v="value", g="gate")
    external = c["decouple_anchor"] and file == "model"
    shapes = {"transformer.wte.weight": (V, d), "transformer.final_norm.weight": (d,)}
    if not c["weight_tying"]:
        shapes["lm_head.weight"] = (V, d)
    if c["smear_gate_enabled"]:
        shapes |= {"smear_gate.weight": (1, 12), "smear_lambda": (1,)}
    if c["per_layer_backout"]:
        shapes["backout_lambdas"] = (c["n_layer"],)
    if external:
        shapes["anchor_proj.weight"] = (len(streams) * d, d)
        shapes |= {f"anchor_{s}_norm.weight": (D,) for s in streams if c[f"{s}_residual_norm_enabled"]}
    for i in range(c["n_layer"]):
        at = f"transformer.layers.{i}."
        shapes |= {at + "attn_norm.weight": (d,), at + "mlp_norm.weight": (d,),
                   at + "attn.c_attn.weight": (len(streams) * d, d), at + "attn.c_proj.weight": (d, d),
                   at + "mlp.fc1.weight": (hidden, d), at + "mlp.fc2.weight": (d, hidden // 2)}
        if c["qk_norm"]:
            shapes |= {f"{at}attn.{s}_norm.weight": (D,) for s in ("qkvg" if file == "model2" else "qk")}
        if external or i:
            shape = dict(elementwise=(H, D), headwise=(H,), scalar=())[c["residual_mode"]]
            shapes |= {f"{at}attn.lambda_{s}{j}": shape for s in streams for j in (1, 2) if c[f"{full[s]}_res_enabled"]}
            if c["dynamic_mixing_enabled"] and file == "model":
                n = 2 * len(streams)
                shapes |= {f"{at}attn.dynamic_mixing.{name}": shape for name, shape in
                           (("fc1.weight", (c["dynamic_mixing_hidden_dim"], d)), ("fc2.weight", (n, 16)),
                            ("fc2.bias", (n,)))}
        elif file == "model":
            shapes |= {f"{at}attn.{s}_res_norm.weight": (D,) for s in "vg" if c[f"{s}_residual_norm_enabled"]
                       and s in streams}
    return c, draw(shapes)


def mudd(**changes):
    c = {**MUDD, **changes}
    d, V, L, D = c["dim"], c["vocab_size"], c["n_layer"], c["dim"] // c["n_head"]
    shapes = {"tok_embeddings.weight": (V, d), "norm.weight": (d,), "output.weight": (V, d)}
    for i in range(L):
        at, C = f"layers.{i}.", 1 if i == L - 1 else 4
        K, f = C * (i + 2), round(c["intermediate_size"] * (i / (L - 1) + 0.5) / 128) * 128
        hidden = K * 4 if i == L - 1 and c["expand_last"] else K
        hidden = (hidden // 64 + 1) * 64 if c["round64"] else hidden
        shapes |= {f"dense_bs.{i}": (C, i + 2), f"dynamic_dense.{i}.w1.weight": (hidden, d),
                   f"dynamic_dense.{i}.w2.weight": (K, hidden)}
        shapes |= {f"{at}attention.w{s}.weight": (d, d) for s in "qkvo"}
        shapes |= {f"{at}attention.{s}_norm.weight": (D,) for s in "qk" if c["use_qk_norm"]}
        shapes |= {f"{at}feed_forward.w{j}.weight": (d, f) if j == 2 else (f, d) for j in (1, 2, 3)}
        shapes |= {at + "ffn_norm.weight": (d,)}
        norms = [f"attention_norms.{j}" for j in range(3)] if i else ["attention_norm"]
        shapes |= {f"{at}{norm}.weight": (d,) for norm in norms}
    return c, draw(shapes)


def llama(base=LLAMA, **changes):
    c = {**base, **changes}
    d, f, V, H = c["hidden_size"], c["intermediate_size"], c["vocab_size"], c["num_attention_heads"]
    kv = d // H * (c["num_key_value_heads"] or H)
    shapes = {"model.embed_tokens.weight": (V, d), "model.norm.weight": (d,)}
    shapes |= {} if c["tie_word_embeddings"] else {"lm_head.weight": (V, d)}
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        shapes |= {f"{at}self_attn.{s}_proj.weight": shape
                   for s, shape in dict(q=(d, d), k=(kv, d), v=(kv, d), o=(d, d)).items()}
        shapes |= {f"{at}mlp.{s}_proj.weight": shape for s, shape in dict(gate=(f, d), up=(f, d), down=(d, f)).items()}
        shapes |= {at + "input_layernorm.weight": (d,), at + "post_attention_layernorm.weight": (d,)}
        shapes |= {f"{at}self_attn.{s}_norm.weight": (d // H,) for s in "qk" if base is QWEN3}
    return c, draw(shapes)


def qwen3(**changes):
    return llama(QWEN3, **changes)


def gpt2(at="", **changes):
    c = {**GPT2, **changes}
    d, f = c["n_embd"], c["n_inner"] or 4 * c["n_embd"]
    shapes = {at + "wte.weight": (c["vocab_size"], d), at + "wpe.weight": (c["n_positions"], d)}
    shapes |= {} if c.get("tie_word_embeddings", True) else {"lm_head.weight": (c["vocab_size"], d)}
    for i in range(c["n_layer"]):
        for name, shape in {"attn.c_attn": (d, 3 * d), "attn.c_proj": (d, d), "mlp.c_fc": (d, f), "mlp.c_proj": (f, d),
                            "ln_1": (d,), "ln_2": (d,)}.items():
            shapes |= {f"{at}h.{i}.{name}.weight": shape, f"{at}h.{i}.{name}.bias": shape[-1:]}
    return c, draw(shapes | {at + "ln_f.weight": (d,), at + "ln_f.bias": (d,)})


def pythia(**changes):
    c = {**PYTHIA, **changes}
    d, f, V = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    shapes = {"gpt_neox.embed_in.weight": (V, d)} | ({} if c["tie_word_embeddings"] else {"embed_out.weight": (V, d)})
    for i in range(c["num_hidden_layers"]):
        for name, shape in {"attention.query_key_value": (3 * d, d), "attention.dense": (d, d),
                            "mlp.dense_h_to_4h": (f, d), "mlp.dense_4h_to_h": (d, f), "input_layernorm": (d,),
                            "post_attention_layernorm": (d,)}.items():
            at = f"gpt_neox.layers.{i}.{name}"
            shapes |= {at + ".weight": shape, at + ".bias": shape[:1]}
    at = "gpt_neox.final_layer_norm"
    return c, draw(shapes | {at + ".weight": (d,), at + ".bias": (d,)})


# -------------------------------------------------------------------------- what they compute, from the equations


def norm(x, gain=1.0, eps=1e-6):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * gain


def rotate(x, theta):
    """x (B, T, H, D): rotates the pair (i, i + D/2) by position * theta^(-2i/D)."""
    half = x.size(-1) // 2
    angle = torch.arange(x.size(1))[:, None] * theta ** (-torch.arange(half) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((turned.real, turned.imag), -1)


def attend(q, k, v):
    """Causal softmax attention of q (B, T, H, D) over k, v (B, T, K, D)."""
    k, v = (u.repeat_interleave(q.size(2) // u.size(2), 2) for u in (k, v))
    scores = torch.einsum("bthd,bshd->bhts", q, k) / math.sqrt(q.size(-1))
    scores += torch.full(scores.shape[-2:], -math.inf).triu(1)
    return torch.einsum("bhts,bshd->bthd", scores.softmax(-1), v)


def obpm_logits(c, p, file="model"):
    H, gated, theta = c["n_head"], c["gated_attention_enabled"], c["rope_theta"]
    streams, full = "qkvg" if gated else "qkv", dict(q="query", k="key", v="value", g="gate")
    x = p["transformer.wte.weight"][IDX]
    heads = lambda y: dict(zip(streams, y.unflatten(-1, (len(streams), H, -1)).unbind(-3)))
    anchors = None
    if "anchor_proj.weight" in p:
        raw = heads(x @ p["anchor_proj.weight"].T)
        anchors = {s: norm(u, p[f"anchor_{s}_norm.weight"]) if c[f"{s}_residual_norm_enabled"] else u
                   for s, u in raw.items()}
    for i in range(c["n_layer"]):
        at = {k.removeprefix(f"transformer.layers.{i}."): v for k, v in p.items()
              if k.startswith(f"transformer.layers.{i}.")}
        a = norm(x, at["attn_norm.weight"])
        own = raw = heads(a @ at["attn.c_attn.weight"].T)
        if anchors:
            gamma = 1.0 + torch.zeros(*a.shape[:2], 8)
            if "attn.dynamic_mixing.fc1.weight" in at:
                mlp = F.gelu(a @ at["attn.dynamic_mixing.fc1.weight"].T)
                gamma = torch.sigmoid(mlp @ at["attn.dynamic_mixing.fc2.weight"].T + at["attn.dynamic_mixing.fc2.bias"])
            for j, s in enumerate(streams):
                if c[f"{full[s]}_res_enabled"]:
                    one, two = (at[f"attn.lambda_{s}{m}"] for m in (1, 2))
                    one, two = (u[:, None] if u.ndim == 1 else u for u in (one, two))
                    one, two = gamma[..., 2 * j, None, None] * one, gamma[..., 2 * j + 1, None, None] * two
                    own = {**own, s: one * anchors[s] + two * own[s]}
        q, k = (norm(own[s], at[f"attn.{s}_norm.weight"]) if c["qk_norm"] else own[s] for s in "qk")
        if not anchors:                                                             # the first layer's streams
            anchors = dict(raw)
            if file == "model2":
                anchors |= dict(q=q, k=k) | {s: norm(raw[s], at[f"attn.{s}_norm.weight"]) for s in "vg"}
            elif file == "model":
                anchors |= {s: u for s, u in (("q", q), ("k", k)) if c[f"{s}_residual_norm_enabled"]}
                anchors |= {s: norm(raw[s], at[f"attn.{s}_res_norm.weight"]) for s in "vg"
                            if f"attn.{s}_res_norm.weight" in at}
        y = attend(rotate(q, theta), rotate(k, theta), own["v"]) * (own["g"].sigmoid() if gated else 1.0)
        x = x + y.flatten(-2) @ at["attn.c_proj.weight"].T
        value, gate = (norm(x, at["mlp_norm.weight"]) @ at["mlp.fc1.weight"].T).chunk(2, -1)
        x = x + (F.silu(gate) * value) @ at["mlp.fc2.weight"].T
    head = p["transformer.wte.weight" if c["weight_tying"] else "lm_head.weight"]
    return norm(x, p["transformer.final_norm.weight"]) @ head.T


def mudd_logits(c, p):
    X = [p["tok_embeddings.weight"][IDX]]
    inputs = X * 4
    for i in range(c["n_layer"]):
        at = f"layers.{i}."
        gains = [p[at + (f"attention_norms.{j}.weight" if i else "attention_norm.weight")] for j in range(3)]
        q, k, v = ((norm(x, gain) @ p[f"{at}attention.w{s}.weight"].T).unflatten(-1, (c["n_head"], -1))
                   for x, gain, s in zip(inputs, gains, "qkv"))
        if c["use_qk_norm"]:
            q, k = norm(q, p[at + "attention.q_norm.weight"]), norm(k, p[at + "attention.k_norm.weight"])
        y = attend(rotate(q, c["rope_base"]), rotate(k, c["rope_base"]), v)
        h = inputs[3] + y.flatten(-2) @ p[at + "attention.wo.weight"].T
        b = norm(h, p[at + "ffn_norm.weight"])
        up = F.silu(b @ p[at + "feed_forward.w1.weight"].T) * (b @ p[at + "feed_forward.w3.weight"].T)
        X.append(h + up @ p[at + "feed_forward.w2.weight"].T)
        A = F.gelu(norm(X[-1]) @ p[f"dynamic_dense.{i}.w1.weight"].T) @ p[f"dynamic_dense.{i}.w2.weight"].T
        A = A.unflatten(-1, p[f"dense_bs.{i}"].shape) + p[f"dense_bs.{i}"]          # (B, T, streams, sources)
        inputs = torch.einsum("btcs,sbtd->cbtd", A, torch.stack(X)).unbind(0)
    return norm(inputs[0], p["norm.weight"]) @ p["output.weight"].T


def llama_logits(c, p):
    theta, eps = c["rope_theta"] or c["rope_parameters"]["rope_theta"], c["rms_norm_eps"]
    D = c["hidden_size"] // c["num_attention_heads"]
    x = p["model.embed_tokens.weight"][IDX]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        a = norm(x, p[at + "input_layernorm.weight"], eps)
        q, k, v = ((a @ p[f"{at}self_attn.{s}_proj.weight"].T).unflatten(-1, (-1, D)) for s in "qkv")
        if c["model_type"] == "qwen3":
            q, k = (norm(u, p[f"{at}self_attn.{s}_norm.weight"], eps) for s, u in (("q", q), ("k", k)))
        x = x + attend(rotate(q, theta), rotate(k, theta), v).flatten(-2) @ p[at + "self_attn.o_proj.weight"].T
        b = norm(x, p[at + "post_attention_layernorm.weight"], eps)
        gate, up = (b @ p[f"{at}mlp.{s}_proj.weight"].T for s in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ p[at + "mlp.down_proj.weight"].T
    head = p["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"]
    return norm(x, p["model.norm.weight"], eps) @ head.T


def layer_norm(x, p, at):
    x = x - x.mean(-1, keepdim=True)
    return norm(x, p[at + ".weight"], 1e-5) + p[at + ".bias"]


def gpt2_logits(c, p):
    p = {name.removeprefix("transformer."): t for name, t in p.items()}
    linear = lambda x, at: x @ p[at + ".weight"] + p[at + ".bias"]
    x = p["wte.weight"][IDX] + p["wpe.weight"][:IDX.size(1)]
    for i in range(c["n_layer"]):
        at = f"h.{i}."
        qkv = linear(layer_norm(x, p, at + "ln_1"), at + "attn.c_attn")
        q, k, v = qkv.unflatten(-1, (3, c["n_head"], -1)).unbind(2)
        x = x + linear(attend(q, k, v).flatten(-2), at + "attn.c_proj")
        h = linear(layer_norm(x, p, at + "ln_2"), at + "mlp.c_fc")
        h = h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h ** 3))) / 2
        x = x + linear(h, at + "mlp.c_proj")
    return layer_norm(x, p, "ln_f") @ p.get("lm_head.weight", p["wte.weight"]).T


def pythia_logits(c, p):
    p = {name.removeprefix("gpt_neox."): t for name, t in p.items()}
    theta = (c.get("rope_parameters") or {"rope_theta": c["rotary_emb_base"]})["rope_theta"]
    linear = lambda x, at: x @ p[at + ".weight"].T + p[at + ".bias"]
    x = p["embed_in.weight"][IDX]
    for i in range(c["num_hidden_layers"]):
        at = f"layers.{i}."
        qkv = linear(layer_norm(x, p, at + "input_layernorm"), at + "attention.query_key_value")
        q, k, v = qkv.unflatten(-1, (c["num_attention_heads"], 3, -1)).unbind(-2)
        turned = q.size(-1) // 4
        q, k = (torch.cat((rotate(u[..., :turned], theta), u[..., turned:]), -1) for u in (q, k))
        h = linear(layer_norm(x, p, at + "post_attention_layernorm"), at + "mlp.dense_h_to_4h")
        h = h * (1 + torch.erf(h / math.sqrt(2))) / 2
        x = x + linear(attend(q, k, v).flatten(-2), at + "attention.dense") + linear(h, at + "mlp.dense_4h_to_h")
    return layer_norm(x, p, "final_layer_norm") @ p.get("embed_out.weight", p["embed_in.weight"]).T


# --------------------------------------------------------------------------------------------------------- equality


def save(layout, folder, config, tensors, **more):
    """Writes a published checkpoint; returns what to name on the command line."""
    folder.mkdir()
    if layout == "exoformer":
        tensors = {f"_orig_mod.{name}": t for name, t in tensors.items()}
        torch.save({"step": 12, "tokens_processed": 345, "model": tensors, "model_args": config, **more},
                   folder / "c.pt")
        return folder / "c.pt"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


CASES = [("exoformer", obpm, obpm_logits, *case) for case in [
    (dict(), "exoformer",
     dict(anchor="external", mixing="static", mix_streams="qkvg", norm_streams="qkvg", gate="elementwise")),
    (dict(dynamic_mixing_enabled=True, residual_mode="headwise"), "exoformer",
     dict(mixing="dynamic", granularity="headwise")),
    (dict(residual_mode="scalar", qk_norm=False, **off(*(f"{s}_residual_norm" for s in "qkvg"))), "exoformer",
     dict(granularity="scalar", norm_streams="", qk_norm=False)),
    (dict(dynamic_mixing_enabled=True, **off("query_res", "key_res", "v_residual_norm")), "exoformer",
     dict(mix_streams="vg", norm_streams="g")),
    (dict(dynamic_mixing_enabled=True, gated_attention_enabled=False, mlp_hidden_dim=40, **off("query_res")),
     "exoformer", dict(mix_streams="kv", gate="none", d_ff=20)),
    (dict(smear_gate_enabled=True, per_layer_backout=True, weight_tying=True), "exoformer", dict(tie_embeddings=True)),
    (dict(FIRST), "exoformer", dict(anchor="first_layer", norm_streams="qkvg")),
    (dict(FIRST, dynamic_mixing_enabled=True, **off("k_residual_norm", "g_residual_norm")), "exoformer",
     dict(norm_streams="qv")),
    (dict(FIRST, **off("v_residual_norm", "g_residual_norm")), "exoformer", dict(norm_streams="qk")),
    (dict(file="model2"), "exoformer", dict(anchor="first_layer", mixing="static", norm_streams="qkvg")),
    (dict(file="model1"), "exoformer", dict(anchor="first_layer", mixing="static", norm_streams="")),
    (dict(FIRST, file="model1", **off("v_residual_norm", "g_residual_norm")), "exoformer", dict(norm_streams="")),
    (dict(file="model1", gated_attention_enabled=False, **off("query_res", "key_res")), "exoformer",
     dict(mix_streams="v", norm_streams="")),
    (dict(RES, dynamic_mixing_enabled=True), "gpt", dict(gate="elementwise")),
    (dict(RES, **FIRST, file="model1", gated_attention_enabled=False), "gpt", dict(gate="none", d_ff=24))]]
CASES += [("muddformer", mudd, mudd_logits, *case) for case in [
    (dict(), "muddformer", dict(released=True, qk_norm=True, d_ff=300)),
    (dict(n_layer=16, use_qk_norm=False, n_local_heads=-1), "muddformer", dict(released=True, qk_norm=False)),
    (dict(round64=False, expand_last=False, intermediate_size=768), "muddformer", dict(released=False))]]
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


CLASSES = [
    ("gpt2", "GPT2", GPT2, 1e-12), ("gpt2", "GPT2", dict(GPT2, n_inner=24, tie_word_embeddings=False), 1e-12),
    ("pythia", "GPTNeoX", PYTHIA, 1e-6), ("pythia", "GPTNeoX", dict(PYTHIA, tie_word_embeddings=True), 1e-6),
    ("llama", "Llama", LLAMA, 1e-5), ("qwen3", "Qwen3", QWEN3, 1e-5)]


@pytest.mark.parametrize("layout, family, config, atol", CLASSES, ids=lambda x: x if isinstance(x, str) else "")
def test_transformers_own_classes(layout, family, config, atol, tmp_path):
    """Also in float64, where transformers keeps its rotary tables and RMSNorms in fp32."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{family}Config")(**{**config, "vocab_size": 300})
    theirs = transformers.AutoModelForCausalLM.from_config(config).eval()
    torch.manual_seed(2)
    for name, p in theirs.named_parameters():
        torch.nn.init.normal_(p, float(p.ndim == 1 and name.endswith("weight")), 0.3)
    theirs.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 1
    convert.convert(layout, tmp_path / "source", tmp_path / "run", "byte")
    ours, _ = runs.load(tmp_path / "run")
    with torch.no_grad():
        for dtype, near in ((torch.float32, 1e-5), (torch.float64, atol)):
            found, wanted = ours.to(dtype)(IDX)[0], theirs.to(dtype)(IDX).logits
            assert wanted.std() > 1
            torch.testing.assert_close(found, wanted, rtol=0, atol=near)


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


# ----------------------------------------------------------------------------------------------------------- exports


def trained(folder, name="gpt", tokenizer="byte", **changes):
    """The folder of a run with a random model, every parameter of it drawn."""
    model = models.build(name, **{**dict(vocab_size=260, n_layer=2, n_head=4, d_model=16, max_len=16), **changes})
    model.load_state_dict(draw({key: t.shape for key, t in model.state_dict().items()}))
    if model.config.tie_embeddings:
        assert model.head.weight is model.embed.weight
    run = {"model": name, "model_config": vars(model.config), "tokenizer": tokenizer,
           "options": {"preset": "tiny", "seq_len": 16, "dtype": "fp32"}, "data": {"path": "", "fingerprint": ""}}
    folder.mkdir()
    torch.save({"model": model.state_dict(), "optimizers": [], "step": 7, "tokens": 70, "config": run,
                "rng": torch.get_rng_state(), "tokenizer": tokenizer}, folder / "ckpt.pt")
    return folder


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
    ours, config = runs.load(run)
    with torch.no_grad():
        for dtype in (torch.float32, torch.float64):                # transformers' norms and rotary tables stay in fp32
            found, wanted = theirs.to(dtype)(IDX).logits, ours.to(dtype)(IDX)[0]
            assert wanted.std() > 1
            torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
    convert.convert(layout, tmp_path / "a" / "out", tmp_path / "back", "byte")
    back, before = runs.read_checkpoint(tmp_path / "back"), runs.read_checkpoint(run)
    assert back["model"].keys() == before["model"].keys()
    assert all(torch.equal(back["model"][key], t) for key, t in before["model"].items())
    assert {**config["model_config"], "zero_init": True} == back["config"]["model_config"]
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
        theirs = transformers.AutoTokenizer.from_pretrained(out)
        assert theirs("it's 12").input_ids == tokenizer.encode("it's 12").ids and 256 in theirs("it's 12").input_ids


# --------------------------------------------------------------------------------------------------------- refusals


def refused(monkeypatch, capsys, tmp_path, *words):
    """The one line of a command that must fail with exit code 2 and leave nothing behind."""
    before = sorted(tmp_path.rglob("*"))
    code = within("convert.py", convert.main, *words, "--out", tmp_path / "new" / "run")
    said = capsys.readouterr()
    assert code == 2 and said.out == "" and said.err.count("\n") == 1 and len(said.err) < 600
    assert sorted(tmp_path.rglob("*")) == before
    return said.err


MAKE = dict(exoformer=obpm, muddformer=mudd, llama=llama, qwen3=qwen3, gpt2=gpt2, pythia=pythia)
REFUSED = [("exoformer", dict([change]), change[0]) for change in dict(
    act_type="gelu", norm_pos="after", rmsnorm_use_weight=False, rmsnorm_use_bias=True, clip_qkv=8.0, yarn_enabled=True,
    logit_soft_cap=30.0, embedding_layer0_mix_enabled=True, anchor_delta_enabled=True, smear_gate_enabled=True,
    per_layer_backout=True).items()]
REFUSED += [("exoformer", dict(dynamic_mixing_enabled=True, dynamic_mixing_hidden_dim=8),
             "dynamic_mixing_hidden_dim 8")]
REFUSED += [("muddformer", dict([change]), change[0]) for change in dict(
    model_type="muddpythia", dense=False, dynamic_dense=False, dense_type="l", sepln=False, n_local_heads=1,
    tie_word_embeddings=True, round64=False, expand_last=False).items()]
REFUSED += [("muddformer", dict(round64=False, expand_last=False), "layers.2.feed_forward.w1.weight is (384, 16)")]
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
    name = "transformer.layers.0.attn.v_res_norm.weight" if changes else "anchor_v_norm.weight"
    without = save("exoformer", tmp_path / "a", config, {key: t for key, t in tensors.items() if key != name})
    assert f"{name} is missing" in refused(monkeypatch, capsys, tmp_path, "exoformer", without)
    unasked = save("exoformer", tmp_path / "b", {**config, "v_residual_norm_enabled": False}, tensors)
    assert f"no place for 1 of its tensors: {name}" in refused(monkeypatch, capsys, tmp_path, "exoformer", unasked)


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
