"""What to watch in a trained exoformer.py."""
import torch

from nanodepth.pictures import LAYERS, grid, heat, lines
from nanodepth.record import averaged, lists, replaced, spaces, watch


def mixes(model):
    """{layer, counted from 1: its mix} of the layers that mix an anchor in."""
    found = {i: getattr(block.attn, "mix", None) for i, block in enumerate(model.blocks, start=1)}
    return {i: mix for i, mix in found.items() if mix is not None}


def gammas(model):
    """The modules that give (B, T, 2 per stream) dynamic factors; [] if mixing is static."""
    return [mix.gamma for mix in mixes(model).values()] if model.config.mixing == "dynamic" else []


def stats(model, idx):
    """What the mechanism does on idx (B, T), for the log: {name: [a number per layer]}."""
    stats = {f"{name}_{s}": [getattr(mix, name)[s].mean().item() for mix in mixes(model).values()]
             for name in ("lambda_anchor", "lambda_self") for s in model.config.mix_streams}
    if gammas(model):
        stats["gamma"] = [g.mean().item() for g in watch(model, idx, gammas(model))]
    return stats


def watched(model):
    return {"attn": [block.attn for block in model.blocks], "mix": list(mixes(model).values()), "gamma": gammas(model)}


def gates(model, record):
    """The layers' gates: those of mixed streams where the layer mixes, else of its own."""
    out, mixed = [], iter(record.outputs_of("mix"))
    for i, (block, (inputs, _)) in enumerate(zip(model.blocks, record.calls["attn"]), start=1):
        streams = next(mixed) if i in mixes(model) else {}
        if block.attn.gate is not None:
            raw = streams["g"] if "g" in streams else block.attn.gate(inputs[0])
            out.append(raw.sigmoid().reshape(*raw.shape[:2], model.config.n_head, -1))
    return out


def weights(model, record):
    """{stream: (lambda_anchor, lambda_self, gamma)} of the n layers that mix: (n, heads, D or 1) twice, and (n, 2) mean
    factors of the two, which are 1 unless they are dynamic."""
    own, streams, out = mixes(model).values(), model.config.mix_streams, {}
    factors = [g.mean((0, 1)) for g in record.outputs_of("gamma")] or [torch.ones(2 * len(streams))] * len(own)
    for i, s in enumerate(streams if own else ""):
        anchor, self_ = (torch.stack([getattr(mix, name)[s].detach() for mix in own]).cpu()
                         for name in ("lambda_anchor", "lambda_self"))
        out[s] = anchor, self_, torch.stack([g[2 * i:2 * i + 2] for g in factors]).cpu()
    return out


def value_matrix(model, record):
    """An anchor from outside is an extra first column (L, L + 1); anchors count as they are mixed in, normalised."""
    found, L, outside = weights(model, record), len(model.blocks), model.config.anchor == "external"
    out = {s: torch.cat((torch.zeros(L, int(outside)), torch.eye(L)), dim=1) for s in found}
    for s, (anchor, own, gamma) in found.items():
        for i, a, b, g in zip(mixes(model), anchor, own, gamma):
            out[s][i - 1, i - 1 + outside] = (g[1] * b).mean()
            out[s][i - 1, 0] = (g[0] * a).mean()
    return out


def observe(model, record):
    return {f"{name}.{s}": x for s, found in weights(model, record).items()
            for name, x in zip(("lambda_anchor", "lambda_self", "gamma"), found)}


def numbers(model, means, batches, quiet_ids):
    return {"mixing_layers": list(mixes(model)), "without_anchor": without_anchor(model, batches, quiet_ids),
            "near_zero": near_zero(model),
            **{name: lists(means, name) for name in ("lambda_anchor", "lambda_self", "gamma")}}


def near_zero(model):
    """{"lambda_anchor" or "lambda_self": share of them below 1e-3 in size} (appendix C.1)."""
    shares = {}
    for name in ("lambda_anchor", "lambda_self"):
        all_of = [p.detach().flatten() for mix in mixes(model).values() for p in getattr(mix, name).values()]
        if all_of:
            shares[name] = torch.cat(all_of).abs().lt(1e-3).double().mean().item()
    return shares


def without_anchor(model, batches, quiet_ids):
    """Section 3.3: loss, similarity and core features when the anchors are zero."""
    with replaced({model.anchor: lambda anchors: {s: torch.zeros_like(x) for s, x in anchors.items()}}):
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
