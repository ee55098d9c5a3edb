"""gpt3, pythia and muddpythia against the models of Hugging Face transformers and against loops over tokens, in float64.

The same random weights must give the same logits, loss and gradient of every parameter; sizes and initial values are those
of the releases and of their training code.
"""
import math

import pytest
import torch
from test_equations import add, float64, gelu, heads, reference_loss, rms, rope, softmax  # noqa: F401  (float64: autouse)
from torch.func import functional_call

import models

SMALL = dict(vocab_size=29, n_layer=3, n_head=4, d_model=64, d_ff=48, max_len=9, norm_eps=1e-5, z_loss=0.01)
CASES = [dict(), dict(n_kv_head=2), dict(n_kv_head=1, tie_embeddings=True), dict(d_ff=None, norm_eps=0.1)]


def random_model(name, **options):
    torch.manual_seed(0)
    model = models.build(name, **{**SMALL, **options})
    with torch.no_grad():
        for key, q in model.named_parameters():
            q.normal_(mean=1.0 if key.endswith("norm.weight") else 0.0, std=0.2)
    return model


def compare(model, reference, atol=1e-10):
    """reference(p, idx): logits of idx (B, T) from {name: parameter}."""
    p = {key: q.detach().clone().requires_grad_() for key, q in model.named_parameters()}
    idx, targets = torch.randint(29, (2, 2, 7))
    targets[0, 2] = targets[1, 0] = targets[1, 6] = -1
    logits, loss = model(idx, targets)
    loss.backward()
    expected = reference(p, idx)
    expected_loss = reference_loss(expected, targets, model.config.z_loss)
    expected_loss.backward()
    torch.testing.assert_close(logits, expected.detach(), rtol=0, atol=atol)
    torch.testing.assert_close(loss, expected_loss, rtol=0, atol=atol)
    for key, q in model.named_parameters():
        torch.testing.assert_close(q.grad, p[key].grad, rtol=0, atol=10 * atol, msg=lambda m, key=key: f"gradient of {key}: {m}")
        assert p[key].grad.abs().max() > 1e-9 or "wk.bias" in key and "pos_embed.weight" in p, key     # see gpt3.py


# ---------------------------------------------------------------------------------------------------------- Hugging Face


def per_head(p, c, at, s):
    """Weight (H, D, C) and bias (H, D) of q, k or v, those of a key/value head once for each query head that it serves."""
    n = c.n_head if s == "q" else c.n_kv_head
    return [p[f"{at}.attn.w{s}.{kind}"].unflatten(0, (n, -1)).repeat_interleave(c.n_head // n, 0) for kind in ("weight", "bias")]


def renamed(p, at, to, names):
    return {f"{to}{theirs}.{kind}": p[f"{at}{ours}.{kind}"] for ours, theirs in (pair.split("=") for pair in names.split()) for kind in ("weight", "bias")}


def as_gpt2(p, c):
    """State dict of GPT2LMHeadModel, whose matrices are transposed."""
    state = renamed(p, "", "transformer.", "final_norm=ln_f") | {
        "transformer.wte.weight": p["embed.weight"], "transformer.wpe.weight": p["pos_embed.weight"],
        "lm_head.weight": p["embed.weight" if c.tie_embeddings else "head.weight"]}
    for i in range(c.n_layer):
        at, to = f"blocks.{i}", f"transformer.h.{i}."
        state |= renamed(p, f"{at}.", to, "attn_norm=ln_1 mlp_norm=ln_2 attn.wo=attn.c_proj mlp.w_up=mlp.c_fc mlp.w_down=mlp.c_proj")
        qkv = [per_head(p, c, at, s) for s in "qkv"]
        state[f"{to}attn.c_attn.weight"] = torch.cat([weight.flatten(0, 1) for weight, _ in qkv])
        state[f"{to}attn.c_attn.bias"] = torch.cat([bias.flatten() for _, bias in qkv])
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            state[f"{to}{name}.weight"] = state[f"{to}{name}.weight"].T
    return state


def as_neox(p, c):
    """State dict of GPTNeoXForCausalLM, whose q, k and v follow each other head by head."""
    state = renamed(p, "", "gpt_neox.", "final_norm=final_layer_norm") | {
        "gpt_neox.embed_in.weight": p["embed.weight"], "lm_head.weight": p["embed.weight" if c.tie_embeddings else "head.weight"]}
    for i in range(c.n_layer):
        at, to = f"blocks.{i}", f"gpt_neox.layers.{i}."
        state |= renamed(p, f"{at}.", to, "attn_norm=input_layernorm mlp_norm=post_attention_layernorm attn.wo=attention.dense "
                                          "mlp.w_up=mlp.dense_h_to_4h mlp.w_down=mlp.dense_4h_to_h")
        qkv = [per_head(p, c, at, s) for s in "qkv"]
        state[f"{to}attention.query_key_value.weight"] = torch.stack([weight for weight, _ in qkv], dim=1).flatten(0, 2)
        state[f"{to}attention.query_key_value.bias"] = torch.stack([bias for _, bias in qkv], dim=1).flatten()
    return state


def theirs(name, c):
    """The model of transformers in its defaults, but for sizes, eps, and dropout, which is off."""
    transformers = pytest.importorskip("transformers")
    if name == "gpt3":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=c.vocab_size, n_positions=c.max_len, n_embd=c.d_model, n_layer=c.n_layer, n_head=c.n_head, n_inner=c.d_ff,
            layer_norm_epsilon=c.norm_eps, tie_word_embeddings=c.tie_embeddings)).eval()
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(
        vocab_size=c.vocab_size, max_position_embeddings=c.max_len, hidden_size=c.d_model, num_hidden_layers=c.n_layer,
        num_attention_heads=c.n_head, intermediate_size=c.d_ff, layer_norm_eps=c.norm_eps, tie_word_embeddings=c.tie_embeddings)).eval()


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("name, state", [("gpt3", as_gpt2), ("pythia", as_neox)], ids=["gpt3", "pythia"])
def test_equal_to_transformers(name, state, options):
    model = random_model(name, **options)
    other = theirs(name, model.config)
    head = "lm_head" if hasattr(other, "lm_head") else "embed_out"                  # of GPT-NeoX before transformers 5

    def weights(p):
        return {key.replace("lm_head", head): tensor for key, tensor in state(p, model.config).items()}

    unset = {key for key, _ in other.named_parameters()} ^ set(weights(dict(model.named_parameters())))
    assert unset <= ({f"{head}.weight"} if model.config.tie_embeddings else set())
    compare(model, lambda p, idx: functional_call(other, weights(p), (idx,)).logits, 1e-6 if name == "pythia" else 1e-10)    # angles in fp32


# ----------------------------------------------------------------------------------------------------------------- loops


def affine(p, name, x):
    return p[f"{name}.weight"] @ x + p[f"{name}.bias"]


def layer_norm(p, name, x, c):
    y = x - x.sum() / len(x)
    return p[f"{name}.weight"] * y / torch.sqrt((y * y).sum() / len(x) + c.norm_eps) + p[f"{name}.bias"]


def turned(u, pos, c):
    quarter = len(u) // 4
    return torch.cat([rope(u[:quarter], pos, c), u[quarter:]])


def attention(p, c, at, xq, xk, xv):
    """Lists of vectors, one per position, normalised -> the same."""
    q = [[turned(u, t, c) for u in heads(affine(p, f"{at}.wq", x), c.n_head)] for t, x in enumerate(xq)]
    k = [[turned(u, t, c) for u in heads(affine(p, f"{at}.wk", x), c.n_kv_head)] for t, x in enumerate(xk)]
    v = [heads(affine(p, f"{at}.wv", x), c.n_kv_head) for x in xv]
    out = []
    for t in range(len(xq)):
        y = []
        for h in range(c.n_head):
            kv = h * c.n_kv_head // c.n_head
            weights = softmax([torch.dot(q[t][h], k[j][kv]) / math.sqrt(len(q[t][h])) for j in range(t + 1)])
            y.append(sum(weights[j] * v[j][kv] for j in range(t + 1)))
        out.append(affine(p, f"{at}.wo", torch.cat(y)))
    return out


def block(p, c, n, xq, xk, xv, xr):
    """X^R + attn(norm_q X^Q, norm_k X^K, norm_v X^V) + mlp(norm X^R); pythia has one norm for the three."""
    at = f"blocks.{n}"
    names = [name if f"{at}.{name}.weight" in p else "q_in_norm" for name in ("q_in_norm", "k_in_norm", "v_in_norm")]
    names = ["attn_norm"] * 3 if f"{at}.attn_norm.weight" in p else names
    inputs = [[layer_norm(p, f"{at}.{name}", u, c) for u in x] for name, x in zip(names, (xq, xk, xv))]
    mlp = [affine(p, f"{at}.mlp.w_down", gelu(affine(p, f"{at}.mlp.w_up", layer_norm(p, f"{at}.mlp_norm", u, c)))) for u in xr]
    return add(add(xr, attention(p, c, f"{at}.attn", *inputs)), mlp)


def aggregates(p, c, i, X):
    """X^c = sum_j A_cj X_j for c = Q, K, V, R after block i; after the last block only R."""
    C, S, at = 1 if i == c.n_layer else 4, i + 1, f"aggregate.{i}.weights"
    out = [[] for _ in range(C)]
    for t, u in enumerate(X[i]):
        made = p[f"{at}.w2.weight"] @ gelu(p[f"{at}.w1.weight"] @ rms(u, c))
        for row in range(C):
            out[row].append(sum((made[row * S + j] + p[f"{at}.a"][row, j]) * X[j][t] for j in range(S)))
    return out


def stack(p, c, x):
    X, streams = [x], [x] * 4
    for i in range(1, c.n_layer + 1):
        X.append(block(p, c, i - 1, *streams))
        streams = aggregates(p, c, i, X) if f"aggregate.{i}.weights.a" in p else [X[i]] * 4
    return streams[-1]


@pytest.mark.parametrize("name, options", [("pythia", dict(n_kv_head=2, rope_theta=50.0))] + [("muddpythia", dict(rope_theta=50.0, **o)) for o in (
    dict(), dict(n_kv_head=2, ffn_realloc=False), dict(tie_embeddings=True, n_layer=2, norm_eps=0.1), dict(n_layer=1, ffn_realloc=False))],
    ids=lambda x: str(x))
def test_equal_to_loops(name, options):
    model = random_model(name, **options)
    c = model.config

    def logits(p, idx):
        head = p["embed.weight" if c.tie_embeddings else "head.weight"]
        return torch.stack([torch.stack([head @ layer_norm(p, "final_norm", u, c) for u in stack(p, c, [p["embed.weight"][i] for i in row])])
                            for row in idx.tolist()])
    compare(model, logits)


@torch.no_grad()
def test_muddpythia_starts_as_pythia():
    """Bit for bit, at its initial mixing weights; away from them it is another function."""
    pythia, mudd = random_model("pythia"), models.build("muddpythia", **SMALL, ffn_realloc=False)
    weights = {key: q for key, q in pythia.state_dict().items() if "attn_norm" not in key}
    for key, q in pythia.state_dict().items():
        if "attn_norm" in key:
            weights |= {key.replace("attn_norm", f"{s}_in_norm"): q for s in "qkv"}
    missing = mudd.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys and all(key.startswith("aggregate.") for key in missing.missing_keys)
    idx = torch.randint(29, (2, 9))
    assert torch.equal(mudd(idx)[0], pythia(idx)[0])
    for key in ("a", "w2.weight"):
        mudd.aggregate["2"].weights.get_parameter(key).add_(0.1)
        assert (mudd(idx)[0] - pythia(idx)[0]).abs().max() > 1e-3
        mudd.aggregate["2"].weights.get_parameter(key).sub_(0.1)


# ---------------------------------------------------------------------------------------------------------------- values


def count(name, **options):
    with torch.device("meta"):
        return sum(p.numel() for p in models.build(name, **options).parameters())


@pytest.mark.parametrize("L, d, h, want", [(12, 768, 12, 124_439_808), (24, 1024, 16, 354_823_168), (36, 1280, 20, 774_030_080), (48, 1600, 25, 1_557_611_200)])
def test_sizes_of_gpt3(L, d, h, want):
    """Those of the four released GPT-2s; GPT-3 has the same formula."""
    assert count("gpt3", vocab_size=50257, max_len=1024, tie_embeddings=True, n_layer=L, d_model=d, n_head=h) == want


@pytest.mark.parametrize("L, d, h, V, want", [
    (6, 512, 8, 50304, 70_426_624), (12, 768, 12, 50304, 162_322_944), (24, 1024, 16, 50304, 405_334_016), (16, 2048, 8, 50304, 1_011_781_632),
    (24, 2048, 16, 50304, 1_414_647_808), (32, 2560, 32, 50304, 2_775_208_960), (32, 4096, 32, 50432, 6_857_302_016), (36, 5120, 40, 50688, 11_846_072_320)])
def test_sizes_of_pythia(L, d, h, V, want):
    """The eight released models, arXiv:2304.01373."""
    assert count("pythia", vocab_size=V, n_layer=L, d_model=d, n_head=h) == want


@pytest.mark.parametrize("L, d, h, percent", [(24, 2048, 16, 0.22), (32, 2560, 32, 0.23)])
def test_what_muddpythia_adds_to_pythia(L, d, h, percent):
    """At the two sizes of arXiv:2502.12170, table 3; the MLP budget stays within rounding."""
    shape = dict(n_layer=L, d_model=d, n_head=h)
    K = [4 * (i + 1) for i in range(1, L)] + [L + 1]
    extra = count("muddpythia", **shape, ffn_realloc=False) - count("pythia", **shape)
    assert extra == sum(d * k + k * k + k for k in K) + 4 * d * (L - 1)
    assert abs(100 * extra / (12 * L * d * d) - percent) < 0.03
    with torch.device("meta"):
        widths = [block.mlp.w_up.out_features for block in models.build("muddpythia", **shape).blocks]
    assert abs(sum(widths) / (4 * d * L) - 1) < 0.003 and (widths[0], widths[-1]) == (2 * d, 6 * d)
    assert all(abs(f - 4 * d * (0.5 * (L - i) + 1.5 * (i - 1)) / (L - 1)) <= 32 for i, f in enumerate(widths, start=1))


@pytest.mark.parametrize("name, std, last", [("gpt3", 0.02, 0.02 / math.sqrt(8)), ("pythia", math.sqrt(2 / 5 / 256), 2 / 4 / 16), ("muddpythia", math.sqrt(2 / 5 / 256), 2 / 4 / 16)])
def test_initial_values_of_the_baselines(name, std, last):
    torch.manual_seed(0)
    model = models.build(name, vocab_size=512, n_layer=4, n_head=4, d_model=256, max_len=512)
    for key, p in model.named_parameters():
        module, kind = key.split(".")[-2:]
        if kind == "bias" or module == "w2":
            assert (p == 0).all(), key
        elif module.endswith("norm"):
            assert (p == 1).all(), key
        elif kind == "a":
            assert torch.equal(p, torch.eye(p.size(1))[-1:].expand_as(p)), key
        else:
            want = last if module in ("wo", "w_down") else 256 ** -0.5 if module == "w1" else std
            assert abs(p.std() / want - 1) < 0.03 or p.numel() < 4096 and abs(p.std() / want - 1) < 0.1, key
            assert abs(p.mean()) < 5 * want / math.sqrt(p.numel()) and p.abs().max() > 2.5 * want, key
