"""The optimizers: which one trains which parameter, at which learning rate. Muon is here; AdamW is torch's.

Your own: write a function like muon_and_adamw() below, and name it in OPTIMIZERS. `--optimizer NAME` then takes it.
A run that is resumed goes on with what is in the optimizer's `state`; its settings are those of today.

Muon replaces the momentum of each weight matrix by (nearly) the closest semi-orthogonal matrix, so that every direction
moves by the same amount. K. Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
The orthogonalisation is five steps of Polar Express (arXiv:2505.16932), weight decay is cautious (arXiv:2510.12402),
and the optional row/column normalisation is NorMuon's (arXiv:2510.05491). ExoFormer's code (arXiv:2601.08131) does the
same, but keeps weights and state in bf16; here they are fp32.
"""
from itertools import groupby

import torch
import torch.distributed as dist
from torch import nn

# (a, b, c) of X <- a X + b (X X^T) X + c (X X^T)^2 X, for 5 steps and singular values from 1e-3 up (arXiv:2505.16932)
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def polar_express(G):
    """Approximate polar factor U V^T of G = U S V^T, for a stack of matrices (..., rows, cols) of any shape.

    Singular values of at least 1e-3 of the Frobenius norm end in [0.84, 1.15], which is close enough to 1 for an
    optimizer; zero stays zero. Computes in the dtype of G; bf16 is enough.
    """
    wide = G.size(-2) <= G.size(-1)
    X = (G if wide else G.mT).reshape(-1, *sorted(G.shape[-2:]))          # few rows: the products below are rows x rows
    X = X / (X.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    for a, b, c in POLAR_EXPRESS:
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)                       # b A + c A A, rounded once
        X = torch.baddbmm(X, B, X, beta=a)
    return (X if wide else X.mT).reshape(G.shape)


class Muon(torch.optim.Optimizer):
    """Muon for matrices. Several ranks share the orthogonalisation; their gradients must be averaged already.

    params: matrices, or stacks (.., rows, cols) of matrices, each orthogonalised separately.
    lr: spectral norm of one update of a wide matrix; that of a tall one is sqrt(rows / cols) times as large.
    weight_decay: decoupled, times lr, and only where it pulls in the direction of the update (cautious).
    momentum: decay rate of the gradients' running mean; the update is Nesterov's, (1 - momentum) grad + momentum mean.
    second_moment: None, or the decay rate (0.95 in ExoFormer's code) of a running mean square per row (per column of
        wide matrices), by which the update is divided at unchanged Frobenius norm.
    dtype: in which to orthogonalise; None: that of the parameters.
    """

    def __init__(self, params, lr=0.02, weight_decay=0.0, momentum=0.95, second_moment=None, dtype=None):
        self.dtype = dtype
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, momentum=momentum, second_moment=second_moment))
        for p in (p for group in self.param_groups for p in group["params"]):
            if p.ndim < 2:
                raise ValueError(f"Muon is for matrices, not for a parameter of shape {tuple(p.shape)}")

    @torch.no_grad()
    def step(self):
        """Updates the parameters."""
        for group in self.param_groups:
            stacks = {}                                                   # matrices of one shape are one stack
            for p in group["params"]:
                if p.grad is not None:
                    stacks.setdefault((p.shape, p.dtype), []).append(p)
                    if "momentum" not in self.state[p]:
                        self.state[p]["momentum"] = torch.zeros_like(p)
            for params in stacks.values():
                means, grads = [self.state[p]["momentum"] for p in params], [p.grad for p in params]
                torch._foreach_lerp_(means, grads, 1 - group["momentum"])
            for params, updates in self.updates(list(stacks.values()), group["momentum"]):
                updates = updates.to(params[0].dtype)
                self.apply(params, updates, group["lr"], group["weight_decay"], group["second_moment"])

    def updates(self, stacks, momentum):
        """Yields (matrices of one shape, their orthogonal updates (N, .., rows, cols)), each matrix once.

        Rank r orthogonalises the matrices r, r + world, r + 2 world ...; one all-gather sends them to all.
        """
        def orthogonal(params):
            grads, means = [p.grad for p in params], [self.state[p]["momentum"] for p in params]
            nesterov = torch.stack(torch._foreach_lerp(grads, means, momentum))
            return polar_express(nesterov.to(self.dtype or nesterov.dtype))

        if not stacks or not dist.is_initialized() or dist.get_world_size() == 1:
            for params in stacks:
                yield params, orthogonal(params)
            return
        world, rank, order = dist.get_world_size(), dist.get_rank(), [p for params in stacks for p in params]
        sizes = [sum(p.numel() for p in order[r::world]) for r in range(world)]
        own = torch.zeros(max(sizes), dtype=self.dtype or order[0].dtype, device=order[0].device)
        everything = own.new_empty(world * len(own))
        if order[rank::world]:
            shares = [list(same) for _, same in groupby(order[rank::world], key=lambda p: (p.shape, p.dtype))]
            own[:sizes[rank]] = torch.cat([orthogonal(params).flatten() for params in shares])
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor    # torch 2.11 has no other
        gather(everything, own)
        update = {}
        for r, row in enumerate(everything.view(world, -1)):
            for p in order[r::world]:
                update[p], row = row[:p.numel()].view_as(p), row[p.numel():]
        for params in stacks:
            yield params, torch.stack([update[p] for p in params])

    def apply(self, params, updates, lr, weight_decay, second_moment):
        """Moves N matrices (or stacks) of the same shape by their orthogonal updates (N, .., rows, cols)."""
        rows, cols = updates.shape[-2:]
        if second_moment is not None:
            updates = self.normalize(params, updates, second_moment, dim=-1 if rows >= cols else -2)
        updates *= max(1, rows / cols) ** 0.5
        weights = torch.stack(params)                                     # one kernel per operation, not one per matrix
        if weight_decay:
            weights.sub_(weights * (updates * weights >= 0), alpha=lr * weight_decay)
        torch._foreach_copy_(params, list(weights.sub_(updates, alpha=lr)))

    def normalize(self, params, updates, rate, dim):
        """Divides updates (N, .., rows, cols) by the root of their running mean square over `dim`, norm unchanged."""
        now = updates.square().mean(dim, keepdim=True)
        for p, square in zip(params, now):
            if "second_moment" not in self.state[p]:
                self.state[p]["second_moment"] = torch.zeros_like(square)
        running = [self.state[p]["second_moment"] for p in params]
        torch._foreach_lerp_(running, list(now), 1 - rate)
        out = updates * torch.stack(running).clamp(min=1e-10).rsqrt()
        norm = [t.norm(dim=(-2, -1), keepdim=True) for t in (updates, out)]
        return out * (norm[0] / norm[1].clamp(min=1e-10))


def split_params(model):
    """(matrices, rest): the weights of all nn.Linear inside model.blocks, and every other parameter; each once.

    If Muon trains other modules as well, the model lists them in `muon_modules` (see exoformer.py).
    ValueError if there is no such module.
    """
    chosen = {}
    for name in getattr(model, "muon_modules", ("blocks",)):
        if not isinstance(getattr(model, name, None), nn.Module):
            raise ValueError(f"Model has no module {name}: name what Muon trains, as in muon_modules = (\"layers\",) "
                             "(see models/exoformer.py), and make it an nn.ModuleList")
        linear = [m for m in getattr(model, name).modules() if isinstance(m, nn.Linear)]
        chosen |= {id(m.weight): m.weight for m in linear if isinstance(m.weight, nn.Parameter)}
    return list(chosen.values()), [p for p in model.parameters() if id(p) not in chosen]


def mixing_params(model):
    """The mixing parameters: those that a plain Transformer does not have. Most of them mix layers.

    They are split_params' rest without embeddings, head, norms (modules whose name ends in "norm", or their class's in
    "Norm") and biases of nn.Linear.
    """
    usual = {id(p) for name, m in model.named_modules() for p in m.parameters(recurse=False)
             if isinstance(m, nn.Embedding) or name == "head" or name.endswith("norm")
             or type(m).__name__.endswith("Norm") or isinstance(m, nn.Linear) and p is m.bias}
    return [p for p in split_params(model)[1] if id(p) not in usual]


# ---------------------------------------------------------------------------------------------- the optimizers of a run


ADAMW = dict(betas=(0.9, 0.95), eps=1e-8, fused=True)


def muon_and_adamw(matrices, others, options):
    """Muon for the matrices and AdamW for the others."""
    dtype = torch.bfloat16 if options.dtype == "bf16" else None
    return [Muon(matrices, options.muon_lr, options.weight_decay, second_moment=options.second_moment, dtype=dtype),
            torch.optim.AdamW(others, **ADAMW)]


def adamw(matrices, others, options):
    """AdamW for everything."""
    first = dict(params=matrices, lr=options.adamw_lr, weight_decay=options.weight_decay)
    return [torch.optim.AdamW([first, *others], **ADAMW)]


OPTIMIZERS = {"muon": muon_and_adamw, "adamw": adamw}                       # the values of --optimizer


def optimizers(model, options):
    """[optimizer] that options.optimizer names, for train.py's options. Only the matrices of split_params() decay.

    A function in OPTIMIZERS gets these matrices and, as groups with their learning rates, the other parameters:
    embeddings, head, norms and biases (adamw_lr), and mixing_params() (mix_lr, or else adamw_lr). Each group of the
    optimizers holds its peak rate in "peak_lr", for set_step().
    """
    matrices, rest = split_params(model)
    mixing = {id(p) for p in mixing_params(model)}
    mix_lr = options.adamw_lr if options.mix_lr is None else options.mix_lr
    groups = [dict(params=[p for p in rest if id(p) not in mixing], lr=options.adamw_lr, weight_decay=0.0),
              dict(params=[p for p in rest if id(p) in mixing], lr=mix_lr, weight_decay=0.0)]
    found = OPTIMIZERS[options.optimizer](matrices, [group for group in groups if group["params"]], options)
    names = {p: name for name, p in model.named_parameters()}
    for group in (group for optimizer in found for group in optimizer.param_groups):
        group["peak_lr"] = group["lr"]
        group["names"] = [names[p] for p in group["params"]]                # by which a resumed run finds their state
    return found


def set_step(optimizers, step, lr_scale, options):
    """Sets the learning rates, as a fraction of their peaks, and Muon's momentum for optimizer step `step` (from 0)."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * lr_scale
            if isinstance(optimizer, Muon):
                group["momentum"] = momentum_at(step, options.max_steps)


def constant_until(options):
    """The step after which rate or momentum falls: up to it a wsd run can be made longer. Cosine: -1."""
    n_momentum = 0 if options.optimizer == "adamw" else momentum_span(options.max_steps)
    n_last = max(n_momentum, round(options.decay_frac * options.max_steps))
    return options.max_steps - n_last if options.schedule == "wsd" else -1


def momentum_span(max_steps):
    """For how many steps Muon's momentum falls at the end: 100, at most a quarter of all."""
    return max(1, min(100, max_steps // 4))


def momentum_at(step, max_steps):
    """Muon's momentum at a step: it rises linearly from 0.85 to 0.95 over 100 steps, and falls back at the end.

    (ExoFormer's code; the paper does not mention it.)
    """
    return 0.85 + (0.95 - 0.85) * min(1.0, step / 100, (max_steps - step) / momentum_span(max_steps))
