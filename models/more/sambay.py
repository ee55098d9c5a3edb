"""SambaY: the first half of the layers makes one memory, and the second half only reads it.   arXiv:2507.06607

The first half of the blocks alternates Mamba with sliding-window attention. Then come a last Mamba layer and the only
full attention. Later blocks keep nothing per token. Their cross-attention reads the full attention's keys and values;
their gated memory units (GMU) read the last Mamba layer's y for the same token. There is no position encoding.
Each block is x <- x + mixer(a), a = norm(x), then the MLP as in gpt.py. The mixers, with half = 2 (n_layer // 4):
    block < half          mamba and window in turn; a token sees the last `window` tokens, itself included
    block half, half + 1  mamba, whose y is the memory;  full, whose k and v are kept
    block > half + 1      gmu and cross in turn
gmu    wo( silu(w_gate(a)) * memory )
cross  attention of wq(a) to the k and v of the full attention
mamba  wo( silu(w_z(a)) * y ),    y_t = s_t read_t + skip * u_t,    s_t = exp(dt_t A) s_(t-1) + dt_t u_t write_t^T
       u = silu(conv(w_u(a))),  dt = softplus(w_dt(w_rank(u)) + dt_bias),  write = w_write(u),  read = w_read(u)
with E = 2 d_model numbers in u, dt and y, N = d_state in write and read (B and C in Mamba), a state s (E, N) and
A = -exp(A_log).
gmu=False has cross-attention in place of the GMUs: the paper's baseline Samba+YOCO.
For simplicity the cache keeps all keys and values of window attention, though only the last ones are read.

Changed from gpt.py: Config, Config.__post_init__, apply_rope, Cache, Cache.__init__, attend, Attention,
    Attention.__init__, Attention.forward, Block.__init__, Block.forward, Model.__init__, Model.init_weights,
    Model.forward, Model.rope
Optimizer: the matrices of all mixers go to Muon; the convolution, dt_bias, A_log and skip to AdamW at mix_lr.
Paper and code: in the code the queries of cross-attention have no QK norm, here they do. The authors' models have no QK
    norm at all (qk_norm=False).
"""
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


@dataclass
class Config:
    vocab_size: int = 50304         # size of the vocabulary (V); token ids are 0 .. vocab_size-1
    n_layer: int = 12               # blocks (L); each is a mixer + MLP
    n_head: int = 12                # query heads (H); d_head (D) = d_model / n_head
    n_kv_head: int | None = None    # key/value heads (K), each shared by n_head / n_kv_head query heads; None: n_head
    d_model: int = 768              # width of the residual stream (C)
    d_ff: int | None = None         # hidden width of the SwiGLU MLP; None: 8/3 d_model rounded up to a multiple of 64
    max_len: int = 2048             # longest sequence, in training and in generation
    norm_eps: float = 1e-6          # added to the mean square in every RMSNorm
    tie_embeddings: bool = False    # head and embedding share one matrix
    z_loss: float = 0.0             # weight of the penalty mean(logsumexp(logits)^2), in training only
    qk_norm: bool = True            # RMSNorm on each head of q and k
    gate: str = "none"              # gated attention: none | elementwise | headwise (one gate per head)
    zero_init: bool = True          # wo, w_down and an untied head start at zero; False: N(0, 0.02), as all others
    window: int = 128               # tokens that window attention sees, the current one included
    d_state: int = 16               # numbers (N) in the state of each of the 2 d_model channels (E) of a Mamba layer
    gmu: bool = True                # False: cross-attention in place of the GMUs

    def __post_init__(self):
        self.n_kv_head = self.n_head if self.n_kv_head is None else self.n_kv_head
        self.d_ff = 64 * math.ceil(self.d_model * 8 / 3 / 64) if self.d_ff is None else self.d_ff
        if self.d_model % (2 * self.n_head) or self.n_head % self.n_kv_head:
            raise ValueError(f"d_model {self.d_model} must be an even multiple of n_head {self.n_head}, "
                             f"and that a multiple of n_kv_head {self.n_kv_head}")
        if self.gate not in ("none", "elementwise", "headwise"):
            raise ValueError(f"gate must be none, elementwise or headwise, not {self.gate!r}")
        if self.window < 2 or self.d_state < 1:
            raise ValueError(f"window must be at least 2, not {self.window}, and d_state positive, not {self.d_state}")

    @property
    def d_head(self):
        return self.d_model // self.n_head

    @property
    def mixers(self):
        """The mixer of each of the n_layer blocks: mamba, window, full, gmu or cross."""
        first, later = ["mamba", "window"] * (self.n_layer // 4), ["gmu" if self.gmu else "cross", "cross"]
        return (first + ["mamba", "full"] + later * self.n_layer)[:self.n_layer]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension; statistics in fp32 or better."""

    def __init__(self, dim, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        y = x.to(torch.promote_types(x.dtype, torch.float32))
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight).type_as(x)


def compute_dtype(weight):
    """The dtype in which this weight is multiplied: autocast's if autocast is on, else the weight's own."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


class Cache:
    """k and v: {layer: (B, K, max_len, D)}. Of each Mamba layer, u: {layer: the last 3 inputs of its convolution
    (B, 3, E)}, and state: {layer: (B, E, N)}. `pos` () counts the tokens held."""

    def __init__(self, model, batch_size, max_len):
        c, like = model.config, model.embed.weight
        shape, kind = (batch_size, c.n_kv_head, max_len, c.d_head), dict(dtype=compute_dtype(like), device=like.device)
        layers = {mixer: [i for i in range(c.n_layer) if c.mixers[i] == mixer] for mixer in ("mamba", "window", "full")}
        self.k, self.v = ({i: torch.zeros(shape, **kind) for i in layers["window"] + layers["full"]} for _ in "kv")
        self.u = {i: torch.zeros(batch_size, 3, 2 * c.d_model, **kind) for i in layers["mamba"]}
        kind["dtype"] = torch.promote_types(kind["dtype"], torch.float32)
        self.state = {i: torch.zeros(batch_size, 2 * c.d_model, c.d_state, **kind) for i in layers["mamba"]}
        self.pos = torch.zeros((), dtype=torch.long, device=like.device)

    def append(self, layer, k, v):
        """Stores k, v (B, K, T, D) of the new tokens; returns all keys and values, and the causal mask (T, max_len)."""
        at = self.pos + torch.arange(k.size(2), device=k.device)                     # (T,)
        self.k[layer].index_copy_(2, at, k.type_as(self.k[layer]))
        self.v[layer].index_copy_(2, at, v.type_as(self.v[layer]))
        seen = torch.arange(self.k[layer].size(2), device=k.device) <= at[:, None]   # (T, max_len)
        return self.k[layer], self.v[layer], seen


def attend(q, k, v, layer, cache, window):
    """Attention of q (B, T, H, D) to the last `window` tokens of k, v (B, T, K, D) and of the cache -> (B, T, H, D)."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)               # (B, H or K, T, D)
    seen = torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril()
    if cache is not None:
        k, v, seen = cache.append(layer, k, v)
    seen = seen & (seen.sum(-1, keepdim=True) - torch.arange(seen.size(1), device=q.device) <= window)
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))     # (B, H, keys, D)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2)


class Attention(nn.Module):
    """The mixers window, full and cross."""

    def __init__(self, c, layer):
        super().__init__()
        self.n_head, self.n_kv_head, self.d_head, self.kind = c.n_head, c.n_kv_head, c.d_head, c.mixers[layer]
        self.layer = c.mixers.index("full") if self.kind == "cross" else layer      # of the keys and values it reads
        self.window = c.window if self.kind == "window" else c.max_len
        self.wq = nn.Linear(c.d_model, c.n_head * c.d_head, bias=False)
        if self.kind != "cross":
            self.wk = nn.Linear(c.d_model, c.n_kv_head * c.d_head, bias=False)
            self.wv = nn.Linear(c.d_model, c.n_kv_head * c.d_head, bias=False)
            self.k_norm = RMSNorm(c.d_head, c.norm_eps) if c.qk_norm else nn.Identity()
        self.wo = nn.Linear(c.n_head * c.d_head, c.d_model, bias=False)
        self.q_norm = RMSNorm(c.d_head, c.norm_eps) if c.qk_norm else nn.Identity()
        n_gate = {"none": 0, "elementwise": c.n_head * c.d_head, "headwise": c.n_head}[c.gate]
        self.gate = nn.Linear(c.d_model, n_gate, bias=False) if n_gate else None

    def forward(self, x, shared, cache=None):
        B, T, _ = x.shape
        q = self.q_norm(self.wq(x).view(B, T, self.n_head, self.d_head))            # (B, T, H, D)
        if self.kind != "cross":                    # the full attention's stay: it is the last to set them
            shared["k"] = self.k_norm(self.wk(x).view(B, T, self.n_kv_head, self.d_head))           # (B, T, K, D)
            shared["v"] = self.wv(x).view(B, T, self.n_kv_head, self.d_head)                        # (B, T, K, D)
        y = attend(q, shared["k"], shared["v"], self.layer, cache, self.window)     # (B, T, H, D)
        if self.gate is not None:
            y = y * self.gate(x).sigmoid().view(B, T, self.n_head, -1)              # times (B, T, H, D or 1)
        return self.wo(y.reshape(B, T, -1))                                         # (B, T, C)


def recurrence(a, b):
    """s_t = a_t s_(t-1) + b_t for all t of a, b (B, T, ..), with s_0 = b_0.

    Two steps make one step of the same form, so a recurrence of half the length gives the states at odd t. Every other
    state follows from the one before it.
    """
    s, T = b.clone(), b.size(1)
    if T > 1:
        odd = recurrence(a[:, 1::2] * a[:, :-1:2], a[:, 1::2] * b[:, :-1:2] + b[:, 1::2])       # (B, T // 2, ..)
        s[:, 1::2] = odd
        s[:, 2::2] += a[:, 2::2] * odd[:, :(T - 1) // 2]
    return s


class Mamba(nn.Module):
    """A selective state space model; the y of the last one is the memory."""

    def __init__(self, c, layer):
        super().__init__()
        self.layer, E, rank = layer, 2 * c.d_model, math.ceil(c.d_model / 16)
        self.w_u = nn.Linear(c.d_model, E, bias=False)
        self.w_z = nn.Linear(c.d_model, E, bias=False)
        self.conv = nn.Conv1d(E, E, 4, groups=E)                                    # every channel by itself
        self.w_rank = nn.Linear(E, rank, bias=False)
        self.w_dt = nn.Linear(rank, E, bias=False)
        self.w_write = nn.Linear(E, c.d_state, bias=False)                          # B in the paper
        self.w_read = nn.Linear(E, c.d_state, bias=False)                           # C in the paper
        self.dt_bias, self.skip = (nn.Parameter(torch.empty(E)) for _ in range(2))
        self.A_log = nn.Parameter(torch.empty(E, c.d_state))
        self.wo = nn.Linear(E, c.d_model, bias=False)

    def forward(self, x, shared, cache=None):
        u, z = self.w_u(x), self.w_z(x)                                             # (B, T, E)
        past, state = u.new_zeros(len(x), 3, u.size(-1)), self.A_log.new_zeros(len(x), *self.A_log.shape)
        if cache is not None:
            past, state = cache.u[self.layer], cache.state[self.layer]
        both = torch.cat((past, u), dim=1)                                          # (B, 3 + T, E)
        u = F.silu(self.conv(both.mT).mT)                                           # (B, T, E)
        y, last = checkpoint(self.scan, u, state, use_reentrant=False)              # backward recomputes the states
        if cache is not None:
            past.copy_(both[:, -3:])
            state.copy_(last)
        shared["memory"] = y.type_as(u)
        return self.wo(shared["memory"] * F.silu(z))

    def scan(self, u, state):
        """y (B, T, E) from u (B, T, E), and the last state (B, E, N), in fp32 or better; state: the one before u."""
        dt = F.softplus(self.w_dt(self.w_rank(u)) + self.dt_bias)                   # (B, T, E)
        a = torch.exp(dt[..., None] * -self.A_log.exp())                            # (B, T, E, N)
        b = (dt * u)[..., None] * self.w_write(u)[:, :, None]                       # (B, T, E, N)
        b[:, 0] += a[:, 0] * state
        s = recurrence(a, b)
        return (s * self.w_read(u)[:, :, None]).sum(-1) + self.skip * u, s[:, -1]


class GMU(nn.Module):
    """The gated memory unit."""

    def __init__(self, c, layer):
        super().__init__()
        self.w_gate = nn.Linear(c.d_model, 2 * c.d_model, bias=False)
        self.wo = nn.Linear(2 * c.d_model, c.d_model, bias=False)

    def forward(self, x, shared, cache=None):
        return self.wo(F.silu(self.w_gate(x)) * shared["memory"])


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
        self.attn = {"mamba": Mamba, "gmu": GMU}.get(c.mixers[layer], Attention)(c, layer)      # the mixer
        self.mlp_norm = RMSNorm(c.d_model, c.norm_eps)
        self.mlp = MLP(c.d_model, c.d_ff)

    def forward(self, x, shared, cache=None):
        """shared: the memory (B, T, E) and the keys and values (B, T, K, D) that later blocks read."""
        x = x + self.attn(self.attn_norm(x), shared, cache)
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
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Initialises every parameter by the name of its module; an unknown name is an error."""
        for name, p in self.named_parameters():
            module = name.split(".")[-2] if name.endswith(".weight") else ""       # "wq" of "blocks.0.attn.wq.weight"
            if name.endswith(".A_log"):
                p.copy_(torch.arange(1, p.size(1) + 1).log().expand_as(p))
            elif name.endswith(".dt_bias"):
                dt = torch.empty_like(p).uniform_(math.log(1e-3), math.log(1e-1)).exp()
                p.copy_(dt + torch.log(-torch.expm1(-dt)))                          # softplus(p) = dt
            elif module in ("conv", "w_dt"):
                p.uniform_(-p[0].numel() ** -0.5, p[0].numel() ** -0.5)
            elif module.endswith("norm") or name.endswith(".skip"):
                p.fill_(1.0)
            elif name.endswith(".bias") or module in ("wo", "w_down", "head") and self.config.zero_init:
                p.zero_()
            elif module in ("embed", "wq", "wk", "wv", "wo", "gate", "w_gate", "w_up", "w_down", "head",
                            "w_u", "w_z", "w_rank", "w_write", "w_read"):
                nn.init.trunc_normal_(p, std=0.02, a=-0.06, b=0.06)
            else:
                raise ValueError(f"init_weights gives {name} no value")

    def forward(self, idx, targets=None, cache=None):
        """Logits (B, T, V) of the next token, and the loss () if targets are given, else None.

        idx, targets: int64 (B, T); targets of -1 are ignored. cache: a Cache that holds what came before idx.
        The loss is the mean cross-entropy in nats per token; training adds z_loss * mean(logsumexp(logits)^2).
        With targets the logits carry no gradient. ValueError if T exceeds max_len.
        """
        if idx.size(1) > self.config.max_len:
            raise ValueError(f"{idx.size(1)} tokens are more than max_len {self.config.max_len}")
        x, shared = self.embed(idx).to(compute_dtype(self.embed.weight)), {}        # (B, T, C)
        for block in self.blocks:
            x = block(x, shared, cache)
        return self.output(x, targets, cache)

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
