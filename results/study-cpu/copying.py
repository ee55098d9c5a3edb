"""What copying heads live on: python results/study-cpu/copying.py     (ten minutes of one core, after study.py)

Of five systems whose values read the first layer or the embedding, in the first seed: the loss of the targets that can
be copied from the window and that of all others (nanodepth.record.copying), as trained, and with one layer at a time
cut off from what its values read there. Writes cuts.json and the table of copying.md.
"""
import argparse
import json
import sys
from contextlib import contextmanager
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
import publish  # noqa: E402

from nanodepth import data, record, runs  # noqa: E402
from nanodepth.record import replaced  # noqa: E402


@contextmanager
def zero(p):
    """While it is active, a parameter is zero."""
    kept = p.detach().clone()
    p.zero_()
    try:
        yield
    finally:
        p.copy_(kept)


def resformer(model):
    """lambda1_n, what layer n takes of the first layer's values."""
    skipped = model.config.n_layer - model.config.last_k

    def without(i):
        return lambda pairs: [(0 * a if n == i else a, b) for n, (a, b) in enumerate(pairs)]
    return {skipped + i + 1: replaced({model.value_mix: without(i)}) for i in range(model.config.last_k)}


def satformer(model):
    """The value gates."""
    return {i: replaced({block.attn.value_gate: torch.zeros_like}) for i, block in enumerate(model.blocks, start=1)
            if getattr(block.attn, "value_gate", None) is not None}


def exoformer(model):
    """lambda_anchor of the values, all channels of a layer."""
    return {i: zero(block.attn.wv.lambda_anchor) for i, block in enumerate(model.blocks, start=1)}


def muddformer(model):
    """The weight of the embedding in the value stream, the third of four."""
    def without(mixture):
        def cut(u):
            u = u.clone()
            u[..., 2 * mixture.a.size(1)] = -mixture.a[2, 0]
            return u
        return cut
    return {i: replaced({m.w2: without(m)}) for i, m in enumerate(model.aggregate, start=2) if len(m.a) == 4}


CUTS = {"resformer": resformer, "satformer": satformer, "exoformer": exoformer, "exoformer-dynamic": exoformer,
        "muddformer": muddformer}


@torch.no_grad()
def measure(run, cuts, n_tokens):
    """{"0" for nothing or the layer that is cut: record.copying()}"""
    model, config = runs.load(run)
    batches = list(data.run_data(run, config).val_batches(n_tokens, 16, config["options"]["seq_len"]))
    found = {"0": record.copying(model, batches)}
    for layer, cut in cuts(model).items():
        with cut:
            found[str(layer)] = record.copying(model, batches)
    return found


def table(found):
    """As trained; the layer whose cut costs most where the target can be copied, and the next one."""
    rows = []
    for system, at in found.items():
        order = sorted((layer for layer in at if layer != "0"), key=lambda layer: -at[layer]["repeated"])[:2]
        cells = [f"{at[i]['repeated']:.2f}, {at[i]['others']:.2f}" for i in ("0", *order)]
        rows.append([f"`{system}`", cells[0], *(f"layer {i}: {cell}" for i, cell in zip(order, cells[1:]))])
    return publish.markdown(["system", "as trained: copied, others", "one layer cut off", "another one"],
                            rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/study"), help="what study.py made (runs/study)")
    parser.add_argument("--tokens", type=int, default=16384, help="of the validation split (%(default)s)")
    args = parser.parse_args()
    found = {system: measure(args.runs / f"{system}-seed0", cuts, args.tokens) for system, cuts in CUTS.items()}
    (HERE / "cuts.json").write_text(json.dumps(found, indent=1) + "\n")
    publish.fill(HERE / "copying.md", cuts=table(found))


if __name__ == "__main__":
    main()
