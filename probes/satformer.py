"""What satformer.py costs, when it is gpt.py, and what to watch in a trained one."""
import torch

from nanodepth.pictures import bars, heat, lines, per_layer
from nanodepth.record import replaced
from probes import watch
from nanodepth.scoring import evaluate


def costs(c, T):
    """Of each reading layer: W_alpha; its product, alpha v_first and a sum; v_first."""
    n, matrix, width = c.last_k, c.d_model * c.n_kv_head, c.n_kv_head * c.d_head
    return n * matrix, n * (2 * matrix + 2 * width), n * width


@torch.no_grad()
def neutral(model):
    """W_alpha = 0. ValueError where act(0) is not 0."""
    if model.config.value_act not in ("relu", "tanh", "identity"):
        raise ValueError(f"value_act {model.config.value_act} is not zero at W_alpha = 0")
    for gate in value_gates(model).values():
        gate.weight.zero_()


def value_gates(model):
    """{layer, counted from 1: its value gate} of the layers that have one."""
    gates = {i: getattr(block.attn, "value_gate", None) for i, block in enumerate(model.blocks, start=1)}
    return {i: gate for i, gate in gates.items() if gate is not None}


def stats(model, idx):
    """What the mechanism does on idx (B, T), for the log: {name: [a number per layer]}."""
    alphas = watch(model, idx, value_gates(model).values())
    return {"value_gate": [a.mean().item() for a in alphas],
            "value_gate_zeros": [(a == 0).float().mean().item() for a in alphas]}


def watched(model):
    return {"alpha": list(value_gates(model).values())}                            # (B, T, K)


def value_matrix(model, record):
    """The values of a layer with a gate are its own plus alpha times the first layer's."""
    A = torch.eye(len(model.blocks))
    for i, alpha in zip(value_gates(model), record.outputs_of("alpha")):
        A[i - 1, 0] = alpha.mean().cpu()
    return {"v": A}


def observe(model, record):
    """Mean gate per layer and head, and the share of exact zeros per layer."""
    alphas = record.outputs_of("alpha")
    return {"value_gate": torch.stack([a.mean((0, 1)) for a in alphas]),
            "value_gate_zeros": torch.stack([(a == 0).double().mean() for a in alphas])}


def numbers(model, means, batches, quiet_ids):
    g = means["value_gate"]                                                         # cv: spread of the heads' means
    return {"value_gate": g.tolist(), "value_gate_zeros": means["value_gate_zeros"].tolist(),
            "value_gate_cv": [(x.std(correction=0) / x.mean()).item() if x.mean() > 0 else None for x in g],
            "mixing_layers": list(value_gates(model)),
            "interventions": interventions(model, batches, g.mean(-1).tolist())}


def interventions(model, batches, averages):
    """Figure 4: change in perplexity when one layer's value gate is zero, or its mean over tokens and heads."""
    gates = value_gates(model)

    def perplexity(change):
        with replaced(change):
            return evaluate(model, batches)["ppl"]

    base = perplexity({})
    constant = {gate: lambda a, x=x: torch.full_like(a, x) for gate, x in zip(gates.values(), averages)}
    return {"layers": list(gates), "perplexity": base,
            "zero": [perplexity({gate: torch.zeros_like}) - base for gate in gates.values()],
            "mean": [perplexity({gate: function}) - base for gate, function in constant.items()]}


def panels(run, numbers):
    """The gates by layer and head, their statistics, and the interventions."""
    gates, changes = numbers["value_gate"], numbers["interventions"]
    layers = changes["layers"]

    def draw_gates(fig, ax):
        top = max(abs(x) for row in gates for x in row) or 1.0
        signed = min(map(min, gates)) < 0                                           # of tanh or identity
        image = heat(ax, gates, f"{run}: value gate, mean", "key/value head", "layer", (layers[0], 1),
                     cmap="RdBu_r" if signed else "viridis", vmin=-top if signed else 0, vmax=top)
        fig.colorbar(image, ax=ax)

    def draw_statistics(fig, ax):
        means = per_layer(gates)
        lines(ax, layers, {"mean": means, "share of exact zeros": numbers["value_gate_zeros"],
                           "sd / mean over heads": numbers["value_gate_cv"]}, f"{run}: value gate")
        ax.set_ylim(bottom=min(0, *means))

    def draw_interventions(fig, ax):
        bars(ax, layers, {"gate = 0": changes["zero"], "gate = its mean": changes["mean"]},
             f"{run}: one layer's gate replaced", f"change of perplexity (of {changes['perplexity']:.1f})")
    return [draw_gates, draw_statistics, draw_interventions]
