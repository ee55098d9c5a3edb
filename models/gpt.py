"""GPT: the baseline Transformer that every other file in this folder changes.

A decoder like Llama's, also called Transformer++ (pre-norm, rotary positions, SwiGLU, no biases), on B sequences of T
tokens, idx (B, T). norm is RMSNorm; for q and k, over each head:
    x  = embed[idx]
    x <- x + wo( softmax(rope(norm(q)) rope(norm(k))^T / sqrt(d_head) + causal) v ),   q, k, v = wq, wk, wv( norm(x) )
    x <- x + w_down( silu(w_gate(norm(x))) * w_up(norm(x)) )
    logits = head( norm(x) )
With gate="elementwise" or "headwise" it is Gated Attention (arXiv:2505.06708, position G1):
    attention output <- attention output * sigmoid(gate(norm(x))),   before wo
Most papers' baselines are settings of this file, see nanodepth/presets.py. Older ones: more/gpt3.py, more/pythia.py.

Optimizer: Muon trains the matrices of the blocks, with weight decay; AdamW embedding, head and norms.
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

    def __post_init__(self):
        self.n_kv_head = self.n_head if self.n_kv_head is None else self.n_kv_head
        self.d_ff = 64 * math.ceil(self.d_model * 8 / 3 / 64) if self.d_ff is None else self.d_ff
        if self.d_model % (2 * self.n_head) or self.n_head % self.n_kv_head:
            raise ValueError(f"d_model {self.d_model} must be an even multiple of n_head {self.n_head}, "
                             f"and that a multiple of n_kv_head {self.n_kv_head}")
        if self.gate not in ("none", "elementwise", "headwise"):
            raise ValueError(f"gate must be none, elementwise or headwise, not {self.gate!r}")

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
        """Initialises every parameter by the name of its module; an unknown name is an error."""
        for name, p in self.named_parameters():
            module = name.split(".")[-2] if name.endswith(".weight") else ""       # "wq" of "blocks.0.attn.wq.weight"
            if module.endswith("norm"):
                p.fill_(1.0)
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
