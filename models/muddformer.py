"""MUDDFormer: every block reads four input-dependent mixtures of all earlier block outputs.   arXiv:2502.12170

In gpt.py a block reads the last output X_i. Here it has four inputs, for queries, keys, values and the residual, each a
weighted sum of all outputs so far. The weights are made per token from X_i. For block i + 1, i = 1 .. L-1 (Eq. 5-8):
    A_i     = gelu( RN(X_i) w1_i ) w2_i + a_i       (B, T, n, S): n = 4 streams, S = i + 1 sources; RN: RMSNorm, no gain
    X^c     = sum_{j=0..i} A_i[c, j] X_j            c in q, k, v, r; X_0 is the embedding, X_j the output of block j
    x       = X^r + attn( norm_q(X^q), norm_k(X^k), norm_v(X^v) )
    X_{i+1} = x + mlp( norm(x) )
Block 1 reads X_0, with one norm; the others have three, also where no mixture comes before (period, last_k). The head
reads one more mixture (r) of X_0 .. X_L. MLP widths grow linearly from 0.5 to 1.5 d_ff over the depth (ffn_realloc,
Eq. 9). norm_q is `q_in_norm`, and A_i, with its w1, w2 and a, `aggregate["i"].weights`.
Rows of the paper's ablation: dynamic=False has A_i = a_i; multiway=False has one mixture for all four inputs (with
dynamic=False too, the sums of denseformer.py); streams="kvr" mixes no q, which is then X_i. The head's mixture stays,
whatever streams says.
pre_post_norm (section 2.5, for deep models): X^c = X_i + norm'_c( sum_j A_i[c, j] norm_j(X_j) ); A_i reads the raw X_i.
Sparse forms, also together: mixtures only after every `period`-th block and the last; only sources j = i modulo
`dilation`; only the last `window` outputs and the embedding; mixtures only after the last `last_k` blocks. last_k=0
with multiway=False mixes nothing: Transformer++ with ffn_realloc, of the paper's table 5.
Costs n S (C + n S + 1) parameters per A_i, two FLOPs per token for each weight of w1 and w2, 2 C n S for the sums,
which read S - 1 earlier outputs (the head's: n = 1, S = L + 1). norm_k and norm_v add 2 C (L-1) parameters.

Changed from gpt.py: Config, Config.__post_init__, Attention.forward, Block.__init__, Block.forward, Model.__init__,
    Model.init_weights, Model.forward
Equal to gpt.py when: ffn_realloc=False, at the start: w2 = 0 and a_i = 1 for j = i, else 0 (pre_post_norm: a_i = 0).
Optimizer: w1, w2 and a go to AdamW at mix_lr, also beside Muon; they are not in the blocks. The paper has a weight
    decay of 0.1 and names no exception; here nothing outside the blocks decays.
Paper and code (github.com/Caiyun-AI/MUDDFormer):
    - The code makes w1_i 64 (n S // 64 + 1) wide, the last 64 (4 n S // 64 + 1), and MLPs a multiple of 128. Here it is
      n S, also for the last, where appendix B has 4 (L + 1), and a multiple of 64. released=True takes the code's
      widths, for the released weights.
    - The PyTorch code rounds the rotary table to bfloat16; here it is not rounded.
    - The JAX code has the tanh form of GELU, and norm' on r alone, by operator precedence; here GELU is exact, as in
      the PyTorch code, and norm' is on all streams, as in the paper.
    - Eq. 4 sums to i - 1; the paper's a_i and the code have the source i too. Eq. 5 makes A_i from a mixture; Eq. 6,
      appendix B and the code make it from X_i. Eq. 10 has X_i inside norm'; the text and the code add it behind. Here
      as in the code.
    - Outside the mixtures the paper starts with Xavier normal; here with the common 0.02.
    - The gate of gated attention, not in the paper, reads the query input.
    - last_k=2 with streams="vr" is near pull request 259 of github.com/KellerJordan/modded-nanogpt (first version: loss
      3.2867 -> 3.2783, +1.9% time), which differs in the sources, the scale of A and the place of X^v.
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
    dynamic: bool = True            # the weights depend on the token; False: static only
    multiway: bool = True           # a mixture each for q, k, v and the residual; False: one for all
    streams: str = "qkvr"           # with multiway: the inputs that are mixtures
    ffn_realloc: bool = True        # MLP widths from 0.5 to 1.5 d_ff over the depth
    pre_post_norm: bool = False     # norms before and after the sums (PrePostDANorm)
    period: int = 1                 # mixtures after every period-th block, and after the last
    dilation: int = 1               # sources are every dilation-th block output
    window: int | None = None       # sources are the last so many block outputs, and the embedding; None: all
    last_k: int | None = None       # mixtures after the last k blocks only; None: after all of them
    released: bool = False          # the code's widths of w1 and of the MLPs, for the released weights

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
        if not self.streams or sorted(self.streams) != sorted(set(self.streams) & set("qkvr")):
            raise ValueError(f"streams must be some of qkvr, not {self.streams!r}")
        if not self.multiway and len(self.streams) < 4:
            raise ValueError("streams is for multiway only")
        if min(self.period, self.dilation, self.window or 1) < 1 or self.window == 0:
            raise ValueError("period, dilation and window must be at least 1")
        if self.last_k is None:
            self.last_k = self.n_layer
        if not 0 <= self.last_k <= self.n_layer:
            raise ValueError(f"last_k must lie between 0 and n_layer {self.n_layer}, not {self.last_k}")
        if self.ffn_realloc and self.n_layer < 2:
            raise ValueError("ffn_realloc needs at least 2 layers")

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


class MLP(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w_gate = nn.Linear(d_model, d_ff, bias=False)
        self.w_up = nn.Linear(d_model, d_ff, bias=False)
        self.w_down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))


def mixtures(c):
    """{i: (streams, sources)}: what is mixed after block i, counting from 1; stream "x" serves all four inputs."""
    found = {}
    for i in range(c.n_layer + 1 - c.last_k, c.n_layer + 1):
        if i % c.period == 0 or i == c.n_layer:
            sources = [j for j in range(i + 1) if (i - j) % c.dilation == 0 and (not c.window or i - j < c.window)]
            if c.window and 0 not in sources:
                sources.insert(0, 0)
            streams = c.streams if c.multiway else "x"
            found[i] = ("r" if i == c.n_layer else streams), sources
    return found


def hidden_width(c, n, S, last):
    """Hidden width of the MLP that makes n S weights."""
    return 64 * ((4 if last else 1) * n * S // 64 + 1) if c.released else n * S


def mlp_width(c, layer):
    """Hidden width of the MLP in block `layer`, counting from 0."""
    n = 128 if c.released else 64
    return n * max(1, round(c.d_ff * (0.5 + layer / (c.n_layer - 1)) / n)) if c.ffn_realloc else c.d_ff


class DepthWeights(nn.Module):
    """A (B, T, n, S), or (n, S) if static: how much of each of S sources goes into each of n streams."""

    def __init__(self, c, n, S, last):
        super().__init__()
        self.shape, self.eps, self.w1 = (n, S), c.norm_eps, None
        self.a = nn.Parameter(torch.empty(n, S))
        if c.dynamic:
            self.w1 = nn.Linear(c.d_model, hidden_width(c, n, S, last), bias=False)
            self.w2 = nn.Linear(hidden_width(c, n, S, last), n * S, bias=False)

    def forward(self, x):
        A = self.a
        if self.w1 is not None:
            A = A + self.w2(F.gelu(self.w1(F.rms_norm(x, x.shape[-1:], eps=self.eps)))).unflatten(-1, self.shape)
        return A.type_as(x)                                                         # else the states would become fp32


def mix_sources(A, sources):
    """X^c = sum_j A[.., c, j] X_j: A (B, T, n, S) or (n, S), S sources X_j (B, T, C) -> n streams X^c (B, T, C)."""
    return [sum(a[..., None] * x for a, x in zip(row.unbind(-1), sources)) for row in A.unbind(-2)]


class Aggregate(nn.Module):
    """The inputs (q, k, v, r) of the next block, each (B, T, C)."""

    def __init__(self, c, last, streams, sources):
        super().__init__()
        self.streams, self.sources = streams, sources
        self.weights = DepthWeights(c, len(streams), len(sources), last)
        normed = streams if c.pre_post_norm else ""
        self.post_norms = nn.ModuleDict({f"{s}_post_norm": RMSNorm(c.d_model, c.norm_eps) for s in normed})

    def forward(self, x, outputs):
        """x: X_i. outputs: X_0 .. X_i, through norm_j if pre_post_norm; (B, T, C) each."""
        streams = dict.fromkeys("qkvr", x)
        for s, mixed in zip(self.streams, mix_sources(self.weights(x), [outputs[j] for j in self.sources])):
            if self.post_norms:
                mixed = x + self.post_norms[f"{s}_post_norm"](mixed)
            streams |= dict.fromkeys("qkvr" if s == "x" else s, mixed)
        return tuple(streams.values())


class Block(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.q_in_norm = RMSNorm(c.d_model, c.norm_eps)                             # block 1 has one input and one norm
        self.k_in_norm = RMSNorm(c.d_model, c.norm_eps) if c.multiway and layer > 0 else None
        self.v_in_norm = RMSNorm(c.d_model, c.norm_eps) if c.multiway and layer > 0 else None
        self.attn = Attention(c, layer)
        self.mlp_norm = RMSNorm(c.d_model, c.norm_eps)
        self.mlp = MLP(c.d_model, mlp_width(c, layer))

    def forward(self, x_q, x_k, x_v, x, rope, cache=None):
        k_norm, v_norm = self.k_in_norm or self.q_in_norm, self.v_in_norm or self.q_in_norm
        q, k, v = self.q_in_norm(x_q), k_norm(x_k), v_norm(x_v)
        x = x + self.attn(q, k, v, rope, cache)
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(c.n_layer))
        self.aggregate = nn.ModuleDict({str(i): Aggregate(c, i == c.n_layer, *of) for i, of in mixtures(c).items()})
        used = sorted({j for _, sources in mixtures(c).values() for j in sources}) if c.pre_post_norm else []
        self.pre_norms = nn.ModuleDict({f"{j}_pre_norm": RMSNorm(c.d_model, c.norm_eps) for j in used})
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
            if last == "a":
                p.zero_()
                if not self.config.pre_post_norm:
                    p[:, -1] = 1.0                                                  # X^c = X_i
            elif module == "w1":
                nn.init.normal_(p, std=self.config.d_model ** -0.5)
            elif module == "w2":
                p.zero_()
            elif module.endswith("post_norm"):
                p.fill_(1e-3)
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
        streams, outputs = (x, x, x, x), [self.pre_norm(0, x)]
        for i, block in enumerate(self.blocks, start=1):
            x = block(*streams, rope, cache)
            outputs.append(self.pre_norm(i, x))
            streams = self.aggregate[str(i)](x, outputs) if str(i) in self.aggregate else (x, x, x, x)
        return self.output(streams[-1], targets, cache)

    def pre_norm(self, j, x):
        """X_j as the sums read it."""
        return self.pre_norms[f"{j}_pre_norm"](x) if f"{j}_pre_norm" in self.pre_norms else x

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
    """(parameters, forward FLOPs per token, numbers read per token) more than gpt.py's, in a context of T tokens."""
    sizes = [(len(streams), len(sources), i == c.n_layer) for i, (streams, sources) in mixtures(c).items()]
    widths = [hidden_width(c, n, S, last) * c.dynamic for n, S, last in sizes]
    weights = sum(width * (c.d_model + n * S) for width, (n, S, _) in zip(widths, sizes))           # w1 and w2
    norms = 2 * (c.n_layer - 1) * c.multiway                                                        # norm_k and norm_v
    if c.pre_post_norm:
        norms += len({j for _, sources in mixtures(c).values() for j in sources}) + sum(n for n, _, _ in sizes)
    mlps = 3 * c.d_model * sum(mlp_width(c, layer) - c.d_ff for layer in range(c.n_layer))          # 0 but for rounding
    sums = sum(n * S for n, S, _ in sizes)
    read = sum(S - 1 for _, S, _ in sizes) * c.d_model
    return weights + sums + norms * c.d_model + mlps, 2 * (weights + sums * c.d_model + mlps), read


def neutral(model):
    """Nothing to set. ValueError for settings that are never the baseline's."""
    if model.config.ffn_realloc:
        raise ValueError("ffn_realloc gives the MLPs other widths than gpt.py's")


if __name__ == "__main__":                      # its size, and one training step on random tokens
    model = Model(Config(vocab_size=256, n_layer=4, n_head=4, d_model=128))
    optimizer, idx = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randint(256, (4, 65))
    model(idx[:, :-1], idx[:, 1:])[1].backward()
    optimizer.step()
    loss = model(idx[:, :-1], idx[:, 1:])[1]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters; loss after a step: {loss:.4f}")
