"""KERN: the router of a mixture of experts is a normalised ReLU instead of a softmax.   arXiv:2509.25913

In place of the MLP a block has E small ones, the experts, and a router that sends each token to k of them. Seen as a
kernel regression, the router is the kernel between token and expert, and softmax is only one choice. The paper uses a
norm and ReLU, as MLPs do; the weights then no longer sum to one. With a token's normalised input x:
    r = relu( s / (|s|_2 + 1e-6) ),   s = W x                                                    (E), W: (E, C)
    y = gamma * sum_{m among the k largest r} r_m expert_m(x),     expert_m: an MLP of width d_ff / k, gamma: a number
router="softmax", "sigmoid" and "tanh" are the paper's baselines: r is that function of s, without gamma.
No token is dropped, however many choose the same expert. Training adds to the loss balance_loss times the mean over
layers and sequences of
    E sum_m F_m P_m,    F_m: share of expert m in the choices with r > 0,    P_m: mean over tokens of p_m / sum(p)
with p = relu(r) and a gradient through P alone. It is 1 at equal load, and E if one expert gets all tokens.
A token uses as many parameters and FLOPs as in gpt.py; outside bf16 up to an eighth more FLOPs, on padded rows.

Changed from gpt.py: Config, Config.__post_init__, MLP, MLP.__init__, MLP.forward, Block.__init__, Block.forward,
    Model.init_weights, Model.forward
Equal to gpt.py when: router = softmax and n_expert = top_k = 1.
Optimizer: Muon trains each expert's matrices separately; W and gamma go to AdamW at train.py's mix_lr.
Paper and code: no code of the authors is known. The paper has k = 8 of E = 64; the defaults are those of muddmoe.py.
    It does not specify the balance loss. Here F and P are of one sequence, so the loss does not depend on the batch.
    One of its equations norms after the ReLU. We norm before, as in the others and in the text. gamma starts at 1.
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
    router: str = "kern"            # kern | softmax | sigmoid | tanh
    n_expert: int = 16              # experts (E) per layer
    top_k: int = 2                  # experts per token (k); each has width d_ff / k
    balance_loss: float = 0.01      # weight of the load-balancing loss, in training only

    def __post_init__(self):
        self.n_kv_head = self.n_head if self.n_kv_head is None else self.n_kv_head
        self.d_ff = 64 * math.ceil(self.d_model * 8 / 3 / 64) if self.d_ff is None else self.d_ff
        if self.d_model % (2 * self.n_head) or self.n_head % self.n_kv_head:
            raise ValueError(f"d_model {self.d_model} must be an even multiple of n_head {self.n_head}, "
                             f"and that a multiple of n_kv_head {self.n_kv_head}")
        if self.gate not in ("none", "elementwise", "headwise"):
            raise ValueError(f"gate must be none, elementwise or headwise, not {self.gate!r}")
        if self.router not in ("kern", "softmax", "sigmoid", "tanh"):
            raise ValueError(f"router must be kern, softmax, sigmoid or tanh, not {self.router!r}")
        if not 1 <= self.top_k <= self.n_expert or self.balance_loss < 0:
            raise ValueError(f"top_k {self.top_k} must lie between 1 and n_expert {self.n_expert}, and balance_loss "
                             f"{self.balance_loss} not below 0")
        if self.d_model % 8 or self.d_ff % (8 * self.top_k):        # rows of 16 bytes in bf16, for grouped_mm
            raise ValueError(f"d_model {self.d_model} must be a multiple of 8, d_ff {self.d_ff} of {8 * self.top_k}")

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


class ExpertLinear(nn.Linear):
    """A linear map for each of E experts, in one parameter (E, out, in)."""

    def __init__(self, n_expert, d_in, d_out):
        super().__init__(d_in, d_out, bias=False)
        self.weight = nn.Parameter(torch.empty(n_expert, d_out, d_in))

    def forward(self, x, owner):
        """x (blocks, rows, in), owner (blocks,): the expert of each, in ascending order -> (blocks, rows, out)."""
        w = self.weight.to(compute_dtype(self.weight))
        if w.dtype == torch.bfloat16:               # copies no matrices; torch.compile supports it only in bf16
            ends = (owner[:, None] <= torch.arange(len(w), device=x.device)).sum(0, dtype=torch.int32)
            return F.grouped_mm(x.to(w.dtype).flatten(0, 1), w.mT, offs=ends * x.size(1)).view(*x.shape[:2], -1)
        return x.to(w.dtype) @ w[owner].mT


class MLP(nn.Module):
    """The experts."""

    def __init__(self, n_expert, d_model, d_ff):
        super().__init__()
        self.w_gate = ExpertLinear(n_expert, d_model, d_ff)
        self.w_up = ExpertLinear(n_expert, d_model, d_ff)
        self.w_down = ExpertLinear(n_expert, d_ff, d_model)

    def forward(self, x, expert):
        """x (N, C), expert (N,): which expert takes each row -> (N, C).

        Each expert's rows fill whole blocks, so no shape depends on the routing. In bf16 a block is one row, since
        grouped_mm takes blocks together; otherwise blocks are larger, and an eighth of all rows may be empty.
        """
        N, E, grouped = len(x), len(self.w_up.weight), compute_dtype(self.w_up.weight) == torch.bfloat16
        size = 1 if grouped else math.ceil(N / (8 * E))                             # rows of a block
        n_block = (N + E * (size - 1)) // size                                      # enough for any routing
        count = (expert[:, None] == torch.arange(E, device=x.device)).cumsum(0)     # (N, E) rows of each expert so far
        blocks = (count[-1] + size - 1) // size                                     # (E,) how many it needs
        first = blocks.cumsum(0) - blocks                                           # (E,) the first of them
        place = first[expert] * size + count.gather(1, expert[:, None])[:, 0] - 1   # (N,) row in the blocks
        owner = (torch.arange(n_block, device=x.device)[:, None] >= first).sum(1) - 1               # (n_block,)
        rows = x.new_zeros(n_block * size, x.size(1)).index_copy(0, place, x).view(n_block, size, -1)
        y = self.w_down(F.silu(self.w_gate(rows, owner)) * self.w_up(rows, owner), owner)
        return y.flatten(0, 1).index_select(0, place)


class Router(nn.Module):
    """r (B, T, E) of the normalised input x (B, T, C); from s on in fp32 or better."""

    def __init__(self, c):
        super().__init__()
        self.kind, self.weight = c.router, nn.Parameter(torch.empty(c.n_expert, c.d_model))

    def forward(self, x):
        s = F.linear(x, self.weight)                                                # (B, T, E)
        s = s.to(torch.promote_types(s.dtype, torch.float32))
        if self.kind == "kern":
            return F.relu(s / (s.norm(dim=-1, keepdim=True) + 1e-6))
        return s.softmax(-1) if self.kind == "softmax" else getattr(torch, self.kind)(s)


class MixtureOfExperts(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.top_k = c.top_k
        self.router = Router(c)
        self.experts = MLP(c.n_expert, c.d_model, c.d_ff // c.top_k)
        self.gamma = nn.Parameter(torch.empty(())) if c.router == "kern" else 1.0

    def forward(self, x):
        """x (B, T, C) -> y (B, T, C), and the imbalance of the load ()."""
        r = self.router(x)                                                          # (B, T, E)
        g, chosen = r.topk(self.top_k)                                              # (B, T, k)
        rows = x.flatten(0, 1).repeat_interleave(self.top_k, 0)                     # (B T k, C)
        y = self.experts(rows, chosen.flatten()).view(*chosen.shape, -1)            # (B, T, k, C)
        return self.gamma * (g[..., None] * y).sum(-2).type_as(x), self.imbalance(r, g, chosen)

    def imbalance(self, r, g, chosen):
        """E sum_m F_m P_m, mean over the sequences."""
        load = torch.zeros_like(r).scatter(-1, chosen, (g > 0).type_as(r)).sum(1)   # (B, E)
        share = F.normalize(r.relu(), p=1, dim=-1, eps=1e-8).mean(1)                # (B, E)
        return r.size(-1) * (F.normalize(load, p=1, dim=-1) * share).sum(-1).mean()


class Block(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.attn_norm = RMSNorm(c.d_model, c.norm_eps)
        self.attn = Attention(c, layer)
        self.mlp_norm = RMSNorm(c.d_model, c.norm_eps)
        self.mlp = MixtureOfExperts(c)

    def forward(self, x, rope, cache=None):
        x = x + self.attn(self.attn_norm(x), rope, cache)
        y, imbalance = self.mlp(self.mlp_norm(x))
        return x + y, imbalance


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
            if module.endswith("norm") or name.endswith(".gamma"):
                p.fill_(1.0)
            elif name.endswith(".bias") or module in ("wo", "w_down", "head") and self.config.zero_init:
                p.zero_()
            elif module in ("embed", "wq", "wk", "wv", "wo", "gate", "w_gate", "w_up", "w_down", "router", "head"):
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
        imbalances = []
        for block in self.blocks:
            x, imbalance = block(x, rope, cache)
            imbalances.append(imbalance)
        logits, loss = self.output(x, targets, cache)
        if loss is not None and self.training:
            loss = loss + self.config.balance_loss * sum(imbalances) / len(imbalances)
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
