"""analyze.py: every number against a case whose answer is known, or against a naive computation in float64."""
import json
import math
import shutil
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from forked import Scripts

import analyze
import data_prep
import models

SHAPE = dict(vocab_size=97, n_layer=3, n_head=4, n_kv_head=2, d_model=32, d_ff=64, max_len=48)
NO_QUIET = torch.tensor([96])


@pytest.fixture(autouse=True, scope="module")
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def random_model(name, **options):
    """In eval mode, float64, with no parameter at its initial value."""
    torch.manual_seed(1)
    model = models.build(name, **{**SHAPE, **options}).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


def tokens(B=2, T=12, seed=0):
    idx = torch.randint(96, (B, T + 1), generator=torch.Generator().manual_seed(seed))
    return idx[:, :-1], idx[:, 1:]


def numbers(model, B=2, T=12, quiet=NO_QUIET):
    return analyze.measure(model, [tokens(B, T)], quiet)


# ------------------------------------------------------------------------------------------------------------ attention


def test_uniform_attention_has_entropy_log_t():
    T = 9
    weights = torch.ones(2, 3, T, T).tril() / torch.arange(1, T + 1)[:, None]
    entropy, sink, active = analyze.attention_numbers(weights, torch.zeros(2, T, dtype=torch.bool))
    assert entropy.tolist() == pytest.approx([sum(math.log(t) for t in range(1, T + 1)) / T] * 3)
    assert sink.tolist() == pytest.approx([sum(1 / t for t in range(2, T + 1)) / (T - 1)] * 3)


def test_attention_on_itself_and_on_quiet_tokens():
    T = 8
    own, first = torch.eye(T), F.one_hot(torch.zeros(T, dtype=torch.long), T).double()
    quiet = torch.zeros(1, T, dtype=torch.bool)
    quiet[0, 5] = True
    entropy, sink, active = analyze.attention_numbers(torch.stack((own, first))[None], quiet)
    assert entropy.tolist() == [0, 0] and sink.tolist() == [0, 1]
    assert active.tolist() == [(T - 3) / T, 0]                                      # not at tokens 0, 1 and 5


def test_attention_numbers_against_loops():
    B, H, T = 2, 2, 7
    weights = torch.randn(B, H, T, T).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf).softmax(-1)
    quiet = torch.rand(B, T) < 0.3
    got = analyze.attention_numbers(weights, quiet)
    for h in range(H):
        entropy = sink = active = 0.0
        for b, t in product(range(B), range(T)):
            row = weights[b, h, t, :t + 1].tolist()
            entropy -= sum(w * math.log(w) for w in row) / (B * T)
            sink += row[0] / (B * (T - 1)) if t else 0
            at = max(range(len(row)), key=row.__getitem__)
            active += (at > 1 and not quiet[b, at]) / (B * T)
        assert [x[h].item() for x in got] == pytest.approx([entropy, sink, active])


@pytest.mark.parametrize("kind", ["causal", "mask", "bias", "none"])
def test_attention_weights_are_those_of_torch(kind):
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    options = {"causal": dict(is_causal=True), "mask": dict(attn_mask=torch.ones(6, 6).tril(1).bool()),
               "bias": dict(attn_mask=torch.randn(6, 6), scale=0.3), "none": {}}[kind]
    seen = []
    with analyze.SeeAttention(seen.append):
        out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    assert len(seen) == 1 and torch.allclose(seen[0] @ v.repeat_interleave(2, 1), out, atol=1e-6)


def test_every_layer_and_head_is_where_it_belongs():
    """measure() against the weights of each layer, taken from its own q and k."""
    model, (idx, targets), quiet = random_model("gpt"), tokens(2, 40), torch.arange(0, 96, 3)
    pairs = []

    class QK(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is F.scaled_dot_product_attention:
                pairs.append(args[:2])
            return function(*args, **(kwargs or {}))
    with QK(), torch.no_grad():
        model(idx)
    found = analyze.measure(model, [(idx, targets)], quiet)
    for layer, (q, k) in enumerate(pairs):
        scores = torch.einsum("bhtd,bhsd->bhts", q, k.repeat_interleave(2, 1)) / math.sqrt(8)
        weights = scores.masked_fill(torch.ones(40, 40).triu(1).bool(), -math.inf).softmax(-1)
        for name, wanted in zip(("entropy", "sink", "active"), analyze.attention_numbers(weights, torch.isin(idx, quiet))):
            assert found[name][layer] == pytest.approx(wanted.tolist()), name
        assert torch.allclose(torch.tensor(found["maps"][layer]), weights[0, :, :32, :32], atol=1e-4)
    everything = analyze.attention_numbers(weights, torch.zeros_like(idx).bool())[2]
    assert found["active"][-1] != pytest.approx(everything.tolist()) and len(found["maps"]) == 3


# --------------------------------------------------------------------------------------------------------- hidden states


def moments(x):
    return x.mT @ x / len(x), x.mean(0)


def test_core_features():
    torch.manual_seed(0)
    plane = torch.linalg.qr(torch.randn(20, 3))[0]
    points = torch.linalg.qr(torch.randn(500, 3) - torch.randn(500, 3).mean(0))[0]
    points = torch.linalg.qr(points - points.mean(0))[0]                            # centred, orthogonal: equal variances
    assert analyze.core_features(*moments(points @ plane.T + torch.randn(20))) == 3     # rank 3, and a mean that is not variance
    assert analyze.core_features(*moments((points * torch.tensor([1, 0.05, 0.05])) @ plane.T)) == 1
    cube = torch.cat((torch.eye(200), -torch.eye(200)))
    assert analyze.core_features(*moments(cube)) == 198                             # 99% of 200 equal ones
    assert analyze.core_features(*moments(torch.ones(50, 20))) == 0


def test_token_similarity_against_loops():
    x = torch.randn(2, 6, 5) + 1
    pairs = [F.cosine_similarity(x[b, i], x[b, j], dim=0).item() for b in range(2) for i in range(6) for j in range(6) if i != j]
    assert analyze.token_similarity(x).item() == pytest.approx(sum(pairs) / len(pairs))
    assert analyze.token_similarity(torch.ones(1, 4, 3)).item() == pytest.approx(1)
    assert analyze.token_similarity(torch.eye(4)[None] * 5).item() == pytest.approx(0)


@pytest.mark.parametrize("similarity, share", [
    ([0.5, 0.4, 0.2, 0.3, 0.6], 0.5), ([0.1, 0.2, 0.3], None), ([0.3, 0.2, 0.1], None), ([0.3, 0.3, 0.3], None), ([0.1, 0.5, 0.3, 0.4, 0.6], 0.5),
    ([0.3, 0.1, 0.5, 0.2, 0.25], 0.75), ([0.5, 0.2, 0.4, 0.41, 0.4099], 0.75), ([0.2, 0.1, 0.1, 0.4, 0.5], 0.5), ([0.3, 0.2, 0.2, 0.1], None)])
def test_refinement_begins_at_the_lowest_local_minimum(similarity, share):
    assert analyze.refinement(similarity) == share


def test_a_model_that_adds_nothing_keeps_its_state():
    found = numbers(models.build("gpt", **SHAPE).eval())                            # wo, w_down and head start at zero
    assert torch.tensor(found["layer_similarity"]).flatten().tolist() == pytest.approx([1.0] * 16)
    assert found["adjacent"]["x"] == pytest.approx([1.0, 1.0])
    assert len(set(found["core_features"])) == 1 and found["lens"] == pytest.approx([math.log(97)] * 4)


def test_similarity_of_layers_and_lens_against_a_plain_forward_pass():
    model = random_model("gpt")
    idx, targets = tokens()
    x, states = model.embed(idx), []
    for block in model.blocks:
        states.append(x)
        x = block(x, model.rope(12, None))
    states.append(x)
    found = numbers(model)
    for i, j in product(range(4), range(4)):
        cos = [F.cosine_similarity(a, b, dim=0).item() for a, b in zip(states[i].flatten(0, 1), states[j].flatten(0, 1))]
        assert found["layer_similarity"][i][j] == pytest.approx(sum(cos) / len(cos))
    for i, state in enumerate(states):
        logp = model.head(model.final_norm(state)).log_softmax(-1)
        assert found["lens"][i] == pytest.approx(-logp.gather(-1, targets[..., None]).mean().item(), rel=1e-6)
    assert found["loss"] == pytest.approx(model(idx, targets)[1].item(), rel=1e-6)
    assert found["norm"] == pytest.approx([sum(v.square().sum().sqrt().item() for v in x.flatten(0, 1)) / 24 for x in states])
    assert found["adjacent"]["x"] == pytest.approx([found["layer_similarity"][i][i + 1] for i in range(2)])


def test_batches_are_averaged_and_leave_no_hooks():
    model = random_model("satformer")
    (a, b), (c, d) = tokens(2), tokens(4, seed=1)
    one = analyze.measure(model, [(torch.cat((a, c)), torch.cat((b, d)))], NO_QUIET)
    two = analyze.measure(model, [(a, b), (c, d)], NO_QUIET)
    for name in ("loss", "entropy", "sink", "active", "token_similarity", "layer_similarity", "value_gate", "value_gate_zeros"):
        assert torch.allclose(torch.tensor(one[name]), torch.tensor(two[name]), rtol=1e-9), name
    assert one["core_features"] == two["core_features"]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# --------------------------------------------------------------------------------------------------------------- mixing

DEPTH = [("gpt", {}), ("resformer", {}), ("exoformer", {}), ("satformer", {}), ("attnres", {}), ("attnres", dict(block_size=2)),
         ("attnres", dict(block_size=4)), ("muddformer", {}), ("muddformer", dict(multiway=False)), ("muddformer", dict(streams="vr")),
         ("muddformer", dict(dynamic=False)), ("muddformer", dict(period=2)), ("muddformer", dict(dilation=2)), ("muddformer", dict(window=1)),
         ("denseformer", {}), ("denseformer", dict(dilation=2)), ("denseformer", dict(period=2)),
         ("geonorm", {}), ("geonorm", dict(update="unprojected", decay="geometric")), ("geonorm", dict(update="pre_norm")),
         ("kern", {}),
         ("sas", {}), ("sas", dict(simulation="projection")),
         *(("hyperconnections", dict(connection=kind, n_streams=n)) for kind, n in dict(static=2, dynamic=4, manifold=3, identity=4).items()),
         ("gpt3", {}), ("pythia", {}), ("muddpythia", {}),
         ("dape", {}),
         ("sambay", {}), ("sambay", dict(gmu="none", window=4))]


@pytest.mark.parametrize("name, options", DEPTH, ids=lambda x: str(x))
@torch.no_grad()
def test_depth_matrix_makes_every_input_from_the_outputs(name, options):
    model = random_model(name, **options)
    with analyze.recorded(model) as record:
        model(tokens()[0])
    A = analyze.depth_matrix(model, record)
    outputs = torch.stack(record.outputs, dim=-2)                                   # (B, T, 7, C)
    assert outputs.size(-2) == 7 and outputs.abs().amax((0, 1, 3)).min() > 0
    assert (A["r"] @ outputs - torch.stack(record.reads, dim=-2)).abs().max() < 1e-9
    assert torch.equal(A["r"], A["r"].tril())
    for stream in set(A) & set(record.streams):                                     # q, k, v and r of MUDD's blocks
        assert torch.equal(A[stream][..., 1::2, :], A["r"][..., 1::2, :])          # MLPs read r alone
        assert ((A[stream] @ outputs)[..., :-1:2, :] - torch.stack(record.streams[stream], dim=-2)).abs().max() < 1e-9
    assert set(A) == (set("qkvr") if name in ("muddformer", "muddpythia") else {"r"})
    assert record.parallel == (name in ("pythia", "muddpythia"))
    assert numbers(model)["depth_error"] < 1e-9


def test_a_stream_that_is_no_sum_of_outputs_is_noticed():
    for found in (numbers(random_model("muddformer", pre_post_norm=True)),
                  numbers(random_model("geonorm", update="post_norm"))):
        assert found["depth_error"] > 1e-2 and found["depth"] == {}


def test_sambay_is_watched_without_attention_in_every_layer():
    found = numbers(random_model("sambay", n_layer=8, window=5, gate="headwise"))   # windows in blocks of 5 of 12 tokens
    assert found["depth_error"] < 1e-9 and len(found["lens"]) == 9 and len(found["core_features"]) == 9
    assert found["entropy"] is found["active"] is found["gate"] is None and found["maps"] == []


def values_of(model, idx):
    """The values that attention gets, (B, T, K, D) per layer, and each layer's own projection before any mixing."""
    mixed, own = [], []

    class Values(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is F.scaled_dot_product_attention:
                mixed.append(args[2].transpose(1, 2))
            return function(*args, **(kwargs or {}))
    with analyze.recorded(model) as record, Values():
        model(idx)
    for block, x in zip(model.blocks, record.streams["x"]):
        own.append(block.attn.wv(block.attn_norm(x)).unflatten(-1, (-1, model.config.d_head)))
    return torch.stack(mixed), torch.stack(own), record


@pytest.mark.parametrize("name, options", [("resformer", {}), ("resformer", dict(value_mix="learnable")), ("resformer", dict(last_k=1)),
                                           ("resformer", dict(value_mix="constant")), ("satformer", dict(value_act="softmax", n_kv_head=1)),
                                           ("exoformer", dict(granularity="scalar")), ("exoformer", dict(granularity="scalar", norm_streams="none")),
                                           ("exoformer", dict(granularity="scalar", anchor="first_layer"))],
                         ids=lambda x: str(x))
@torch.no_grad()
def test_value_matrix_makes_the_values(name, options):
    """Where the weights do not depend on token or channel (softmax over one head is 1) the matrix is exact."""
    model = random_model(name, **options)
    anchors = []
    if name == "exoformer":
        model.anchor.register_forward_hook(lambda m, inputs, output: anchors.append(output["v"]))
    mixed, own, record = values_of(model, tokens()[0])
    A = analyze.value_matrix(model, record)
    assert set(A) == (set("qkvg") if name == "exoformer" else {"v"})
    A, outside = A["v"].to(own.dtype), int(A["v"].size(1) > 3)
    made = torch.einsum("nm,mbthd->nbthd", A[:, outside:], own)
    for n in range(1 - outside, 3) if anchors else ():                              # the anchor as it is mixed in: normalised
        made[n] += A[n, 0] * (anchors[0] if outside else anchors[0] - own[0])
    assert (made - mixed).abs().max() < 1e-5 * mixed.abs().max()


@pytest.mark.parametrize("name", ["gpt", "exoformer", "attnres", "muddformer"])
def test_one_layer(name):
    found = numbers(random_model(name, n_layer=1, **(dict(ffn_realloc=False) if name == "muddformer" else {})))
    assert found["adjacent"] == {} and len(found["lens"]) == 2 and found["depth_error"] < 1e-9


@torch.no_grad()
def test_value_matrix_means_of_what_varies():
    model = random_model("satformer")
    with analyze.recorded(model) as record:
        model(tokens()[0])
    alphas = [block.attn.value_gate(block.attn_norm(x)) for block, x in zip(model.blocks[1:], record.hidden[1:])]
    A = analyze.value_matrix(model, record)["v"]
    assert A[1:, 0].tolist() == pytest.approx([a.mean().item() for a in alphas], rel=1e-5)
    assert A[:, 1:].tolist() == torch.eye(3)[:, 1:].tolist() and A[0, 0] == 1
    model = random_model("exoformer", mixing="dynamic")
    with analyze.recorded(model) as record:
        model(tokens()[0])
    mix = model.blocks[1].attn.mix
    gamma = mix.gamma(model.blocks[1].attn_norm(record.hidden[1])).mean((0, 1))     # anchor, own for q, k, v, g
    assert analyze.value_matrix(model, record)["k"][1].tolist() == pytest.approx(
        [(gamma[2] * mix.lambda_anchor["k"].mean()).item(), 0, (gamma[3] * mix.lambda_self["k"].mean()).item(), 0], rel=1e-5)


@pytest.mark.parametrize("mixing", ["static", "dynamic"])
def test_lambdas_are_the_parameters(mixing):
    model = random_model("exoformer", mixing=mixing)
    found = numbers(model)
    assert found["mixing_layers"] == [1, 2, 3]
    with torch.no_grad(), analyze.recorded(model) as record:
        model(tokens()[0])
    for i, s in enumerate("qkvg"):
        gammas = [block.attn.mix.gamma(block.attn_norm(x)).mean((0, 1))[2 * i:2 * i + 2] if mixing == "dynamic" else torch.ones(2)
                  for block, x in zip(model.blocks, record.hidden)]
        assert torch.allclose(torch.tensor(found["gamma"][s]), torch.stack(gammas))
    for kind in ("lambda_anchor", "lambda_self"):
        for s, heads in dict(q=4, k=2, v=2, g=4).items():
            wanted = torch.stack([getattr(block.attn.mix, kind)[s] for block in model.blocks]).float()
            assert torch.equal(torch.tensor(found[kind][s]).float(), wanted) and wanted.shape == (3, heads, 8)


@pytest.mark.parametrize("name, options", [("muddformer", dict(window=2)), ("muddformer", dict(window=2, pre_post_norm=True)), ("muddpythia", {})],
                         ids=lambda x: str(x))
@torch.no_grad()
def test_dynamic_weights_against_loops(name, options):
    model = random_model(name, **options)
    found = numbers(model)["dynamic"]
    x, pre_norm = model.embed(tokens()[0]), getattr(model, "pre_norm", lambda j, x: x)
    X, seen, streams = [x], [pre_norm(0, x)], (x,) * 4                              # seen: what is weighted
    for i, block in enumerate(model.blocks, start=1):
        X.append(block(*streams, model.rope(12, None)))
        seen.append(pre_norm(i, X[-1]))
        aggregate, last = model.aggregate[str(i)], [0, 2, 3] if "window" in options else [0, 1, 2, 3]
        weights, (names, sources) = aggregate.weights(X[-1]), ("qkvr" if i < 3 else "r", [[0, 1], [0, 1, 2], last][i - 1])
        assert found[str(i)]["streams"] == names and found[str(i)]["sources"] == sources
        for (c, _), (j, source) in product(enumerate(names), enumerate(sources)):
            w = [weights[b, t, c, j].item() for b in range(2) for t in range(12)]
            norm = sum(seen[source][b, t].square().sum().sqrt().item() for b in range(2) for t in range(12)) / 24
            m = sum(w) / 24
            sd = math.sqrt(sum((a - m) ** 2 for a in w) / 24)
            assert found[str(i)]["mean"][c][j] == pytest.approx(m * norm, rel=1e-4, abs=1e-6)
            assert found[str(i)]["sd"][c][j] == pytest.approx(sd * norm, rel=1e-3, abs=1e-6)
        streams = aggregate(X, seen) if name == "muddformer" else aggregate(X)


def test_small_deviations_of_weights_in_fp32():
    model = random_model("muddformer").float()
    with torch.no_grad():
        weights = model.aggregate["2"].weights
        weights.w2.weight.normal_(std=2e-4)
        weights.a.fill_(1.0)
        got = numbers(model)["dynamic"]["2"]["sd"]
        wanted = numbers(model.double())["dynamic"]["2"]["sd"]
    assert torch.allclose(torch.tensor(got), torch.tensor(wanted), rtol=1e-2) and torch.tensor(wanted).min() > 0


# ---------------------------------------------------------------------------------------------------------------- gates


@pytest.mark.parametrize("name, options", [("gpt", dict(gate="elementwise")), ("gpt", dict(gate="headwise")), ("muddformer", dict(gate="elementwise")),
                                           ("exoformer", {}), ("exoformer", dict(anchor="first_layer")), ("exoformer", dict(mix_streams="v"))],
                         ids=lambda x: str(x))
def test_gates(name, options):
    """The layers' true gates, found from what they do to the attention's output, which is made 1."""
    model = random_model(name, **options)
    truth = []

    class One(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            return torch.ones_like(out) if function is F.scaled_dot_product_attention else out
    hooks = [block.attn.wo.register_forward_pre_hook(lambda m, i: truth.append(i[0].unflatten(-1, (4, 8)).mean((0, 1, 3)))) for block in model.blocks]
    with torch.no_grad(), One():
        out = analyze.observe(model, *tokens(), torch.zeros(2, 12, dtype=torch.bool))
    for hook in hooks:
        hook.remove()
    assert torch.allclose(out["gate"].double(), torch.stack(truth), atol=1e-6)


def test_no_gate():
    assert numbers(random_model("gpt"))["gate"] is None
    assert numbers(random_model("exoformer", gate="none", mix_streams="qkv"))["gate"] is None


def test_value_gate_statistics():
    model = random_model("satformer", n_kv_head=4)
    with torch.no_grad(), analyze.recorded(model) as record:
        model(tokens()[0])
    found = numbers(model)
    for i in range(2):
        alpha = model.blocks[i + 1].attn.value_gate(model.blocks[i + 1].attn_norm(record.hidden[i + 1])).flatten(0, 1).T.tolist()   # per head
        means = [sum(a) / len(a) for a in alpha]
        centre = sum(means) / 4
        assert found["value_gate"][i] == pytest.approx(means, rel=1e-5)
        assert found["value_gate_zeros"][i] == pytest.approx(sum(x == 0 for a in alpha for x in a) / (4 * 24))
        assert found["value_gate_cv"][i] == pytest.approx(math.sqrt(sum((m - centre) ** 2 for m in means) / 4) / centre, rel=1e-4)
    assert 0 < found["value_gate_zeros"][0] < 1
    even = numbers(random_model("satformer", value_act="softmax", n_kv_head=1))
    assert even["value_gate_cv"] == pytest.approx([0, 0], abs=1e-6) and even["value_gate"] == [[1.0], [1.0]]


def test_interventions_are_what_changed_weights_give():
    model = random_model("satformer", last_k=2, n_layer=4)
    batches = [tokens(2), tokens(2, seed=1)]
    found = analyze.measure(model, batches, NO_QUIET)["interventions"]
    base = math.exp(sum(model(*b)[1].item() for b in batches) / 2)
    assert found["layers"] == [3, 4] and found["perplexity"] == pytest.approx(base, rel=1e-6)
    for i, layer in enumerate(found["layers"]):
        weight = model.blocks[layer - 1].attn.value_gate.weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.zero_()                                                          # relu(0) = 0
        assert found["zero"][i] == pytest.approx(math.exp(sum(model(*b)[1].item() for b in batches) / 2) - base, rel=1e-5)
        with torch.no_grad():
            weight.copy_(kept)
        assert abs(found["mean"][i]) > 1e-6 and found["mean"][i] != found["zero"][i]
    constant = random_model("satformer", value_act="softmax", n_kv_head=1)          # the gate is its mean
    assert analyze.measure(constant, batches, NO_QUIET)["interventions"]["mean"] == pytest.approx([0, 0], abs=1e-3)


def test_mean_interventions_use_one_number_per_layer():
    """They are the models whose gate is a constant, here in batches of different sizes."""
    model, batches = random_model("satformer"), [tokens(3), tokens(1, seed=1)]
    found = analyze.measure(model, batches, NO_QUIET)
    for i, row in enumerate(found["value_gate"]):
        gate, average = model.blocks[i + 1].attn.value_gate, sum(row) / 2
        gate.forward = lambda x, average=average: torch.full((*x.shape[:2], 2), average)
        loss = (3 * model(*batches[0])[1].item() + model(*batches[1])[1].item()) / 4
        del gate.forward
        assert found["interventions"]["mean"][i] == pytest.approx(math.exp(loss) - found["interventions"]["perplexity"], rel=1e-6)
    assert found["interventions"]["mean"][0] != pytest.approx(found["interventions"]["mean"][1])


def test_gates_below_zero_have_no_coefficient_of_variation():
    found = numbers(random_model("satformer", value_act="tanh"))
    means = [sum(row) / 2 for row in found["value_gate"]]
    assert [x is None for x in found["value_gate_cv"]] == [m <= 0 for m in means] and min(means) < 0


@pytest.mark.parametrize("anchor", ["external", "first_layer"])
def test_anchors_removed_is_lambda_anchor_zero(anchor):
    model = random_model("exoformer", anchor=anchor)
    bare = numbers(model)["without_anchor"]
    with torch.no_grad():
        for block in model.blocks:
            for p in block.attn.mix.lambda_anchor.values() if getattr(block.attn, "mix", None) is not None else ():
                p.zero_()
    wanted = numbers(model)
    assert bare["loss"] == pytest.approx(wanted["loss"], rel=1e-9) and bare["core_features"] == wanted["core_features"]
    assert bare["token_similarity"] == pytest.approx(wanted["token_similarity"])
    assert numbers(random_model("gpt"))["without_anchor"] == {}


# -------------------------------------------------------------------------------------------------------------- pictures


def test_heat_map_has_its_rows_and_columns_where_the_labels_say():
    plt = pytest.importorskip("matplotlib.pyplot")
    ax = plt.subplots()[1]
    image = analyze.heat(ax, [[1, 2, 3], [4, 5, 6]], "t", "x", "y", first=(2, 1))
    inverse = ax.transData.inverted()
    assert ax.get_xlabel() == "x" and ax.get_ylabel() == "y" and image.get_extent() == [0.5, 3.5, 3.5, 1.5]
    def at(x, y):                                                                   # the value drawn at these coordinates
        cx, cy = ax.transData.transform((x, y))
        event = type("E", (), dict(x=cx, y=cy, inaxes=ax, xdata=x, ydata=y))
        return image.get_cursor_data(event)
    assert [[at(x, y) for x in (1, 2, 3)] for y in (2, 3)] == [[1, 2, 3], [4, 5, 6]] and inverse is not None


def test_pictures_show_the_numbers():
    pytest.importorskip("matplotlib")
    sat, exo = random_model("satformer", last_k=1), random_model("exoformer", anchor="first_layer")
    mudd, res = random_model("muddformer", streams="vr"), random_model("attnres", block_size=2)
    found = {m.__class__.__module__.split(".")[1]: numbers(m) for m in (sat, exo, mudd, res)}
    layers = {ax.get_title(): ax for ax in analyze.draw_layers(found).axes}
    lens, entropy = layers["logit lens"].get_lines(), layers["attention entropy"].get_lines()
    assert lens[1].get_xydata().tolist() == [[i, y] for i, y in enumerate(found["exoformer"]["lens"])]
    assert entropy[2].get_xydata() == pytest.approx(torch.tensor([[i + 1, sum(y) / 4] for i, y in enumerate(found["muddformer"]["entropy"])]).numpy())
    by_stream = [line.get_ydata().tolist() for line in layers["input against previous layer's"].get_lines()]
    assert [list(y) for y in found["muddformer"]["adjacent"].values()] == by_stream[2:6]
    depth = {ax.get_title(): ax for ax in analyze.draw_depth(found).axes}
    assert "satformer, exoformer" in depth and "muddformer, v input" in depth       # both plain sums: drawn once
    drawn = depth["attnres"].get_images()[0]
    assert torch.allclose(torch.tensor(drawn.get_array().filled(0.0)), torch.tensor(found["attnres"]["depth"]["r"]))
    assert drawn.get_array().mask.tolist() == torch.ones(7, 7).triu(1).bool().tolist() and drawn.get_extent() == [-0.5, 6.5, 7.5, 0.5]
    drawn = depth["muddformer, v input"].get_images()[0]                            # attention's rows alone
    assert torch.allclose(torch.tensor(drawn.get_array().filled(0.0)), torch.tensor(found["muddformer"]["depth"]["v"])[:-1:2])
    gates = {ax.get_title(): ax for ax in analyze.draw_gates(found).axes}
    assert gates["satformer: value gate, mean"].get_images()[0].get_extent() == [0.5, 2.5, 3.5, 2.5]                # layer 3 alone
    assert [bar.get_height() for bar in gates["satformer: one layer's gate replaced"].patches] == [
        found["satformer"]["interventions"][kind][0] for kind in ("zero", "mean")]
    anchors = {ax.get_title(): ax for ax in analyze.draw_anchors(found).axes}
    panel = anchors["exoformer: anchor / own, K"]
    wanted = torch.stack([(mix.lambda_anchor["k"] / mix.lambda_self["k"]).flatten() for mix in (b.attn.mix for b in exo.blocks[1:])])
    assert torch.allclose(torch.tensor(panel.get_images()[0].get_array().data), wanted) and panel.get_images()[0].get_extent() == [-0.5, 15.5, 3.5, 1.5]
    assert [line.get_xdata()[0] for line in panel.get_lines()] == [7.5]             # two key heads of 8 channels
    dynamic = {ax.get_title(): ax for ax in analyze.draw_dynamic(found).axes}
    cells = dynamic["muddformer: sd, stream V"].get_images()[0].get_array()
    assert cells[1].tolist()[:3] == pytest.approx(found["muddformer"]["dynamic"]["2"]["sd"][0]) and cells.mask[1].tolist() == [False] * 3 + [True]
    maps = analyze.draw_maps("attnres", found["attnres"])
    assert torch.equal(torch.tensor(maps.axes[4 * 1 + 2].get_images()[0].get_array().data), torch.tensor(found["attnres"]["maps"][1][2]))


# --------------------------------------------------------------------------------------------------------------- curves


def write_run(folder, losses, seed=0, model="gpt", tok_s=1000.0, step=100, config=(), options=(), peak=2 ** 30):
    """A run folder as train.py leaves it, without a checkpoint: validations at steps 0, 1, 2, .. times `step`."""
    folder.mkdir(parents=True)
    chosen = {"model": model, "preset": "tiny", "seed": seed, "out": str(folder), "seq_len": 256, "eval_tokens": 1000, "muon_lr": 0.005, **dict(options)}
    (folder / "config.json").write_text(json.dumps({
        "model": model, "model_config": {"gate": "none", "n_layer": 2, **dict(config)}, "options": chosen, "data": {"path": "d", "fingerprint": "f"}}))
    rows = [{"kind": "val", "step": i * step, "tokens": i * step * 10, "loss": loss, "peak_bytes": peak} for i, loss in enumerate(losses)]
    rows += [{"kind": "train", "step": i, "tokens": i * 10, "loss": 1.0, "tok_s": tok_s * (3 if i == 1 else 1)} for i in range(1, 6)]
    (folder / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_table_against_numbers_by_hand(tmp_path, capsys):
    gpt = [[5.0, 4.0, 3.0], [5.0, 4.2, 3.2], [5.0, 4.1, 3.1]]
    sat = [[5.0, 3.4, 2.8], [5.0, 3.7, 3.1], [5.0, 3.4, 2.8]]
    runs = [write_run(tmp_path / f"g{s}", x, s) for s, x in enumerate(gpt)]
    runs += [write_run(tmp_path / f"s{s}", x, s, "satformer", 500.0, peak=2 ** 31) for s, x in enumerate(sat)]
    analyze.main(["curves", *map(str, reversed(runs)), "--out", str(tmp_path / "out")])
    rows = json.loads((tmp_path / "out" / "curves.json").read_text())
    assert list(rows) == ["gpt", "satformer"]
    g, s = rows.values()
    assert g["loss"] == pytest.approx(3.1) and g["loss_sd"] == pytest.approx(0.1) and g["difference_95"] == 0
    assert s["loss"] == pytest.approx(2.9) and s["difference"] == pytest.approx(-0.2)               # gaps -0.2, -0.1, -0.3
    assert s["difference_95"] == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)
    assert g["tokens_to_baseline"] == 2000 and s["tokens_to_baseline"] == pytest.approx(1000 + 1000 * (3.5 - 3.1) / (3.5 - 2.9))
    assert g["tok_s"] == 1000 and s["tok_s"] == 500 and s["peak_bytes"] == 2 ** 31
    line = "| `satformer` | 3 | 0.00M | 2.9000 ± 0.1732 | -0.2000 ± 0.2484 | 0.00M (1.20x fewer) | 500 ± 0 | 2.00 |\n"
    text = (tmp_path / "out" / "curves.md").read_text()
    assert line in text and text in capsys.readouterr().out
    assert (tmp_path / "out" / "curves.png").stat().st_size > 10_000


def test_student_quantiles():
    stats = pytest.importorskip("scipy.stats")
    assert analyze.T95 == pytest.approx([stats.t.ppf(0.975, n) for n in range(1, 31)], abs=6e-4)


def test_systems_are_named_by_what_differs(tmp_path):
    def labels(*runs):
        return {label: len(some) for label, some in analyze.systems([analyze.read_log(run) for run in runs]).items()}
    a = write_run(tmp_path / "a", [5, 4])
    b = write_run(tmp_path / "b", [5, 4], seed=1, options={"out": "x", "preset": "mine", "micro_batch": 1})
    c = write_run(tmp_path / "c", [5, 4], config={"gate": "elementwise"}, options={"muon_lr": 0.01})
    d = write_run(tmp_path / "d", [5, 4], options={"muon_lr": 0.01})
    e = write_run(tmp_path / "e", [5, 4], model="hacked")
    assert labels(a, b, c, e) == {"gpt": 2, "gpt gate=elementwise": 1, "hacked": 1}
    assert labels(a, d) == {"gpt muon_lr=0.005": 1, "gpt muon_lr=0.01": 1}
    shape = dict(vocab_size=97, n_layer=2, n_head=4, d_model=32, d_ff=128)
    f = write_run(tmp_path / "f", [5, 4], config={**shape, "n_kv_head": 4})         # its default, as train.py writes it
    g = write_run(tmp_path / "g", [5, 4], config={**shape, "n_kv_head": 2})
    h = write_run(tmp_path / "h", [5, 4], config={**shape, "n_kv_head": 4, "my_new_option": 1})     # a file that has grown
    assert labels(g, f) == {"gpt": 1, "gpt n_kv_head=2": 1} and labels(f, h) == {"gpt": 1, "gpt my_new_option=1": 1}


def test_seeds_are_paired_and_one_seed_has_no_interval(tmp_path):
    def read(*runs):
        return [analyze.read_log(run) for run in runs]
    base = read(*(write_run(tmp_path / f"b{s}", [9, s], s) for s in (1, 2, 3)))
    some = read(*(write_run(tmp_path / f"a{s}", [9, s + gap], s) for s, gap in ((3, 0.5), (2, 0.7), (7, 100))))
    assert analyze.interval(analyze.gaps(some, base, 1000)) == (pytest.approx(0.6), pytest.approx(12.706 * math.sqrt(0.02) / math.sqrt(2)))
    assert analyze.interval(analyze.gaps(some[:1], base, 1000)) == (pytest.approx(0.5), None)
    assert analyze.interval(analyze.gaps(some[2:], base, 1000)) == (None, None) == analyze.interval(analyze.gaps(some, base, 77))
    lone = analyze.summarise({"x": some[2:], "gpt": base}, "gpt")
    assert list(lone) == ["gpt", "x"]
    assert lone["x"]["tokens_to_baseline"] is None and "| - | not reached |" in analyze.table(lone, "gpt")


def test_only_losses_after_equal_tokens_are_compared(tmp_path):
    base = [analyze.read_log(write_run(tmp_path / f"b{s}", [9, 5, 3 + s], s)) for s in (0, 1)]
    more = [analyze.read_log(write_run(tmp_path / f"m{s}", [9, 5, 4, 2], s)) for s in (0, 1)]
    late = [analyze.read_log(write_run(tmp_path / "l0", [9, 4, 1], 0)), analyze.read_log(write_run(tmp_path / "l1", [9, 4], 1))]
    rows = analyze.summarise({"gpt": base, "more": more, "late": late}, "gpt")
    assert rows["more"]["difference"] is None and rows["more"]["loss"] == 2
    assert rows["late"]["loss"] == 4 and rows["late"]["loss_sd"] == 0 and rows["late"]["tokens"] == 1000    # what both seeds have
    assert rows["gpt"]["loss"] == 3.5 and rows["more"]["tokens_to_baseline"] == 2250


def test_a_run_that_diverged_is_shown(tmp_path):
    runs = [write_run(tmp_path / "a", [9, 5, 4]), write_run(tmp_path / "b", [9, 5, math.nan], model="satformer")]
    analyze.main(["curves", *map(str, runs), "--out", str(tmp_path / "o")])
    assert "| `satformer` | 1 | 0.00M | nan | +nan | not reached |" in (tmp_path / "o" / "curves.md").read_text()
    assert (tmp_path / "o" / "curves.png").exists()


def test_picture_of_the_curves(tmp_path):
    pytest.importorskip("matplotlib")
    runs = [analyze.read_log(write_run(tmp_path / f"{m}{s}", x, s, m, speed)) for m, s, x, speed in (
        ("gpt", 0, [9, 5, 4], 1000), ("gpt", 1, [9, 5.2, 4.4], 1000), ("satformer", 1, [9, 4, 3], 500), ("satformer", 0, [9, 4.4, 3], 500))]
    groups = analyze.systems(runs)
    fig = analyze.draw_curves(analyze.summarise(groups, "gpt"), groups, "gpt")
    line = [ax.get_lines()[1].get_xydata() for ax in fig.axes]
    assert line[0] == pytest.approx(torch.tensor([[0, 9], [1e-3, 4.2], [2e-3, 3]]).numpy())
    assert line[1] == pytest.approx(torch.tensor([[0, 9], [1 / 30, 4.2], [2 / 30, 3]]).numpy())     # 1,000 tokens at 500/s: 1/30 minute
    assert line[2] == pytest.approx(torch.tensor([[1e-3, -0.9], [2e-3, -1.2]]).numpy())
    assert line[3] == pytest.approx(torch.tensor([[1 / 30, 4.2 - 4.2]]).numpy())                    # gpt is at its end by then


# ------------------------------------------------------------------------------------------------------------ command line


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with data and short runs of every model, and a server that starts scripts in it quickly."""
    folder = tmp_path_factory.mktemp("analyze")
    words = "the cat sat on the mat. a dog ran to it\n" * 200
    (folder / "a.txt").write_text("\n<|endoftext|>\n".join([words] * 20))
    torch.set_default_dtype(torch.float32)
    data_prep.prepare_text([folder / "a.txt"], folder / "data", "byte", val_frac=0.2)
    torch.set_default_dtype(torch.float64)
    small = ("--data data --n_layer 2 --d_model 32 --n_head 2 --d_ff 64 --max_len 64 --seq_len 32 --batch_tokens 64 --max_steps 3 "
             "--warmup_steps 1 --eval_every 1 --eval_tokens 128 --device cpu --dtype fp32").split()
    with Scripts() as scripts:
        for name in models.names():
            assert scripts.run("train.py", "--model", name, *small, "--out", name, cwd=folder).returncode == 0
        yield folder, scripts


def test_probe_of_every_model(trained, tmp_path):
    folder, scripts = trained
    done = scripts.run("analyze.py", "probe", *models.names(), "--out", tmp_path / "o", "--tokens", "512", "--batch_tokens", "128",
                       "--device", "cpu", cwd=folder, seconds=300)
    assert done.returncode == 0 and not done.stderr, done.stderr
    for name in models.names():
        found = json.loads((tmp_path / "o" / f"{name}.json").read_text())
        assert found["model"] == name and found["step"] == 3 and found["tokens"] == 512
        assert found["depth_error"] < 1e-5
        if name == "sambay":                                                        # one of its two mixers is no attention
            assert found["entropy"] is None
            continue
        assert len(found["entropy"]) == 2
        maps = torch.tensor(json.loads((tmp_path / "o" / f"maps-{name}.json").read_text())["maps"])
        n_maps = 6 if name == "sas" else 2                                  # of each head it simulates three
        assert maps.shape == (2, n_maps, 32, 32) and torch.allclose(maps.sum(-1), torch.tensor(1.0), atol=2e-3)
    pictures = {"layers", "depth", "similarity", "gates", "anchors", "dynamic", *(f"maps-{name}" for name in models.names() if name != "sambay")}
    assert {path.stem for path in (tmp_path / "o").glob("*.png")} == pictures


def test_full_stops_and_newlines_are_quiet(trained, monkeypatch):
    folder, _ = trained
    seen = []
    monkeypatch.setattr(analyze, "measure", lambda model, batches, quiet: seen.append(sorted(quiet.tolist())) or {"loss": 1.0, "tokens": 1, "maps": []})
    monkeypatch.setattr(analyze, "save", lambda figures, out: None)
    monkeypatch.chdir(folder)
    analyze.main(["probe", "gpt", "--out", "o2", "--device", "cpu"])
    assert seen == [[ord("\n"), ord("."), 256]]


def test_curves_of_every_model(trained, tmp_path):
    folder, scripts = trained
    done = scripts.run("analyze.py", "curves", *models.names(), "--out", tmp_path / "o", cwd=folder)
    assert done.returncode == 0 and not done.stderr, done.stderr
    rows = json.loads((tmp_path / "o" / "curves.json").read_text())
    assert list(rows) == models.names() and all(0.1 < r["peak_bytes"] / 2 ** 30 < 4 for r in rows.values())


def test_without_matplotlib_the_numbers_are_there(trained, tmp_path):
    folder, scripts = trained
    (tmp_path / "matplotlib.py").write_text("raise ImportError")
    for words in (["curves", "gpt"], ["probe", "gpt", "--tokens", "64"]):
        done = scripts.run("analyze.py", *words, "--out", tmp_path / "o", cwd=folder, PYTHONPATH=str(tmp_path))
        assert done.returncode == 0 and done.stderr == "analyze.py: no pictures, only numbers: they need matplotlib: pip install matplotlib\n"
    assert sorted(p.name for p in (tmp_path / "o").iterdir()) == ["curves.json", "curves.md", "gpt.json", "maps-gpt.json"]


@pytest.mark.parametrize("words, message", [
    (["curves", "nothing"], "nothing is not the folder of a run"),
    (["curves", "data"], "data is not the folder of a run"),
    (["curves", "gpt", "--baseline", "bert"], "no system 'bert' among the runs: choose from 'gpt'"),
    (["curves", "young", "broken"], "young has not reached its second validation yet"),
    (["curves", "broken"], "broken/log.jsonl has a line that is not train.py's: 'no json'"),
    (["curves", "gpt", "elsewhere"], "gpt and elsewhere differ in data: their losses cannot be compared"),
    (["curves", "gpt", "copy"], "gpt and copy are the same system with the same seed: leave one out"),
    (["curves", "gpt", "--out", "a.txt"], "--out a.txt is not a folder"),
    (["probe", "gpt"], "the following arguments are required: --out"),
    (["probe", "nothing", "--out", "o"], "nothing/ckpt.pt does not exist"),
    (["probe", "gpt", "gpt", "--out", "o"], "a run is given twice"),
    (["probe", "gpt", "--out", "o", "--tokens", "5"], "--tokens 5 and the validation split of data must hold one sequence of 32 tokens"),
    (["probe", "gpt", "--out", "o", "--tokens", "0"], "--tokens and --batch_tokens must be at least 1"),
    (["probe", "gpt", "--out", "a.txt"], "--out a.txt is not a folder"),
    (["probe", "infinite", "--out", "o"], "infinite: the residual stream is not finite"),
    ([], "the following arguments are required: curves|probe"),
])
def test_mistakes_are_one_line(trained, tmp_path, words, message):
    folder, scripts = trained
    for name in ("young", "elsewhere", "broken"):
        if not (folder / name).exists():
            write_run(folder / name, [5.0] if name == "young" else [5.0, 4.0], options={"seq_len": 32, "eval_tokens": 128})
    (folder / "broken" / "log.jsonl").write_text("no json\n" + (folder / "broken" / "log.jsonl").read_text())
    own = json.loads((folder / "gpt" / "config.json").read_text())
    for name in ("young", "broken"):
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps({**config, "data": own["data"]}))
    if not (folder / "copy").exists():
        shutil.copytree(folder / "gpt", folder / "copy")
        shutil.copytree(folder / "gpt", folder / "infinite")
        checkpoint = torch.load(folder / "infinite" / "ckpt.pt")
        checkpoint["model"]["embed.weight"][5:] = math.inf
        torch.save(checkpoint, folder / "infinite" / "ckpt.pt")
    done = scripts.run("analyze.py", *words, cwd=folder)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("analyze.py: error: ") and message in done.stderr
    assert not (folder / "o").exists()


def test_a_run_that_has_only_begun_is_left_out(trained, tmp_path):
    folder, scripts = trained
    write_run(tmp_path / "young", [5.0])
    (tmp_path / "notes.txt").write_text("x")
    done = scripts.run("analyze.py", "curves", "gpt", tmp_path / "young", tmp_path / "notes.txt", "gpt", "--out", tmp_path / "o", cwd=folder)
    assert done.returncode == 0 and list(json.loads((tmp_path / "o" / "curves.json").read_text())) == ["gpt"]
    assert [line.split(": ")[1] for line in done.stderr.splitlines()] == ["left out"] * 2


def test_a_last_line_that_was_cut_off_does_not_count(tmp_path):
    run = write_run(tmp_path / "r", [5.0, 4.0])
    with open(run / "log.jsonl", "a") as f:
        f.write('{"kind": "val", "st')
    assert [row["loss"] for row in analyze.read_log(run)["val"]] == [5.0, 4.0]
