"""What holds for every model: neutral setting, causality, cache, gradients, optimizer groups, bf16, initial values.

A file dropped into models/ is tested in its default setting; settings/__init__.py says how others are added.
"""
import copy
import re

import pytest
import settings
import torch
import torch.nn.functional as F
from settings import show
from torch.utils._pytree import tree_leaves

import models
import muon
import sample
import train

TINY = dict(vocab_size=31, n_layer=3, n_head=4, n_kv_head=2, d_model=32, d_ff=64, max_len=32)
CASES = [(name, options) for name in models.names() for options in [{}, *settings.of(name, "CASES")]]
every_case = pytest.mark.parametrize("name, options", CASES, ids=show)
every_model = pytest.mark.parametrize("name", models.names())


def fields(name):
    return models.module(name).Config.__dataclass_fields__


def build(name, options, randomise=True, **more):
    """A small model; randomise: no zero or one-hot initial value hides an error. Config takes what it has of TINY."""
    torch.manual_seed(0)
    model = models.build(name, **settings.fitting(name, TINY) | options | more)
    if randomise:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * (0.2 if p.ndim > 1 else 0.1))
    return model.eval()


def baseline(model, name):
    """The baseline of a model, at its initial values, in the settings that they share."""
    base = settings.baseline(name)
    shared = fields(name).keys() & fields(base).keys()
    return build(base, {key: getattr(model.config, key) for key in shared}, randomise=False)


def tokens(*shape):
    return torch.randint(TINY["vocab_size"], shape, generator=torch.Generator().manual_seed(1))


def seeded(model, *inputs):
    """A forward pass whose dropout and moving averages, in somebody's own model, are the same every time."""
    torch.manual_seed(0)
    return torch.func.functional_call(model, {key: b.clone() for key, b in model.named_buffers()}, inputs)


NEUTRAL = [(name, options) for name in models.names()
           for options in settings.of(name, "NEUTRAL", [{}] if settings.of(name, "neutral") else [])]


@pytest.mark.parametrize("name, options", NEUTRAL, ids=show)
@torch.no_grad()
def test_neutral_setting_equals_the_baseline(name, options):
    """With neutral(model) and the baseline's weights, in float64. With other mixing weights it is another function."""
    start = settings.fitting(name, dict(zero_init=False, norm_eps=1e-16))
    model = build(name, start | options, randomise=False).double()
    base = baseline(model, name).double()
    for p in base.parameters():
        # norm gains stay 1: a model may have several for one of the baseline
        p.add_(torch.randn_like(p) * 0.1 * (p.ndim > 1))
    if neutral := settings.of(name, "neutral"):
        neutral(model)
    own = model.load_state_dict(base.state_dict(), strict=False)
    assert all(base.get_parameter(key).ndim == 1 for key in own.unexpected_keys)
    difference = (model(tokens(2, 16))[0] - base(tokens(2, 16))[0]).abs().max()
    wrong = f"neutral setting of tests/settings/{name}.py: not {settings.baseline(name)}.py, correct or remove it"
    assert difference < 1e-9, wrong
    for key in own.missing_keys:
        p = model.get_parameter(key)
        p.add_(torch.randn_like(p) * (0.2 if p.ndim > 1 else 0.1))
    if {key for key in own.missing_keys if not f".{key}".split(".")[-2].endswith("norm")}:
        wrong = f"models/{name}.py: other values of the model's own parameters change nothing"
        assert (model(tokens(2, 16))[0] - base(tokens(2, 16))[0]).abs().max() > 1e-3, wrong


@every_case
def test_causal_later_tokens_do_not_change_earlier_logits(name, options):
    rounding = settings.of(name, "ROUNDING", 0 if settings.belongs(name) else 1e-12)
    model, idx = build(name, options), tokens(2, 16)
    model = model.double() if rounding else model
    changed = idx.clone()
    changed[0, 9] = (changed[0, 9] + 1) % TINY["vocab_size"]
    for training in (True, False):
        before, after = (seeded(model.train(training), x)[0] for x in (idx, changed))
        torch.testing.assert_close(after[0, :9], before[0, :9], rtol=0, atol=rounding,
                                   msg=f"models/{name}.py: a token changes the logits before it: not causal")
        torch.testing.assert_close(after[1], before[1], rtol=0, atol=rounding,
                                   msg=f"models/{name}.py: a text changes the logits of another one in its batch")
    assert ((before - after)[0, 9:].abs().amax(dim=1) > 1e-6).all()


@every_case
@torch.no_grad()
def test_cached_decoding_equals_the_full_forward(name, options):
    """A prompt in pieces of 1, 4 and 3 tokens, then token by token; float64."""
    module = models.module(name)
    settings.need(name, module, "Cache")
    model, idx = build(name, options).double(), tokens(2, 14)
    full = model(idx)[0]
    cache, parts, at = module.Cache(model, 2, 14), [], 0
    for n in (1, 4, 3, *[1] * 6):
        parts.append(model(idx[:, at:at + n], cache=cache)[0])
        at += n
    assert cache.pos == 14, f"models/{name}.py: after 14 tokens cache.pos is {cache.pos}"
    torch.testing.assert_close(torch.cat(parts, dim=1), full, atol=1e-9, rtol=0,
                               msg=f"models/{name}.py: something reads earlier tokens, and not from the cache, "
                                   "or it reads later ones")


@pytest.mark.sparse
@every_model
def test_generate(name):
    settings.need(name, models.module(name).Model, "generate")
    model, idx = build(name, {}).double(), tokens(2, 5)
    for n, options in ((1, dict(temperature=0)), (3, dict(top_k=3))):
        drawn = torch.cat([idx, *model.generate(idx, 20, **options)], dim=1)
        for t in range(5, 25):                              # each token is among the n likeliest of its context
            assert (model(drawn[:, :t])[0][:, -1].topk(n).indices == drawn[:, t:t + 1]).any(-1).all()
    for call in (lambda: next(model.generate(idx, 28)), lambda: model(tokens(1, 33))):
        with pytest.raises(ValueError, match="33 tokens are more than max_len 32"):
            call()


@every_model
def test_loss_is_the_mean_over_targets_that_are_not_ignored(name):
    """Evaluation adds nothing, training the z-loss of all positions. Returned logits carry no gradient."""
    model, idx, targets = build(name, {}).double(), tokens(2, 8), tokens(2, 8).roll(1, 1)
    logits, loss = model(idx, torch.where(torch.arange(8) < 5, targets, -1))
    nll = -logits.log_softmax(-1).gather(-1, targets[..., None])[:, :5].mean()
    torch.testing.assert_close(loss, nll)
    assert model(idx)[0].requires_grad
    assert not logits.requires_grad or not settings.belongs(name)       # else backward makes zeros as large as they
    if "z_loss" in fields(name):
        plain = seeded(model.train(), idx, targets)
        model.config.z_loss = 0.1
        z_loss = 0.1 * plain[0].logsumexp(-1).square().mean()
        torch.testing.assert_close(seeded(model, idx, targets)[1], plain[1] + z_loss)


@every_case
def test_bf16_autocast_is_close(name, options, monkeypatch):
    """States are bf16 all the way: what blocks and norms read, and q, k and v of attention. The loss is fp32."""
    model, idx, targets = build(name, options).train(), tokens(2, 16), tokens(2, 16).roll(1, 1)
    loss, seen = seeded(model, idx, targets)[1], set()

    def note(*read):
        states = [x for x in tree_leaves(read) if torch.is_tensor(x) and x.is_floating_point() and x.ndim > 2]
        seen.update(x.dtype for x in states if len(x) == 2)                 # rotary tables have no batch

    def attend(q, k, v, *args, plain=F.scaled_dot_product_attention, **options):
        note(q, k, v)
        return plain(q, k, v, *args, **options)

    if settings.belongs(name):
        monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
        for module in (*model.blocks, *(m for key, m in model.named_modules() if key.endswith("norm"))):
            module.register_forward_pre_hook(lambda module, inputs: note(inputs))
    with torch.autocast("cpu", torch.bfloat16):
        rough = seeded(model, idx, targets)[1]
    rough.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert rough.dtype == torch.float32 and abs(rough - loss) < 0.03 * loss
    assert seen == ({torch.bfloat16} if settings.belongs(name) else set())


def train_steps(model, n, optimizer="adamw", muon_lr=0.05, adamw_lr=0.01):
    model.train()
    opts = muon.optimizers(model, train.Options(optimizer=optimizer, muon_lr=muon_lr, adamw_lr=adamw_lr))
    for step in range(n):
        idx = torch.randint(TINY["vocab_size"], (4, 17), generator=torch.Generator().manual_seed(step))
        model(idx[:, :-1], idx[:, 1:])[1].backward()
        if step < n - 1:
            for opt in opts:
                opt.step()
                opt.zero_grad(set_to_none=True)


@every_model
@torch.no_grad()
def test_matrices_in_bf16_give_the_logits_of_autocast(name):
    """As generation has them: what is cast once is not cast again, and nothing else changes."""
    model, idx = build(name, {}), tokens(2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        want = model(idx)[0]
        sample.cast_weights(model, "bf16")
        got = model(idx)[0]
    assert (got - want).abs().max() <= 16 * torch.finfo(torch.bfloat16).eps * want.abs().max()
    changed = {p.dtype for key, p in model.named_parameters() if key.endswith(("embed.weight", "norm.weight"))}
    assert changed == {torch.bfloat16, torch.float32} or not settings.belongs(name)


@every_case
def test_every_parameter_gets_a_gradient_after_two_steps_and_has_moved_after_five(name, options):
    model = build(name, options, randomise=False, **settings.fitting(name, dict(zero_init=False)))
    train_steps(model, 3)                                              # two steps, and the backward pass of the third
    trained = [(key, p) for key, p in model.named_parameters() if p.requires_grad]
    for key, p in trained:
        assert p.grad is not None and p.grad.abs().max() > 0, f"models/{name}.py: {key} gets no gradient"
    # zeros in front of zeros take a step each to wake up
    model = build(name, options, randomise=False)
    before = copy.deepcopy(dict((*model.named_parameters(), *model.named_buffers())))
    train_steps(model, 6, "muon")
    for key in dict(model.named_buffers()).keys() - model.state_dict().keys():
        assert torch.equal(model.get_buffer(key), before[key]), (
            f"models/{name}.py: training changes {key}, and no checkpoint has it: drop persistent=False")
    for key, p in model.named_parameters():
        assert not torch.equal(p, before[key]) or not p.requires_grad, key


@every_case
def test_optimizer_groups_are_a_partition(name, options):
    """With either optimizer; what gpt.py does not have is trained as tests/settings/NAME.py says."""
    model = build(name, options, randomise=False)
    matrices, rest = muon.split_params(model)
    everything, mixing = sorted(map(id, model.parameters())), {id(p) for p in muon.mixing_params(model)}
    assert sorted(map(id, matrices + rest)) == everything, f"models/{name}.py: see split_params in muon.py"
    assert all(p.ndim >= 2 for p in matrices) and mixing <= {id(p) for p in rest}
    for kind, rate in (("muon", 0.02), ("adamw", 0.01)):
        opts = muon.optimizers(model, train.Options(optimizer=kind, muon_lr=0.02, adamw_lr=0.01, mix_lr=0.003))
        found = [(id(p), (group["lr"], group["weight_decay"])) for opt in opts for group in opt.param_groups
                 for p in group["params"]]
        wanted = {id(p): (0.003 if id(p) in mixing else 0.01, 0.0) for p in rest}
        assert sorted(found) == sorted((wanted | {id(p): (rate, 0.1) for p in matrices}).items())
        assert {(group["betas"], group["eps"]) for group in opts[-1].param_groups} == {((0.9, 0.95), 1e-8)}
    if settings.belongs(name) and not options:
        names = {id(p): re.sub(r"\.\d+\.", ".", key, count=1) for key, p in model.named_parameters()}
        ours, mixing = ({names[id(p)] for p in part} for part in (matrices, muon.mixing_params(model)))
        usual = {f"blocks.{key}.weight" for key in ("attn.wq", "attn.wk", "attn.wv", "attn.wo", "attn.gate",
                                                    "mlp.w_gate", "mlp.w_up", "mlp.w_down")}
        assert (ours - usual, mixing) == (settings.of(name, "MUON", set()), settings.of(name, "MIXES", set()))
        assert {key for key in names.values() if key in usual} <= ours


@pytest.mark.parametrize("name", [name for name in models.names() if "zero_init" in fields(name)])
def test_what_the_baseline_has_too_starts_as_there(name):
    """The same constant, or about the same standard deviation and largest value."""
    if not settings.belongs(name):
        pytest.skip("your own model may start from other values")
    for options in ({}, dict(zero_init=False)):
        model = build(name, options, randomise=False, d_model=64)
        own, base = dict(model.named_parameters()), dict(baseline(model, name).named_parameters())
        shared = [key for key in base if key in own and own[key].shape == base[key].shape]
        assert len(shared) > len(base) / 2
        for key in shared:
            if base[key].std() == 0:
                assert torch.equal(own[key], base[key]), key
            else:
                assert abs(own[key].std() / base[key].std() - 1) < 0.1, key
                assert abs(own[key].abs().max() / base[key].abs().max() - 1) < 0.2, key


@every_case
def test_every_parameter_and_buffer_gets_a_value(name, options):
    """Memory that nothing has been written to holds nan here. A tensor that is neither would stay behind on the CPU."""
    torch.use_deterministic_algorithms(True)
    try:
        model = build(name, options, randomise=False)
    finally:
        torch.use_deterministic_algorithms(False)
    for key, t in (*model.named_parameters(), *model.named_buffers()):
        assert t.isfinite().all(), f"models/{name}.py: {key} has no finite initial value: see init_weights"
    held = [(f"{type(m).__name__}.{key}", x) for m in model.modules() for key, x in vars(m).items() if key[0] != "_"]
    plain = [key for key, x in held if any(isinstance(y, (torch.Tensor, torch.nn.Module)) for y in tree_leaves(x))]
    assert not plain, (f"models/{name}.py: {plain[0]} holds tensors or modules that nothing trains or moves: use "
                       "nn.Parameter, nn.ParameterList, nn.ModuleList or register_buffer")


@pytest.mark.sparse
@every_model
def test_the_final_norm_is_one_at_the_start(name):
    """norm_eps is small against the states: an embedding of std 0.02 over 48 layers still gives rms 1 after a norm."""
    model, seen = build(name, {}, randomise=False, n_layer=48), []
    settings.need(name, model, "final_norm")
    model.final_norm.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(tokens(2, 8))
    rms = seen[0].square().mean().sqrt().item()
    assert abs(rms - 1) < 0.02, f"models/{name}.py: with 48 layers norm_eps is not small against the states"


@every_model
def test_init_weights_sets_what_it_knows(name):
    """A bias of a norm (nn.LayerNorm in place of ours) or of an nn.Linear becomes 0, where weights of norms stay 1. Any
    other parameter is an error, also of a norm or matrix: it need not start like the weight.
    """
    model = build(name, {}, randomise=False)
    if not settings.belongs(name):
        pytest.skip("your own model may start from other values")
    named = [(key, m) for key, m in model.named_modules() if isinstance(getattr(m, "weight", None), torch.Tensor)]
    norms = [m for key, m in named if key.endswith("norm")]
    bare = [m for _, m in named if (m in norms or isinstance(m, torch.nn.Linear)) and getattr(m, "bias", None) is None]
    for module in bare:
        module.bias = torch.nn.Parameter(torch.full(module.weight.shape[:1], torch.nan))
    before = [m.weight.clone() for m in norms]
    model.init_weights()
    assert not any(m.bias.any() for m in bare) and all(torch.equal(m.weight, w) for m, w in zip(norms, before))
    for place in (model, model.blocks[-1], norms[0], model.blocks[0].attn.wo):
        place.surprise = torch.nn.Parameter(torch.zeros(3))
        with pytest.raises(ValueError, match="surprise"):
            model.init_weights()
        del place.surprise


@pytest.mark.parametrize("name, options", [("nonsense", {}), *(
    (name, options) for name in models.names() for options in (dict(nonsense=1), *settings.of(name, "BAD")))], ids=show)
def test_impossible_settings_are_refused(name, options):
    with pytest.raises(ValueError) as error:
        models.build(name, **({**TINY, **options}))
    assert "\n" not in str(error.value) and len(str(error.value)) > 20
