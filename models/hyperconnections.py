"""Hyper-Connections: n residual streams, and learned maps of what a sublayer reads and writes.   arXiv:2409.19606

The residual stream becomes n streams X_s (B, T, C), all equal to the embedding at first. Sublayer f (attention or MLP,
with its norm) reads one mixture of them. Its output is added to n other mixtures. The head reads the streams' sum:
    X_i  <-  sum_s H_res[i, s] X_s  +  H_post[i] f( sum_s H_pre[s] X_s )
`connection` says what the maps H of sublayer k = 0 .. 2L-1 are:
    static     learned numbers, the paper's A_m, B and A_r^T; at the start one-hot at k mod n, ones, identity
    dynamic    static + scale * tanh( LN(X_s) W ) per token. W (C, 2 + n) gives H_pre[s], H_post[s] and H_res[:, s]; it
               is zero at the start. H_pre and H_res share one scale, H_post has the other. LN and RN are LayerNorm and
               RMSNorm without parameters
    manifold   mHC, arXiv:2512.24880: z = alpha * ( RN(X_1 .. X_n) phi ) + bias, one RN over all n C numbers of a token;
               H_pre = sigmoid(z_pre), H_post = 2 sigmoid(z_post), H_res = sinkhorn(z_res). H_res is doubly stochastic,
               so that products of it over depth cannot grow
    lite       mHC-lite, arXiv:2601.05732: manifold with H_res = sum_p softmax(z_res)_p P_p over the n! permutations
               P_p of the streams, which is doubly stochastic without a loop
    identity   manifold with H_res = I, from "Your DeepSeek mHC might not need the m", 2026-02-27, translated at
               https://www.tylerromero.com/translations/zhihu/your-deepseek-mhc-might-not-need-the-m
Costs per sublayer: its maps have 2 n entries, and n^2 more with an H_res. An entry takes 1 parameter and, for mixing,
2 C FLOPs per token. manifold adds n C parameters and 2 n C FLOPs per entry, and 1 parameter (alpha) per map; lite makes
an H_res of n! numbers instead of n^2. dynamic adds 2 C FLOPs per entry and C (n + 2) + 2 parameters. n - 1 more streams
are read, (n - 1) C numbers, and written.

Changed from gpt.py: Config, Config.__post_init__, Block.__init__, Block.forward, Model.init_weights, Model.forward
Equal to gpt.py when: the maps are those of the start, in every setting, up to norm_eps: the streams are equal, and all
    readers normalise. H_pre prefers another stream in each sublayer, else the streams would stay equal for ever.
Optimizer: static, W and scale, or bias, phi and alpha, go to AdamW at mix_lr, without decay.
Paper and code:
    - The paper's LayerNorm has gain and bias in its code and none in its parameter counts. Here it has none. As a
      baseline of SATFormer it has an RMSNorm in the code, layer normalization in the paper.
    - The paper scales the initial std of wo and w_down by sqrt(n) (up or down is not clear) and decays W. Here neither,
      so that all models start and train alike.
    - mHC gives alpha = 0.01 and 20 steps, but neither phi nor bias. Here phi = 0, and the biases are those of
      mHC-lite's code (github.com/FFTYYY/mhc-lite: 1 or -1 for H_pre, 0 or -8 for H_res), but 0 for H_post:
      2 sigmoid(0) = 1, as in gpt.py.
    - Here H_res of the first and last sublayer is I with manifold and lite: equal streams, and the sum of the streams,
      are the same under any doubly stochastic map.
    - DeepSeek-V4's code adds an eps to sigmoids and sums, and its head learns its mixture. Here neither.
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
    connection: str = "dynamic"     # static | dynamic | manifold | lite (mHC-lite) | identity (H_res = I)
    n_streams: int = 4              # parallel residual streams: n, the paper's expansion rate
    tanh: bool = True               # dynamic: tanh bounds the dynamic part
    sinkhorn_steps: int = 20        # manifold: times that columns and rows of H_res are normalised

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
        if self.connection not in ("static", "dynamic", "manifold", "lite", "identity"):
            raise ValueError(f"connection must be static, dynamic, manifold, lite or identity, not {self.connection!r}")
        if self.n_streams < 1:
            raise ValueError(f"n_streams must be positive, not {self.n_streams}")
        if self.n_streams > 6 and self.connection == "lite":
            raise ValueError(f"connection lite has n_streams! permutations: at most 6 streams, not {self.n_streams}")
        if not self.tanh and self.connection != "dynamic":
            raise ValueError(f"tanh belongs to connection dynamic, not to {self.connection}")
        if self.sinkhorn_steps < 1:
            raise ValueError(f"sinkhorn_steps must be positive, not {self.sinkhorn_steps}")

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

    def forward(self, x, rope, cache=None):
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.n_head, self.d_head)                         # (B, T, H, D)
        k = self.wk(x).view(B, T, self.n_kv_head, self.d_head)                      # (B, T, K, D)
        v = self.wv(x).view(B, T, self.n_kv_head, self.d_head)                      # (B, T, K, D)
        q, k = apply_rope(self.q_norm(q), *rope), apply_rope(self.k_norm(k), *rope)
        y = attend(q, k, v, self.layer, cache)                                      # (B, T, H, D)
        if self.gate is not None:
            y = y * self.gate(x).sigmoid().view(B, T, self.n_head, -1)              # times (B, T, H, D or 1)
        return self.wo(y.reshape(B, T, -1))                                         # (B, T, C)


class MLP(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w_gate = nn.Linear(d_model, d_ff, bias=False)
        self.w_up = nn.Linear(d_model, d_ff, bias=False)
        self.w_down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))


class HyperConnection(nn.Module):
    """Static or dynamic maps of sublayer k: H_pre (n) or (B, T, n), H_post alike, H_res (n, n) or (B, T, n, n)."""

    def __init__(self, c, k):
        super().__init__()
        n, dynamic = c.n_streams, c.connection == "dynamic"
        self.favourite = k % n                                                      # the stream it reads at the start
        self.tanh, self.eps = c.tanh, c.norm_eps
        self.static = nn.Parameter(torch.empty(n, 2 + n))               # row s: H_pre[s], H_post[s], H_res[:, s]
        self.dynamic = nn.Parameter(torch.empty(c.d_model, 2 + n)) if dynamic else None     # W
        self.scale = nn.Parameter(torch.empty(2)) if dynamic else None              # of H_pre and H_res, of H_post

    def forward(self, streams):
        maps = self.static
        if self.dynamic is not None:
            z = torch.stack([self.project(x) for x in streams], dim=-2)             # (B, T, n, 2 + n)
            scale = torch.cat((self.scale, self.scale[:1].expand(len(streams))))
            maps = maps + scale * (z.tanh() if self.tanh else z)
        return maps[..., 0], maps[..., 1], maps[..., 2:].mT

    def project(self, x):
        """LN(x) W of x (B, T, C) -> (B, T, 2 + n). The product is first: no normalised stream is stored."""
        W = self.dynamic - self.dynamic.mean(0)                                     # (x - mean(x)) W = x (W - mean(W))
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        return (x @ W) * torch.rsqrt(y.var(-1, keepdim=True, correction=0) + self.eps)


def sinkhorn(z, steps):
    """diag(a) K diag(b), K = exp(z) (..., n, n), made doubly stochastic: `steps` times, b makes the columns' sums one,
    then a the rows'. The first time K itself is divided, by softmax, for exp(z) may over- and underflow. No sum of what
    that leaves is below 1 / n^2.
    """
    K = z.log_softmax(-2).softmax(-1)
    a = b = torch.ones_like(K[..., 0])
    for _ in range(steps - 1):
        b = 1 / (a[..., :, None] * K).sum(-2)
        a = 1 / (K * b[..., None, :]).sum(-1)
    return a[..., :, None] * K * b[..., None, :]


def permutations(n):
    """The n! matrices (n!, n, n) with a single one in each row and column; the identity is first."""
    orders = [()]
    for _ in range(n):
        orders = [(*order, s) for order in orders for s in range(n) if s not in order]
    return torch.eye(n)[torch.tensor(orders)]


class ManifoldConnection(nn.Module):
    """H_pre (B, T, n), H_post (B, T, n), and H_res (B, T, n, n) or None where it is the identity, of sublayer k."""

    def __init__(self, c, k):
        super().__init__()
        n, self.favourite = c.n_streams, k % c.n_streams
        self.eps, self.steps = c.norm_eps, c.sinkhorn_steps
        mixes = c.connection != "identity" and n > 1 and 0 < k < 2 * c.n_layer - 1
        lite = mixes and c.connection == "lite"
        self.register_buffer("orders", permutations(n) if lite else None, persistent=False)
        # row s: H_pre[s], H_post[s], H_res[:, s]; of lite its weights of the permutations that put s first
        width = 2 + (math.factorial(n - 1) if lite else n if mixes else 0)
        self.bias = nn.Parameter(torch.empty(n, width))
        self.phi = nn.Parameter(torch.empty(n, c.d_model, n * width))
        self.alpha = nn.Parameter(torch.empty(3 if mixes else 2))                   # of H_pre, H_post, H_res

    def forward(self, streams):
        n, width = self.bias.shape
        wide = torch.promote_types(streams[0].dtype, torch.float32)
        square = sum(x.to(wide).square().mean(-1, keepdim=True) for x in streams) / n
        z = sum(x @ phi for x, phi in zip(streams, self.phi)) * torch.rsqrt(square + self.eps)  # RN after the product
        alpha = torch.cat((self.alpha[:2], self.alpha[2:].expand(width - 2)))
        z = alpha * z.unflatten(-1, (n, width)) + self.bias                         # (B, T, n, width)
        H_pre, H_post, H_res = z[..., 0].sigmoid(), 2 * z[..., 1].sigmoid(), None
        if self.orders is not None:
            H_res = (z[..., 2:].flatten(-2).softmax(-1)[..., None, None] * self.orders).sum(-3)
        elif width > 2:
            H_res = sinkhorn(z[..., 2:].mT, self.steps)
        return H_pre, H_post, H_res


def mix(weights, streams):
    """sum_s weights[s] X_s: weights (n) or (B, T, n), n streams (B, T, C) -> (B, T, C)."""
    return sum(w[..., None] * x for w, x in zip(weights.unbind(-1), streams)).type_as(streams[0])


def write(H_res, H_post, streams, y):
    """The streams after a sublayer with output y (B, T, C): X_i <- sum_s H_res[i, s] X_s + H_post[i] y.

    Computed as X_i + sum_s (H_res - I)[i, s] X_s + H_post[i] y: so backward moves the streams' gradients in their own
    dtype.
    """
    if H_res is None:
        return [x + mix(post, [y]) for x, post in zip(streams, H_post.split(1, dim=-1))]
    eye = torch.eye(len(streams), dtype=H_res.dtype, device=H_res.device)
    weights = torch.cat((H_res - eye, H_post[..., None]), dim=-1)                   # (n, n + 1) or (B, T, n, n + 1)
    return [x + mix(row, [*streams, y]) for x, row in zip(streams, weights.unbind(-2))]


class Block(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        connection = HyperConnection if c.connection in ("static", "dynamic") else ManifoldConnection
        self.attn_connection = connection(c, 2 * layer)
        self.mlp_connection = connection(c, 2 * layer + 1)
        self.attn_norm = RMSNorm(c.d_model, c.norm_eps)
        self.attn = Attention(c, layer)
        self.mlp_norm = RMSNorm(c.d_model, c.norm_eps)
        self.mlp = MLP(c.d_model, c.d_ff)

    def forward(self, streams, rope, cache=None):
        H_pre, H_post, H_res = self.attn_connection(streams)
        y = self.attn(self.attn_norm(mix(H_pre, streams)), rope, cache)             # (B, T, C)
        streams = write(H_res, H_post, streams, y)
        H_pre, H_post, H_res = self.mlp_connection(streams)
        y = self.mlp(self.mlp_norm(mix(H_pre, streams)))
        return write(H_res, H_post, streams, y)


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(c.n_layer))
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
            if last == "static":                # one stream is read, all are written to, all are kept
                p[:, 0], p[:, 1], p[:, 2:] = 0.0, 1.0, torch.eye(len(p))
                p[self.get_submodule(name.removesuffix(".static")).favourite, 0] = 1.0
            elif last == "bias":                # the same, before sigmoids and softmax or Sinkhorn's steps
                p[:, 0], p[:, 1], p[:, 2:] = -1.0, 0.0, -8.0
                p[self.get_submodule(name.removesuffix(".bias")).favourite, 0] = 1.0
                if self.config.connection == "lite":
                    p[:1, 2:3] = 0.0            # the identity, the first of the permutations
                else:
                    p[:, 2:].fill_diagonal_(0.0)
            elif last in ("dynamic", "phi"):
                p.zero_()
            elif last in ("scale", "alpha"):
                p.fill_(0.01)
            elif module.endswith("norm"):
                p.fill_(1.0)
            elif module in ("wo", "w_down", "head") and self.config.zero_init:
                p.zero_()
            elif module in ("embed", "wq", "wk", "wv", "wo", "gate", "w_gate", "w_up", "w_down", "head"):
                nn.init.trunc_normal_(p, std=0.02, a=-0.06, b=0.06)
            else:
                raise ValueError(f"init_weights does not know {name}")

    def forward(self, idx, targets=None, cache=None):
        """Logits of the next token, and the loss if targets are given.

        idx, targets: int64 (B, T); targets of -1 are ignored. cache: a Cache that holds what came before idx.
        Returns logits (B, T, vocab_size) and loss (), the mean cross-entropy in nats per token; in training mode with
        z_loss * mean(logsumexp(logits)^2) added. Without targets loss is None; with them the logits carry no gradient.
        ValueError if T exceeds max_len.
        """
        rope = self.rope(idx.size(1), cache)
        x = self.embed(idx).to(compute_dtype(self.embed.weight))                    # (B, T, C)
        streams = [x] * self.config.n_streams
        for block in self.blocks:
            streams = block(streams, rope, cache)
        return self.output(sum(streams), targets, cache)

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
    """(extra parameters, extra forward FLOPs per token, numbers read per token) against gpt.py; T: the context."""
    n, C, n_sub = c.n_streams, c.d_model, 2 * c.n_layer
    with_res = {"static": n_sub, "dynamic": n_sub, "identity": 0}.get(c.connection, (n_sub - 2) * (n > 1))
    entries = n_sub * 2 * n + with_res * n * n
    made = n_sub * 2 * n + with_res * (math.factorial(n) if c.connection == "lite" else n * n)
    own, per_number = {"static": (0, 0), "dynamic": (n_sub * (C * (n + 2) + 2), 1)}.get(
        c.connection, (made * n * C + 2 * n_sub + with_res, n))
    return made + own, 2 * C * (entries + made * per_number), n_sub * (n - 1) * C


def neutral(model):
    """Nothing to set."""


if __name__ == "__main__":                      # its size, and one training step on random tokens
    model = Model(Config(vocab_size=256, n_layer=4, n_head=4, d_model=128))
    optimizer, idx = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randint(256, (4, 65))
    model(idx[:, :-1], idx[:, 1:])[1].backward()
    optimizer.step()
    loss = model(idx[:, :-1], idx[:, 1:])[1]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters; loss after a step: {loss:.4f}")
