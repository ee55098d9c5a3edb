"""What is known about exoformer.py, and most of what is about nuresformer.py and exoformer_dynamic.py."""
import torch

from nanodepth.pictures import LAYERS, grid, heat, lines
from nanodepth.record import averaged, lists, replaced, spaces
from probes import watch

MAPS = dict(q="wq", k="wk", v="wv", g="gate")               # the module of a layer's attention that makes each stream


def costs(c, T):
    proj = 2 * (c.n_head + c.n_kv_head) * c.d_head * c.d_model
    params, flops, read = mixing_costs(c, c.n_layer)
    return params + proj, flops + 2 * proj, read


def mixing_costs(c, n):
    """Of n layers that mix, and of the anchors' norms."""
    width = 2 * (c.n_head + c.n_kv_head) * c.d_head
    lambdas = 2 * dict(elementwise=width, headwise=width // c.d_head, scalar=4)[c.granularity]
    return dict(qkvg=4, qk=2, none=0)[c.norms] * c.d_head + n * lambdas, 3 * n * width, n * width


def mixing(model):
    """{layer, counted from 1: its attention} of the layers that mix an anchor in."""
    return {i: block.attn for i, block in enumerate(model.blocks, start=1) if hasattr(block.attn.wq, "lambda_anchor")}


def gammas(model):
    """The modules that give (B, T, 4, 2) factors of the lambdas; [] unless mixing is dynamic."""
    return [attn.gamma for attn in mixing(model).values() if hasattr(attn, "gamma")]


@torch.no_grad()
def neutral(model):
    for attn in mixing(model).values():
        for w in MAPS.values():
            getattr(attn, w).lambda_anchor.zero_()
            getattr(attn, w).lambda_self.fill_(2.0 if gammas(model) else 1.0)       # a gamma starts at 1/2


def lambdas(model):
    """{"lambda_anchor" or "lambda_self": {stream: (n, heads, D or 1)}} of the n layers that mix."""
    return {name: {s: torch.stack([getattr(getattr(attn, w), name).detach() for attn in mixing(model).values()]).cpu()
                   for s, w in MAPS.items()} for name in ("lambda_anchor", "lambda_self")}


def stats(model, idx):
    """What the mechanism does on idx (B, T), for the log: {name: [a number per layer]}."""
    stats = {f"{name}_{s}": x.flatten(1).mean(1).tolist()
             for name, streams in lambdas(model).items() for s, x in streams.items()}
    if gammas(model):
        stats["gamma"] = [g.mean().item() for g in watch(model, idx, gammas(model))]
    return stats


def watched(model):
    return {"gate": [block.attn.gate for block in model.blocks], "gamma": gammas(model)}


def gates(model, record):
    return [g.sigmoid() for g in record.outputs_of("gate")]


def weights(model, record):
    """{stream: (lambda_anchor, lambda_self, gamma)} of the n layers that mix: (n, heads, D or 1) twice, and (n, 2) mean
    factors of the two, which are 1 unless they are dynamic."""
    found, n = lambdas(model), len(mixing(model))
    factors = [g.mean((0, 1)).cpu() for g in record.outputs_of("gamma")] or [torch.ones(4, 2)] * n
    return {s: (found["lambda_anchor"][s], found["lambda_self"][s], torch.stack(factors)[:, i])
            for i, s in enumerate(MAPS)}


def value_matrix(model, record):
    """An anchor from outside is an extra first column (L, L + 1); anchors count as they are mixed in, normalised."""
    found, L = weights(model, record), len(model.blocks)
    outside = len(mixing(model)) == L
    out = {s: torch.cat((torch.zeros(L, int(outside)), torch.eye(L)), dim=1) for s in found}
    for s, (anchor, own, gamma) in found.items():
        for i, a, b, g in zip(mixing(model), anchor, own, gamma):
            out[s][i - 1, i - 1 + outside] = (g[1] * b).mean()
            out[s][i - 1, 0] = (g[0] * a).mean()
    return out


def observe(model, record):
    return {f"{name}.{s}": x for s, found in weights(model, record).items()
            for name, x in zip(("lambda_anchor", "lambda_self", "gamma"), found)}


def numbers(model, means, batches, quiet_ids):
    return {"mixing_layers": list(mixing(model)), "without_anchor": without_anchor(model, batches, quiet_ids),
            "near_zero": near_zero(model),
            **{name: lists(means, name) for name in ("lambda_anchor", "lambda_self", "gamma")}}


def near_zero(model):
    """{"lambda_anchor" or "lambda_self": share of them below 1e-3 in size} (appendix C.1)."""
    return {name: torch.cat([x.flatten() for x in streams.values()]).abs().lt(1e-3).double().mean().item()
            for name, streams in lambdas(model).items()}


def without_anchor(model, batches, quiet_ids):
    """Section 3.3: loss, similarity and core features when the anchors are zero."""
    with replaced({norm: torch.zeros_like for norm in model.anchor_norms.values()}):
        means = averaged(model, batches, quiet_ids)
    return {"loss": means["lens"][-1].item(), "layer_similarity": means["layer_similarity"].tolist(), **spaces(means)}


def draw_anchors(found):
    """Ratios of the lambdas per channel with the heads' boundaries (figure 3), and the model without its anchors."""
    panels = [(run, kind) for run, numbers in found.items()
              for kind in (*numbers["lambda_anchor"], "token_similarity", "core_features", "layer_similarity")]
    fig, axes = grid(len(panels))
    for ax, (run, kind) in zip(axes, panels):
        numbers, bare = found[run], found[run]["without_anchor"]
        if kind in numbers["lambda_anchor"]:
            draw_ratio(fig, ax, run, numbers, kind)
        elif kind == "layer_similarity":
            image = heat(ax, bare[kind], f"{run}: anchors zero", "state after layer", "state after layer",
                         cmap="viridis", vmin=0, vmax=1)
            fig.colorbar(image, ax=ax, label="mean cosine, same token")
        else:
            title, unit = LAYERS[kind]
            pair = {f"as it is (loss {numbers['loss']:.2f})": numbers[kind],
                    f"anchors zero (loss {bare['loss']:.2f})": bare[kind]}
            lines(ax, range(len(bare[kind])), pair, f"{run}: {title}", unit, markers="os")
    return fig


def draw_ratio(fig, ax, run, numbers, s):
    """What the anchor weighs over what the layer's own projection weighs, in stream s."""
    anchor, own, gamma = (torch.tensor(numbers[name][s]) for name in ("lambda_anchor", "lambda_self", "gamma"))
    ratio = (gamma[:, 0] / gamma[:, 1])[:, None, None] * anchor / own                # (layers, heads, D or 1)
    image = heat(ax, ratio.flatten(1).tolist(), f"{run}: anchor / own, {s.upper()}",
                 "channel (lines: heads)" if ratio.size(2) > 1 else "head", "layer", (numbers["mixing_layers"][0], 0),
                 cmap="RdBu_r", vmin=0, vmax=2)
    fig.colorbar(image, ax=ax, extend="both")
    for head in range(1, ratio.size(1)):
        ax.axvline(head * ratio.size(2) - 0.5, color="#FFD500", lw=1.2)


PICTURES = {"anchors": draw_anchors}
