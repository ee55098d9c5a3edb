"""MUDDFormer with a mixture of experts in each block.   arXiv:2502.12170, section 3.2 and figure 5

In kern.py, whose router="softmax" is the baseline here, a block reads the last output X_i. Here it has four inputs, for
queries, keys, values and the residual, each a weighted sum of all outputs so far. The weights are made per token from
X_i. For block i + 1, i = 1 .. L-1:
    A_i     = gelu( RN(X_i) w1_i ) w2_i + a_i       (B, T, n, S): n = 4 streams, S = i + 1 sources; RN: RMSNorm, no gain
    X^c     = sum_{j=0..i} A_i[c, j] X_j            c in q, k, v, r; X_0 is the embedding, X_j the output of block j
    x       = X^r + attn( norm_q(X^q), norm_k(X^k), norm_v(X^v) )
    X_{i+1} = x + sum_{m among the k largest r} r_m expert_m(norm(x)),   r = softmax(W norm(x)), m = 1 .. E
Block 1 reads X_0, with one norm. The head reads one more mixture (r) of X_0 .. X_L. muddformer.py has the same with one
MLP and the paper's ablations. All experts have the same width in all blocks.
Costs n S (C + n S + 1) parameters per A_i, two FLOPs per token for each weight of w1 and w2, 2 C n S for the sums,
which read S - 1 earlier outputs (the head's: n = 1, S = L + 1). The norms add 2 C (L-1) parameters.

Changed from kern.py: Config, Attention.forward, Block.__init__, Block.forward, Model.__init__, Model.init_weights,
    Model.forward
Equal to kern.py when: at the start: w2 = 0 and a_i = 1 for j = i, else 0.
Optimizer: w1, w2, a and the router's W go to AdamW at mix_lr; the experts to Muon, one by one.
Paper and code: the code of this model is not public.
    - The paper has 16 experts of width 1,408 at a d_model of 1,024, of which a token takes 2: the default, with
      d_ff=2816. It follows OLMoE (a softmax before the choice, a balance loss of 0.01, as here).
    - It drops the tokens of full experts; here none are dropped.
    - Whether it reallocates widths over the depth, it does not say; here all experts are equal.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    vocab_size: int = 50304         # size of the vocabulary (V); token ids are 0 .. vocab_size-1
    n_layer: int = 12               # blocks (L); each is attention + MLP
    n_head: int = 12                # query heads (H); d_head (D) = d_model / n_head
    n_kv_head: int | None = None    # key/value heads (K), each shared by n_head / n_kv_head query heads; None: n_head
    d_model: int = 768              # width of the residual stream (C)
    d_ff: int | None = None         # hidden width of the SwiGLU MLP; None: 8/3 d_model rounded up to a multiple of 64
    max_len: int = 2048             # longest sequence, in training and in generation
    rope_theta: float = 10000.0     # base of the rotary frequencies
    norm_eps: float = 1e-6          # added to the mean square in every RMSNorm
    tie_embeddings: bool = False    # head and embedding share one matrix
    z_loss: float = 0.0             # weight of mean(logsumexp(logits)^2), in training only
    qk_norm: bool = True            # RMSNorm on each head of q and k, before the rotation
    gate: str = "none"              # gated attention: none | elementwise | headwise
    zero_init: bool = True          # wo, w_down and an untied head start at zero; False: N(0, 0.02) as all others
    router: str = "softmax"         # softmax (the paper) | of kern.py: kern | kern_l1 | sigmoid | tanh
    n_expert: int = 16              # E: MLPs per layer
    top_k: int = 2                  # k: experts per token; each has width d_ff / k
    balance_loss: float = 0.01      # weight of the load-balancing loss, in training only

    def __post_init__(self):
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.d_ff is None:
            self.d_ff = 64 * math.ceil(self.d_model * 8 / 3 / 64)
        for name in ("vocab_size", "n_layer", "n_head", "n_kv_head", "d_model", "d_ff", "max_len", "rope_theta"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.d_model % (2 * self.n_head):
            raise ValueError(f"d_model {self.d_model} must be an even multiple of n_head {self.n_head} (rotary pairs)")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} must be a multiple of n_kv_head {self.n_kv_head}")
        if self.gate not in ("none", "elementwise", "headwise"):
            raise ValueError(f"gate must be none, elementwise or headwise, not {self.gate!r}")
        if self.router not in ("kern", "kern_l1", "softmax", "sigmoid", "tanh"):
            raise ValueError(f"router must be kern, kern_l1, softmax, sigmoid or tanh, not {self.router!r}")
        if not 1 <= self.top_k <= self.n_expert:
            raise ValueError(f"top_k must lie between 1 and n_expert {self.n_expert}, not {self.top_k}")
        if self.d_model % 8 or self.d_ff % (8 * self.top_k):        # rows of 16 bytes in bf16, for grouped_mm
            raise ValueError(f"d_model {self.d_model} must be a multiple of 8, d_ff {self.d_ff} of {8 * self.top_k}")
        if self.balance_loss < 0:
            raise ValueError(f"balance_loss must not be negative, not {self.balance_loss}")

    @property
    def d_head(self):
        return self.d_model // self.n_head


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; statistics in fp32 or better."""

    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight).type_as(x)


def apply_rope(x, cos, sin):
    """Rotates the pairs (x[i], x[i + D/2]) of x (B, T, H, D) by the angles in cos, sin (T, 1, D/2)."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).type_as(x)


def compute_dtype(weight):
    """The dtype of products with this weight: autocast's where that is on, else the weight's."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else weight.dtype


class Cache:
    """Preallocated keys and values of every layer, (B, K, max_len, D) each; `pos` () counts the tokens held.

    Model.forward advances it. Its shapes never change, so that a decoding step compiles once.
    """

    def __init__(self, model, batch_size, max_len):
        c, like = model.config, model.embed.weight
        dtype = compute_dtype(like)
        shape = (batch_size, c.n_kv_head, max_len, c.d_head)
        self.k = [torch.zeros(shape, dtype=dtype, device=like.device) for _ in range(c.n_layer)]
        self.v = [torch.zeros(shape, dtype=dtype, device=like.device) for _ in range(c.n_layer)]
        self.pos = torch.zeros((), dtype=torch.long, device=like.device)

    def append(self, layer, k, v):
        """Stores k, v (B, K, T, D) of the new tokens; returns all keys, values, and their causal mask (T, max_len)."""
        at = self.pos + torch.arange(k.size(2), device=k.device)                     # (T,)
        self.k[layer].index_copy_(2, at, k.type_as(self.k[layer]))
        self.v[layer].index_copy_(2, at, v.type_as(self.v[layer]))
        seen = torch.arange(self.k[layer].size(2), device=k.device) <= at[:, None]   # (T, max_len)
        return self.k[layer], self.v[layer], seen


def attend(q, k, v, layer, cache):
    """Causal attention of q (B, T, H, D) over k, v (B, T, K, D), and over what the cache holds -> (B, T, H, D)."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)               # (B, H or K, T, D)
    gqa = q.size(1) != k.size(1)
    if cache is None:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
    else:
        k, v, seen = cache.append(layer, k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=gqa)
    return y.transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.layer, self.n_head, self.n_kv_head, self.d_head = layer, c.n_head, c.n_kv_head, c.d_head
        self.wq = nn.Linear(c.d_model, c.n_head * c.d_head, bias=False)
        self.wk = nn.Linear(c.d_model, c.n_kv_head * c.d_head, bias=False)
        self.wv = nn.Linear(c.d_model, c.n_kv_head * c.d_head, bias=False)
        self.wo = nn.Linear(c.n_head * c.d_head, c.d_model, bias=False)
        self.q_norm = RMSNorm(c.d_head, c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.d_head, c.norm_eps) if c.qk_norm else nn.Identity()
        n_gate = {"none": 0, "elementwise": c.n_head * c.d_head, "headwise": c.n_head}[c.gate]
        self.gate = nn.Linear(c.d_model, n_gate, bias=False) if n_gate else None

    def forward(self, x_q, x_k, x_v, rope, cache=None):
        B, T, _ = x_q.shape
        q = self.wq(x_q).view(B, T, self.n_head, self.d_head)                       # (B, T, H, D)
        k = self.wk(x_k).view(B, T, self.n_kv_head, self.d_head)                    # (B, T, K, D)
        v = self.wv(x_v).view(B, T, self.n_kv_head, self.d_head)                    # (B, T, K, D)
        q, k = apply_rope(self.q_norm(q), *rope), apply_rope(self.k_norm(k), *rope)
        y = attend(q, k, v, self.layer, cache)                                      # (B, T, H, D)
        if self.gate is not None:
            y = y * self.gate(x_q).sigmoid().view(B, T, self.n_head, -1)            # times (B, T, H, D or 1)
        return self.wo(y.reshape(B, T, -1))                                         # (B, T, C)


class Reorder(torch.autograd.Function):
    """x[order] for a permutation `order` (N,) of the rows of x. Its gradient is gathered by the inverse permutation;
    that of an index is a sum of atomic additions."""

    @staticmethod
    def forward(ctx, x, order, inverse):
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx, grad):
        return grad.index_select(0, *ctx.saved_tensors), None, None


def grouped_product(x, weights, ends):
    """x (N, in), weights (E, out, in) each -> (N, all outs): each row times its expert's matrices, side by side.
    The rows are in the order of their experts: those of expert e end before row ends[e]."""
    if x.is_meta:                                       # counting FLOPs: each row costs the same, whoever its expert is
        return torch.cat([F.linear(x, w[0]) for w in weights], dim=-1)
    dtype, N, E = compute_dtype(weights[0]), len(x), len(weights[0])
    if N > E and (dtype == torch.bfloat16 or dtype == torch.float32 and not torch.compiler.is_compiling()):
        return F.grouped_mm(x.to(dtype), torch.cat([w.to(dtype) for w in weights], dim=1).mT, offs=ends)
    # Blocks of equally many rows of one expert, each with a copy of its matrix: no shape depends on the routing.
    # A few rows, as in decoding, are blocks of one row, and only their experts' matrices are read.
    size = max(1, N // (2 * E))
    n_block = (N + E * (size - 1)) // size                                      # enough, however the rows are spread
    rows, n_rows = torch.arange(N, dtype=torch.int32, device=x.device), ends.diff(prepend=ends.new_zeros(1))
    blocks = (n_rows + size - 1) // size                                        # (E,) of each expert
    last = blocks.cumsum(0)                                                     # (E,) where they end
    shift = (last - blocks) * size - (ends - n_rows)                            # (E,) from a row to its place in them
    place = rows + shift[torch.searchsorted(ends, rows, right=True)]            # (N,)
    owner = torch.searchsorted(last, torch.arange(n_block, device=x.device), right=True).clamp(max=E - 1)   # (n_block,)
    x = x.new_zeros(n_block * size, x.size(1)).index_copy(0, place, x).view(n_block, size, -1)
    y = torch.cat([x @ w.index_select(0, owner).mT for w in weights], dim=-1)
    return y.flatten(0, 1).index_select(0, place)


class ExpertLinear(nn.Linear):
    """E linear maps in one parameter (E, out, in); a Linear, so that Muon trains it."""

    def __init__(self, n_expert, d_in, d_out):
        super().__init__(d_in, d_out, bias=False)
        self.weight = nn.Parameter(torch.empty(n_expert, d_out, d_in))


class MLP(nn.Module):
    def __init__(self, n_expert, d_model, d_ff):
        super().__init__()
        self.w_gate = ExpertLinear(n_expert, d_model, d_ff)
        self.w_up = ExpertLinear(n_expert, d_model, d_ff)
        self.w_down = ExpertLinear(n_expert, d_ff, d_model)

    def forward(self, x, ends):
        gate, up = grouped_product(x, [self.w_gate.weight, self.w_up.weight], ends).chunk(2, dim=-1)
        return grouped_product(F.silu(gate) * up, [self.w_down.weight], ends)


class Router(nn.Module):
    """r (B, T, E) from the normalised input x (B, T, C), in fp32 or better; negative values only with tanh."""

    def __init__(self, d_model, n_expert, kind):
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.empty(n_expert, d_model))

    def forward(self, x):
        with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):
            x = x.to(torch.promote_types(x.dtype, torch.float32))
            w = self.weight.type_as(x)
            if self.kind == "kern_l1":
                return F.normalize(F.relu(F.linear(x, F.normalize(w, dim=-1))), p=1, dim=-1, eps=1e-8)
            s = F.linear(x, w)                                                      # (B, T, E)
            if self.kind == "kern":
                return F.relu(s / (s.norm(dim=-1, keepdim=True) + 1e-6))
            if self.kind == "softmax":
                return s.softmax(-1)
            return s.sigmoid() if self.kind == "sigmoid" else s.tanh()


class MixtureOfExperts(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.top_k = c.top_k
        self.router = Router(c.d_model, c.n_expert, c.router)
        self.experts = MLP(c.n_expert, c.d_model, c.d_ff // c.top_k)
        self.gamma = nn.Parameter(torch.empty(())) if c.router == "kern" else None

    def forward(self, x):
        """x (B, T, C) -> y (B, T, C), and in training mode the imbalance of the load (), else None."""
        r = self.router(x)                                                          # (B, T, E)
        g, chosen = r.topk(self.top_k)                                              # (B, T, k)
        imbalance = self.imbalance(r, g, chosen) if self.training else None
        expert = chosen.flatten()                                                   # (N,), N = B T k pairs
        order = expert.argsort(stable=True)                                         # the pairs expert by expert
        inverse = order.argsort()
        ends = (expert[:, None] <= torch.arange(r.size(-1), device=x.device)).sum(0, dtype=torch.int32)     # (E,)
        pairs = x.flatten(0, 1).repeat_interleave(self.top_k, 0)                    # (N, C)
        y = self.experts(Reorder.apply(pairs, order, inverse), ends)
        y = Reorder.apply(y, inverse, order).view(*chosen.shape, -1)                # (B, T, k, C)
        if self.gamma is not None:
            g = self.gamma * g
        return (g[..., None] * y).sum(-2).type_as(x), imbalance

    def imbalance(self, r, g, chosen):
        """E sum_m F_m P_m, mean over the sequences."""
        load = torch.zeros_like(r).scatter(-1, chosen, (g > 0).type_as(r)).sum(1)   # (B, E)
        share = F.normalize(r.relu(), p=1, dim=-1, eps=1e-8).mean(1)                # (B, E)
        return r.size(-1) * (F.normalize(load, p=1, dim=-1) * share).sum(-1).mean()


class DynamicWeights(nn.Module):
    """A (B, T, n, S): how much of each of S sources goes into each of n streams."""

    def __init__(self, c, n, S):
        super().__init__()
        self.shape, self.eps = (n, S), c.norm_eps
        self.w1 = nn.Linear(c.d_model, n * S, bias=False)
        self.w2 = nn.Linear(n * S, n * S, bias=False)
        self.a = nn.Parameter(torch.empty(n, S))

    def forward(self, x):
        A = self.a + self.w2(F.gelu(self.w1(F.rms_norm(x, x.shape[-1:], eps=self.eps)))).unflatten(-1, self.shape)
        return A.type_as(x)                                                         # else the states would become fp32


def mix_sources(A, sources):
    """X^c = sum_j A[.., c, j] X_j: A (B, T, n, S) or (n, S), S sources X_j (B, T, C) -> n streams X^c (B, T, C)."""
    return [sum(a[..., None] * x for a, x in zip(row.unbind(-1), sources)) for row in A.unbind(-2)]


class DenseConnections(nn.Module):
    """What the next block reads, (B, T, C) for each of `streams`, from the outputs X_0 .. X_i of the earlier ones."""

    def __init__(self, c, i, streams):
        super().__init__()
        self.streams, self.sources = streams, list(range(i + 1))                    # for probes/
        self.weights = DynamicWeights(c, len(streams), i + 1)

    def forward(self, outputs):
        return mix_sources(self.weights(outputs[-1]), outputs)


class Block(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.q_in_norm = RMSNorm(c.d_model, c.norm_eps)                             # block 1 has one input and one norm
        self.k_in_norm = RMSNorm(c.d_model, c.norm_eps) if layer > 0 else self.q_in_norm
        self.v_in_norm = RMSNorm(c.d_model, c.norm_eps) if layer > 0 else self.q_in_norm
        self.attn = Attention(c, layer)
        self.mlp_norm = RMSNorm(c.d_model, c.norm_eps)
        self.mlp = MixtureOfExperts(c)

    def forward(self, x_q, x_k, x_v, x, rope, cache=None):
        x = x + self.attn(self.q_in_norm(x_q), self.k_in_norm(x_k), self.v_in_norm(x_v), rope, cache)
        y, imbalance = self.mlp(self.mlp_norm(x))
        return x + y, imbalance


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(c.n_layer))
        self.aggregate = nn.ModuleDict({str(i): DenseConnections(c, i, "qkvr" if i < c.n_layer else "r")
                                        for i in range(1, c.n_layer + 1)})          # i: after block i, counting from 1
        self.final_norm = RMSNorm(c.d_model, c.norm_eps)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        if c.tie_embeddings:
            self.head.weight = self.embed.weight
        freqs = c.rope_theta ** (-torch.arange(0, c.d_head, 2, dtype=torch.float64) / c.d_head)
        angles = torch.arange(c.max_len, dtype=torch.float64)[:, None, None] * freqs     # (max_len, 1, D/2)
        self.register_buffer("cos", angles.cos().to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("sin", angles.sin().to(torch.get_default_dtype()), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Sets every parameter by the name of the module it is in; a name it does not know is an error."""
        for name, p in self.named_parameters():
            module, last = f".{name}".split(".")[-2:]
            if module.endswith("norm") or last == "gamma":
                p.fill_(1.0)
            elif last == "a":
                p.zero_()
                p[:, -1] = 1.0                                                      # X^c = X_i
            elif module == "w1":
                nn.init.normal_(p, std=self.config.d_model ** -0.5)
            elif module == "w2" or module in ("wo", "w_down", "head") and self.config.zero_init:
                p.zero_()
            elif module in ("embed", "wq", "wk", "wv", "wo", "gate", "w_gate", "w_up", "w_down", "router", "head"):
                nn.init.trunc_normal_(p, std=0.02, a=-0.06, b=0.06)
            else:
                raise ValueError(f"init_weights does not know {name}")

    def forward(self, idx, targets=None, cache=None):
        """Logits of the next token, and the loss if targets are given.

        idx, targets: int64 (B, T); targets of -1 are ignored. cache: a Cache that holds what came before idx.
        Returns logits (B, T, vocab_size) and loss (), the mean cross-entropy in nats per token; in training mode with
        z_loss * mean(logsumexp(logits)^2) and the load-balancing loss added. Without targets loss is None; with them
        the logits carry no gradient. ValueError if T exceeds max_len.
        """
        rope = self.rope(idx.size(1), cache)
        x = self.embed(idx).to(compute_dtype(self.embed.weight))                    # (B, T, C)
        outputs, streams, imbalances = [x], (x, x, x, x), []
        for block, aggregate in zip(self.blocks, self.aggregate.values()):
            x, imbalance = block(*streams, rope, cache)
            imbalances.append(imbalance)
            outputs.append(x)
            streams = aggregate(outputs)
        logits, loss = self.output(streams[-1], targets, cache)
        if loss is not None and self.training:
            loss = loss + self.config.balance_loss * torch.stack(imbalances).mean()
        return logits, loss

    def rope(self, T, cache):
        """cos, sin (T, 1, D/2) of the next T positions."""
        if T > self.config.max_len:
            raise ValueError(f"{T} tokens are more than max_len {self.config.max_len}")
        if cache is None:
            return self.cos[:T], self.sin[:T]
        at = cache.pos + torch.arange(T, device=cache.pos.device)
        return self.cos[at], self.sin[at]

    def output(self, x, targets, cache):
        """Final norm, head and loss on x (B, T, C); advances the cache."""
        pad = -self.config.vocab_size % 64                  # a GPU multiplies rows of whole 128 bytes faster
        weight = F.pad(self.head.weight, (0, 0, 0, pad)) if pad else self.head.weight
        logits = F.linear(self.final_norm(x), weight)[..., :self.config.vocab_size]          # (B, T, V)
        if cache is not None:
            cache.pos += x.size(1)
        if targets is None:
            return logits, None
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        loss = F.cross_entropy(scores, targets.flatten(), ignore_index=-1)
        if self.training and self.config.z_loss:
            loss = loss + self.config.z_loss * scores.logsumexp(-1).square().mean()
        return logits.detach(), loss        # detached, so that backward makes one gradient of the logits, the loss's

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None, compile=False):
        """Continues idx (B, T) by max_new_tokens sampled tokens -> (B, T + max_new_tokens).

        temperature 0 takes the likeliest token; top_k keeps the k likeliest. compile=True compiles the decoding step.
        ValueError if the result would be longer than max_len.
        """
        (B, T), total = idx.shape, idx.size(1) + max_new_tokens
        if T == 0 or max_new_tokens < 0 or total > self.config.max_len:
            raise ValueError(f"{T} + {max_new_tokens} tokens: at least 1 + 0 and at most max_len {self.config.max_len}")
        cache, out = Cache(self, B, total), torch.cat((idx, idx.new_zeros(B, max_new_tokens)), dim=1)
        step = torch.compile(self.forward, fullgraph=True) if compile else self.forward
        for t in range(T, total):
            logits, _ = self.forward(idx, cache=cache) if t == T else step(out[:, t - 1:t].clone(), cache=cache)
            scores = logits[:, -1].float()                                          # (B, V)
            if top_k is not None:
                kept = scores.topk(min(top_k, scores.size(-1))).values[:, -1:]
                scores = scores.masked_fill(scores < kept, -math.inf)
            if temperature == 0:
                out[:, t] = scores.argmax(-1)
            else:
                out[:, t] = torch.multinomial((scores / temperature).softmax(-1), 1, generator=generator)[:, 0]
        return out


def costs(c, T):
    """(parameters, forward FLOPs per token, numbers read per token) more than kern.py's, in a context of T tokens."""
    C, L = c.d_model, c.n_layer
    sizes = [4 * (i + 1) for i in range(1, L)] + [L + 1]                            # n S of A_1 .. A_L
    weights = sum(C * size + size * size for size in sizes)                         # w1 and w2
    return weights + sum(sizes) + 2 * C * (L - 1), 2 * (weights + C * sum(sizes)), sum(range(1, L + 1)) * C


def neutral(model):
    """Nothing to set: it starts as kern.py."""


if __name__ == "__main__":                      # its size, and one training step on random tokens
    model = Model(Config(vocab_size=256, n_layer=4, n_head=4, d_model=128))
    optimizer, idx = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randint(256, (4, 65))
    model(idx[:, :-1], idx[:, 1:])[1].backward()
    optimizer.step()
    loss = model(idx[:, :-1], idx[:, 1:])[1]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters; loss after a step: {loss:.4f}")
