"""What a forward pass does, by hooks."""
import torch

import probes


@torch.no_grad()
def watch(model, idx, modules):
    """Outputs of some submodules in a forward pass on idx (B, T), in fp32 and in the order of their calls.

    A tensor each, or a list where a module gives several, or None among them.
    """
    outputs = []

    def keep(module, inputs, output):
        several = () if torch.is_tensor(output) else [None if x is None else x.float() for x in output]
        outputs.append(several or output.float())

    hooks = [m.register_forward_hook(keep) for m in modules]
    try:
        model(idx)
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


@torch.no_grad()
def stats(name, model, idx):
    """What the mechanism of model `name` does on idx (B, T), for the log: {quantity: [a number per layer]}.

    From probes/NAME.py; without that file the mean output gates, if the model has them, in the field `gate` of its Config.
    """
    probe = probes.find(name)
    if probe:
        return probe.stats(model, idx)
    if getattr(model.config, "gate", "none") == "none":
        return {}
    return {"gate": [g.sigmoid().mean().item() for g in watch(model, idx, [block.attn.gate for block in model.blocks])]}
