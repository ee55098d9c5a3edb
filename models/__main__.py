"""python -m models NAME [option=value ...]: size and cost beside the baseline of that shape, and the neutral check."""
from dataclasses import fields

import torch

import models
from nanodepth.devices import flops_per_token
from nanodepth.options import parse_spec, run_script, same_shape, user_errors


def sizes(name, options):
    """(parameters, forward FLOPs per token in a context of 1,024) of a model."""
    with torch.device("meta"):
        model = models.build(name, **options)
    return sum(p.numel() for p in model.parameters()), flops_per_token(model, 1024)


def neutral_difference(name, base, options):
    """Largest difference of the logits of a small `name`, set neutral, and of `base` with its weights; in float64."""
    own, of_base = ({f.name for f in fields(models.module(n).Config)} for n in (name, base))
    small = dict(vocab_size=97, n_layer=4, n_head=4, n_kv_head=2, d_model=64, norm_eps=1e-12, zero_init=False)
    model = models.build(name, **{key: value for key, value in {**small, **options}.items() if key in own}).double()
    other = models.build(base, **{key: getattr(model.config, key) for key in own & of_base}).double()
    models.module(name).neutral(model)
    model.load_state_dict(other.state_dict(), strict=False)
    idx = torch.randint(97, (2, 33))
    return (model(idx)[0] - other(idx)[0]).abs().max().item()


@user_errors()
def main(words):
    name, options = parse_spec(":".join(words or ["gpt"]))
    base = models.baseline(name)
    of_base = same_shape(models.module(name).Config, models.module(base).Config, options)
    (n, flops), (n0, flops0) = sizes(name, options), sizes(base, of_base)
    print(f"{n:,} parameters ({n - n0:+,} = {n / n0 - 1:+.3%} against {base}.py); {flops:,.0f} forward FLOPs per token "
          f"in a context of 1,024 ({flops / flops0 - 1:+.3%})")
    if hasattr(models.module(name), "neutral"):
        try:
            difference = neutral_difference(name, base, options)
            print(f"neutral setting: logits differ from {base}.py's by at most {difference:.0e}")
        except ValueError as e:
            print(f"no neutral setting: {e}")
    return 0


if __name__ == "__main__":
    run_script("python -m models", main)
