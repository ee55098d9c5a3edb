"""ExoFormer: every layer mixes an anchor into its queries, keys, values and gate.   arXiv:2601.08131

Anchors are attention projections that all layers share, made once per token. For S in {Q, K, V, G}, where G is the
output gate before its sigmoid, layer n forms, before QK norm and rotation (Eq. 1),
    S_n  <-  lambda_anchor_n * norm_S(S_anc) + lambda_self_n * S_n
`anchor` says where S_anc comes from:
    external     [Q_anc K_anc V_anc G_anc] = x_0 W_anc from the raw embedding x_0 (Eq. 5); all layers mix  (ExoFormer)
    first_layer  the first layer's own projections; the later layers mix                               (NuResFormer)
mixing="dynamic" multiplies each of the lambdas (two per stream) by a gamma of its own, one number per token; all gammas
are sigmoid(gelu(norm(x) W_1) W_2 + b) (Eq. 6, 7). Below, W_anc is `proj`, W_1 `mix_in`, W_2 and b `mix_out`.
`granularity` is the shape of a lambda: elementwise (heads, D), headwise (heads, 1) or scalar (1, 1). `mix_streams` are
the S that mix, `norm_streams` the anchors that get norm_S, an RMSNorm per head. The paper's rows: all four and all
normed (default); norm_streams="none" (No Norm); norm_streams="qk" (Only Q/K Norms); mix_streams="vg" with
norm_streams="none" (No Norm, {V,G}).
Costs (all four streams, K = H) 4 C^2 + 4 D parameters and 8 C^2 FLOPs per token for the anchors; in each layer 8
lambdas of C, H or 1 numbers, 12 C FLOPs and 4 C numbers read; dynamic also 16 C + 136 parameters and 32 C + 256 FLOPs.

Changed from gpt.py: Config, Config.__post_init__, Attention.__init__, Attention.forward, Block.forward, Model,
    Model.__init__, Model.init_weights, Model.forward
Equal to gpt.py (gated) when: lambda_anchor = 0 and lambda_self = 1 (static) or 2 (dynamic, at its initial gamma = 1/2).
Optimizer: W_anc and the dynamic mixing matrices go to Muon, as in the authors' code; every lambda to AdamW at mix_lr,
    b to AdamW at adamw_lr.
Paper and code (github.com/jon123boss/ExoFormer):
  - The code masks the other documents of a window in training; the paper does not say so. Here there is no mask.
  - W_2 and b start at zero in the paper, as here; in the code a later init of all matrices overwrites W_2's zeros.
  - In a layer the code has one matrix for Q, K, V and G, and one for w_gate and w_up, each of which Muon orthogonalises
    as one; here they are separate. W_anc is one in both.
  - Only Q/K Norms norms no anchor in its released code (oldmodels/model1.py); here those of Q and K, as in table 2.
  - NuResFormer's code takes Q and K anchors after the first layer's QK norm; here, as in the paper, each anchor is the
    raw projection with a norm of its own.
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
    gate: str = "elementwise"       # gated attention: none | elementwise; none needs mix_streams without g
    zero_init: bool = True          # wo, w_down and an untied head start at zero; False: N(0, 0.02) as all others
    anchor: str = "external"        # external (ExoFormer) | first_layer (NuResFormer)
    mixing: str = "static"          # static | dynamic
    granularity: str = "elementwise"  # of the lambdas: elementwise | headwise | scalar
    mix_streams: str = "qkvg"       # the streams that mix in their anchor
    norm_streams: str = "all"       # the streams whose anchor is normalised: all, none, or some of mix_streams

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
        self.norm_streams = {"all": self.mix_streams, "none": ""}.get(self.norm_streams, self.norm_streams)
        for name, allowed in dict(gate="none elementwise", anchor="external first_layer", mixing="static dynamic",
                                  granularity="elementwise headwise scalar").items():
            if getattr(self, name) not in allowed.split():
                raise ValueError(f"{name} must be one of {allowed}, not {getattr(self, name)!r}")
        streams = "qkv" if self.gate == "none" else "qkvg"
        if not self.mix_streams or sorted(self.mix_streams) != sorted(set(self.mix_streams) & set(streams)):
            raise ValueError(f"mix_streams must be some of {streams} (g needs gate=elementwise), "
                             f"not {self.mix_streams!r}")
        if sorted(self.norm_streams) != sorted(set(self.norm_streams) & set(self.mix_streams)):
            raise ValueError(f"norm_streams must be some of mix_streams {self.mix_streams}, not {self.norm_streams!r}")
        self.mix_streams = "".join(s for s in "qkvg" if s in self.mix_streams)      # one order, for gamma and W_anc
        if self.anchor == "first_layer" and self.n_layer < 2:
            raise ValueError("anchor=first_layer needs at least 2 layers")

    @property
    def d_head(self):
        return self.d_model // self.n_head

    @property
    def stream_heads(self):
        """{stream: its number of heads} of the streams that mix."""
        return {s: self.n_head if s in "qg" else self.n_kv_head for s in self.mix_streams}


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


class Anchor(nn.Module):
    """The anchors {stream: (B, T, heads, D)}, normalised where asked."""

    def __init__(self, c):
        super().__init__()
        self.stream_heads = c.stream_heads
        if c.anchor == "external":
            self.proj = nn.Linear(c.d_model, sum(c.stream_heads.values()) * c.d_head, bias=False)
        self.norms = nn.ModuleDict({f"{s}_norm": RMSNorm(c.d_head, c.norm_eps) if s in c.norm_streams else nn.Identity()
                                    for s in c.mix_streams})

    def project(self, x_0):
        """The streams {stream: (B, T, heads, D)} that W_anc makes of x_0 (B, T, C)."""
        numbers = list(self.stream_heads.values())
        heads = self.proj(x_0).unflatten(-1, (sum(numbers), -1))                    # (B, T, all heads, D)
        return dict(zip(self.stream_heads, heads.split(numbers, dim=2)))

    def forward(self, streams):
        """The anchors: W_anc's or the first layer's streams, with their norms."""
        return {s: self.norms[f"{s}_norm"](streams[s]) for s in self.stream_heads}


class Gamma(nn.Module):
    """gamma (B, T, 2 per stream): how much of anchor and own projection each token takes, from x (B, T, C)."""

    def __init__(self, d_model, n):
        super().__init__()
        self.mix_in = nn.Linear(d_model, 16, bias=False)
        self.mix_out = nn.Linear(16, n)

    def forward(self, x):
        return self.mix_out(F.gelu(self.mix_in(x))).sigmoid()


class Mix(nn.Module):
    """S  <-  lambda_anchor * S_anc + lambda_self * S for each mixed stream S (B, T, heads, D)."""

    def __init__(self, c):
        super().__init__()
        self.mix_streams, self.d_head = c.mix_streams, c.d_head
        shapes = {s: dict(elementwise=(n, c.d_head), headwise=(n, 1), scalar=(1, 1)) for s, n in c.stream_heads.items()}
        self.lambda_anchor = nn.ParameterDict({s: torch.empty(shapes[s][c.granularity]) for s in shapes})
        self.lambda_self = nn.ParameterDict({s: torch.empty(shapes[s][c.granularity]) for s in shapes})
        self.gamma = Gamma(c.d_model, 2 * len(shapes)) if c.mixing == "dynamic" else None

    def fold(self, s, weight):
        """lambda_self * W of stream s (heads D, C): (lambda_self * W) x is lambda_self * (W x) with fewer bytes."""
        return (self.lambda_self[s][..., None] * weight.unflatten(0, (-1, self.d_head))).flatten(0, 1)

    def forward(self, x, streams, anchors):
        """x (B, T, C): the layer's normalised input. streams {stream: (B, T, heads, D)}: lambda_self is in them."""
        gamma = None if self.gamma is None else self.gamma(x)[..., None, None].unbind(2)    # 2 per stream, (B, T, 1, 1)
        mixed = dict(streams)
        for i, s in enumerate(self.mix_streams):                                    # a ParameterDict would sort them
            a, lambda_S = self.lambda_anchor[s].type_as(x), streams[s]              # lambda_self * S, by fold()
            if gamma is not None:
                a, lambda_S = gamma[2 * i] * a, gamma[2 * i + 1] * lambda_S
            mixed[s] = a * anchors[s] + lambda_S
        return mixed


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
        self.mix = Mix(c) if layer > 0 or c.anchor == "external" else None

    def project(self, x):
        """The streams of x (B, T, C), {stream: (B, T, H or K, D)}; those that mix are times lambda_self already."""
        weights = {s: w.weight for s, w in zip("qkvg", (self.wq, self.wk, self.wv, self.gate)) if w is not None}
        if self.mix is not None:
            weights |= {s: self.mix.fold(s, weights[s]) for s in self.mix.mix_streams}
        return {s: F.linear(x, weight).unflatten(-1, (-1, self.d_head)) for s, weight in weights.items()}

    def forward(self, x, rope, cache=None, anchors=None):
        B, T, _ = x.shape
        streams = self.project(x)
        mixed = streams if self.mix is None else self.mix(x, streams, anchors)
        q, k = apply_rope(self.q_norm(mixed["q"]), *rope), apply_rope(self.k_norm(mixed["k"]), *rope)
        y = attend(q, k, mixed["v"], self.layer, cache)                             # (B, T, H, D)
        if self.gate is not None:
            y = y * mixed["g"].sigmoid()
        return self.wo(y.reshape(B, T, -1)), streams                                # (B, T, C), the streams


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

    def forward(self, x, rope, cache=None, anchors=None):
        y, streams = self.attn(self.attn_norm(x), rope, cache, anchors)
        x = x + y
        return x + self.mlp(self.mlp_norm(x)), streams


class Model(nn.Module):
    muon_modules = ("blocks", "anchor")

    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(c.n_layer))
        self.anchor = Anchor(c)
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
            if module in ("lambda_anchor", "lambda_self"):
                p.fill_(0.5 if self.config.mixing == "static" else 1.0)             # gamma starts at 0.5
            elif module == "mix_out":
                p.zero_()
            elif module.endswith("norm"):
                p.fill_(1.0)
            elif module in ("wo", "w_down", "head") and self.config.zero_init:
                p.zero_()
            elif module in ("embed", "proj", "mix_in", "wq", "wk", "wv", "wo", "gate", "w_gate", "w_up", "w_down",
                            "head"):
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
        anchors = self.anchor(self.anchor.project(x)) if self.config.anchor == "external" else None
        for i, block in enumerate(self.blocks):
            x, streams = block(x, rope, cache, anchors)
            if i == 0 and anchors is None:
                anchors = self.anchor(streams)
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
    """(extra parameters, extra forward FLOPs per token, numbers read per token) against gpt.py; T: the context."""
    width, n_streams = sum(c.stream_heads.values()) * c.d_head, len(c.stream_heads)
    lambdas = 2 * {"elementwise": width, "headwise": width // c.d_head, "scalar": n_streams}[c.granularity]
    proj = c.d_model * width if c.anchor == "external" else 0
    gamma, bias = (16 * (c.d_model + 2 * n_streams), 2 * n_streams) if c.mixing == "dynamic" else (0, 0)
    n = c.n_layer - (c.anchor == "first_layer")                                     # layers that mix
    params = proj + len(c.norm_streams) * c.d_head + n * (lambdas + gamma + bias)
    return params, 2 * proj + n * (3 * width + 2 * gamma), n * width


@torch.no_grad()
def neutral(model):
    """Sets the parameters for which the model is gpt.py's. ValueError for settings without such values."""
    for block in model.blocks[model.config.anchor == "first_layer":]:
        for s in model.config.mix_streams:
            block.attn.mix.lambda_anchor[s].zero_()
            block.attn.mix.lambda_self[s].fill_(2.0 if model.config.mixing == "dynamic" else 1.0)


if __name__ == "__main__":                      # its size, and one training step on random tokens
    model = Model(Config(vocab_size=256, n_layer=4, n_head=4, d_model=128))
    optimizer, idx = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randint(256, (4, 65))
    model(idx[:, :-1], idx[:, 1:])[1].backward()
    optimizer.step()
    loss = model(idx[:, :-1], idx[:, 1:])[1]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters; loss after a step: {loss:.4f}")
