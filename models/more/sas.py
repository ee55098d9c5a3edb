"""SAS: few heads simulate many, with more features for queries and keys.   arXiv:2507.07694

Attention improves with more heads, as long as they stay wide. Simulated attention scores make G = n_sim heads of every
head and widen queries and keys from D to D_sim features, by small maps that all tokens share. With x (N, D), one
token's N = H query heads or N = K key or value heads:
    heads(x)    = y + refine(relu(y)),   y = expand(x)          convolutions along D, N -> G N, G N -> G N channels
    features(y) = z + refine(relu(z)),   z = expand(y)          Linear, D -> D_sim, D_sim -> D_sim, one for all heads
    q <- rope(norm(features(heads(q)))),   k <- rope(norm(features(heads(k)))),   v <- heads(v),    each by its own maps
    y = softmax(q k^T / sqrt(D_sim) + causal) v                 G groups of H heads, from G groups of K
    attention output = wo( mean of y over the groups )          parameter-efficient attention aggregation (PEAA)
simulation="projection" is the form of J. Sun, one of the authors, in "The Architecture Stack" (web.stanford.edu/~jksun/
blog/llm-architecture.html): no convolution, values shared, a matrix W per head (`sim_q`, `sim_k`), scalars g
(`sim_gate`). For the groups s = 1 .. G:
    q^{s,h} <- rope(norm(q^h W_q^{s,h})),   k^{s,h} <- rope(norm(k^h W_k^{s,h}))
    y^h = sum_s g^{s,h} softmax(q^{s,h} k^{s,h}^T / sqrt(D_sim) + causal) v^h
Costs per layer: G (G + 1) N^2 kernel + 2 G N parameters for each of q, k, v, 2 (D + D_sim + 2) D_sim for features, and
2 (D_sim - D) norm gains (projection: G (H + K) D D_sim + G H and the gains). Scores cost G D_sim / D times as much,
their use G times (in training G D_sim / D, by padding). The cache grows as both: it holds simulated keys and values,
since making them again for every new token would cost far more.

Changed from gpt.py: Config, Config.__post_init__, Cache, Cache.__init__, attend, Attention.__init__, Attention.forward,
    Model, Model.__init__, Model.init_weights
Equal to gpt.py when: d_sim = d_head, the expand of heads copies them G times, that of features is the identity, and
    every refine is 0; with projections, W_q = W_k = I and the g of a head sum to 1.
Optimizer: the weights of features are matrices inside the blocks, for Muon, their biases go to AdamW at adamw_lr;
    convolutions, W and g go to AdamW at mix_lr, without decay.
Paper and code (github.com/chuanyang-Zheng/SAS):
  - The paper names an MLP and a convolution for both steps; its code convolves heads and maps features. So does this.
  - The code has no positions, no norm of q and k, and no shared key/value heads. Here norm and rotation come last: maps
    of rotated vectors would not score by distance alone. K key/value heads become G K; group s of q reads group s.
  - The code applies wo, with a bias, to each group before the mean: the same, but for the bias.
  - The maps start as PyTorch's Conv1d and Linear, as there.
  - The code gives no sizes. The defaults here (at 124M 12 heads -> 36, 64 features -> 96, kernel 5) are believed to be
    the paper's, and unverified.
  - Sun's equations are reconstructed from the text, which gives no initial values: here g = 1 / G, and W as a Linear.
    Without norm and rotation D_sim > D adds nothing there: the scores are q^h M k^h^T with M = W_q W_k^T of D x D.
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
    n_sim: int = 3                  # simulated heads per head (G)
    d_sim: int | None = None        # features of simulated queries and keys (D_sim); None: 3/2 d_head, made even
    kernel: int = 5                 # width of the convolutions along the features; odd
    simulation: str = "convolution"  # convolution: the paper's; projection: a matrix per simulated head

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
        if self.d_sim is None:
            self.d_sim = 2 * math.ceil(self.d_head * 3 / 4)
        if self.n_sim < 1:
            raise ValueError(f"n_sim must be at least 1, not {self.n_sim}")
        if self.d_sim < self.d_head or self.d_sim % 2:
            raise ValueError(f"d_sim must be even (rotary pairs) and at least d_head {self.d_head}, not {self.d_sim}")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel must be positive and odd, not {self.kernel}")
        if self.simulation not in ("convolution", "projection"):
            raise ValueError(f"simulation must be convolution or projection, not {self.simulation!r}")

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
    """Preallocated simulated keys (B, G K, max_len, D_sim) and values (.., D) of each layer; `pos` () tokens held.

    Model.forward advances it. Its shapes never change, so that a decoding step compiles once.
    """

    def __init__(self, model, batch_size, max_len):
        c, like = model.config, model.embed.weight
        dtype = compute_dtype(like)
        shape = (batch_size, c.n_sim * c.n_kv_head, max_len)
        self.k = [torch.zeros(*shape, c.d_sim, dtype=dtype, device=like.device) for _ in range(c.n_layer)]
        self.v = [torch.zeros(*shape, c.d_head, dtype=dtype, device=like.device) for _ in range(c.n_layer)]
        self.pos = torch.zeros((), dtype=torch.long, device=like.device)

    def append(self, layer, k, v):
        """Stores k, v (B, K, T, D) of the new tokens; returns all keys, values, and their causal mask (T, max_len)."""
        at = self.pos + torch.arange(k.size(2), device=k.device)                     # (T,)
        self.k[layer].index_copy_(2, at, k.type_as(self.k[layer]))
        self.v[layer].index_copy_(2, at, v.type_as(self.v[layer]))
        seen = torch.arange(self.k[layer].size(2), device=k.device) <= at[:, None]   # (T, max_len)
        return self.k[layer], self.v[layer], seen


def attend(q, k, v, layer, cache):
    """Causal attention of q (B, T, G H, D_sim) over k (.. G K, D_sim), v (.. G K, D) and the cache -> (.. G H, D)."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)               # (B, G H or G K, T, D_sim or D)
    gqa = q.size(1) != k.size(1)
    if cache is None:
        wide = F.pad(v, (0, k.size(-1) - v.size(-1)))                               # flash attention wants one width
        y = F.scaled_dot_product_attention(q, k, wide, is_causal=True, enable_gqa=gqa)[..., :v.size(-1)]
    else:
        k, v, seen = cache.append(layer, k, v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=gqa)
    return y.transpose(1, 2)


class SimulatedHeads(nn.Module):
    """G N heads (B, T, G N, D) from N heads x (B, T, N, D): a residual CNN with the heads as channels."""

    def __init__(self, c, n_head):
        super().__init__()
        self.expand = nn.Conv1d(n_head, c.n_sim * n_head, c.kernel, padding="same")
        self.refine = nn.Conv1d(c.n_sim * n_head, c.n_sim * n_head, c.kernel, padding="same")

    def forward(self, x):
        y = self.expand(x.flatten(0, 1))                                            # (B T, G N, D)
        return (y + self.refine(F.relu(y))).unflatten(0, x.shape[:2])


class SimulatedFeatures(nn.Module):
    """(B, T, G N, D_sim) from x (B, T, G N, D): a residual MLP on the features of each head."""

    def __init__(self, c):
        super().__init__()
        self.expand = nn.Linear(c.d_head, c.d_sim)
        self.refine = nn.Linear(c.d_sim, c.d_sim)

    def forward(self, x):
        y = self.expand(x)
        return y + self.refine(F.relu(y))


class ProjectedHeads(nn.Module):
    """(B, T, G N, D_sim) from x (B, T, N, D): a matrix for each of the G heads made of each head."""

    def __init__(self, c, n_head):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(c.n_sim, n_head, c.d_head, c.d_sim))

    def forward(self, x):
        return torch.einsum("btnd,gndf->btgnf", x, self.weight).flatten(2, 3)


class Attention(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.layer, self.n_head, self.n_kv_head, self.d_head = layer, c.n_head, c.n_kv_head, c.d_head
        self.wq = nn.Linear(c.d_model, c.n_head * c.d_head, bias=False)
        self.wk = nn.Linear(c.d_model, c.n_kv_head * c.d_head, bias=False)
        self.wv = nn.Linear(c.d_model, c.n_kv_head * c.d_head, bias=False)
        self.wo = nn.Linear(c.n_head * c.d_head, c.d_model, bias=False)
        self.n_sim, self.sim_v, self.sim_gate = c.n_sim, None, None                 # values shared, groups averaged
        if c.simulation == "convolution":
            self.sim_q = nn.Sequential(SimulatedHeads(c, c.n_head), SimulatedFeatures(c))
            self.sim_k = nn.Sequential(SimulatedHeads(c, c.n_kv_head), SimulatedFeatures(c))
            self.sim_v = SimulatedHeads(c, c.n_kv_head)
        else:
            self.sim_q, self.sim_k = ProjectedHeads(c, c.n_head), ProjectedHeads(c, c.n_kv_head)
            self.sim_gate = nn.Parameter(torch.empty(c.n_sim, c.n_head))
        self.q_norm = RMSNorm(c.d_sim, c.norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.d_sim, c.norm_eps) if c.qk_norm else nn.Identity()
        n_gate = {"none": 0, "elementwise": c.n_head * c.d_head, "headwise": c.n_head}[c.gate]
        self.gate = nn.Linear(c.d_model, n_gate, bias=False) if n_gate else None

    def forward(self, x, rope, cache=None):
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.n_head, self.d_head)                         # (B, T, H, D)
        k = self.wk(x).view(B, T, self.n_kv_head, self.d_head)                      # (B, T, K, D)
        v = self.wv(x).view(B, T, self.n_kv_head, self.d_head)                      # (B, T, K, D)
        q, k = self.sim_q(q), self.sim_k(k)                                         # (B, T, G H or G K, D_sim)
        v = v.repeat(1, 1, self.n_sim, 1) if self.sim_v is None else self.sim_v(v)  # (B, T, G K, D)
        q, k = apply_rope(self.q_norm(q), *rope), apply_rope(self.k_norm(k), *rope)
        y = attend(q, k, v, self.layer, cache).unflatten(2, (self.n_sim, self.n_head))   # (B, T, G, H, D)
        y = y.mean(2) if self.sim_gate is None else (y * self.sim_gate[..., None]).sum(2).type_as(y)    # (B, T, H, D)
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
    micro_tokens = 8192             # of a forward pass unless told otherwise: keeps 32 GiB at ExoFormer's 450M shape

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(c.n_layer))
        self.final_norm = RMSNorm(c.d_model, c.norm_eps)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        if c.tie_embeddings:
            self.head.weight = self.embed.weight
        freqs = c.rope_theta ** (-torch.arange(0, c.d_sim, 2, dtype=torch.float64) / c.d_sim)
        angles = torch.arange(c.max_len, dtype=torch.float64)[:, None, None] * freqs     # (max_len, 1, D_sim/2)
        self.register_buffer("cos", angles.cos().to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("sin", angles.sin().to(torch.get_default_dtype()), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Sets every parameter by the name of the module it is in; a name it does not know is an error."""
        for name, p in self.named_parameters():
            module, last = f".{name}".split(".")[-2:]
            if module.endswith("norm"):
                p.fill_(1.0)
            elif last == "sim_gate":
                p.fill_(1 / self.config.n_sim)
            elif module in ("expand", "refine"):                                    # PyTorch's own: 1 / sqrt(inputs)
                bound = self.get_parameter(f"{name.rpartition('.')[0]}.weight")[0].numel() ** -0.5
                nn.init.uniform_(p, -bound, bound)
            elif module in ("sim_q", "sim_k"):
                nn.init.uniform_(p, -self.config.d_head ** -0.5, self.config.d_head ** -0.5)
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
    G, H, K, D, D_sim = c.n_sim, c.n_head, c.n_kv_head, c.d_head, c.d_sim
    attention, gains = 2 * T * (G * H * (D_sim + D) - 2 * c.d_model), 2 * c.qk_norm * (D_sim - D)
    if c.simulation == "projection":
        maps = G * (H + K) * D * D_sim
        return c.n_layer * (maps + G * H + gains), c.n_layer * (2 * maps + attention + 2 * G * c.d_model), 0
    heads, features = sum(G * (G + 1) * N * N * c.kernel for N in (H, K, K)), (D + D_sim) * D_sim
    biases = 2 * G * (H + 2 * K) + 4 * D_sim
    products = D * heads + G * (H + K) * features
    params, flops = heads + 2 * features + biases + gains, 2 * products + attention + G * c.d_model
    return c.n_layer * params, c.n_layer * flops, 0


@torch.no_grad()
def neutral(model):
    """Sets the parameters for which the model is gpt.py's. ValueError for settings without such values."""
    if model.config.simulation != "convolution" or model.config.d_sim != model.config.d_head:
        raise ValueError("sas copies gpt.py's heads with d_sim = d_head and simulation=convolution alone")
    for module in model.modules():
        if isinstance(module, (SimulatedHeads, SimulatedFeatures)):
            for p in module.parameters():
                p.zero_()
            if isinstance(module, SimulatedHeads):
                nn.init.dirac_(module.expand.weight, groups=model.config.n_sim)
            else:
                nn.init.eye_(module.expand.weight)


if __name__ == "__main__":                      # its size, and one training step on random tokens
    model = Model(Config(vocab_size=256, n_layer=4, n_head=4, d_model=128))
    optimizer, idx = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randint(256, (4, 65))
    model(idx[:, :-1], idx[:, 1:])[1].backward()
    optimizer.step()
    loss = model(idx[:, :-1], idx[:, 1:])[1]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters; loss after a step: {loss:.4f}")
