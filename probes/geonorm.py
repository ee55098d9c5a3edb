"""What to watch in a trained geonorm.py."""
import torch.nn.functional as F

from nanodepth.record import plain_depth_matrix, watch


def turns(model):
    """The geodesic steps of the 2 L sublayers; [] for the updates that have none."""
    steps = [getattr(block, name, None) for block in model.blocks for name in ("attn_geodesic", "mlp_geodesic")]
    return [step for step in steps if step is not None]


def stats(model, idx):
    """What the mechanism does on idx (B, T), for the log: {name: [a number per layer]}."""
    states = [F.normalize(x, dim=-1) for x in watch(model, idx, [model.embed, *model.blocks])]
    chords = [(b - a).norm(dim=-1) for a, b in zip(states, states[1:])]
    out = {"angle": [2 * (c / 2).clamp(max=1.0).asin().mean().item() for c in chords]}   # radians that a block turns x
    if steps := [(step.scale * step.decay).item() for step in turns(model)]:
        out |= {"attn_step": steps[::2], "mlp_step": steps[1::2]}
    return out


def depth_matrix(model, record):
    """The next state is a x + b g, of state x and output g: what was there is weighed by a, the new output by b."""
    if not turns(model):
        return plain_depth_matrix(model, record)
    n, like = len(record.reads), record.outputs[0]
    A = like.new_zeros(*like.shape[:2], n, n)
    A[..., 0, 0] = record.reads[0].norm(dim=-1) / like.norm(dim=-1)                 # the embedding, put onto the sphere
    for i, (step, x, g) in enumerate(zip(turns(model), record.reads, record.outputs[1:])):
        a, b = step.weights(x, g.type_as(x))                                        # (B, T, 1)
        A[..., i + 1, :] = a * A[..., i, :]
        A[..., i + 1, i + 1] = b[..., 0]
    return {"r": A}
