"""Small random checkpoints in each published layout, and what they compute: by the equations, or by transformers."""
import json
import math

import pytest
import torch
import torch.nn.functional as F

OBPM = dict(block_size=16, vocab_size=260, n_layer=3, n_head=2, n_embd=16, mlp_hidden_dim=None, mlp_ratio=3.0,
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
GPT2 = dict(model_type="gpt2", vocab_size=37, n_positions=16, n_embd=16, n_layer=2, n_head=4, n_inner=None,
            activation_function="gelu_new", layer_norm_epsilon=1e-5)
PYTHIA = dict(model_type="gpt_neox", vocab_size=37, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
              num_attention_heads=2, max_position_embeddings=16, layer_norm_eps=1e-5, hidden_act="gelu",
              rotary_pct=0.25, rotary_emb_base=500, use_parallel_residual=True, tie_word_embeddings=False)
IDX = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(0))


def off(*names):
    return {f"{name}_enabled": False for name in names}


RES = off("query_res", "key_res", "value_res", "gate_res")
QK_NORM = off("v_residual_norm", "g_residual_norm")
NO_NORM = QK_NORM | off("q_residual_norm", "k_residual_norm")


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
        c |= dict(decouple_anchor=False, anchor_delta_enabled=False)
    d, H, V = c["n_embd"], c["n_head"], c["vocab_size"]
    D, hidden, gated = d // H, c["mlp_hidden_dim"] or int(d * c["mlp_ratio"]), c["gated_attention_enabled"]
    streams, full = "qkvg" if gated else "qkv", dict(q="query", k="key", v="value", g="gate")
    shapes = {"transformer.wte.weight": (V, d), "transformer.final_norm.weight": (d,)}
    shapes |= {} if c["weight_tying"] else {"lm_head.weight": (V, d)}
    if file == "model":
        shapes["anchor_proj.weight"] = (len(streams) * d, d)
        shapes |= {f"anchor_{s}_norm.weight": (D,) for s in streams if c[f"{s}_residual_norm_enabled"]}
    for i in range(c["n_layer"]):
        at = f"transformer.layers.{i}."
        shapes |= {at + "attn_norm.weight": (d,), at + "mlp_norm.weight": (d,),
                   at + "attn.c_attn.weight": (len(streams) * d, d), at + "attn.c_proj.weight": (d, d),
                   at + "mlp.fc1.weight": (hidden, d), at + "mlp.fc2.weight": (d, hidden // 2)}
        if c["qk_norm"]:
            shapes |= {f"{at}attn.{s}_norm.weight": (D,) for s in ("qkvg" if file == "model2" else "qk")}
        if file == "model" or i:
            shape = dict(elementwise=(H, D), headwise=(H,), scalar=())[c["residual_mode"]]
            shapes |= {f"{at}attn.lambda_{s}{j}": shape for s in streams for j in (1, 2) if c[f"{full[s]}_res_enabled"]}
            if c["dynamic_mixing_enabled"] and file == "model":
                n, mixing = c["dynamic_mixing_hidden_dim"], f"{at}attn.dynamic_mixing.fc"
                shapes |= {f"{mixing}1.weight": (n, d), f"{mixing}2.weight": (8, n), f"{mixing}2.bias": (8,)}
    return c, draw(shapes)


def mudd(**changes):
    """The same with MUDDFormer's; a setting that is None is left out."""
    c = {key: value for key, value in {**MUDD, **changes}.items() if value is not None}
    d, V, L, D = c["dim"], c["vocab_size"], c["n_layer"], c["dim"] // c["n_head"]
    shapes = {"tok_embeddings.weight": (V, d), "norm.weight": (d,), "output.weight": (V, d)}
    for i in range(L):
        at, C = f"layers.{i}.", 1 if i == L - 1 else 4
        K, f = C * (i + 2), round(c["intermediate_size"] * (i / (L - 1) + 0.5) / 128) * 128
        hidden = (K * (4 if i == L - 1 else 1) // 64 + 1) * 64
        shapes |= {f"dense_bs.{i}": (C, i + 2), f"dynamic_dense.{i}.w1.weight": (hidden, d),
                   f"dynamic_dense.{i}.w2.weight": (K, hidden)}
        shapes |= {f"{at}attention.w{s}.weight": (d, d) for s in "qkvo"}
        shapes |= {f"{at}attention.{s}_norm.weight": (D,) for s in "qk" if c.get("use_qk_norm")}
        shapes |= {f"{at}feed_forward.w{j}.weight": (d, f) if j == 2 else (f, d) for j in (1, 2, 3)}
        shapes |= {at + "ffn_norm.weight": (d,)}
        norms = [f"attention_norms.{j}" for j in range(3)] if i else ["attention_norm"]
        shapes |= {f"{at}{norm}.weight": (d,) for norm in norms}
    return c, draw(shapes)


def theirs(config):
    """transformers' model by a config.json, every parameter drawn."""
    transformers = pytest.importorskip("transformers")
    settings = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
    model = transformers.AutoModelForCausalLM.from_config(settings).eval()
    model.load_state_dict(draw({name: p.shape for name, p in model.named_parameters()}), strict=False)     # tied heads
    return model


def family(base, *renamed):
    """make(**changes) of a layout of transformers: (config, tensors) in the shapes of the config `base`, but for the
    vocabulary and whether the head is tied. In files a part of their names is `renamed`."""
    def make(**changes):
        shaped = {key: changes[key] for key in ("vocab_size", "tie_word_embeddings") if key in changes}
        tensors = dict(theirs(base | shaped).named_parameters())
        return {**base, **changes}, {name.replace(*renamed): p.detach() for name, p in tensors.items()}
    return make


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
            gamma = torch.ones(*a.shape[:2], 8)
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
        if c.get("use_qk_norm"):
            q, k = norm(q, p[at + "attention.q_norm.weight"]), norm(k, p[at + "attention.k_norm.weight"])
        y = attend(*(rotate(x, c.get("rope_base", 10000)) for x in (q, k)), v)
        h = inputs[3] + y.flatten(-2) @ p[at + "attention.wo.weight"].T
        b = norm(h, p[at + "ffn_norm.weight"])
        up = F.silu(b @ p[at + "feed_forward.w1.weight"].T) * (b @ p[at + "feed_forward.w3.weight"].T)
        X.append(h + up @ p[at + "feed_forward.w2.weight"].T)
        A = F.gelu(norm(X[-1]) @ p[f"dynamic_dense.{i}.w1.weight"].T) @ p[f"dynamic_dense.{i}.w2.weight"].T
        A = A.unflatten(-1, p[f"dense_bs.{i}"].shape) + p[f"dense_bs.{i}"]          # (B, T, streams, sources)
        inputs = torch.einsum("btcs,sbtd->cbtd", A, torch.stack(X)).unbind(0)
    return norm(inputs[0], p["norm.weight"]) @ p["output.weight"].T


def tokenizer_json(vocab):
    """The text of a tokenizer.json of words."""
    return json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "added_tokens": [],
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "</s>"}})


def save(layout, folder, config, tensors):
    """Writes a published checkpoint; returns what to name on the command line."""
    folder.mkdir()
    if layout == "exoformer":
        tensors = {f"_orig_mod.{name}": t for name, t in tensors.items()}
        torch.save({"step": 12, "tokens_processed": 345, "model": tensors, "model_args": config}, folder / "c.pt")
        return folder / "c.pt"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tokenizer_json({"</s>": 0, "a": 1}))
    torch.save(tensors, folder / "pytorch_model.bin")
    return folder


MAKE = dict(exoformer=obpm, muddformer=mudd, gpt2=family(GPT2, "transformer.", ""),
            pythia=family(PYTHIA, "lm_head", "embed_out"))
