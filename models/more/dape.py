"""DAPE V2: the attention scores are a feature map, and convolutions correct it.   arXiv:2410.04798

A product of one query and one key says little at distances that training has not seen. Here each score is corrected,
before the softmax, by what all heads give to the same query's neighbouring keys (CDAPE: convolutional data-adaptive
position encoding). Per layer, with scores (H, T, T) = q k^T / sqrt(d_head) and a bias (H, T, T) per head and distance:
    attention = softmax( scores + bias + delta + causal ) v
    hidden = leaky_relu( conv_in( [scores, bias] ) )    2 H channels (without bias: H) -> width
    delta = conv_out( hidden )                          width -> H channels
Both convolutions mix all channels and span `kernel` keys; queries do not mix. kernel=1 is DAPE (2405.14722). A
convolution reads zeros as scores and bias of future keys; else they leak, and the paper's perplexity falls to about 1.
    bias = -p log(1 + a (i - j)), p and a learned       position="kerple" (2205.09921), the paper's best
    bias = -m (i - j), m fixed                          position="alibi" (2108.12409)
    no bias; rotated or plain q and k                   position="rope", "none"
kernel=0 leaves delta out: the paper's baselines with bias alone. conv="heads" is the form of J. Sun, "The Architecture
Stack" (web.stanford.edu/~jksun/blog/llm-architecture.html), one filter of `kernel` weights for every pair (i, j):
    delta = conv(scores + bias)                         along the heads

To read longer texts than in training takes a large max_len and nothing else: nothing is trained or stored per position.
    train.py --model dape --seq_len 512 --max_len 4096, then eval.py RUN --seq_len 4096 --batch_tokens 4096
Costs per layer: kernel * width * (channels + H) + width parameters (conv="heads": kernel), where channels are 2 H or H,
and 2 H more with kerple; 2 * kernel * width * (channels + H) FLOPs (conv="heads": 2 * kernel * H) per token and key
that it meets. In training a token meets the keys up to the end of its block (attend_in_blocks): all T up to 128, on
average 0.56 T from 1,024 on. Not in costs(): the scores are computed twice, here and in the attention kernel, 2 d_model
more per token and key. Backward keeps scores, hidden, and bias + delta: 2 H + width numbers per token and key
(conv="heads": 2 H).

Changed from gpt.py: Config, Config.__post_init__, attend, Attention.__init__, Attention.forward, Model,
    Model.init_weights
Equal to gpt.py when: position="rope", and kernel=0 or conv_out (conv="heads": conv) is zero.
Optimizer: convolutions, p and a go to AdamW at mix_lr, without decay; the authors' code decays them like other weights.
Paper and code (github.com/chuanyang-Zheng/DAPE):
  - hidden is not zero right of the diagonal, and delta on the diagonal reads it. In the last rows of a text the
    authors' code lacks these columns and reads zeros, so the same token has other logits at the end of a text than
    inside one. Here kernel // 2 columns follow the last key, and every row is what it is inside a text.
  - Left of the first key hidden is zero in both.
  - Their conv_out has a bias. It is the same for all keys and drops out of the softmax: none here.
  - Their class for RoPE expects 2 H channels and gets H: here H.
  - They clamp the parameters p and a at 0.01. Here the values are clamped, so that the parameters can come back.
  - The paper also mentions causal padding: here that of the code.
  - Slopes m for a number of heads that is no power of two are those of ALiBi's code.
  - FIRE, another bias, is left out.
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
    position: str = "kerple"        # kerple | alibi | rope | none
    conv: str = "keys"              # what it slides along: keys, mixing all heads | heads, one filter for all
    kernel: int = 3                 # keys, or heads, that a convolution spans; odd, or 0: no delta
    width: int | None = None        # channels between the two convolutions along the keys; None: 32

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
        if self.position not in ("kerple", "alibi", "rope", "none"):
            raise ValueError(f"position must be kerple, alibi, rope or none, not {self.position!r}")
        if self.conv not in ("keys", "heads"):
            raise ValueError(f"conv must be keys or heads, not {self.conv!r}")
        if self.kernel and (self.kernel < 0 or self.kernel % 2 == 0):
            raise ValueError(f"kernel must be odd and positive, or 0, not {self.kernel}")
        if self.conv == "heads" and self.kernel >= 2 * self.n_head:
            raise ValueError(f"conv='heads' has a kernel of at most 2 n_head - 1 = {2 * self.n_head - 1}")
        if self.conv == "keys" and self.kernel and self.width is None:
            self.width = 32
        elif self.width is not None and (self.conv == "heads" or self.kernel == 0 or self.width < 1):
            raise ValueError(f"width {self.width}: must be positive, and is for convolutions along the keys only")

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


class KerpleBias(nn.Module):
    """bias (H, T, keys) = -p log(1 + a distance) of distances (T, keys); one p and one a per head."""

    def __init__(self, n_head):
        super().__init__()
        self.p = nn.Parameter(torch.empty(n_head, 1, 1))
        self.a = nn.Parameter(torch.empty(n_head, 1, 1))

    def forward(self, distance):
        p, a = (x + (x.clamp(min=0.01) - x).detach() for x in (self.p, self.a))     # clamped, with the gradient of x
        return -p * torch.log1p(a * distance)


class AlibiBias(nn.Module):
    """bias (H, T, keys) = -m distance of distances (T, keys); m = 2^(-8 h / H), h = 1 .. H, if H is a power of two."""

    def __init__(self, n_head):
        super().__init__()
        n = 2 ** (n_head.bit_length() - 1)                                          # later heads lie between these
        slopes = [2 ** (-8 * (h + 1) / n) for h in range(n)] + [2 ** (-8 * (h + 0.5) / n) for h in range(n_head - n)]
        self.register_buffer("slope", torch.tensor(slopes)[:, None, None], persistent=False)

    def forward(self, distance):
        return -self.slope * distance


class KeyConvolution(nn.Module):
    """delta (B, H, T, keys) from scores (B, H, T, keys) and bias (H, T, keys) or None, 0 where a key is not seen."""

    def __init__(self, c):
        super().__init__()
        channels = c.n_head * (2 if c.position in ("kerple", "alibi") else 1)
        self.conv_in = nn.Conv2d(channels, c.width, (1, c.kernel))
        self.conv_out = nn.Conv2d(c.width, c.n_head, (1, c.kernel), bias=False)

    def forward(self, scores, bias):
        w, H, r = self.conv_in.weight, scores.size(1), self.conv_in.kernel_size[1] // 2
        if bias is None:
            hidden = F.conv2d(scores, w, self.conv_in.bias, padding=(0, 2 * r))     # (B, width, T, r + keys + r)
        else:                                                                       # bias: once for all sequences
            hidden = F.conv2d(scores, w[:, :H], padding=(0, 2 * r))
            hidden = hidden + F.conv2d(bias, w[:, H:], self.conv_in.bias, padding=(0, 2 * r))
        before = torch.arange(hidden.size(-1), device=hidden.device) < r            # columns before the first key
        return self.conv_out(F.leaky_relu(hidden.masked_fill(before, 0.0), inplace=True))


class HeadConvolution(nn.Module):
    """delta (B, H, T, keys) from scores (B, H, T, keys) and bias (H, T, keys) or None."""

    def __init__(self, c):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, (c.kernel, 1), padding=(c.kernel // 2, 0), bias=False)

    def forward(self, scores, bias):
        x = scores if bias is None else scores + bias
        return self.conv(x.flatten(2).unsqueeze(1)).view_as(x)                      # an image of H x (T keys)


class ScoreBias(nn.Module):
    """bias + delta, and -inf for keys not seen, from q (B, H, T, D), k (B, H, keys, D) and seen (T, keys)."""

    def __init__(self, c):
        super().__init__()
        self.position = self.delta = None
        if c.position in ("kerple", "alibi"):
            self.position = (KerpleBias if c.position == "kerple" else AlibiBias)(c.n_head)
        if c.kernel:
            self.delta = (KeyConvolution if c.conv == "keys" else HeadConvolution)(c)

    def forward(self, q, k, seen):
        bias, out = None, torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, -math.inf)
        if self.position is not None:
            now = seen.sum(-1, keepdim=True) - 1                                    # (T, 1): the queries' positions
            distance = (now - torch.arange(seen.size(1), device=seen.device)).clamp(min=0)
            bias = self.position(distance).type_as(q)                               # (H, T, keys), 0 where not seen
            out = out + bias
        if self.delta is not None:
            scores = (q * q.size(-1) ** -0.5 @ k.mT).masked_fill(~seen, 0.0)        # (B, H, T, keys)
            out = out + self.delta(scores, bias)
        return out


def query_blocks(T):
    """(first, end) of at most 8 blocks of at least 128 of T queries."""
    n = max(128, math.ceil(T / 8))
    return [(a, min(a + n, T)) for a in range(0, T, n)]


def attend_at_once(q, k, v, seen, score_bias):
    """Attention of q (B, H, T, D) over k, v (B, H, keys, D) where seen (T, keys) -> (B, H, T, D)."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=score_bias(q, k, seen))


def attend_in_blocks(q, k, v, seen, score_bias):
    """attend_at_once() of T tokens to each other, in blocks of queries, which meet the keys up to their last token."""
    return torch.cat([attend_at_once(q[:, :, a:b], k[:, :, :b], v[:, :, :b], seen[a:b, :b], score_bias)
                      for a, b in query_blocks(q.size(2))], dim=2)


def attend(q, k, v, layer, cache, score_bias):
    """Causal attention of q (B, T, H, D) over k, v (B, T, K, D), and over what the cache holds -> (B, T, H, D)."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))                   # (B, H or K, T, D)
    if cache is None:
        seen = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril()
    else:
        k, v, seen = cache.append(layer, k, v)
    if q.size(1) != k.size(1):                                                      # kernels with masks want H keys
        k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
    mix = attend_in_blocks if cache is None and torch.is_grad_enabled() else attend_at_once
    return mix(q, k, v, seen, score_bias).transpose(1, 2)


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
        self.rotary = c.position == "rope"
        self.score_bias = ScoreBias(c)

    def forward(self, x, rope, cache=None):
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.n_head, self.d_head)                         # (B, T, H, D)
        k = self.wk(x).view(B, T, self.n_kv_head, self.d_head)                      # (B, T, K, D)
        v = self.wv(x).view(B, T, self.n_kv_head, self.d_head)                      # (B, T, K, D)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary:
            q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        y = attend(q, k, v, self.layer, cache, self.score_bias)                     # (B, T, H, D)
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


class Block(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.attn_norm = RMSNorm(c.d_model, c.norm_eps)
        self.attn = Attention(c, layer)
        self.mlp_norm = RMSNorm(c.d_model, c.norm_eps)
        self.mlp = MLP(c.d_model, c.d_ff)

    def forward(self, x, rope, cache=None):
        x = x + self.attn(self.attn_norm(x), rope, cache)
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    micro_tokens = 8192             # of a forward pass unless told otherwise: keeps 43 GiB at ExoFormer's 450M shape

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
            if module.startswith("conv"):
                bound = self.get_submodule(name.rpartition(".")[0]).weight[0].numel() ** -0.5
                p.uniform_(-bound, bound)                                           # torch's own for convolutions
            elif module == "position":
                p.uniform_(0.0, 2.0 if last == "p" else 1.0)
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
        for block in self.blocks:
            x = block(x, rope, cache)
        return self.output(x, targets, cache)

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
    """(parameters, forward FLOPs per token, numbers read per token) beyond gpt.py's, in a context of T tokens."""
    keys = sum((b - a) * b for a, b in query_blocks(T)) / T                         # that a token meets, on average
    biased, learned = c.position in ("kerple", "alibi"), 2 * c.n_head * (c.position == "kerple")
    if c.kernel == 0:
        params, flops, read = 0, 0, keys * c.n_head * biased
    elif c.conv == "heads":
        params, flops, read = c.kernel, 2 * keys * c.n_head * c.kernel, keys * 2 * c.n_head
    else:
        taps = c.kernel * c.width * (c.n_head * (1 + biased) + c.n_head)
        params, flops, read = taps + c.width, 2 * keys * taps, keys * (2 * c.n_head + c.width)
    return c.n_layer * (params + learned), c.n_layer * flops, c.n_layer * read


@torch.no_grad()
def neutral(model):
    """Sets the parameters for which the model is gpt.py's. ValueError for settings without such values."""
    if model.config.position != "rope":
        raise ValueError("dape has gpt.py's positions with position=rope alone")
    for block in model.blocks:
        delta = block.attn.score_bias.delta
        if delta is not None:
            (delta.conv_out if model.config.conv == "keys" else delta.conv).weight.zero_()


if __name__ == "__main__":                      # its size, and one training step on random tokens
    model = Model(Config(vocab_size=256, n_layer=4, n_head=4, d_model=128))
    optimizer, idx = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randint(256, (4, 65))
    model(idx[:, :-1], idx[:, 1:])[1].backward()
    optimizer.step()
    loss = model(idx[:, :-1], idx[:, 1:])[1]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters; loss after a step: {loss:.4f}")
