"""SambaY: the first half of the layers makes one memory, the second half only reads it.   arXiv:2507.06607

A decoder-hybrid-decoder. The self-decoder alternates Mamba and sliding-window attention, and ends with one more Mamba
layer and the only full attention. The cross-decoder keeps nothing per token: its cross-attention reads the keys and
values of that one full attention, and its gated memory units (GMU, in place of every other cross-attention of YOCO)
read what that last Mamba layer read out of its state for the same token. There are no positions (NoPE).
Block i = 0 .. n_layer - 1 is x <- x + mixer_i(a), a = norm(x), then the MLP as in gpt.py. With half = 2 (n_layer // 4):
    i < half           mamba and window in turn     window: attention over the last `window` tokens, the own included
    half, half + 1     mamba, full                  memory <- y of this Mamba layer;  k, v <- those of this attention
    i > half + 1       gmu and cross in turn        cross: wo( softmax(norm(wq(a)) k^T / sqrt(d_head) + causal) v )
GMU      mixer = wo( silu(w_gate(a)) * memory )     per token: earlier memories are not needed
Mamba    mixer = wo( silu(w_z(a)) * y ),   y = s read + skip * u,   s <- exp(dt A) * s + (dt * u) write^T
         u = silu(conv(w_x(a))),   dt = softplus(w_dt(w_rank(u)) + dt_bias),   write = w_write(u),   read = w_read(u)
with E = 2 d_model channels in u, dt, y, memory and skip, N = d_state numbers in write and read, and
a state s (E, N) per sequence, A = -exp(A_log). Parameters of the mixer in block i are blocks.i.attn, as in gpt.py.

The scan over s takes the steps of all chunks of `scan_chunk` tokens at once. Backward repeats it, for one layer at a
time, and then holds 4.5 T E N numbers in fp32 per sequence (states and decays, twice); kept from forward to backward
are its inputs alone.
torch.compile unrolls its 2 scan_chunk + T / scan_chunk steps: minutes to compile.
Costs per layer: about 6 d_model^2 parameters (Mamba), 4 d_model^2 (GMU, attention), 2 d_model^2 (cross-attention).
Decoding holds keys and values of all tokens once, and in the other layers of the self-decoder a window or a state;
prompts take linear time (Model.prefill).

Changed from gpt.py: Config, Config.__post_init__, apply_rope, Cache, Cache.__init__, Cache.append, attend, Attention,
    Attention.__init__, Attention.forward, Block.__init__, Block.forward, Model.__init__, Model.init_weights,
    Model.forward, Model.rope, Model.generate
Equal to gpt.py when: never. It has no positions, and a Mamba layer is no attention.
Optimizer: the matrices of all mixers go to Muon; A_log, skip, dt_bias and the convolution to AdamW at mix_lr, without
    decay.
Paper and code (github.com/microsoft/ArchScale):
  - The code wants n_layer to be a multiple of 4, so that half = n_layer / 2.
  - It draws w_dt from N(0, 0.02) unless it trains with muP; here U(+-1/sqrt(rank)) as in Mamba (arXiv:2312.00752).
  - With QK norm (off in its models: qk_norm=False) it leaves the queries of cross-attention as they are; here they are
    normalised.
  - Its MLPs are 4 d_model wide, and an untied embedding starts at N(0, 1e-4); here 0.02, as in all files.
  - The paper's baseline Samba+YOCO, with cross-attention in place of the GMUs, is gmu="none".
  - J. Sun, "The Architecture Stack" (web.stanford.edu/~jksun/blog/llm-architecture.html), reads the sigma of the GMU,
    which is SiLU, as a sigmoid, has it gate by the memory instead of the layer's input, and adds the gated memory to
    the hidden state of a later SSM. The later layers have no SSM, so gmu="sigmoid" adds it to a projection:
    mixer = wo( w_in(a) + sigmoid(w_gate(memory)) * memory ), with E^2 more parameters. That text also takes the memory
    for the SSM's hidden state, which has N times as many numbers; paper and code take y.
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
    n_layer: int = 12               # blocks (L); each is a mixer + MLP; the paper's depths are multiples of 4
    n_head: int = 12                # query heads (H); d_head (D) = d_model / n_head
    n_kv_head: int | None = None    # key/value heads (K), each shared by n_head / n_kv_head query heads; None: n_head
    d_model: int = 768              # width of the residual stream (C)
    d_ff: int | None = None         # hidden width of the SwiGLU MLP; None: 8/3 d_model rounded up to a multiple of 64
    max_len: int = 2048             # longest sequence, in training and in generation
    norm_eps: float = 1e-6          # added to the mean square in every RMSNorm
    tie_embeddings: bool = False    # head and embedding share one matrix
    z_loss: float = 0.0             # weight of mean(logsumexp(logits)^2), in training only
    qk_norm: bool = True            # RMSNorm on each head of q and k
    gate: str = "none"              # gated attention: none | elementwise | headwise
    zero_init: bool = True          # wo, w_down and an untied head start at zero; False: N(0, 0.02) as all others
    window: int = 128               # tokens that sliding-window attention sees, the current one included
    d_state: int = 16               # numbers in the state of each of the 2 d_model channels of a Mamba layer
    d_conv: int = 4                 # taps of Mamba's causal convolution
    gmu: str = "silu"               # silu (the paper) | sigmoid (Sun's) | none: cross-attention instead
    scan_chunk: int = 32            # tokens per chunk of the scan: speed, memory and rounding, no other effect

    def __post_init__(self):
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.d_ff is None:
            self.d_ff = 64 * math.ceil(self.d_model * 8 / 3 / 64)
        for name in ("vocab_size", "n_layer", "n_head", "n_kv_head", "d_model", "d_ff", "max_len", "d_state", "d_conv",
                     "scan_chunk"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.d_model % self.n_head:
            raise ValueError(f"d_model {self.d_model} must be a multiple of n_head {self.n_head}")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} must be a multiple of n_kv_head {self.n_kv_head}")
        if self.gate not in ("none", "elementwise", "headwise"):
            raise ValueError(f"gate must be none, elementwise or headwise, not {self.gate!r}")
        if self.gmu not in ("silu", "sigmoid", "none"):
            raise ValueError(f"gmu must be silu, sigmoid or none, not {self.gmu!r}")
        if self.n_layer < 2:
            raise ValueError(f"n_layer must be at least 2, a Mamba layer and the full attention, not {self.n_layer}")
        if self.window < 2:
            raise ValueError(f"window must be at least 2, the current token and one before it, not {self.window}")

    @property
    def d_head(self):
        return self.d_model // self.n_head

    @property
    def d_inner(self):
        return 2 * self.d_model

    @property
    def mixers(self):
        """What the blocks mix tokens with: mamba, window, full, gmu or cross, n_layer times."""
        own, shared = ["mamba", "window"] * (self.n_layer // 4), ["cross" if self.gmu == "none" else "gmu", "cross"]
        return (own + ["mamba", "full"] + shared * self.n_layer)[:self.n_layer]


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
    """The dtype of products with this weight: autocast's where that is on, else the weight's."""
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else weight.dtype


class Cache:
    """What decoding remembers: `layers`, each mixer's own cache or None, and `pos` (), the count of tokens held.

    Model.forward advances it. Its shapes never change, so that a decoding step compiles once.
    """

    def __init__(self, model, batch_size, max_len):
        c, like = model.config, model.embed.weight
        self.pos = torch.zeros((), dtype=torch.long, device=like.device)
        make = {"mamba": MambaCache, "window": WindowCache, "full": FullCache}      # the cross-decoder keeps nothing
        self.layers = [make[mixer](c, batch_size, max_len, self.pos, compute_dtype(like)) if mixer in make else None
                       for mixer in c.mixers]


class FullCache:
    """Keys and values of all tokens, (B, K, max_len, D) each; pos: the Cache's."""

    def __init__(self, c, batch_size, max_len, pos, dtype):
        shape = (batch_size, c.n_kv_head, max_len, c.d_head)
        self.pos = pos
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=pos.device) for _ in "kv")

    def append(self, k, v):
        """Stores k, v (B, T, K, D) of the new tokens; returns all keys, values, and their causal mask (T, max_len)."""
        at = self.pos + torch.arange(k.size(1), device=k.device)                    # (T,)
        self.k.index_copy_(2, at, k.transpose(1, 2).type_as(self.k))
        self.v.index_copy_(2, at, v.transpose(1, 2).type_as(self.v))
        seen = torch.arange(self.k.size(2), device=k.device) <= at[:, None]         # (T, max_len)
        return self.k.transpose(1, 2), self.v.transpose(1, 2), seen


class WindowCache:
    """Keys and values of the last window - 1 tokens, (B, window - 1, K, D) each; pos: the Cache's."""

    def __init__(self, c, batch_size, max_len, pos, dtype):
        shape = (batch_size, c.window - 1, c.n_kv_head, c.d_head)
        self.pos = pos
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=pos.device) for _ in "kv")

    def append(self, k, v):
        """Keys and values of those tokens and of the new ones, (B, window - 1 + T, K, D), from k, v (B, T, K, D)."""
        return roll(self.k, k), roll(self.v, v)


class MambaCache:
    """The last inputs of the convolution (B, d_conv - 1, E), and the state (B, E, N) in fp32 or better."""

    def __init__(self, c, batch_size, max_len, pos, dtype):
        self.u = torch.zeros(batch_size, c.d_conv - 1, c.d_inner, dtype=dtype, device=pos.device)
        wide = torch.promote_types(dtype, torch.float32)
        self.state = torch.zeros(batch_size, c.d_inner, c.d_state, dtype=wide, device=pos.device)


def roll(held, new):
    """What `held` (B, n, ..) holds, followed by the new tokens (B, T, ..); it goes on holding n, the last."""
    both = torch.cat((held.type_as(new), new), dim=1)
    held.copy_(both[:, new.size(1):])
    return both


def attend(q, k, v, seen=None):
    """Attention of q (B, T, H, D) over k, v (B, keys, K, D), causal or where `seen` (.., T, keys) -> (B, T, H, D)."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)               # (B, H or K, T or keys, D)
    gqa = q.size(1) != k.size(1)
    if gqa and seen is not None:                                                    # kernels with masks want H keys
        k, v, gqa = *(x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v)), False
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=gqa)
    return y.transpose(1, 2)


def attend_window(q, k, v, window, start):
    """Attention of q (B, T, H, D) to the last `window` tokens, the own one included -> (B, T, H, D).

    k, v (B, P + T, K, D) begin with P tokens before the first query, which has `start` tokens before it in its text.
    """
    P = k.size(1) - q.size(1)
    i, j = (torch.arange(n, device=q.device) for n in (q.size(1), k.size(1)))
    seen = (j <= i[:, None] + P) & (j > i[:, None] + P - window) & (j >= P - start)     # (T, P + T)
    return attend(q, k, v, seen)


def attend_window_in_blocks(q, k, v, window, start):
    """attend_window() in time linear in T: a block of `window` queries, its own block of keys and the one before."""
    B, T, P = *q.shape[:2], k.size(1) - q.size(1)
    q = F.pad(q, (0, 0, 0, 0, 0, -T % window)).unflatten(1, (-1, window))           # (B, blocks, window, H, D)
    k, v = (F.pad(x, (0, 0, 0, 0, window - P, -T % window)).unflatten(1, (-1, window)) for x in (k, v))
    k, v = (torch.cat((x[:, :-1], x[:, 1:]), dim=2) for x in (k, v))                # (B, blocks, 2 window, K, D)
    block, i, j = (torch.arange(n, device=q.device) for n in (q.size(1), window, 2 * window))
    seen = (j > i[:, None]) & (j <= i[:, None] + window)                            # query i is at key i + window
    seen = seen & (start + (block[:, None, None] - 1) * window + j >= 0)            # (blocks, window, 2 window)
    y = attend(*(x.flatten(0, 1) for x in (q, k, v)), seen.repeat(B, 1, 1)[:, None])
    return y.unflatten(0, (B, -1)).flatten(1, 2)[:, :T]


class Attention(nn.Module):
    """What the three kinds of attention share: queries, keys and values, gate and output projection."""

    def __init__(self, c, own_keys=True):
        super().__init__()
        self.n_head, self.n_kv_head, self.d_head = c.n_head, c.n_kv_head, c.d_head
        self.wq = nn.Linear(c.d_model, c.n_head * c.d_head, bias=False)
        self.wo = nn.Linear(c.n_head * c.d_head, c.d_model, bias=False)
        self.q_norm = RMSNorm(c.d_head, c.norm_eps) if c.qk_norm else nn.Identity()
        if own_keys:
            self.wk = nn.Linear(c.d_model, c.n_kv_head * c.d_head, bias=False)
            self.wv = nn.Linear(c.d_model, c.n_kv_head * c.d_head, bias=False)
            self.k_norm = RMSNorm(c.d_head, c.norm_eps) if c.qk_norm else nn.Identity()
        n_gate = {"none": 0, "elementwise": c.n_head * c.d_head, "headwise": c.n_head}[c.gate]
        self.gate = nn.Linear(c.d_model, n_gate, bias=False) if n_gate else None

    def queries(self, x):
        return self.q_norm(self.wq(x).unflatten(-1, (self.n_head, self.d_head)))    # (B, T, H, D)

    def keys_values(self, x):
        k, v = (w(x).unflatten(-1, (self.n_kv_head, self.d_head)) for w in (self.wk, self.wv))
        return self.k_norm(k), v                                                    # (B, T, K, D) each

    def output(self, x, y):
        """The mixer's output (B, T, C) from its input x (B, T, C) and the heads' outputs y (B, T, H, D)."""
        if self.gate is not None:
            y = y * self.gate(x).sigmoid().unflatten(-1, (self.n_head, -1))         # times (B, T, H, D or 1)
        return self.wo(y.flatten(2))


class FullAttention(Attention):
    """Attention to all tokens; makes the keys and values that cross-attention reads."""

    def forward(self, x, memory, shared, cache=None):
        k, v = self.keys_values(x)                                                  # (B, T, K, D)
        shared = (k, v) if cache is None else cache.append(k, v)
        return self.output(x, attend(self.queries(x), *shared)), memory, shared


class CrossAttention(Attention):
    """Own queries, keys and values of the full attention."""

    def __init__(self, c):
        super().__init__(c, own_keys=False)

    def forward(self, x, memory, shared, cache=None):
        return self.output(x, attend(self.queries(x), *shared)), memory, shared


class WindowAttention(Attention):
    """Attention to the last `window` tokens."""

    def __init__(self, c):
        super().__init__(c)
        self.window = c.window

    def forward(self, x, memory, shared, cache=None):
        (k, v), start = self.keys_values(x), 0                                      # (B, T, K, D)
        if cache is not None:
            (k, v), start = cache.append(k, v), cache.pos
        mix = attend_window_in_blocks if x.size(1) > self.window else attend_window
        return self.output(x, mix(self.queries(x), k, v, self.window, start)), memory, shared


def recur(dt, u, write, read, A, state):
    """s <- exp(dt A) s + (dt u) write^T along dim 2, for n chunks at once, from their states (B, n, E, N).

    dt, u: (B, n, T, E); write, read: (B, n, T, N). Returns y = s read (B, n, T, E), None without read, and the last s.
    """
    y, dtu = [], dt * u
    for t in range(dt.size(2)):
        add = dtu[:, :, t, :, None] * write[:, :, t, None]                          # (B, n, E, N)
        state = torch.addcmul(add, torch.exp(dt[:, :, t, :, None] * A), state)
        if read is not None:
            y.append((state * read[:, :, t, None]).sum(-1))
    return torch.stack(y, dim=2) if y else None, state


def selective_scan(dt, u, write, read, A, state, chunk):
    """s_t = exp(dt_t A) s_{t-1} + (dt_t u_t) write_t^T -> y_t = s_t read_t (B, T, E), and the last state (B, E, N).

    dt, u: (B, T, E); write, read: (B, T, N); A: (E, N), negative; state: (B, E, N), before the first token.
    All chunks run side by side, twice: from zero, which tells what each adds to the state, then from their true states:
    2 chunk + T / chunk steps instead of T. No division by a decay, which would overflow.
    """
    T, chunk = dt.size(1), min(chunk, dt.size(1))
    dt, u, write, read = (F.pad(x, (0, 0, 0, -T % chunk)).unflatten(1, (-1, chunk)) for x in (dt, u, write, read))
    states = [state]                                                                # padding has dt = 0: s stays
    if dt.size(1) > 1:
        _, added = recur(dt, u, write, None, A, torch.zeros_like(state)[:, None])   # (B, n, E, N)
        decay = torch.exp(dt.sum(2)[..., None] * A)                                 # of whole chunks
        for i in range(dt.size(1) - 1):
            states.append(torch.addcmul(added[:, i], decay[:, i], states[-1]))
    y, state = recur(dt, u, write, read, A, torch.stack(states, dim=1))
    return y.flatten(1, 2)[:, :T], state[:, -1]


class Mamba(nn.Module):
    """Selective state space; its readout is the memory, if it is the last Mamba layer."""

    def __init__(self, c):
        super().__init__()
        self.chunk, rank = c.scan_chunk, math.ceil(c.d_model / 16)
        self.w_x = nn.Linear(c.d_model, c.d_inner, bias=False)
        self.w_z = nn.Linear(c.d_model, c.d_inner, bias=False)
        self.conv_weight = nn.Parameter(torch.empty(c.d_conv, c.d_inner))           # the last tap: the current token
        self.conv_bias = nn.Parameter(torch.empty(c.d_inner))
        self.w_rank = nn.Linear(c.d_inner, rank, bias=False)
        self.w_dt = nn.Linear(rank, c.d_inner, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(c.d_inner))
        self.w_write = nn.Linear(c.d_inner, c.d_state, bias=False)                  # B in the paper
        self.w_read = nn.Linear(c.d_inner, c.d_state, bias=False)                   # C in the paper
        self.A_log = nn.Parameter(torch.empty(c.d_inner, c.d_state))
        self.skip = nn.Parameter(torch.empty(c.d_inner))
        self.wo = nn.Linear(c.d_inner, c.d_model, bias=False)

    def forward(self, x, memory, shared, cache=None):
        u, z, T = self.w_x(x), self.w_z(x), x.size(1)                               # (B, T, E)
        taps = len(self.conv_weight)
        u = F.pad(u, (0, 0, taps - 1, 0)) if cache is None else roll(cache.u, u)    # (B, taps - 1 + T, E)
        u = F.silu(sum((u[:, j:j + T] * w for j, w in enumerate(self.conv_weight)), start=self.conv_bias)).type_as(z)
        inputs = u, self.w_dt(self.w_rank(u)), self.w_write(u), self.w_read(u)
        if cache is not None:
            memory, state = self.scan(*inputs, cache.state)
            cache.state.copy_(state)
        elif torch.is_grad_enabled():                                               # autograd would keep all states
            memory, _ = checkpoint(self.scan, *inputs, use_reentrant=False, preserve_rng_state=False)
        else:
            memory, _ = self.scan(*inputs)
        return self.wo(memory * F.silu(z)), memory, shared

    def scan(self, u, dt, write, read, state=None):
        """Readouts y (B, T, E) and the last state (B, E, N), from the equations' u, w_dt(w_rank(u)), write and read."""
        wide = torch.promote_types(u.dtype, torch.float32)                          # only in here
        state = torch.zeros(len(u), *self.A_log.shape, dtype=wide, device=u.device) if state is None else state
        dt, A = F.softplus(dt.to(wide) + self.dt_bias), -torch.exp(self.A_log)
        y, state = selective_scan(dt, u.to(wide), write.to(wide), read.to(wide), A, state, self.chunk)
        return (y + self.skip * u).type_as(u), state


class GMU(nn.Module):
    """Gated memory unit: the memory of a token, through a gate that this layer's input makes."""

    def __init__(self, c):
        super().__init__()
        self.w_gate = nn.Linear(c.d_model, c.d_inner, bias=False)
        self.wo = nn.Linear(c.d_inner, c.d_model, bias=False)

    def forward(self, x, memory, shared, cache=None):
        return self.wo(F.silu(self.w_gate(x)) * memory), memory, shared


class AddingGMU(nn.Module):
    """The GMU of gmu="sigmoid": the memory, through a gate that it makes itself, is added to this layer's input."""

    def __init__(self, c):
        super().__init__()
        self.w_in = nn.Linear(c.d_model, c.d_inner, bias=False)
        self.w_gate = nn.Linear(c.d_inner, c.d_inner, bias=False)
        self.wo = nn.Linear(c.d_inner, c.d_model, bias=False)

    def forward(self, x, memory, shared, cache=None):
        return self.wo(self.w_in(x) + self.w_gate(memory).sigmoid() * memory), memory, shared


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
        gmu = AddingGMU if c.gmu == "sigmoid" else GMU
        mixers = {"mamba": Mamba, "window": WindowAttention, "full": FullAttention, "gmu": gmu, "cross": CrossAttention}
        self.attn_norm = RMSNorm(c.d_model, c.norm_eps)
        self.attn = mixers[c.mixers[layer]](c)                                      # any mixer; gpt.py's name
        self.mlp_norm = RMSNorm(c.d_model, c.norm_eps)
        self.mlp = MLP(c.d_model, c.d_ff)

    def forward(self, x, memory, shared, cache=None):
        """x (B, T, C) after this block, and what later blocks read: memory (B, T, E), shared keys and values."""
        mixed, memory, shared = self.attn(self.attn_norm(x), memory, shared, cache)
        x = x + mixed
        return x + self.mlp(self.mlp_norm(x)), memory, shared


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
        """Sets every parameter by the name of the module it is in; a name it does not know is an error."""
        for name, p in self.named_parameters():
            module, last = f".{name}".split(".")[-2:]
            if last == "A_log":
                p.copy_(torch.arange(1, p.size(1) + 1).log().expand_as(p))
            elif last == "skip":
                p.fill_(1.0)
            elif last == "dt_bias":
                dt = torch.empty_like(p).uniform_(math.log(1e-3), math.log(1e-1)).exp()
                p.copy_(dt + torch.log(-torch.expm1(-dt)))                          # softplus(p) = dt
            elif last == "conv_weight":
                nn.init.uniform_(p, -len(p) ** -0.5, len(p) ** -0.5)
            elif last == "conv_bias":
                p.zero_()
            elif module == "w_dt":
                nn.init.uniform_(p, -p.size(1) ** -0.5, p.size(1) ** -0.5)
            elif module.endswith("norm"):
                p.fill_(1.0)
            elif module in ("wo", "w_down", "head") and self.config.zero_init:
                p.zero_()
            elif module in ("embed", "wq", "wk", "wv", "wo", "gate", "w_gate", "w_up", "w_down", "head",
                            "w_x", "w_z", "w_rank", "w_write", "w_read", "w_in"):
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
        if idx.size(1) > self.config.max_len:
            raise ValueError(f"{idx.size(1)} tokens are more than max_len {self.config.max_len}")
        x, memory, shared = self.embed(idx).to(compute_dtype(self.embed.weight)), None, None        # (B, T, C)
        for block, held in zip(self.blocks, [None] * len(self.blocks) if cache is None else cache.layers):
            x, memory, shared = block(x, memory, shared, held)
        return self.output(x, targets, cache)

    def prefill(self, idx, cache):
        """Takes idx (B, T) into the cache without logits.

        Later tokens need nothing of these beyond keys and values of the full attention: neither its attention nor the
        cross-decoder runs, and the time is linear in T.
        """
        full = self.config.mixers.index("full")
        x, memory, shared = self.embed(idx).to(compute_dtype(self.embed.weight)), None, None        # (B, T, C)
        for block, held in zip(self.blocks[:full], cache.layers):
            x, memory, shared = block(x, memory, shared, held)
        block = self.blocks[full]
        cache.layers[full].append(*block.attn.keys_values(block.attn_norm(x)))
        cache.pos += idx.size(1)

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
        if T > 1:
            self.prefill(idx[:, :-1], cache)
        for t in range(T, total):
            logits, _ = (self.forward if t == T else step)(out[:, t - 1:t].clone(), cache=cache)
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
    d, E, N, kv = c.d_model, c.d_inner, c.d_state, c.n_kv_head * c.d_head
    cross = 2 * d * d + d * {"none": 0, "elementwise": d, "headwise": c.n_head}[c.gate]
    full, gains = cross + 2 * d * kv, c.d_head * c.qk_norm
    matrices = {"mamba": 3 * d * E + 2 * E * math.ceil(d / 16) + 2 * E * N, "window": full, "full": full,
                "gmu": 2 * d * E + E * E * (c.gmu == "sigmoid"), "cross": cross}
    vectors = {"mamba": E * (N + c.d_conv + 3), "window": 2 * gains, "full": 2 * gains, "gmu": 0, "cross": gains}
    mixing = {"mamba": E * (7 * N + 2 * c.d_conv + 3), "window": 4 * d * min(c.window, T), "full": 4 * d * T,
              "gmu": E * (1 + (c.gmu == "sigmoid")), "cross": 4 * d * T}
    params = sum(matrices[mixer] + vectors[mixer] for mixer in c.mixers) - c.n_layer * (full + vectors["full"])
    flops = sum(2 * matrices[mixer] + mixing[mixer] for mixer in c.mixers) - c.n_layer * (2 * full + mixing["full"])
    return params, flops, c.mixers.count("gmu") * E


if __name__ == "__main__":                      # its size, and one training step on random tokens
    model = Model(Config(vocab_size=256, n_layer=4, n_head=4, d_model=128))
    optimizer, idx = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randint(256, (4, 65))
    model(idx[:, :-1], idx[:, 1:])[1].backward()
    optimizer.step()
    loss = model(idx[:, :-1], idx[:, 1:])[1]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters; loss after a step: {loss:.4f}")
