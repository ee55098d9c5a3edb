"""Pictures and numbers of runs: learning curves against the baseline, and what the trained mechanisms do.

    python analyze.py curves runs/*                            losses over tokens and over time, gpt's difference, a table
    python analyze.py probe runs/A runs/B --out DIR            attention, features, gates, mixing weights, layer by layer

Numbers are written as JSON and Markdown, pictures as PNG (pip install matplotlib). Runs that differ in nothing but their
seed count as one system. Models are watched through hooks while they read the validation split, in fp32; any model file
is understood whose blocks have `attn`, `attn_norm`, `mlp` and `mlp_norm` like gpt.py's.
"""
import argparse
import json
import math
import sys
import textwrap
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from statistics import mean, median, stdev

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import data_prep
import models

try:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
except ImportError:
    plt = None

COLORS = ("#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")         # Okabe and Ito's
T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110,
       2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)  # Student's t, by freedom

# ------------------------------------------------------------------------------------------------------------- curves


def read_log(run):
    """{"run", "config", "train", "val"} of a run folder; config.json and log.jsonl are enough. ValueError without them."""
    try:
        config = json.loads((Path(run) / "config.json").read_text())
        lines = (Path(run) / "log.jsonl").read_text().splitlines()
        seed, *_ = [config["options"][name] for name in ("seed", "seq_len", "eval_tokens")]
        {**config["model_config"], "": (config["model"], config["data"]["fingerprint"])}
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise ValueError(f"{run} is not the folder of a run: {models.one_line(e)}") from None
    rows = {"train": [], "val": []}
    for line in lines:
        try:
            row = json.loads(line)
            needed = {"train": ("tok_s",), "val": ("tokens", "loss")}[row["kind"]]
            rows[row["kind"]].append({key: row[key] + 0 for key in (*needed, *({"peak_bytes"} & set(row)))})
        except (ValueError, KeyError, TypeError):
            if line is not lines[-1]:                                       # the last may be cut off
                raise ValueError(f"{run}/log.jsonl has a line that is not train.py's: {line[:80]!r}") from None
    if len(rows["val"]) < 2 or not rows["train"]:
        raise ValueError(f"{run} has not reached its second validation yet")
    return {"run": str(run), "config": config, "seed": seed, **rows}


def systems(runs):
    """{label: [runs that differ only in the seed]}, labelled by the model and the options in which the systems differ."""
    hidden = {"seed", "out", "resume", "device", "compile", "micro_batch", "save_every", "wandb", "data", "model", "preset"}
    groups = {}
    for run in runs:
        c = run["config"]
        key = {"model": c["model"], **c["model_config"], **{k: x for k, x in c["options"].items() if k not in hidden}, "gpu": c.get("gpu")}
        groups.setdefault(json.dumps(key, sort_keys=True), (key, {}))[1].setdefault(run["seed"], []).append(run)
    out = {}
    for key, seeds in groups.values():
        for some in seeds.values():
            if len(some) > 1:
                raise ValueError(f"{some[0]['run']} and {some[1]['run']} are the same system with the same seed: leave one out")
        same = [other for other, _ in groups.values() if other["model"] == key["model"]]
        shown = [name for name in key if any(other.get(name) != key[name] for other in same)]
        structure = next(iter(seeds.values()))[0]["config"]["model_config"]
        structural = [name for name in shown if name in structure]
        apart = {json.dumps([other.get(name) for name in structural]) for other in same}
        if len(apart) == len(same):
            usual = defaults(key["model"], {name: x for name, x in structure.items() if name not in shown})
            shown = [name for name in structural if key[name] != usual.get(name)]
        out[" ".join([key["model"], *(f"{name}={key[name]}" for name in shown)])] = [run for some in seeds.values() for run in some]
    return out


def defaults(name, given):
    """The values that a model's Config takes beside the given ones; {} if its file is gone or has changed too much."""
    try:
        return vars(models.module(name).Config(**given))
    except (ValueError, TypeError):
        return {}


def curve(some):
    """Mean over the seeds of the validation losses at the steps that all of them have: [(tokens, loss)]."""
    at = [{row["tokens"]: row["loss"] for row in run["val"]} for run in some]
    return [(tokens, mean(rows[tokens] for rows in at)) for tokens in sorted(set.intersection(*map(set, at)))]


def crossing(points, level):
    """Where a curve [(x, y)] first comes down to a level, on straight lines between its points; None if it does not."""
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if y1 <= level < y0:
            return x0 + (x1 - x0) * (y0 - level) / (y0 - y1)
    return None


def gaps(some, base, tokens):
    """Losses after so many tokens minus those of the run in `base` with the same seed, hence the same batches."""
    at = [{run["seed"]: row["loss"] for run in group for row in run["val"] if row["tokens"] == tokens} for group in (some, base)]
    return [at[0][seed] - at[1][seed] for seed in at[0] if seed in at[1]]


def interval(values):
    """(mean, half of its 95% interval by Student's t) of a sample; None for what it is too small for."""
    if len(values) < 2:
        return (values[0] if values else None), None
    return mean(values), T95[min(len(values) - 1, len(T95)) - 1] * stdev(values) / math.sqrt(len(values))


def summarise(groups, baseline):
    """{label: row of the table} of systems()'s groups, the baseline first. The last validation that all seeds have counts."""
    rows, level = {}, curve(groups[baseline])[-1]
    for label, some in {baseline: groups[baseline], **groups}.items():
        points = curve(some)
        ends = [row["loss"] for run in some for row in run["val"] if row["tokens"] == points[-1][0]]
        gap, half = interval(gaps(some, groups[baseline], level[0])) if points[-1][0] == level[0] else (None, None)
        peaks = [max(row.get("peak_bytes", 0) for row in run["val"]) for run in some]
        speeds = [median(row["tok_s"] for row in run["train"]) for run in some]
        rows[label] = {
            "runs": [run["run"] for run in some], "seeds": [run["seed"] for run in some], "tokens": points[-1][0],
            "loss": points[-1][1], "loss_sd": stdev(ends) if len(ends) > 1 else None, "difference": gap, "difference_95": half,
            "tokens_to_baseline": level[0] if label == baseline else crossing(points, level[1]),
            "tok_s": mean(speeds), "tok_s_sd": stdev(speeds) if len(speeds) > 1 else None,
            "peak_bytes": mean(peaks) if min(peaks) else None, "curve": points}
    return rows


def table(rows, baseline):
    """The rows of summarise() as Markdown."""
    lines = [f"| system | seeds | tokens | final loss (nats) | difference to {baseline} (95% interval) "
             f"| tokens to reach {baseline}'s final loss | tokens/s | peak GiB |", "|---|---|---|---|---|---|---|---|"]
    for label, r in rows.items():
        loss = f"{r['loss']:.4f}" + ("" if r["loss_sd"] is None else f" ± {r['loss_sd']:.4f}")
        gap = "-" if r["difference"] is None or label == baseline else f"{r['difference']:+.4f}" + (
            "" if r["difference_95"] is None else f" ± {r['difference_95']:.4f}")
        reached = "-" if label == baseline else "not reached"
        if label != baseline and r["tokens_to_baseline"] is not None:
            times = rows[baseline]["tokens"] / r["tokens_to_baseline"]
            reached = f"{r['tokens_to_baseline'] / 1e6:,.2f}M ({times:.2f}x fewer)" if times >= 1 else f"{r['tokens_to_baseline'] / 1e6:,.2f}M"
        speed = f"{r['tok_s']:,.0f}" + ("" if r["tok_s_sd"] is None else f" ± {r['tok_s_sd']:,.0f}")
        peak = "-" if r["peak_bytes"] is None else f"{r['peak_bytes'] / 2 ** 30:.2f}"
        lines.append(f"| `{label}` | {len(r['seeds'])} | {r['tokens'] / 1e6:,.2f}M | {loss} | {gap} | {reached} | {speed} | {peak} |")
    return "\n".join(lines) + "\n"


def draw_curves(rows, groups, baseline):
    """Losses above, differences to the baseline below, over tokens (paired by seed, +- their deviation) on the left, over time on
    the right. Time is tokens over the median speed: without compiling, validations and pauses of the machine."""
    fig, axes = plt.subplots(2, 2, figsize=(11, 7.5), sharex="col", sharey="row", layout="constrained")
    late = []
    for (label, r), (color, dash) in zip(rows.items(), styles()):
        look = dict(color=color, ls=dash, lw=2 if label == baseline else 1.4)
        for ax, scale in zip(axes[0], (1e6, 60 * r["tok_s"])):
            ax.plot([x / scale for x, _ in r["curve"]], [y for _, y in r["curve"]], label=label, **look)
        spread = [(x / 1e6, gaps(groups[label], groups[baseline], x)) for x, _ in r["curve"][1:]]
        old = [(x / (60 * rows[baseline]["tok_s"]), y) for x, y in rows[baseline]["curve"]]
        timed = [(x / (60 * r["tok_s"]), y) for x, y in r["curve"]]
        for ax, points in zip(axes[1], ([(x, mean(g)) for x, g in spread if g],
                                        [(x, y - between(old, x)) for x, y in timed if old[1][0] <= x <= old[-1][0]])):
            if points:
                ax.plot(*zip(*points), **look)
                late += [y for x, y in points[1:] if math.isfinite(y)]
        spread = [(x, mean(g) - stdev(g), mean(g) + stdev(g)) for x, g in spread if len(g) > 1]
        if spread and label != baseline:
            axes[1, 0].fill_between(*zip(*spread), color=color, alpha=0.15, lw=0)
    finite = [[y for _, y in r["curve"][1:] if math.isfinite(y)] or [0.0] for r in rows.values()]
    low, high = min(map(min, finite)), max(ys[0] for ys in finite)
    axes[0, 0].set_ylim(low - 0.05 * (high - low) - 1e-3, high + 1e-3)
    low, high = min([*late, 0.0]), max([*late, 0.0])
    axes[1, 0].set_ylim(low - 0.1 * (high - low) - 1e-3, high + 0.1 * (high - low) + 1e-3)
    axes[0, 0].set_ylabel("validation loss (nats per token)")
    axes[1, 0].set_ylabel(f"difference to {baseline} (nats per token)")
    axes[1, 0].set_xlabel("training tokens (millions)")
    axes[1, 1].set_xlabel("training time (minutes, at the median speed of the runs)")
    seeds = sorted({len(r["seeds"]) for r in rows.values()})
    title = f"mean of {'-'.join(map(str, seeds))} seed{'s' * (seeds != [1])}"
    fig.legend(*axes[0, 0].get_legend_handles_labels(), title=title, loc="outside center right", fontsize=9, frameon=False)
    for ax in axes.flat:
        ax.grid(alpha=0.3, lw=0.6)
    return fig


def between(points, x):
    """The value of a curve [(x, y)] at x, on straight lines between its points."""
    for (x0, y0), (x1, y1) in zip(points, points[1:]):
        if x <= x1:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return points[-1][1]


def styles():
    """Colours and dashes that can be told apart, also without colour."""
    return cycle([(color, dash) for dash in ("-", "--", ":", "-.") for color in COLORS])


def curves(args):
    runs, skipped = [], []
    for run in dict.fromkeys(str(Path(run)) for run in args.runs):
        try:
            runs.append(read_log(run))
        except ValueError as e:
            if not Path(run).exists():
                raise
            skipped.append(str(e))
    if not runs:
        raise ValueError(skipped[0])
    for message in skipped:                                                 # of runs/*, the one that has only begun
        print(f"analyze.py: left out: {models.escaped(message)}", file=sys.stderr)
    for name in ("data", "eval_tokens", "seq_len"):
        seen = {json.dumps({**run["config"]["options"], "data": run["config"]["data"]["fingerprint"]}[name]): run["run"] for run in runs}
        if len(seen) > 1:
            a, b, *_ = seen.values()
            raise ValueError(f"{a} and {b} differ in {name}: their losses cannot be compared")
    groups = systems(runs)
    plain = [label for label in groups if label.split()[0] == "gpt"]
    baseline = args.baseline or ("gpt" if "gpt" in groups else (plain or list(groups))[0])
    if baseline not in groups:
        raise ValueError(f"no system {baseline!r} among the runs: choose from {', '.join(map(repr, groups))}")
    rows = summarise(groups, baseline)
    text = table(rows, baseline)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "curves.md").write_text(text)
    (args.out / "curves.json").write_text(json.dumps(rows, indent=1) + "\n")
    print(text, end="")
    save({"curves": lambda: draw_curves(rows, groups, baseline)}, args.out)


def save(figures, out):
    """Writes {name: function that draws it} as PNG, or says what is missing."""
    if plt is None:
        print("analyze.py: no pictures, only numbers: they need matplotlib: pip install matplotlib", file=sys.stderr)
        return
    for name, draw in figures.items():
        fig = draw()
        if fig is not None:
            fig.savefig(out / f"{name}.png", dpi=130)
            plt.close(fig)
            print(f"{out / name}.png")


# ------------------------------------------------------------------------------------------------- what a forward pass does


class SeeAttention(TorchFunctionMode):
    """While it is active, take(weights (B, H, T, T)) gets the attention weights of every scaled_dot_product_attention."""

    def __init__(self, take):
        super().__init__()
        self.take = take

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            self.take(attention_weights(*args, **kwargs))
        return function(*args, **kwargs)


def attention_weights(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Softmax weights (B, H, T, T) of a scaled_dot_product_attention with these arguments."""
    k = k.repeat_interleave(q.size(1) // k.size(1), dim=1)
    scores = q @ k.mT * (q.size(-1) ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return scores.softmax(-1)


class Record:
    """What the layers hand to each other in one forward pass. All tensors (B, T, C).

    reads     inputs of the 2 L sublayers before their norms, and of the final norm; where a block has separate inputs for
              q, k, v and the residual (muddformer), that of the residual
    outputs   the embedding, and what the 2 L sublayers give
    streams   {"x" or q, k, v, r: inputs of the L attention sublayers before their norms}
    gates     sigmoid output gates of the L layers, (B, T, H, D or 1) each; empty without
    called    {name of a module that mixes across layers: its outputs, in the order of its calls}
    """

    def __init__(self):
        self.reads, self.outputs, self.streams, self.gates, self.called = [], [], defaultdict(list), [], defaultdict(list)

    @property
    def parallel(self):
        """Whether attention and MLP of a block read the same state (pythia)."""
        return self.reads[0] is self.reads[1]

    @property
    def hidden(self):
        """The residual stream before each block and at the end: L + 1 tensors (B, T, C)."""
        return self.reads[::2]


MIXERS = ("depth_attention", "weights", "value_mix", "value_gate", "gamma",     # last part of the modules' names
          "attn_connection", "mlp_connection")


@contextmanager
def recorded(model):
    """A Record that the next forward pass fills."""
    record = Record()
    if not all(hasattr(model, name) for name in ("embed", "blocks", "final_norm", "head")) or not all(
            hasattr(block, name) for block in model.blocks for name in ("attn", "mlp_norm", "mlp")):
        raise ValueError("the model must have embed, blocks with attn, attn_norm, mlp and mlp_norm, final_norm and head")

    def reads(module, inputs):
        if len(inputs) > 3 and all(torch.is_tensor(x) for x in inputs[:4]):         # a block with four inputs
            for name, x in zip("qkvr", inputs):
                record.streams[name].append(x)
            record.reads.append(inputs[3])
        else:
            record.reads.append(inputs[0])

    def attn_reads(module, inputs):
        record.streams["x"].append(inputs[0])
        reads(module, inputs)

    def gives(module, inputs, output):
        record.outputs.append(output[0] if isinstance(output, tuple) else output)

    def gate(block):
        attn, n_head = block.attn, model.config.n_head

        def keep(raw):
            record.gates.append(raw.sigmoid().reshape(*raw.shape[:2], n_head, -1))
        if getattr(attn, "mix", None) is not None:                                                    # exoformer's, mixed with the anchor's
            return attn.mix.register_forward_hook(lambda m, i, output: keep(output["g"]) if "g" in output else None)
        if getattr(attn, "gate", None) is not None and model.config.__dict__.get("anchor") == "first_layer":
            return attn.register_forward_hook(lambda m, i, output: keep(output[1]["g"]))
        if getattr(attn, "gate", None) is not None:
            return attn.gate.register_forward_hook(lambda m, i, output: keep(output))
        return None

    def positions(module, inputs, output):                                          # gpt3's are part of its embedding
        record.outputs[0] = record.outputs[0] + output

    hooks = [model.embed.register_forward_hook(gives), model.final_norm.register_forward_pre_hook(reads)]
    hooks += [model.pos_embed.register_forward_hook(positions)] if hasattr(model, "pos_embed") else []
    for block in model.blocks:
        if hasattr(block, "attn_norm"):
            hooks.append(block.attn_norm.register_forward_pre_hook(attn_reads))
        else:
            hooks.append(block.register_forward_pre_hook(reads))
        hooks += [block.mlp_norm.register_forward_pre_hook(reads), block.attn.register_forward_hook(gives),
                  block.mlp.register_forward_hook(gives)]
        hooks += [hook for hook in [gate(block)] if hook]
    for name, module in model.named_modules():
        if name.split(".")[-1] in MIXERS:
            hooks.append(module.register_forward_hook(
                lambda m, i, output, kind=name.split(".")[-1]: record.called[kind].append(output)))
    try:
        yield record
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def replaced(outputs):
    """While it is active, the modules of {module: function(output) -> output} give something else."""
    with ExitStack() as stack:
        for module, function in outputs.items():
            hook = module.register_forward_hook(lambda m, inputs, output, function=function: function(output))
            stack.callback(hook.remove)
        yield


# ------------------------------------------------------------------------------------------------------ numbers of tensors


def attention_numbers(weights, quiet):
    """Per head (H,): entropy in nats, mean over queries; mass on the first token, mean over all later queries; and the share
    of queries at which the head is active (MUDDFormer, section 3.4): its largest weight is not on the first two
    tokens, nor on a `quiet` (B, T) one (end of text, full stop, newline). weights: (B, H, T, T).
    """
    entropy = -weights.xlogy(weights).sum(-1).mean((0, 2))
    sink = weights[:, :, 1:, 0].mean((0, 2))
    at = weights.argmax(-1)                                                         # (B, H, T)
    active = (at >= 2) & ~quiet.gather(1, at.flatten(1)).view_as(at)
    return entropy, sink, active.double().mean((0, 2))


def core_features(second, first, share=0.99):
    """Principal components that hold `share` of the variance, from E[x x^T] (C, C) and E[x] (C,)."""
    values = torch.linalg.eigvalsh(second.double() - torch.outer(first.double(), first.double())).clamp(min=0).flip(0)
    if values.sum() <= 1e-12 * second.double().trace():
        return 0
    return int((values.cumsum(0) < share * values.sum()).sum()) + 1


def token_similarity(x):
    """Mean cosine between two different tokens of a sequence; x: (B, T, C)."""
    u, T = F.normalize(x.double(), dim=-1), x.size(1)
    return ((u.sum(1).square().sum(-1) - u.square().sum((1, 2))) / (T * (T - 1))).mean()


def refinement(similarity):
    """Share of the layers after the lowest local minimum of the token similarity (L + 1 numbers, the embedding's first), where
    ExoFormer (section 3.3) sees the refinement stage begin; None without a minimum between the ends."""
    falls, lows, L = False, [], len(similarity) - 1
    for i in range(L):
        if similarity[i + 1] > similarity[i] and falls:
            lows.append(i)
        falls = falls if similarity[i + 1] == similarity[i] else similarity[i + 1] < similarity[i]
    return (L - min(lows, key=lambda i: (similarity[i], i))) / L if lows else None


def cosine(a, b):
    """Mean cosine of the same tokens in two layers."""
    return F.cosine_similarity(a.double(), b.double(), dim=-1, eps=1e-30).mean()


def depth_matrix(model, record):
    """{stream: A (tokens.., 2 L + 1, 2 L + 1)}: reader l, a sublayer or the head, gets sum_s A[l, s] outputs[s].

    One stream "r" for models that read one input per sublayer; muddformer's attention also has q, k and v.
    """
    n, like = len(record.reads), record.outputs[0]
    ones = torch.ones(n, n, dtype=like.dtype, device=like.device).tril()
    if record.called["depth_attention"]:                                            # attnres
        A, S = torch.zeros(*like.shape[:2], n, n, dtype=like.dtype, device=like.device), model.config.block_size
        A[..., 0, 0] = 1.0
        for row, alpha in enumerate(record.called["depth_attention"], start=1):
            source = [0] + [1 + (s - 1) // S for s in range(1, row + 1)]            # the block that holds output s
            A[..., row, :row + 1] = alpha[..., source]
        return {"r": A}
    if hasattr(model, "aggregate"):                                                 # muddformer
        eye = torch.eye(n, dtype=like.dtype, device=like.device)
        X, A = [eye[0]], {name: torch.zeros(*like.shape[:2], n, n, dtype=like.dtype, device=like.device) for name in "qkvr"}
        rows, weights = dict.fromkeys("qkvr", eye[0]), iter(record.called["weights"])
        for i in range(1, len(model.blocks) + 1):
            for name in "qkvr":
                A[name][..., 2 * i - 2, :] = rows[name]
                A[name][..., 2 * i - 1, :] = rows["r"] + (0 if record.parallel else eye[2 * i - 1])
            X.append(rows["r"] + eye[2 * i - 1] + eye[2 * i])
            rows = dict.fromkeys("qkvr", X[i])
            if str(i) in model.aggregate:
                aggregate, w = model.aggregate[str(i)], next(weights)               # w: (B, T, C, S)
                for c, name in enumerate(aggregate.streams):
                    mixed = sum(w[..., c, j, None] * X[source] for j, source in enumerate(aggregate.sources))
                    rows = dict.fromkeys("qkvr", mixed) if name == "x" else {**rows, name: mixed}
        for name in "qkvr":
            A[name][..., n - 1, :] = rows["r"]
        return A
    if hasattr(model, "average"):                                                   # denseformer
        eye, A = torch.eye(n, dtype=like.dtype, device=like.device), torch.zeros_like(ones)
        X = [eye[0]]
        A[0] = eye[0]
        for i in range(1, len(model.blocks) + 1):
            A[2 * i - 1] = A[2 * i - 2] + eye[2 * i - 1]
            X.append(A[2 * i - 1] + eye[2 * i])
            A[2 * i] = X[i]
            if str(i) in model.average:
                average = model.average[str(i)]
                A[2 * i] = sum(a * X[j] for a, j in zip(average.alpha, average.sources))
        return {"r": A.expand(*like.shape[:2], n, n)}
    if hasattr(model.blocks[0], "attn_geodesic"):                                   # geonorm
        A = torch.zeros(*like.shape[:2], n, n, dtype=like.dtype, device=like.device)
        A[..., 0, 0] = record.reads[0].norm(dim=-1) / like.norm(dim=-1)
        steps = [step for block in model.blocks for step in (block.attn_geodesic, block.mlp_geodesic)]
        for l, (step, x, g) in enumerate(zip(steps, record.reads, record.outputs[1:])):
            a, b = step.weights(x, g.type_as(x))                                    # (B, T, 1): the next state is a x + b g
            A[..., l + 1, :] = a * A[..., l, :]
            A[..., l + 1, l + 1] = b[..., 0]
        return {"r": A}
    if record.called["attn_connection"]:                                            # hyperconnections
        eye, A = torch.eye(n, dtype=like.dtype, device=like.device), ones.new_zeros(*like.shape[:2], n, n)
        streams = eye[:1].expand(model.config.n_streams, n)                         # each as a sum of outputs: (.., streams, n)
        pairs = zip(record.called["attn_connection"], record.called["mlp_connection"])
        for row, maps in enumerate(m for pair in pairs for m in pair):              # columns: H_pre, H_post, H_res transposed
            A[..., row, :] = (maps[..., :1] * streams).sum(-2)
            carried = maps[..., 2:].mT @ streams if maps.size(-1) > 2 else streams
            streams = carried + maps[..., 1:2] * eye[row + 1]
        A[..., n - 1, :] = streams.sum(-2)
        return {"r": A}
    if record.parallel:                                                             # pythia: an MLP reads what its attention reads
        ones[1::2] = ones[:-1:2]
    return {"r": ones.expand(*like.shape[:2], n, n)}


def value_matrix(model, record):
    """{stream: A (L, L)}, token means: the values (or queries, keys, gates) of layer n are sum_m A[n, m] times those of
    layer m; exoformer's anchor from outside is an extra first column (L, L + 1), and its anchors count as they are mixed in,
    normalised. Empty for models that mix no values."""
    L = len(model.blocks)
    if record.called["value_mix"]:                                                  # resformer
        l1, l2 = (torch.as_tensor(x).cpu() for x in record.called["value_mix"][0])
        A = torch.eye(L)
        for n, a, b in zip(range(L - len(l1), L), l1, l2):
            A[n, n] = b
            A[n, 0] = a
        return {"v": A}
    if record.called["value_gate"]:                                                 # satformer
        A, read = torch.eye(L), record.called["value_gate"]
        for n, alpha in zip(range(L - len(read), L), read):
            A[n, 0] = alpha.mean().cpu()
        return {"v": A}
    weights = mix_weights(model, record)
    if not weights:
        return {}
    outside = model.config.anchor == "external"
    out = {s: torch.cat((torch.zeros(L, int(outside)), torch.eye(L)), dim=1) for s in model.config.mix_streams}
    for s, (anchor, own, gamma) in weights.items():
        for n, a, b, g in zip(range(L - len(own), L), anchor, own, gamma):
            out[s][n, n + outside] = (g[1] * b).mean()
            out[s][n, 0] = (g[0] * a).mean()
    return out


def mix_weights(model, record):
    """{stream: (lambda_anchor, lambda_self, gamma)} of exoformer's n mixing layers, else {}: (n, heads, D or 1) twice, and (n, 2) mean
    factors of the two, which are 1 unless they are dynamic."""
    mixes, out = [block.attn.mix for block in model.blocks if getattr(block.attn, "mix", None) is not None], {}
    gammas = [g.mean((0, 1)) for g in record.called["gamma"]] or [torch.ones(8)] * len(mixes)
    for i, s in enumerate(mixes[0].mix_streams if mixes else ""):
        lambdas = [torch.stack([getattr(mix, name)[s].detach() for mix in mixes]).cpu() for name in ("lambda_anchor", "lambda_self")]
        out[s] = (*lambdas, torch.stack([g[2 * i:2 * i + 2] for g in gammas]).cpu())
    return out


def observe(model, idx, targets, quiet):
    """{name: tensor, a mean over the tokens of idx (B, T)}: everything that probe() finishes into numbers."""
    heads = []

    def whole(weights):                                                             # not those of sambay's windows, in blocks
        if weights.size(0) == len(idx) and weights.shape[2:] == 2 * idx.shape[1:]:
            heads.append(attention_numbers(weights, quiet))
    with recorded(model) as record, SeeAttention(whole):
        model(idx)
    hidden, L = record.hidden, len(model.blocks)
    if len(record.reads) != 2 * L + 1 or len(record.outputs) != 2 * L + 1:
        raise ValueError("a block does not call its attn_norm, attn, mlp_norm and mlp once each: probe() cannot watch this model")
    if not all(x.isfinite().all() for x in hidden):
        raise ValueError("the residual stream is not finite")
    out = {"second": torch.stack([(x.double().flatten(0, 1).mT @ x.double().flatten(0, 1)) / idx.numel() for x in hidden]),
           "first": torch.stack([x.double().mean((0, 1)) for x in hidden]),
           "token_similarity": torch.stack([token_similarity(x) for x in hidden]),
           "layer_similarity": torch.stack([torch.stack([cosine(a, b) for b in hidden]) for a in hidden]),
           "norm": torch.stack([x.norm(dim=-1).mean() for x in hidden]),
           "lens": torch.stack([F.cross_entropy(model.head(model.final_norm(x)).flatten(0, 1), targets.flatten())
                                for x in hidden])}
    if len(heads) == L:
        out |= dict(zip(("entropy", "sink", "active"), (torch.stack(x) for x in zip(*heads))))
    for name, inputs in record.streams.items() if L > 1 else ():
        out[f"adjacent.{name}"] = torch.stack([cosine(a, b) for a, b in zip(inputs, inputs[1:])])
    if len(record.gates) == L:
        out["gate"] = torch.stack([g.mean((0, 1, 3)) for g in record.gates])
    if record.called["value_gate"]:
        out["value_gate"] = torch.stack([a.mean((0, 1)) for a in record.called["value_gate"]])
        out["value_gate_zeros"] = torch.stack([(a == 0).double().mean() for a in record.called["value_gate"]])
    A = depth_matrix(model, record)
    outputs, wanted = torch.stack(record.outputs, dim=-2), {"r": record.reads}
    wanted |= {name: inputs for name, inputs in record.streams.items() if name in "qkv"}
    errors = []
    for name, inputs in wanted.items():
        inputs = torch.stack(inputs, dim=-2)
        rows = slice(None) if name == "r" else slice(0, -1, 2)
        errors.append((A[name][..., rows, :] @ outputs - inputs).norm() / inputs.norm())
    out["depth_error"] = max(errors)
    out |= {f"depth.{name}": a.mean((0, 1)) for name, a in A.items()}
    out |= {f"values.{name}": a for name, a in value_matrix(model, record).items()}
    for s, weights in mix_weights(model, record).items():
        out |= {f"{name}.{s}": x for name, x in zip(("lambda_anchor", "lambda_self", "gamma"), weights)}
    if hasattr(model, "aggregate"):
        X = [record.outputs[0], *(record.reads[2 * i] + record.outputs[2 * i + 1] + record.outputs[2 * i + 2] for i in range(L))]
        seen = getattr(model, "pre_norm", lambda j, x: x)
        out["dynamic_norm"] = torch.stack([seen(j, x).norm(dim=-1).mean() for j, x in enumerate(X)])
        for i, w in zip(model.aggregate, record.called["weights"]):
            w = w.double().expand(*idx.shape, -1, -1)
            out[f"dynamic.{i}"], out[f"dynamic_square.{i}"] = w.mean((0, 1)), w.square().mean((0, 1))
    return {name: x.detach().cpu() for name, x in out.items()}


def averaged(model, batches, quiet_ids):
    """observe() over batches (idx, targets), averaged."""
    total, n = {}, 0
    for idx, targets in batches:
        for name, x in observe(model, idx, targets, torch.isin(idx, quiet_ids)).items():
            total[name] = total.get(name, 0) + x.double() * len(idx)
        n += len(idx)
    return {name: x / n for name, x in total.items()}


def loss_of(model, batches):
    """Mean cross-entropy in nats per token."""
    return sum(model(idx, targets)[1].item() * len(idx) for idx, targets in batches) / sum(len(idx) for idx, _ in batches)


def spaces(means):
    """What the hidden states of averaged() look like, per layer."""
    similarity = means["token_similarity"].tolist()
    return {"core_features": [core_features(a, b) for a, b in zip(means["second"], means["first"])],
            "token_similarity": similarity, "refinement": refinement(similarity)}


def interventions(model, batches, averages):
    """SATFormer (figure 4): change in perplexity when one layer's value gate is zero, or its mean over tokens and heads."""
    gates = {i: block.attn.value_gate for i, block in enumerate(model.blocks, start=1)
             if getattr(block.attn, "value_gate", None) is not None}

    def perplexity(change):
        with replaced(change):
            return math.exp(min(loss_of(model, batches), 700))

    base = perplexity({})
    return {"layers": list(gates), "perplexity": base,
            "zero": [perplexity({gate: torch.zeros_like}) - base for gate in gates.values()],
            "mean": [perplexity({gate: lambda a, x=x: torch.full_like(a, x)}) - base for gate, x in zip(gates.values(), averages)]}


def without_anchor(model, batches, quiet_ids):
    """ExoFormer (section 3.3): loss, similarity and core features when the anchors are zero; {} for other models."""
    if not hasattr(model, "anchor"):
        return {}
    with replaced({model.anchor: lambda anchors: {s: torch.zeros_like(x) for s, x in anchors.items()}}):
        means = averaged(model, batches, quiet_ids)
    return {"loss": means["lens"][-1].item(), "layer_similarity": means["layer_similarity"].tolist(), **spaces(means)}


@torch.no_grad()
def measure(model, batches, quiet_ids):
    """All numbers of one model: a dict that JSON can hold. batches: [(idx, targets)], int64 (B, T), full rows."""
    means = averaged(model, batches, quiet_ids)
    out = {"loss": means["lens"][-1].item(), "tokens": sum(idx.numel() for idx, _ in batches), **spaces(means)}
    for name in ("entropy", "sink", "active", "layer_similarity", "norm", "lens", "gate", "value_gate", "value_gate_zeros", "depth_error"):
        out[name] = means[name].tolist() if name in means else None
    parts = {kind: {name.split(".")[1]: x for name, x in means.items() if name.startswith(f"{kind}.")}
             for kind in ("adjacent", "depth", "values", "lambda_anchor", "lambda_self", "gamma", "dynamic")}
    if out["depth_error"] > 1e-3:                                                   # what is read is no sum of outputs
        parts["depth"] = {}
    out |= {kind: {name: x.tolist() for name, x in part.items()} for kind, part in parts.items() if kind != "dynamic"}
    out["mixing_layers"] = [i for i, block in enumerate(model.blocks, start=1)
                            if any(getattr(block.attn, name, None) is not None for name in ("mix", "value_gate"))]
    out["value_gate_cv"], out["interventions"] = None, {}
    if "value_gate" in means:                                                       # spread over the heads, of their means
        g = means["value_gate"]
        out["value_gate_cv"] = [(x.std(correction=0) / x.mean()).item() if x.mean() > 0 else None for x in g]
        out["interventions"] = interventions(model, batches, g.mean(-1).tolist())
    out["dynamic"] = {}
    for i, w in parts["dynamic"].items():                                           # MUDDFormer (appendix G)
        aggregate = model.aggregate[i]
        norm, sd = means["dynamic_norm"][aggregate.sources], (means[f"dynamic_square.{i}"] - w.square()).clamp(min=0).sqrt()
        out["dynamic"][i] = {"streams": aggregate.streams, "sources": aggregate.sources, "mean": (w * norm).tolist(),
                             "sd": (sd * norm).tolist()}
    out["without_anchor"] = without_anchor(model, batches, quiet_ids)
    maps = []
    with SeeAttention(lambda weights: maps.append(weights[0])):
        model(batches[0][0][:1, :32])
    maps = maps if len(maps) == len(model.blocks) else []                            # sambay's other mixers have none
    out["maps"] = [[[[round(x, 4) for x in row] for row in head] for head in layer.tolist()] for layer in maps]
    return out


# ------------------------------------------------------------------------------------------------------------ pictures


LAYERS = {                                                                          # panel: (key, title, unit)
    "entropy": ("attention entropy", "nats"), "sink": ("attention on the first token", "share of the mass"),
    "active": ("active heads", "share of heads and queries"), "core_features": ("core features", "components for 99% of variance"),
    "token_similarity": ("similarity of tokens", "mean cosine"), "adjacent": ("input against previous layer's", "mean cosine"),
    "lens": ("logit lens", "nats per token"), "gate": ("output gate", "mean activation")}


def per_layer(x):
    """Means over heads, where there are heads."""
    return [mean(row) if isinstance(row, list) else row for row in x]


def draw_layers(found):
    """One panel per quantity, one line per run. What a block does is at 1 .. L, states of the residual stream at 0 .. L."""
    fig, axes = plt.subplots(2, 4, figsize=(15, 7), layout="constrained")
    for ax, (key, (title, unit)) in zip(axes.flat, LAYERS.items()):
        for (run, numbers), (color, dash) in zip(found.items(), styles()):
            if key == "adjacent":
                for name, y in numbers[key].items():                                # q, k, v, r of one model: one colour
                    ax.plot(range(2, len(y) + 2), y, {"q": ":", "k": "-.", "v": "--"}.get(name, "-"), color=color, lw=1.3, marker=".", ms=4)
                    if name != "x" and y:
                        ax.annotate(name, (len(y) + 1, y[-1]), xytext=(3, 0), textcoords="offset points", fontsize=8, va="center")
            elif numbers[key]:
                y = per_layer(numbers[key])
                first = 0 if len(y) == len(numbers["norm"]) else 1
                ax.plot(range(first, first + len(y)), y, dash, color=color, lw=1.3, marker=".", ms=4)
                if key == "token_similarity" and numbers["refinement"] is not None:
                    at = round((1 - numbers["refinement"]) * (len(y) - 1))
                    ax.plot(at, y[at], "o", color=color, ms=5)
        ax.set_title(title + (" (o: refinement begins)" if key == "token_similarity" else ""), fontsize=10)
        ax.set_ylabel(unit, fontsize=9)
        ax.set_xlabel("layer", fontsize=9)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.grid(alpha=0.3, lw=0.6)
    handles = [plt.Line2D([], [], color=color, ls=dash, label=run) for run, (color, dash) in zip(found, styles())]
    fig.legend(handles=handles, loc="outside lower center", ncols=min(len(found), 7), fontsize=9, frameon=False)
    return fig


def heat(ax, matrix, title, xlabel, ylabel, first=(0, 0), **options):
    """A matrix (list of rows) as a picture; first: numbers of its first row and column."""
    n, m = len(matrix), len(matrix[0])
    extent = (first[1] - 0.5, first[1] + m - 0.5, first[0] + n - 0.5, first[0] - 0.5)
    image = ax.imshow(matrix, aspect="auto", interpolation="nearest", extent=extent, **options)
    ax.set_title(title, fontsize=10)
    ax.set_xlabel(xlabel, fontsize=9)
    ax.set_ylabel(ylabel, fontsize=9)
    for axis in (ax.xaxis, ax.yaxis):
        axis.get_major_locator().set_params(integer=True)
    return image


def grid(n, width=4.0, height=3.4, columns=4):
    """A figure with n panels, and those."""
    columns = min(n, columns)
    rows = -(-n // columns)
    fig, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained")
    for ax in axes.flat[n:]:
        ax.axis("off")
    return fig, list(axes.flat[:n])


def lower(matrix):
    """The rows with what lies right of the diagonal blanked; a matrix with one column more than rows has it one further."""
    extra = len(matrix[0]) - len(matrix)
    return [[x if j <= i + extra else math.nan for j, x in enumerate(row)] for i, row in enumerate(matrix)]


def draw_depth(found):
    """Who reads what, with which weight; what looks the same is drawn once."""
    panels = {}
    for run, numbers in found.items():
        for name, A in numbers["depth"].items():
            title, rows, reader = run, lower(A), "read by sublayer (last: head)"
            if len(numbers["depth"]) > 1:
                title += f", {name} input"
            if name != "r":
                rows, reader = rows[:-1:2], "read by attention of layer"            # the MLPs and the head read r
            panels.setdefault(("output of sublayer (0: embedding)", reader, json.dumps(rows)), []).append(title)
        for name, A in numbers["values"].items():
            title = f"{run}, {dict(q='queries', k='keys', v='values', g='gates')[name]}"
            panels.setdefault(("of layer (0: anchor)" if len(A[0]) > len(A) else "of layer", "in layer", json.dumps(lower(A))), []).append(title)
    if not panels:
        return None
    fig, axes = grid(len(panels), width=3.6, height=3.3)
    for ax, ((source, reader, A), titles) in zip(axes, panels.items()):
        A = json.loads(A)
        top = max(abs(x) for row in A for x in row if not math.isnan(x))
        image = heat(ax, A, textwrap.fill(", ".join(titles), 34), source, reader, (1, 1 if source == "of layer" else 0), cmap="RdBu_r",
                     vmin=-top, vmax=top)
        fig.colorbar(image, ax=ax)
    return fig


def draw_similarity(found):
    fig, axes = grid(len(found))
    low = min(min(map(min, numbers["layer_similarity"])) for numbers in found.values())
    for ax, (run, numbers) in zip(axes, found.items()):
        image = heat(ax, numbers["layer_similarity"], run, "state after layer", "state after layer", cmap="viridis", vmin=min(low, 0), vmax=1)
    fig.colorbar(image, ax=axes, label="mean cosine, same token")
    return fig


def draw_gates(found):
    """Output gates by layer and head; SATFormer's value gates with their statistics and interventions."""
    panels = [(run, numbers, "gate") for run, numbers in found.items() if numbers["gate"]]
    panels += [(run, numbers, kind) for run, numbers in found.items() if numbers["value_gate"]
               for kind in ("value_gate", "statistics", "interventions")]
    if not panels:
        return None
    fig, axes = grid(len(panels), width=4.6, columns=3)
    seen = [x for _, numbers, kind in panels if kind == "gate" for row in numbers["gate"] for x in row]
    for ax, (run, numbers, kind) in zip(axes, panels):
        changes = numbers["interventions"]
        if kind == "gate":
            image = heat(ax, numbers["gate"], f"{run}: output gate, mean", "head", "layer", (1, 1), cmap="viridis", vmin=min(seen), vmax=max(seen))
        elif kind == "value_gate":
            top = max(abs(x) for row in numbers["value_gate"] for x in row) or 1.0
            signed = min(map(min, numbers["value_gate"])) < 0                       # of tanh or identity
            image = heat(ax, numbers["value_gate"], f"{run}: value gate, mean", "key/value head", "layer", (changes["layers"][0], 1),
                         cmap="RdBu_r" if signed else "viridis", vmin=-top if signed else 0, vmax=top)
        elif kind == "statistics":
            for name, y, (color, dash) in (("mean", per_layer(numbers["value_gate"]), ("#0072B2", "-")),
                                           ("share of exact zeros", numbers["value_gate_zeros"], ("#D55E00", "--")),
                                           ("sd / mean over heads", numbers["value_gate_cv"], ("#009E73", ":"))):
                ax.plot(changes["layers"], [math.nan if x is None else x for x in y], dash, color=color, marker="o", ms=3, label=name)
            ax.set_ylim(bottom=min(0, *per_layer(numbers["value_gate"])))
            ax.set_title(f"{run}: value gate", fontsize=10)
        else:
            for name, shift, color in (("gate = 0", -0.2, COLORS[1]), ("gate = its mean", 0.2, COLORS[2])):
                ax.bar([x + shift for x in changes["layers"]], changes["zero" if shift < 0 else "mean"], 0.4, label=name, color=color)
            ax.set_title(f"{run}: one layer's gate replaced", fontsize=10)
            ax.set_ylabel(f"change of perplexity (of {changes['perplexity']:.1f})", fontsize=9)
        if kind in ("gate", "value_gate"):
            fig.colorbar(image, ax=ax)
        else:
            ax.set_xlabel("layer", fontsize=9)
            ax.xaxis.get_major_locator().set_params(integer=True)
            ax.legend(fontsize=8, frameon=False)
            ax.grid(alpha=0.3, lw=0.6)
    return fig


def draw_anchors(found):
    """ExoFormer: lambda ratios per channel with head boundaries (figure 4), and the model without its anchors."""
    found = {run: numbers for run, numbers in found.items() if numbers["without_anchor"]}
    if not found:
        return None
    panels = [(run, kind) for run, numbers in found.items()
              for kind in (*numbers["lambda_anchor"], "token_similarity", "core_features", "layer_similarity")]
    fig, axes = grid(len(panels))
    for ax, (run, kind) in zip(axes, panels):
        numbers, bare = found[run], found[run]["without_anchor"]
        if kind in numbers["lambda_anchor"]:
            a, b, gamma = (torch.tensor(numbers[name][kind]) for name in ("lambda_anchor", "lambda_self", "gamma"))
            ratio = (gamma[:, 0] / gamma[:, 1])[:, None, None] * a / b              # (layers, heads, D or 1)
            image = heat(ax, ratio.flatten(1).tolist(), f"{run}: anchor / own, {kind.upper()}", "channel (lines: heads)" if ratio.size(2) > 1
                         else "head", "layer", (numbers["mixing_layers"][0], 0), cmap="RdBu_r", vmin=0, vmax=2)
            fig.colorbar(image, ax=ax, extend="both")
            for head in range(1, ratio.size(1)):
                ax.axvline(head * ratio.size(2) - 0.5, color="#FFD500", lw=1.2)
        elif kind == "layer_similarity":
            image = heat(ax, bare[kind], f"{run}: anchors zero", "state after layer", "state after layer", cmap="viridis", vmin=0, vmax=1)
            fig.colorbar(image, ax=ax, label="mean cosine, same token")
        else:
            ax.plot(numbers[kind], "-o", ms=3, color=COLORS[2], label=f"as it is (loss {numbers['loss']:.2f})")
            ax.plot(bare[kind], "--s", ms=3, color=COLORS[4], label=f"anchors zero (loss {bare['loss']:.2f})")
            ax.set_title(f"{run}: {LAYERS[kind][0]}", fontsize=10)
            ax.set_ylabel(LAYERS[kind][1], fontsize=9)
            ax.set_xlabel("layer", fontsize=9)
            ax.legend(fontsize=8, frameon=False)
            ax.grid(alpha=0.3, lw=0.6)
    return fig


def draw_dynamic(found):
    """MUDDFormer (figures 12, 13): mean and deviation of the weights, times the mean norm of what they weigh."""
    found = {run: numbers for run, numbers in found.items() if numbers["dynamic"]}
    if not found:
        return None
    fig, axes = plt.subplots(2 * len(found), 4, figsize=(16, 6.6 * len(found)), squeeze=False, layout="constrained")
    for row, (run, kind) in zip(axes, [(run, kind) for run in found for kind in ("mean", "sd")]):
        places = {int(i): d for i, d in found[run]["dynamic"].items()}
        streams = [s for s in "xqkvr" if any(s in d["streams"] for d in places.values())]     # x: one aggregate for all inputs
        for ax in row[len(streams):]:
            ax.axis("off")
        for ax, s in zip(row, streams):
            L = max(places)
            matrix = [[math.nan] * (L + 1) for _ in range(L)]
            for i, d in places.items():
                if s in d["streams"]:
                    for j, x in zip(d["sources"], d[kind][d["streams"].index(s)]):
                        matrix[i - 1][j] = x
            top = max(abs(x) for cells in matrix for x in cells if not math.isnan(x)) or 1.0
            options = dict(cmap="RdBu_r", vmin=-top, vmax=top) if kind == "mean" else dict(cmap="viridis", vmin=0, vmax=top)
            image = heat(ax, matrix, f"{run}: {kind}, stream {s.upper()}", "source (0: embedding)", "after block", (1, 0), **options)
            fig.colorbar(image, ax=ax)
    fig.suptitle("weights over earlier outputs, times the mean norm of the output", fontsize=11)
    return fig


def draw_maps(run, numbers):
    """Attention of one sequence: a row per layer, a column per head."""
    maps = numbers["maps"]
    if not maps:
        return None
    L, H = len(maps), len(maps[0])
    fig, axes = plt.subplots(L, H, figsize=(1.3 * H + 1, 1.3 * L + 0.5), squeeze=False, layout="constrained")
    for layer, (row, heads) in enumerate(zip(axes, maps), start=1):
        for head, (ax, weights) in enumerate(zip(row, heads), start=1):
            image = ax.imshow(weights, cmap="viridis", norm=matplotlib.colors.PowerNorm(0.5, 0, 1), interpolation="nearest")
            ax.set_xticks([])
            ax.set_yticks([])
            if layer == 1:
                ax.set_title(f"head {head}", fontsize=8)
            if head == 1:
                ax.set_ylabel(f"layer {layer}", fontsize=8)
    fig.colorbar(image, ax=axes, shrink=min(1.0, 4 / L), label="attention weight", location="right")
    fig.suptitle(f"{run}: {len(maps[0][0])} tokens, query down, key across", fontsize=9)
    return fig


# --------------------------------------------------------------------------------------------------------------- main


def probe(args):
    names = [Path(run).resolve().name for run in args.runs]
    if len(set(names)) < len(names):
        names = [str(run).strip("/").replace("/", "-") for run in args.runs]
    if len(set(names)) < len(names):
        raise ValueError("a run is given twice")
    for run in args.runs:                                                           # before minutes of work
        models.read_checkpoint(run)
    device, found = models.find_device(args.device), {}
    for run, name in zip(args.runs, names):
        model, config = models.load(run, device)
        data, T = data_prep.run_data(run, config, args.data), config["options"]["seq_len"]
        if T < 2:
            raise ValueError(f"{run} was trained on sequences of {T} token: probes need 2")
        tokenizer = data_prep.run_tokenizer(run, config)
        short = {tokenizer.encode_ordinary(text)[0]: text for text in (".", "\n") if len(tokenizer.encode_ordinary(text)) == 1}
        quiet = torch.tensor([tokenizer.eot_token, *short], device=device)
        batches = []
        for idx, targets in data.val_batches(args.tokens, max(1, args.batch_tokens // T), T):
            full = (targets >= 0).all(1)
            if full.any():
                batches.append((idx[full].to(device), targets[full].to(device)))
        if not batches:
            raise ValueError(f"--tokens {args.tokens} and the validation split of {data.path} must hold one sequence of {T} tokens")
        try:
            numbers = measure(model, batches, quiet)
        except ValueError as e:
            raise ValueError(f"{run}: {e}") from None
        found[name] = {"run": str(run), "model": config["model"], "step": models.read_checkpoint(run)["step"], **numbers}
        print(f"{name}: {config['model']}, loss {found[name]['loss']:.4f} on {found[name]['tokens']:,} tokens", flush=True)
    found = dict(sorted(found.items(), key=lambda item: item[1]["model"] != "gpt"))     # the baseline is black
    args.out.mkdir(parents=True, exist_ok=True)
    for name, numbers in found.items():
        maps = {"maps": numbers["maps"]}
        (args.out / f"{name}.json").write_text(json.dumps({key: x for key, x in numbers.items() if key not in maps}) + "\n")
        (args.out / f"maps-{name}.json").write_text(json.dumps(maps) + "\n")
    draws = {"layers": draw_layers, "depth": draw_depth, "similarity": draw_similarity, "gates": draw_gates, "anchors": draw_anchors,
             "dynamic": draw_dynamic}
    save({**{kind: lambda draw=draw: draw(found) for kind, draw in draws.items()},
          **{f"maps-{name}": lambda name=name: draw_maps(name, found[name]) for name in found}}, args.out)


def main(argv=None):
    parser = models.Parser("analyze.py", description=__doc__, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="curves|probe")
    one = commands.add_parser("curves", allow_abbrev=False, help="learning curves of several runs")
    one.add_argument("runs", nargs="+", help="run folders; config.json and log.jsonl are enough")
    one.add_argument("--out", type=Path, default=Path("analysis"), metavar="DIR", help="folder for curves.png, .md and .json (%(default)s)")
    one.add_argument("--baseline", metavar="SYSTEM", help="the system that the others are compared with, as the table calls it (gpt)")
    two = commands.add_parser("probe", allow_abbrev=False, help="what trained models do inside")
    two.add_argument("runs", nargs="+", help="run folders with a checkpoint")
    two.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for pictures, RUN.json and maps-RUN.json")
    two.add_argument("--data", help="data folder; none: the one the run was trained on")
    two.add_argument("--tokens", type=int, default=16384, help="first tokens of the validation split to look at (%(default)s)")
    two.add_argument("--batch_tokens", type=int, default=2048, help="tokens per forward pass (%(default)s)")
    two.add_argument("--device", default="auto", help="torch device; auto: cuda, else cpu")
    args = parser.parse_args(argv)
    try:
        if args.command == "probe" and min(args.tokens, args.batch_tokens) < 1:
            raise ValueError("--tokens and --batch_tokens must be at least 1")
        if args.out.exists() and not args.out.is_dir():
            raise ValueError(f"--out {args.out} is not a folder")
        curves(args) if args.command == "curves" else probe(args)
    except (ValueError, OSError) as e:
        parser.error(models.one_line(e))
    except (RuntimeError, MemoryError) as e:
        if not models.out_of_memory(e):
            raise
        parser.error("out of memory: lower --batch_tokens")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
