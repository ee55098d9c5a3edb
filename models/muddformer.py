"""MUDDFormer: every block reads four input-dependent mixtures of all earlier block outputs.   arXiv:2502.12170

In gpt.py the last output X_i is all that a block reads. Here a block has four inputs: for its queries, its keys, its
values and the residual. Each is a weighted sum of all outputs so far; the weights are computed from X_i for each token.
X_0 is the embedding, X_j the output of block j. After block i = 1 .. L, for block i + 1 (Eq. 5 to 8):
    A_i     = gelu( RN(X_i) w1_i ) w2_i + a_i       (B, T, n, S): n = 4 streams, S = i + 1 sources; RN: RMSNorm, no gain
    X^c     = sum_{j=0..i} A_i[c, j] X_j            for the streams c = q, k, v, r
    x       = X^r + attn( q_in_norm(X^q), k_in_norm(X^k), v_in_norm(X^v) )
    X_{i+1} = x + mlp( mlp_norm(x) )
In block 1 all four are X_0. The head reads one more mixture, X^r of X_0 .. X_L. MLPs grow with depth, from 0.5 to
1.5 d_ff (Eq. 9).
pre_post_norm (section 2.5, for deep models): X^c = X_i + post_norms_c( sum_j A_i[c, j] pre_norms_j(X_j) ), where a_i
starts at 0 and the gains of post_norms at 1e-3.

Changed from gpt.py: Config, Config.__post_init__, Attention.forward, Block.__init__, Block.forward, Model.__init__,
    Model.init_weights, Model.forward
Equal to gpt.py at initialisation, where w2 is zero and a picks X_i, but for the MLPs' widths.
Optimizer: w1, w2 and a go to AdamW at train.py's mix_lr; Muon trains the matrices of the blocks alone.
Paper and code (github.com/Caiyun-AI/MUDDFormer): w1 has the code's hidden width, so that released weights load; the
paper's is 4 S. Eq. 10 has X_i inside the last norm; here it is outside, as in the paper's text and the code. In the
released weights block 1 has one norm for q, k and v. Outside the mixtures the paper initialises with Xavier normal, the
JAX code with N(0, 0.006), we as in gpt.py.
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
    z_loss: float = 0.0             # weight of the penalty mean(logsumexp(logits)^2), in training only
    qk_norm: bool = True            # RMSNorm on each head of q and k, before the rotation
    gate: str = "none"              # gated attention: none | elementwise | headwise (one gate per head)
    zero_init: bool = True          # wo, w_down and an untied head start at zero; False: N(0, 0.02), as all others
    pre_post_norm: bool = False     # norms before and after the mixtures, for deep models (section 2.5)

    def __post_init__(self):
        self.n_kv_head = self.n_head if self.n_kv_head is None else self.n_kv_head
        self.d_ff = 64 * math.ceil(self.d_model * 8 / 3 / 64) if self.d_ff is None else self.d_ff
        if self.d_model % (2 * self.n_head) or self.n_head % self.n_kv_head:
            raise ValueError(f"d_model {self.d_model} must be an even multiple of n_head {self.n_head}, "
                             f"and that a multiple of n_kv_head {self.n_kv_head}")
        if self.gate not in ("none", "elementwise", "headwise"):
            raise ValueError(f"gate must be none, elementwise or headwise, not {self.gate!r}")
        if self.n_layer < 2:
            raise ValueError("n_layer must be at least 2, since MLP widths grow from the first layer to the last")

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
    """The dtype in which this weight is multiplied: autocast's if autocast is on, else the weight's own."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


class Cache:
    """Keys and values of every layer, (B, K, max_len, D) each; `pos` () counts the tokens held."""

    def __init__(self, model, batch_size, max_len):
        c, like = model.config, model.embed.weight
        shape, kind = (batch_size, c.n_kv_head, max_len, c.d_head), dict(dtype=compute_dtype(like), device=like.device)
        self.k = [torch.zeros(shape, **kind) for _ in range(c.n_layer)]
        self.v = [torch.zeros(shape, **kind) for _ in range(c.n_layer)]
        self.pos = torch.zeros((), dtype=torch.long, device=like.device)

    def append(self, layer, k, v):
        """Stores k, v (B, K, T, D) of the new tokens; returns all keys and values, and the causal mask (T, max_len)."""
        at = self.pos + torch.arange(k.size(2), device=k.device)                     # (T,)
        self.k[layer].index_copy_(2, at, k.type_as(self.k[layer]))
        self.v[layer].index_copy_(2, at, v.type_as(self.v[layer]))
        seen = torch.arange(self.k[layer].size(2), device=k.device) <= at[:, None]   # (T, max_len)
        return self.k[layer], self.v[layer], seen


def attend(q, k, v, layer, cache):
    """Causal attention of q (B, T, H, D) over the cache and over k, v (B, T, K, D) -> (B, T, H, D)."""
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

    def forward(self, x, x_k, x_v, rope, cache=None):       # x: the input of the queries and the gate
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.n_head, self.d_head)                         # (B, T, H, D)
        k = self.wk(x_k).view(B, T, self.n_kv_head, self.d_head)                    # (B, T, K, D)
        v = self.wv(x_v).view(B, T, self.n_kv_head, self.d_head)                    # (B, T, K, D)
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


class DepthAggregate(nn.Module):
    """X^c = sum_j A[c, j] X_j for each of n streams c, with weights A = gelu( RN(x) w1 ) w2 + a made per token."""

    def __init__(self, c, n, S):
        super().__init__()
        hidden = 64 * (4 * S // 64 + 1)                                             # as in the released code
        self.norm = nn.RMSNorm(c.d_model, c.norm_eps, elementwise_affine=False)
        self.w1 = nn.Linear(c.d_model, hidden, bias=False)
        self.w2 = nn.Linear(hidden, n * S, bias=False)
        self.a = nn.Parameter(torch.empty(n, S))

    def forward(self, x, sources):              # x: the last output X_i; sources: S tensors X_j, all (B, T, C)
        A = self.w2(F.gelu(self.w1(self.norm(x)))).unflatten(-1, self.a.shape) + self.a          # (B, T, n, S)
        return [sum(a[..., None] * X for a, X in zip(row.unbind(-1), sources)) for row in A.type_as(x).unbind(-2)]


class Block(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.q_in_norm, self.k_in_norm, self.v_in_norm = (RMSNorm(c.d_model, c.norm_eps) for _ in range(3))
        self.attn = Attention(c, layer)
        self.mlp_norm = RMSNorm(c.d_model, c.norm_eps)
        self.mlp = MLP(c.d_model, 128 * max(1, round(c.d_ff / 128 * (layer / (c.n_layer - 1) + 0.5))))    # Eq. 9

    def forward(self, x_q, x_k, x_v, x, rope, cache=None):
        x = x + self.attn(self.q_in_norm(x_q), self.k_in_norm(x_k), self.v_in_norm(x_v), rope, cache)
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(c.n_layer))
        self.aggregate = nn.ModuleList(DepthAggregate(c, 1 if S > c.n_layer else 4, S) for S in range(2, c.n_layer + 2))
        norm = RMSNorm if c.pre_post_norm else nn.Identity
        self.pre_norms = nn.ModuleList(norm(c.d_model, c.norm_eps) for _ in range(c.n_layer + 1))
        self.post_norms = nn.ModuleList(nn.ModuleList(norm(c.d_model, c.norm_eps) for _ in m.a) for m in self.aggregate)
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
        """Initialises every parameter by the name of its module; an unknown name is an error."""
        for name, p in self.named_parameters():
            module = name.split(".")[-2] if name.endswith(".weight") else ""       # "wq" of "blocks.0.attn.wq.weight"
            if "norm" in name and name.endswith(".weight"):
                p.fill_(1e-3 if "post_norms" in name else 1.0)
            elif name.endswith(".a"):
                p.zero_()
                p[:, -1] = 0.0 if self.config.pre_post_norm else 1.0                # X^c = X_i
            elif module == "w1":
                nn.init.normal_(p, std=self.config.d_model ** -0.5)
            elif module == "w2":
                p.zero_()
            elif name.endswith(".bias") or module in ("wo", "w_down", "head") and self.config.zero_init:
                p.zero_()
            elif module in ("embed", "wq", "wk", "wv", "wo", "gate", "w_gate", "w_up", "w_down", "head"):
                nn.init.trunc_normal_(p, std=0.02, a=-0.06, b=0.06)
            else:
                raise ValueError(f"init_weights gives {name} no value")

    def forward(self, idx, targets=None, cache=None):
        """Logits (B, T, V) of the next token, and the loss () if targets are given, else None.

        idx, targets: int64 (B, T); targets of -1 are ignored. cache: a Cache that holds what came before idx.
        The loss is the mean cross-entropy in nats per token; training adds z_loss * mean(logsumexp(logits)^2).
        With targets the logits carry no gradient. ValueError if T exceeds max_len.
        """
        rope = self.rope(idx.size(1), cache)
        x = self.embed(idx).to(compute_dtype(self.embed.weight))                    # (B, T, C)
        streams, sources = (x, x, x, x), [self.pre_norms[0](x)]
        for i, block in enumerate(self.blocks):
            x = block(*streams, rope, cache)
            sources.append(self.pre_norms[i + 1](x))
            streams = self.aggregate[i](x, sources)
            if self.config.pre_post_norm:
                streams = [x + norm(mixed) for norm, mixed in zip(self.post_norms[i], streams)]
        return self.output(streams[-1], targets, cache)

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
        logits = self.head(self.final_norm(x))                                      # (B, T, V)
        if cache is not None:
            cache.pos += x.size(1)
        if targets is None:
            return logits, None
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
        loss = F.cross_entropy(scores, targets.flatten(), ignore_index=-1)
        if self.training and self.config.z_loss:
            loss = loss + self.config.z_loss * scores.logsumexp(-1).square().mean()
        return logits.detach(), loss                # detached: else a compiled backward adds zeros as large as they are

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, n_vocab=None):
        """Continues idx (B, T): yields the next tokens (B, 1), max_new_tokens times. ValueError if max_len is exceeded.

        temperature 0 takes the likeliest token. top_k samples among the k likeliest, top_p among the fewest that have
        this probability together, n_vocab among the ids below it.
        """
        if (total := idx.size(1) + max_new_tokens) > self.config.max_len:
            raise ValueError(f"{total} tokens are more than max_len {self.config.max_len}")
        cache = Cache(self, idx.size(0), total)
        for _ in range(max_new_tokens):
            scores = self(idx, cache=cache)[0][:, -1, :n_vocab].float()             # (B, V)
            if top_k:
                scores[scores < scores.topk(min(top_k, scores.size(-1))).values[:, -1:]] = -math.inf
            p = (scores / max(temperature, 1e-6)).softmax(-1)
            if top_p:
                ranked = p.sort(-1, descending=True).values
                p[p < ranked.where(ranked.cumsum(-1) - ranked < top_p, 1).amin(-1, keepdim=True)] = 0
            idx = torch.multinomial(p, 1) if temperature else scores.argmax(-1, keepdim=True)
            yield idx


if __name__ == "__main__":                      # prints its size and the loss after one training step on random tokens
    model = Model(Config(vocab_size=256, n_layer=4, n_head=4, d_model=128))
    optimizer, idx = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randint(256, (4, 65))
    model(idx[:, :-1], idx[:, 1:])[1].backward()
    optimizer.step()
    loss = model(idx[:, :-1], idx[:, 1:])[1]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters; loss after a step: {loss:.4f}")
