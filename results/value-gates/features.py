"""What do the gates read of the first layer's values?     python results/value-gates/features.py RUN [RUN ...]

SATFormer, section 5.3 and appendix C (arXiv:2605.03953): a sparse autoencoder splits the first layer's values v_1 into
features. Each feature gets a class. The value gate of a layer is averaged over the features of each class.

v_1 depends on the token alone: before the first attention tokens are not mixed, and values have no position. So a
feature is a set of tokens, and sums over a text are sums over the vocabulary. We tell the class of a feature from the
bytes of its tokens. (The paper asks a language model.) The classes summarise the paper's table 8:

    semantic     tokens with an English letter: words, pieces of words
    functional   digits, other scripts, bytes that are not a character
    structural   punctuation, symbols, spaces, newlines

    a = top_k(relu(W_enc (v - b) + c)),   v' = W_dec a + b,   mean of |v - v'|^2, Adam at 5e-4, cosine

A feature counts if it is active at least ten times and at no more than 0.5% of the tokens, and if 7 of 10 of its
strongest tokens have one class. Prints two tables.
"""
import argparse
import sys
import unicodedata
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1])]
import publish  # noqa: E402

import nanodepth  # noqa: E402
from nanodepth.cli import run_script  # noqa: E402
from nanodepth.data import run_data  # noqa: E402
from probes import watch  # noqa: E402
from probes.satformer import value_gates  # noqa: E402

CLASSES = ("semantic", "functional", "structural")


def class_of(token):
    """The class of a token, given its bytes."""
    text = token.decode(errors="replace").strip()
    if any(c.isascii() and c.isalpha() for c in text):
        return "semantic"
    kinds = {unicodedata.category(c)[0] for c in text if c != "\ufffd"}
    return "structural" if kinds <= {"P", "S", "Z", "C"} and "\ufffd" not in text else "functional"


def classes(tokenizer):
    """int64 (V,): index into CLASSES of every token; -1: end-of-text and unused ids."""
    found = torch.full((tokenizer.n_vocab,), -1)
    for token in tokenizer.token_byte_values():
        found[tokenizer.encode_single_token(token)] = CLASSES.index(class_of(token))
    return found


@torch.no_grad()
def gates_by_token(model, modules, batches, n_vocab):
    """count (V,) of each token in the batches, and gate (R, V): the mean output of each of R value gates at it."""
    count = torch.zeros(n_vocab)
    total = torch.zeros(len(modules), n_vocab)
    for idx in batches:
        count += torch.bincount(idx.flatten(), minlength=n_vocab)
        for i, alpha in enumerate(watch(model, idx, modules)):
            total[i].index_add_(0, idx.flatten(), alpha.mean(-1).flatten())
    return count, total / count.clamp(min=1)


@torch.no_grad()
def first_values(model, n_vocab):
    """v_1 of every token, (V, K D). SystemExit if it depends on more than the token."""
    idx = torch.arange(min(n_vocab, model.config.max_len))[None]
    wv = model.blocks[0].attn.wv
    table = torch.cat([wv(model.blocks[0].attn_norm(model.embed(part))) for part in torch.arange(n_vocab).split(4096)])
    if not torch.allclose(watch(model, idx, [wv])[0][0], table[:idx.size(1)], atol=1e-4):
        sys.exit("the first layer's values of this model depend on more than the token")
    return table


class Autoencoder(nn.Module):
    def __init__(self, d, n_features, k):
        super().__init__()
        self.encode, self.bias, self.k = nn.Linear(d, n_features), nn.Parameter(torch.zeros(d)), k
        self.decode = nn.Parameter(F.normalize(self.encode.weight.detach(), dim=1))     # (n_features, d)
        self.encode.weight.data.copy_(self.decode)

    def features(self, v):
        """v (N, d) -> the k largest features of each, and which they are, (N, k)."""
        return self.encode(v - self.bias).relu().topk(self.k, dim=-1)

    def forward(self, v):
        a, which = self.features(v)
        return F.embedding_bag(which, self.decode, per_sample_weights=a, mode="sum") + self.bias


def fit(v, count, k, steps, batch=1024, seed=0):
    """(features (V, F) of an autoencoder of v (V, d), share of variance explained). Draws tokens by their frequency."""
    torch.manual_seed(seed)
    share = count / count.sum()
    v = v - share @ v
    v = v / (share @ v.square().mean(1)).sqrt()                 # mean 0, mean square 1
    model = Autoencoder(v.size(1), 16 * v.size(1), k)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        x = v[torch.multinomial(count, batch, replacement=True)]
        (x - model(x)).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    with torch.no_grad():
        a, which = model.features(v)
        a = torch.zeros(len(v), 16 * v.size(1)).scatter(1, which, a)
        return a, 1 - (share @ (v - model(v)).square().mean(1)).item()


def classified(a, count, kinds):
    """int64 (F,): the class of each feature, from its activation at every token, a (V, F); -1: it does not count."""
    times = count @ (a > 0).float()
    found = torch.full((a.size(1),), -1)
    for f in ((times >= 10) & (times <= 0.005 * count.sum())).nonzero().flatten().tolist():
        seen = (a[:, f] > 0) & (count > 0)
        top = torch.where(seen, a[:, f], 0).topk(min(10, int(seen.sum()))).indices
        shares = torch.stack([(kinds[top] == i).float().mean() for i in range(len(CLASSES))])
        if shares.max() >= 0.7:
            found[f] = shares.argmax()
    return found


def by_class(gate, weights, kinds):
    """{class: mean gate (R,)}: gate (R, V), weights (V, N) of N features or tokens, kinds (N,)."""
    each = gate @ weights / weights.sum(0).clamp(min=1e-30)                                     # (R, N)
    return {name: each[:, kinds == i].mean(1).tolist() for i, name in enumerate(CLASSES) if (kinds == i).any()}


def measure(run, k, n_tokens=262_144, steps=4000):
    """The numbers of a run's tables, from this many training tokens and this many steps of the autoencoder."""
    model, tokenizer, config = nanodepth.load(run)
    data, T = run_data(run, config), config["options"]["seq_len"]
    kinds = classes(tokenizer)
    batches = [data.batch(i, 0, 16, 16, T, seed=1)[0] for i in range(n_tokens // (16 * T))]
    gates = value_gates(model) if config["model"] == "satformer" else {}
    count, gate = gates_by_token(model, gates.values(), batches, len(kinds))
    count[kinds < 0] = 0
    a, explained = fit(first_values(model, len(kinds)), count, k, steps)
    found = classified(a, count, kinds)
    numbers = {"layers": list(gates), "explained": explained,
               "alive": int((count @ a > 0).sum()), "features": a.size(1),
               "count": {name: int((found == i).sum()) for i, name in enumerate(CLASSES)}}
    if gates:
        numbers["by_feature"] = by_class(gate, a * count[:, None], found)
        tokens = torch.stack([count * (kinds == i) for i in range(len(CLASSES))], dim=1)
        numbers["by_token"] = by_class(gate, tokens, torch.arange(len(CLASSES)))
    return numbers


def tables(found):
    """Tables of each run's features, and of the gates of the runs that have some."""
    counts = publish.markdown(["run", "features", "alive", *CLASSES, "variance explained"], [
        [f"`{name}`", *(f"{n:,}" for n in (x["features"], x["alive"], *x["count"].values())),
         f"{100 * x['explained']:.1f}%"] for name, x in found.items()])
    gates = "\n\n".join(publish.markdown([f"{name}: layer", *map(str, x["layers"])], [
        [c, *(f"{value:.3f}" for value in row)] for c, row in x["by_feature"].items()] + [
        [f"{c} tokens", *(f"{value:.3f}" for value in row)] for c, row in x["by_token"].items()])
        for name, x in found.items() if "by_feature" in x)
    return counts, gates


def main(argv):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders of train.py")
    parser.add_argument("--k", type=int, default=32, help="active features per token (%(default)s, the paper's)")
    args = parser.parse_args(argv)
    print(*tables({run.resolve().name: measure(run, args.k) for run in args.runs}), sep="\n\n")


if __name__ == "__main__":
    run_script("features.py", main)
