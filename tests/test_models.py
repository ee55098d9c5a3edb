"""What holds for every model: neutral setting, causality, cache, gradients, compile, bf16, initial values."""
import copy

import pytest
import torch

import models
import muon
from nanodepth import record

TINY = dict(vocab_size=31, n_layer=3, n_head=4, n_kv_head=2, d_model=32, d_ff=64, max_len=32)
# every model in its default setting (files dropped into models/ included), and the main options
CASES = [(name, {}) for name in models.names()] + [
    ("gpt", dict(gate="elementwise")), ("gpt", dict(gate="headwise", tie_embeddings=True, z_loss=1e-3)),
    ("gpt", dict(qk_norm=False, n_kv_head=4)),
    ("resformer", dict(value_mix="identity")), ("resformer", dict(value_mix="constant", gate="elementwise")),
    ("resformer", dict(value_mix="learnable", last_k=1)),
    ("satformer", dict(value_act="softmax_sigmoid", last_k=1)), ("satformer", dict(value_act="tanh")),
    ("satformer", dict(value_act="sigmoid")), ("satformer", dict(value_act="softmax")), ("satformer", dict(value_act="identity")),
    ("exoformer", dict(anchor="first_layer", granularity="headwise")), ("exoformer", dict(mixing="dynamic")),
    ("exoformer", dict(mixing="dynamic", anchor="first_layer", granularity="scalar", mix_streams="vg", norm_streams="none")),
    ("exoformer", dict(gate="none", mix_streams="qkv", norm_streams="qk")),
    ("muddformer", dict(dynamic=False)), ("muddformer", dict(multiway=False, ffn_realloc=False)),
    ("muddformer", dict(streams="kv", pre_post_norm=True)), ("muddformer", dict(period=2, dilation=2, n_layer=4)),
    ("muddformer", dict(window=2, n_layer=4)),
    ("attnres", dict(block_size=2)), ("attnres", dict(block_size=4, key_norm=False)), ("attnres", dict(block_size=6)),
    ("denseformer", dict(dilation=2, period=3, n_layer=7)), ("denseformer", dict(period=2, gate="headwise")),
    ("geonorm", dict(update="unprojected", decay="geometric")), ("geonorm", dict(update="post_norm")),
    ("geonorm", dict(update="pre_norm", gate="headwise")), ("geonorm", dict(decay="linear", gate="elementwise", tie_embeddings=True)),
    ("kern", dict(router="kern_l1", n_expert=4)), ("kern", dict(router="softmax", n_expert=8, top_k=4, gate="headwise")),
    ("kern", dict(router="sigmoid", n_expert=4, top_k=1, balance_loss=0.0, tie_embeddings=True)),
    ("kern", dict(router="tanh", n_expert=4)),
    ("sas", dict(n_sim=2, d_sim=8, kernel=1, gate="headwise")), ("sas", dict(n_sim=1, d_sim=14, n_kv_head=4, qk_norm=False)),
    ("sas", dict(simulation="projection")), ("sas", dict(simulation="projection", n_sim=2, n_kv_head=1, gate="elementwise")),
    ("hyperconnections", dict(connection="static", n_streams=2)), ("hyperconnections", dict(tanh=False, n_streams=1)),
    ("hyperconnections", dict(map_norm="rms")),
    ("hyperconnections", dict(connection="manifold")), ("hyperconnections", dict(connection="identity", n_streams=2)),
    ("gpt3", dict(n_kv_head=4, tie_embeddings=True)), ("pythia", dict(n_kv_head=1, z_loss=1e-3)), ("muddpythia", dict(ffn_realloc=False)),
    ("dape", dict(position="rope", kernel=5)), ("dape", dict(position="alibi", gate="elementwise")), ("dape", dict(position="none", width=8)),
    ("dape", dict(conv="heads")), ("dape", dict(conv="heads", position="rope", kernel=7, n_kv_head=4)), ("dape", dict(kernel=1)),
    ("dape", dict(kernel=0)),
    ("sambay", dict(n_layer=8, window=5, scan_chunk=4)), ("sambay", dict(n_layer=6, window=2, gmu="none", gate="headwise")),
    ("sambay", dict(n_layer=5, gmu="sigmoid", qk_norm=False, d_conv=1, d_state=3, scan_chunk=1)),
]
IDS = ["-".join([name, *(f"{k}={v}" for k, v in options.items())]) for name, options in CASES]
every_case = pytest.mark.parametrize("name, options", CASES, ids=IDS)


def build(name, options, randomise=True, **more):
    """A small model; randomise: no zero or one-hot initial value hides anything."""
    torch.manual_seed(0)
    model = models.build(name, **{**TINY, **options, **more})
    if randomise:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * (0.2 if p.ndim > 1 else 0.1))
    return model.eval()


def tokens(*shape):
    return torch.randint(TINY["vocab_size"], shape, generator=torch.Generator().manual_seed(1))


NEUTRAL = {   # settings and parameter values with which a model is gpt.py; models not named here have none to check
    "resformer": [(dict(value_mix="learnable"), dict(lambda1=0.0, lambda2=1.0)),
                  (dict(value_mix="plus", gate="elementwise"), dict(lambda_scale=0.0, lambda2=1.0))],
    "satformer": [(dict(value_act=act), dict(value_gate=0.0)) for act in ("relu", "tanh", "identity")],
    "exoformer": [(dict(), dict(lambda_anchor=0.0, lambda_self=1.0)),
                  (dict(mixing="dynamic", granularity="headwise"), dict(lambda_anchor=0.0, lambda_self=2.0)),
                  (dict(anchor="first_layer", granularity="scalar"), dict(lambda_anchor=0.0, lambda_self=1.0)),
                  (dict(gate="none", mix_streams="qkv"), dict(lambda_anchor=0.0, lambda_self=1.0))],
    "muddformer": [(dict(ffn_realloc=False, **more), {}) for more in (
        dict(), dict(dynamic=False), dict(multiway=False), dict(streams="kr"), dict(pre_post_norm=True), dict(period=2, dilation=2),
        dict(window=1))],
    "attnres": [(dict(block_size=s, norm_eps=1e-12), {}) for s in (1, 2, 4, 6)],
    "denseformer": [(dict(), {}), (dict(dilation=2, period=3, n_layer=7), {})],
    "hyperconnections": [(dict(connection=kind, n_streams=n, norm_eps=1e-12), {}) for kind, n in (
        ("static", 2), ("dynamic", 1), ("dynamic", 4), ("manifold", 1), ("manifold", 3), ("identity", 4))] + [
            (dict(map_norm="rms", norm_eps=1e-12), {})],
    "dape": [(dict(position="rope"), dict(conv_out=0.0)), (dict(position="rope", kernel=5, gate="headwise"), dict(conv_out=0.0)),
             (dict(position="rope", conv="heads"), dict(conv=0.0))],
}


@pytest.mark.parametrize("name, options, values", [(n, *case) for n, cases in NEUTRAL.items() for case in cases])
def test_neutral_setting_equals_gpt(name, options, values):
    model = build(name, options, randomise=False, zero_init=False)
    shared = {k: v for k, v in TINY.items()} | {k: getattr(model.config, k) for k in ("gate", "norm_eps", "n_layer")}
    base = models.build("gpt", **shared, zero_init=False).eval()
    with torch.no_grad():
        for p in base.parameters():
            p.add_(torch.randn_like(p) * 0.1 * (p.ndim > 1))          # norm gains stay 1: MUDD has one per stream
        missing = model.load_state_dict(base.state_dict(), strict=False)
        assert all("attn_norm" in key for key in missing.unexpected_keys)
        for key, p in model.named_parameters():
            for part, value in values.items():
                if part in key.split("."):
                    p.fill_(value)
    difference = (model(tokens(2, 16))[0] - base(tokens(2, 16))[0]).abs().max()
    assert difference < 1e-5
    other = build(name, options, zero_init=False)                     # and away from that setting it is another function
    other.load_state_dict(base.state_dict(), strict=False)
    assert (other(tokens(2, 16))[0] - base(tokens(2, 16))[0]).abs().max() > 1e-3


def test_equalities_between_settings():
    """SAT with softmax gate at W = 0 is ResFormer (1, 1); dynamic Exo starts as static."""
    sat, res = build("satformer", dict(value_act="softmax")), build("resformer", dict(value_mix="learnable"))
    res.load_state_dict(sat.state_dict(), strict=False)
    with torch.no_grad():
        for block in sat.blocks[1:]:
            block.attn.value_gate.weight.zero_()
        res.value_mix.lambda1.fill_(1.0), res.value_mix.lambda2.fill_(1.0)
    torch.testing.assert_close(sat(tokens(2, 9))[0], res(tokens(2, 9))[0], atol=1e-5, rtol=0)

    static = build("exoformer", {}, randomise=False, zero_init=False)
    dynamic = build("exoformer", dict(mixing="dynamic"), randomise=False, zero_init=False)
    dynamic.load_state_dict({k: v for k, v in static.state_dict().items() if "lambda" not in k}, strict=False)
    torch.testing.assert_close(static(tokens(2, 9))[0], dynamic(tokens(2, 9))[0], atol=1e-5, rtol=0)


@every_case
def test_later_tokens_do_not_change_earlier_logits(name, options):
    model, idx = build(name, options), tokens(2, 16)
    model = model.double() if name == "kern" else model
    changed = idx.clone()
    changed[:, 9] = (changed[:, 9] + 1) % TINY["vocab_size"]
    before, after = model(idx)[0], model(changed)[0]
    rounding = 1e-12 if name == "kern" else 0                         # its experts get other numbers of rows
    torch.testing.assert_close(after[:, :9], before[:, :9], rtol=0, atol=rounding)
    assert ((before - after)[:, 9:].abs().amax(dim=(0, 2)) > 1e-6).all()


@every_case
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward(name, options):
    """A prompt in pieces of 1, 4 and 3 tokens, then token by token; float64."""
    model, idx = build(name, options).double(), tokens(2, 14)
    full = model(idx)[0]
    module = models.module(name)
    cache, parts, at = module.Cache(model, 2, 14), [], 0
    for n in (1, 4, 3, *[1] * 6):
        parts.append(model(idx[:, at:at + n], cache=cache)[0])
        at += n
    torch.testing.assert_close(torch.cat(parts, dim=1), full, atol=1e-9, rtol=0)
    assert cache.pos == 14


@pytest.mark.parametrize("name", models.names())
def test_generate(name):
    model, idx = build(name, {}), tokens(2, 5)
    greedy = idx
    for _ in range(6):
        greedy = torch.cat((greedy, model(greedy)[0][:, -1:].argmax(-1)), dim=1)
    assert torch.equal(model.generate(idx, 6, temperature=0), greedy)
    draw = [model.generate(idx, 20, top_k=3, generator=torch.Generator().manual_seed(s)) for s in (0, 0, 1)]
    assert torch.equal(draw[0], draw[1]) and not torch.equal(draw[0], draw[2])
    for t in range(5, 25):                                             # each token is among the 3 likeliest of its context
        assert (model(draw[0][:, :t])[0][:, -1].topk(3).indices == draw[0][:, t:t + 1]).any(-1).all()
    with pytest.raises(ValueError, match="max_len 32"):
        model.generate(idx, 28)
    with pytest.raises(ValueError, match="max_len 32"):
        model(tokens(1, 33))


def train_steps(model, n, optimizer="adamw", muon_lr=0.05, adamw_lr=0.01):
    model.train()
    opts = muon.optimizers(model, optimizer, muon_lr, adamw_lr, 0.1)
    for step in range(n):
        idx = torch.randint(TINY["vocab_size"], (4, 17), generator=torch.Generator().manual_seed(step))
        model(idx[:, :-1], idx[:, 1:])[1].backward()
        if step < n - 1:
            for opt in opts:
                opt.step()
                opt.zero_grad(set_to_none=True)


@every_case
def test_every_parameter_gets_a_gradient_after_two_steps_and_has_moved_after_five(name, options):
    own_start = {"zero_init": False} if hasattr(models.module(name).Config, "zero_init") else {}
    model = build(name, options, randomise=False, **own_start)
    train_steps(model, 3)                                              # two steps, and the backward pass of the third
    for key, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 0, key
    model = build(name, options, randomise=False)                      # zeros in front of zeros take a step each to wake up
    before = copy.deepcopy(dict(model.named_parameters()))
    train_steps(model, 6, "muon")
    for key, p in model.named_parameters():
        assert not torch.equal(p, before[key]), key


@every_case
def test_optimizer_groups_are_a_partition(name, options):
    model = build(name, options, randomise=False)
    matrices, rest = muon.split_params(model)
    assert sorted(map(id, matrices + rest)) == sorted(map(id, model.parameters()))
    names = {id(p): key for key, p in model.named_parameters()}
    assert all(p.ndim == 2 + (".experts." in names[id(p)]) for p in matrices)
    for p in matrices:
        assert names[id(p)].startswith("blocks.") or names[id(p)] == "anchor.proj.weight"
    for p in rest:
        key = names[id(p)]
        assert p.ndim < 2 or key in ("embed.weight", "pos_embed.weight", "head.weight", "depth_attention.query") or "lambda" in key or key.startswith("aggregate.") or ".sim_" in key or "_connection." in key or ".score_bias." in key or key.endswith(
            (".A_log", ".conv_weight", ".router.weight"))


@pytest.mark.parametrize("name, options", [(name, {}) for name in models.names()] + [
    ("exoformer", dict(mixing="dynamic")), ("attnres", dict(block_size=2)), ("gpt", dict(gate="headwise")),
    ("exoformer", dict(anchor="first_layer", norm_streams="qk")), ("muddformer", dict(dynamic=False, pre_post_norm=True)),
    ("hyperconnections", dict(connection="manifold", n_streams=2, sinkhorn_steps=2)), ("dape", dict(conv="heads", position="alibi"))])
def test_compiled_equals_eager(name, options):
    """One graph in forward and backward, and one for the decoding step; float64."""
    model = build(name, options, n_layer=2).double()
    idx, targets = tokens(2, 8), tokens(2, 8).roll(1, 1)
    model.train()
    want = model(idx, targets)[1]
    want.backward()
    grads = {key: p.grad.clone() for key, p in model.named_parameters()}
    model.zero_grad()
    model.compile(fullgraph=True, dynamic=False)
    got = model(idx, targets)[1]
    got.backward()
    torch.testing.assert_close(got, want, atol=1e-9, rtol=0)
    for key, p in model.named_parameters():
        torch.testing.assert_close(p.grad, grads[key], atol=1e-9, rtol=1e-9, msg=key)
    assert not any("_orig_mod" in key for key in model.state_dict())
    if not options:
        model.eval()
        assert torch.equal(model.generate(idx, 4, temperature=0, compile=True), model.generate(idx, 4, temperature=0))


def test_logits_beside_a_loss_carry_no_gradient():
    """Else backward makes a gradient as large as the logits, of zeros."""
    for name in models.names():
        model, idx = build(name, {}), tokens(2, 8)
        assert model(idx)[0].requires_grad and not model(idx, idx)[0].requires_grad, name


@every_case
def test_bf16_autocast_is_close(name, options):
    model, idx, targets = build(name, options).train(), tokens(2, 16), tokens(2, 16).roll(1, 1)
    loss = model(idx, targets)[1]
    with torch.autocast("cpu", torch.bfloat16):
        rough = model(idx, targets)[1]
    rough.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert rough.dtype == torch.float32 and abs(rough - loss) < 0.03 * loss


@every_case
def test_save_load_and_stats(name, options, tmp_path):
    model = build(name, options)
    torch.save(model.state_dict(), tmp_path / "w.pt")
    again = build(name, options, randomise=False)
    again.load_state_dict(torch.load(tmp_path / "w.pt", weights_only=True))
    assert torch.equal(model(tokens(2, 8))[0], again(tokens(2, 8))[0])
    stats = record.stats(name, model, tokens(2, 8))
    assert stats or name in ("gpt3", "pythia") or (name == "gpt" and model.config.gate == "none")
    assert all(isinstance(x, float) for numbers in stats.values() for x in numbers) and all(stats.values())


@pytest.mark.parametrize("name", [name for name in models.names() if hasattr(models.module(name).Config, "zero_init")])
def test_initial_values(name):
    """Zero head: the first loss is log(vocab). Special values hold after build()."""
    model = models.build(name, **TINY).eval()
    loss = model(tokens(2, 8), tokens(2, 8))[1].item()
    assert abs(loss - torch.tensor(31.0).log().item()) < 1e-6
    for key, p in model.named_parameters():
        if key.split(".")[-2] in ("wo", "w_down", "head", "w2", "mix_out") or key.endswith("query"):
            assert (p == 0).all(), key
        elif key.split(".")[-2].endswith("norm"):
            assert (p == 1).all(), key
        elif p.ndim == 2 and "lambda" not in key and not key.endswith((".a", "w1.weight", ".A_log", ".conv_weight", ".w_dt.weight")) and ".sim_" not in key and "_connection." not in key:
            assert 0.015 < p.std() < 0.025 and p.abs().max() <= 0.06 + 1e-6, key
    loose = models.build(name, **TINY, zero_init=False)
    assert loose.head.weight.std() > 0.015 and loose.blocks[0].attn.wo.weight.std() > 0.015


@pytest.mark.parametrize("n_layer", [12, 48])
@pytest.mark.parametrize("name", models.names())
def test_the_final_norm_is_one_at_the_start(name, n_layer):
    """norm_eps is small against the states: an embedding of std 0.02 over so many sources still leaves a norm at rms 1."""
    model, seen = models.build(name, **{**TINY, "n_layer": n_layer}).eval(), []
    model.final_norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(tokens(2, 8))
    assert abs(seen[0].square().mean().sqrt() - 1) < 0.02


def test_special_initial_values():
    lambdas = models.build("resformer", **TINY).value_mix()
    torch.testing.assert_close(torch.stack(lambdas), torch.tensor([[1.0, 1.0], [0.5, 0.5]]))
    assert models.build("resformer", **TINY, value_mix="identity").value_mix() == ([0.5] * 2, [0.5] * 2)
    assert models.build("resformer", **TINY, value_mix="constant").value_mix() == ([2.0] * 2, [1.0] * 2)
    learnable = models.build("resformer", **TINY, value_mix="learnable").value_mix
    assert (learnable.lambda1 == 0.5).all() and (learnable.lambda2 == 0.5).all()
    for mixing, value in dict(static=0.5, dynamic=1.0).items():
        model = models.build("exoformer", **TINY, mixing=mixing)
        for block in model.blocks:
            assert all((p == value).all() for p in (*block.attn.mix.lambda_anchor.values(), *block.attn.mix.lambda_self.values()))
    assert (model.blocks[0].attn.mix.gamma.mix_out.bias == 0).all()
    mudd = models.build("muddformer", **TINY)
    for i, aggregate in mudd.aggregate.items():
        assert torch.equal(aggregate.weights.a, torch.eye(int(i) + 1)[-1].expand_as(aggregate.weights.a))
    big = models.build("muddformer", **{**TINY, "d_model": 256})
    assert abs(big.aggregate["2"].weights.w1.weight.std() * 16 - 1) < 0.1               # variance 1 / d_model
    post = models.build("muddformer", **TINY, pre_post_norm=True)
    assert all((p == 1e-3).all() for key, p in post.named_parameters() if "post_norm" in key)
    assert all((p == 0).all() for key, p in post.named_parameters() if key.endswith("weights.a"))


def test_z_loss_counts_in_training_only():
    model, idx, targets = build("gpt", dict(z_loss=0.1)), tokens(2, 8), tokens(2, 8).roll(1, 1)
    plain = model(idx, targets)
    z = plain[0].logsumexp(-1).square().mean()
    torch.testing.assert_close(model.train()(idx, targets)[1], plain[1] + 0.1 * z)


def test_ignored_targets():
    model, idx, targets = build("gpt", {}), tokens(2, 8), tokens(2, 8).roll(1, 1)
    logits, loss = model(idx, torch.where(torch.arange(8) < 5, targets, -1))
    nll = -logits.log_softmax(-1).gather(-1, targets[..., None])[:, :5].mean()
    torch.testing.assert_close(loss, nll)


BAD = [("gpt", dict(n_head=5)), ("gpt", dict(n_kv_head=3)), ("gpt", dict(gate="x")), ("gpt", dict(n_layer=0)), ("gpt", dict(d_model=-8)),
       ("resformer", dict(value_mix="x")), ("resformer", dict(last_k=3)), ("satformer", dict(value_act="x")), ("satformer", dict(last_k=0)),
       ("exoformer", dict(gate="headwise")), ("exoformer", dict(gate="none")), ("exoformer", dict(mix_streams="qq")),
       ("exoformer", dict(mix_streams="qk", norm_streams="v")), ("exoformer", dict(anchor="first_layer", n_layer=1)),
       ("muddformer", dict(streams="x")), ("muddformer", dict(multiway=False, streams="q")), ("muddformer", dict(period=0)),
       ("muddformer", dict(window=0)), ("attnres", dict(block_size=0)), ("attnres", dict(block_size=7)), ("gpt", dict(nonsense=1)),
       ("denseformer", dict(period=0)), ("denseformer", dict(period=4)), ("denseformer", dict(dilation=0)),
       ("denseformer", dict(dilation=4)), ("denseformer", dict(dilation=3, period=2)),
       ("geonorm", dict(update="x")), ("geonorm", dict(decay="x")), ("geonorm", dict(decay_rate=0.0)), ("geonorm", dict(decay_rate=1.5)),
       ("kern", dict(router="x")), ("kern", dict(top_k=0)), ("kern", dict(n_expert=4, top_k=5)), ("kern", dict(n_expert=0, top_k=0)),
       ("kern", dict(d_ff=72)), ("kern", dict(top_k=3)), ("kern", dict(d_model=20, n_head=2)), ("kern", dict(balance_loss=-0.1)),
       ("sas", dict(n_sim=0)), ("sas", dict(d_sim=6)), ("sas", dict(d_sim=9)), ("sas", dict(kernel=4)), ("sas", dict(kernel=-1)),
       ("sas", dict(simulation="x")),
       ("hyperconnections", dict(connection="x")), ("hyperconnections", dict(n_streams=0)),
       ("hyperconnections", dict(connection="static", tanh=False)), ("hyperconnections", dict(sinkhorn_steps=0)),
       ("hyperconnections", dict(map_norm="x")), ("hyperconnections", dict(connection="manifold", map_norm="rms")),
       ("gpt3", dict(n_head=5)), ("gpt3", dict(n_kv_head=3)), ("gpt3", dict(max_len=0)), ("gpt3", dict(rope_theta=1e4)),
       ("pythia", dict(d_model=48)), ("pythia", dict(rope_theta=0.0)), ("muddpythia", dict(n_layer=1)),
       ("dape", dict(position="x")), ("dape", dict(conv="x")), ("dape", dict(kernel=2)), ("dape", dict(kernel=-1)), ("dape", dict(width=0)),
       ("dape", dict(kernel=0, width=8)), ("dape", dict(conv="heads", width=8)), ("dape", dict(conv="heads", kernel=9)),
       ("sambay", dict(window=1)), ("sambay", dict(gmu="x")), ("sambay", dict(n_layer=1)), ("sambay", dict(scan_chunk=0)),
       ("nonsense", {})]


@pytest.mark.parametrize("name, options", BAD)
def test_impossible_settings_are_refused(name, options):
    with pytest.raises(ValueError) as error:
        models.build(name, **{**TINY, **options})
    assert "\n" not in str(error.value) and len(str(error.value)) > 20
