"""What to watch in a trained resformer.py."""
import torch


def stats(model, idx):
    """What the mechanism does on idx (B, T), for the log: {name: [a number per layer]}."""
    return {name: torch.as_tensor(x).tolist() for name, x in zip(("lambda1", "lambda2"), model.value_mix())}
