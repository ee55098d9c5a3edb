"""Attention Residuals: each sublayer attends over the outputs of all earlier sublayers.   arXiv:2603.15031

In gpt.py a sublayer reads the sum of what all earlier ones wrote. Here it reads a mean of it, weighted by a softmax
over depth. Sublayers l = 0 .. 2L-1 are attention and MLP in turn, v_0 is the embedding, v_{l+1} what sublayer l wrote:
    h_l     = sum_{s<=l} alpha_{l,s} v_s,     alpha_{l,.} = softmax_s( w_l . RN(v_s) )      per token
    v_{l+1} = sublayer_l( norm(h_l) )
with a learned vector w_l (C,) per reader l (row l-1 of `query`), and RN an RMSNorm without gain. The head is reader 2L.
Block form (block_size): the outputs of so many sublayers are summed into one source. A reader sees the embedding, the
finished blocks, and the running sum of its own block (unless that is empty). block_size=1 is the full form.
additive (Delta Attention Residuals, arXiv:2605.18855) adds the mean to the residual sum; the head reads that sum alone:
    h_l     = sum_{s<=l} v_s + sum_{s<=l} alpha_{l,s} v_s  for 0 < l < 2L,     h_{2L} = sum_s v_s
Costs 2 L C parameters. Per token: 2 S C FLOPs for a reader of S sources (3 S C if additive), of which it reads S - 1
anew; 4 L C for the scores of a source, all readers' in one product (of a running sum: 2 C, for its one reader); 3 C for
its RN. Reader 0 has a single source and no choice, hence no query here; the paper counts one, C parameters more. With
additive the head has none either: C less.

Changed from gpt.py: Config, Config.__post_init__, Block.forward, Model.__init__, Model.init_weights, Model.forward
Equal to gpt.py when: all queries are zero, as they are at the start, up to norm_eps: a uniform mean is the residual sum
    divided by the number of sources, and every reader normalises.
Optimizer: the queries go to AdamW at mix_lr, without decay.
Other default than gpt.py's: norm_eps. At the start (zero_init) all sources but the embedding are zero, so that a state
    is the embedding (std 0.02) divided by S. Its mean square is 6e-7 for S = 25; with an eps of 1e-6 every norm
    would shrink it.
Paper and code:
    - The paper's pseudo-code gives each key norm a gain, which w_l absorbs.
    - Blocks count sublayers, as in the paper.
    - arXiv:2605.18855 describes Attention Residuals as attention over running sums; its code
      (github.com/wdlctc/delta-attention-residuals-code) attends over outputs, as here. What Delta adds is the sum that
      stays. Perplexity at 1B: 29.70 gpt, 33.36 full form, 29.13 additive.
    - Delta's block form reads finished blocks alone. Here additive is for the full form.
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
    norm_eps: float = 1e-10         # added to the mean square in every RMSNorm
    tie_embeddings: bool = False    # head and embedding share one matrix
    z_loss: float = 0.0             # weight of mean(logsumexp(logits)^2), in training only
    qk_norm: bool = True            # RMSNorm on each head of q and k, before the rotation
    gate: str = "none"              # gated attention: none | elementwise | headwise
    zero_init: bool = True          # wo, w_down and an untied head start at zero; False: N(0, 0.02) as all others
    block_size: int = 1             # sublayers per source, attention and MLP counting one each; 1: the full form
    key_norm: bool = True           # RMSNorm on the sources before they meet the query
    additive: bool = False          # the mean is added to the residual sum (Delta Attention Residuals)

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
        if not 1 <= self.block_size <= 2 * self.n_layer:
            raise ValueError(f"block_size must lie between 1 and 2 n_layer = {2 * self.n_layer}, not {self.block_size}")
        if self.additive and self.block_size > 1:
            raise ValueError(f"additive needs block_size 1, not {self.block_size}")

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


class DepthAttention(nn.Module):
    """alpha (B, T, S): how much reader l = 1 .. 2L takes of each of S sources v (B, T, C)."""

    def __init__(self, c):
        super().__init__()
        self.query = nn.Parameter(torch.empty(2 * c.n_layer - c.additive, c.d_model))       # w_1 .. w_R
        self.eps = c.norm_eps if c.key_norm else None

    def key(self, v):
        """RN(v)."""
        return v if self.eps is None else F.rms_norm(v, v.shape[-1:], eps=self.eps)

    def scores(self, v):
        """w_l . RN(v) of all R readers (B, T, R): a source that stays as it is gets them in one product."""
        return F.linear(self.key(v), self.query)

    def forward(self, l, scores, partial):
        """scores: of the sources that stay, (B, T, R) each; partial: the source that is still growing, or None."""
        scores = [s[..., l - 1] for s in scores]
        if partial is not None:
            scores.append((self.query[l - 1] * self.key(partial)).sum(-1))
        return torch.stack(scores, dim=-1).softmax(-1)


class Sources:
    """What the next reader sees: the embedding and the finished blocks, and the running sum of the current block."""

    def __init__(self, x, attention, c):
        self.attention, self.config, self.l = attention, c, 0                       # l: the next reader
        self.done, self.scores, self.partial = [x], [attention.scores(x)], None

    def read(self):
        """h_l (B, T, C)."""
        if self.l == 0:
            return self.done[0]
        sources = self.done + ([] if self.partial is None else [self.partial])
        if self.config.additive and self.l == 2 * self.config.n_layer:              # the head
            return sum(sources)
        alpha = self.attention(self.l, self.scores, self.partial).type_as(sources[0])   # else the states would be fp32
        mean = sum(a[..., None] * v for a, v in zip(alpha.unbind(-1), sources))
        return sum(sources) + mean if self.config.additive else mean

    def add(self, v):
        """Takes what sublayer l wrote, v (B, T, C)."""
        self.partial = v if self.partial is None else self.partial + v
        self.l += 1
        if self.l % self.config.block_size == 0:
            self.done.append(self.partial)
            self.scores.append(self.attention.scores(self.partial))
            self.partial = None


class Block(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.attn_norm = RMSNorm(c.d_model, c.norm_eps)
        self.attn = Attention(c, layer)
        self.mlp_norm = RMSNorm(c.d_model, c.norm_eps)
        self.mlp = MLP(c.d_model, c.d_ff)

    def forward(self, sources, rope, cache=None):
        sources.add(self.attn(self.attn_norm(sources.read()), rope, cache))
        sources.add(self.mlp(self.mlp_norm(sources.read())))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(c.n_layer))
        self.depth_attention = DepthAttention(c)
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
            module = f".{name}".split(".")[-2]
            if name == "depth_attention.query":
                p.zero_()
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
        sources = Sources(x, self.depth_attention, self.config)
        for block in self.blocks:
            block(sources, rope, cache)
        return self.output(sources.read(), targets, cache)

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
    S = [1 + math.ceil(l / c.block_size) for l in range(1, 2 * c.n_layer + 1)]     # sources of the readers 1 .. 2L
    n, done = 2 * c.n_layer - c.additive, 1 + 2 * c.n_layer // c.block_size        # readers with a query, whole sources
    growing = sum(l % c.block_size > 0 for l in range(1, n + 1))                   # readers of a running sum
    flops = (2 + c.additive) * sum(S[:n]) + 2 * n * done + 2 * growing + 3 * (done + growing) * c.key_norm
    return n * c.d_model, flops * c.d_model, (sum(S) - len(S)) * c.d_model


def neutral(model):
    """Nothing to set."""


if __name__ == "__main__":                      # its size, and one training step on random tokens
    model = Model(Config(vocab_size=256, n_layer=4, n_head=4, d_model=128))
    optimizer, idx = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randint(256, (4, 65))
    model(idx[:, :-1], idx[:, 1:])[1].backward()
    optimizer.step()
    loss = model(idx[:, :-1], idx[:, 1:])[1]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters; loss after a step: {loss:.4f}")
