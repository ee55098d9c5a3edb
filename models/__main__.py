"""python -m models NAME [option=value ...]: size and cost beside its baseline, and whether the two can be equal."""
from dataclasses import fields

import torch

import models
import probes
from nanodepth.cli import run_script
from nanodepth.devices import flops_per_token
from nanodepth.timing import parse_spec, same_shape


def sizes(name, options):
    """(config, parameters, tokens of context (1,024 or max_len), forward FLOPs per token in matrix products)."""
    with torch.device("meta"):
        model = models.build(name, **options)
    T = min(1024, model.config.max_len)
    return model.config, sum(p.numel() for p in model.parameters()), T, flops_per_token(model, T)


def small_pair(name, base, options):
    """A model with 16 channels a head and all its other options, and its baseline; both in float64."""
    own = {f.name for f in fields(models.module(name).Config)}
    of_base = {f.name for f in fields(models.module(base).Config)}
    n_head = options.get("n_head", models.module(name).Config.n_head)
    small = {**options, "vocab_size": 97, "max_len": 33, "d_model": 16 * n_head, "d_ff": None, "norm_eps": 1e-12,
             "zero_init": False}
    model = models.build(name, **{key: value for key, value in small.items() if key in own}).double()
    return model, models.build(base, **{key: getattr(model.config, key) for key in own & of_base}).double()


@torch.no_grad()
def neutral_line(name, base, options):
    """One line: whether the model, at its neutral setting and with the baseline's weights, is the baseline."""
    try:
        model, other = small_pair(name, base, options)
    except ValueError as e:
        return f"neutral setting: not tried, because with 16 channels a head {e}"
    try:
        probes.of(name, "neutral")(model)
    except ValueError as e:
        return f"no neutral setting: {e}"
    model.load_state_dict(other.state_dict(), strict=False)
    idx = torch.randint(97, (2, 33))
    difference = (model(idx)[0] - other(idx)[0]).abs().max().item()
    return f"neutral setting: logits differ from {base}.py's by at most {difference:.0e}"


def main(words):
    if "--help" in words:
        print(__doc__)
        return 0
    name, options = parse_spec(":".join(words or ["gpt"]))
    module, base = models.module(name), models.baseline(name)
    config, n, T, flops = sizes(name, options)
    try:
        _, n0, _, flops0 = sizes(base, same_shape(module.Config, models.module(base).Config, options))
    except ValueError as e:
        print(f"{n:,} parameters; {flops:,.0f} forward FLOPs per token in a context of {T:,}; no such {base}.py: {e}")
        return 0
    print(f"{n:,} parameters ({n - n0:+,} = {n / n0 - 1:+.3%} against {base}.py); {flops:,.0f} forward FLOPs per token "
          f"in a context of {T:,} ({flops / flops0 - 1:+.3%} in matrix products)")
    if probes.of(name, "neutral"):
        print(neutral_line(name, base, options))
    return 0


if __name__ == "__main__":
    run_script("python -m models", main)
