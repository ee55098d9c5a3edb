"""MUDDPythia: multiway dynamic dense connections between the blocks of Pythia.   arXiv:2502.12170, section 3.3

In pythia.py a block reads the last output X_i. Here it has four inputs, for queries, keys, values and the residual,
each a weighted sum of all outputs so far. The weights are made per token from X_i. For block i + 1, i = 1 .. L-1:
    A_i     = gelu( RN(X_i) w1_i ) w2_i + a_i       (B, T, n, S): n = 4 streams, S = i + 1 sources; RN: RMSNorm, no gain
    X^c     = sum_{j=0..i} A_i[c, j] X_j            c in q, k, v, r; X_0 is the embedding, X_j the output of block j
    X_{i+1} = X^r + attn( norm_q(X^q), norm_k(X^k), norm_v(X^v) ) + mlp( norm(X^r) )
Block 1 reads X_0, with one norm before its attention. The head reads one more mixture (r) of X_0 .. X_L. MLP widths
grow linearly from 0.5 to 1.5 d_ff over the depth (ffn_realloc). muddformer.py has the same on gpt.py, with the paper's
ablations.
Costs n S (C + n S + 1) parameters per A_i, two FLOPs per token for each weight of w1 and w2, 2 C n S for the sums,
which read S - 1 earlier outputs (the head's: n = 1, S = L + 1). The norms add 4 C (L-1) parameters.

Changed from pythia.py: Config, Config.__post_init__, Attention.forward, Block.__init__, Block.forward, Model.__init__,
    Model.init_weights, Model.forward
Equal to pythia.py when: ffn_realloc=False, at the start: w2 = 0 and a_i = 1 for j = i, else 0.
Optimizer: w1, w2 and a go to AdamW at mix_lr, also beside Muon; they are not in the blocks.
Paper and code (github.com/Caiyun-AI/MUDDFormer):
    - The paper says that all but the connections is Pythia's; the released weights have QK norm, which is not here.
    - As in the code, the MLP reads the mixture r, and the first block has one norm for q, k and v.
    - The code makes w1_i 64 (n S // 64 + 1) wide, the last 64 (4 n S // 64 + 1), and MLPs a multiple of 128. Here it is
      n S, also for the last, where appendix B has 4 (L + 1), and a multiple of 64.
    - The code's norm_eps is 1e-5, in all norms; here 1e-6 unless set.
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
    d_ff: int | None = None         # hidden width of the MLP; None: 4 d_model
    max_len: int = 2048             # longest sequence, in training and in generation
    rope_theta: float = 10000.0     # base of the rotary frequencies, on a quarter of each head
    norm_eps: float = 1e-6          # added to the variance in every LayerNorm
    tie_embeddings: bool = False    # head and embedding share one matrix
    z_loss: float = 0.0             # weight of mean(logsumexp(logits)^2), in training only
    ffn_realloc: bool = True        # MLP widths from 0.5 to 1.5 d_ff over the depth

    def __post_init__(self):
        if self.n_kv_head is None:
            self.n_kv_head = self.n_head
        if self.d_ff is None:
            self.d_ff = 4 * self.d_model
        for name in ("vocab_size", "n_layer", "n_head", "n_kv_head", "d_model", "d_ff", "max_len", "rope_theta"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, not {getattr(self, name)}")
        if self.d_model % (8 * self.n_head):
            raise ValueError(f"d_model {self.d_model} must be a multiple of 8 n_head {self.n_head} (rotary pairs)")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head {self.n_head} must be a multiple of n_kv_head {self.n_kv_head}")
        if self.ffn_realloc and self.n_layer < 2:
            raise ValueError("ffn_realloc needs at least 2 layers")

    @property
    def d_head(self):
        return self.d_model // self.n_head


def apply_rope(x, cos, sin):
    """Rotates the pairs (x[i], x[i + R/2]) of x (B, T, H, D), i < R/2, by the angles in cos, sin (T, 1, R/2)."""
    n = cos.size(-1)
    x1, x2, rest = x.split((n, n, x.size(-1) - 2 * n), dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest), dim=-1).type_as(x)


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
        self.wq = nn.Linear(c.d_model, c.n_head * c.d_head)
        self.wk = nn.Linear(c.d_model, c.n_kv_head * c.d_head)
        self.wv = nn.Linear(c.d_model, c.n_kv_head * c.d_head)
        self.wo = nn.Linear(c.n_head * c.d_head, c.d_model)

    def forward(self, x_q, x_k, x_v, rope, cache=None):
        B, T, _ = x_q.shape
        q = self.wq(x_q).view(B, T, self.n_head, self.d_head)                       # (B, T, H, D)
        k = self.wk(x_k).view(B, T, self.n_kv_head, self.d_head)                    # (B, T, K, D)
        v = self.wv(x_v).view(B, T, self.n_kv_head, self.d_head)                    # (B, T, K, D)
        q, k = apply_rope(q, *rope), apply_rope(k, *rope)
        y = attend(q, k, v, self.layer, cache)                                      # (B, T, H, D)
        return self.wo(y.reshape(B, T, -1))                                         # (B, T, C)


class MLP(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w_up = nn.Linear(d_model, d_ff)
        self.w_down = nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.w_down(F.gelu(self.w_up(x)))


def block_width(c, layer):
    """Hidden width of the MLP in block `layer`, counting from 0."""
    return 64 * max(1, round(c.d_ff * (0.5 + layer / (c.n_layer - 1)) / 64)) if c.ffn_realloc else c.d_ff


class DynamicWeights(nn.Module):
    """A (B, T, n, S): how much of each of S sources goes into each of n streams."""

    def __init__(self, c, n, S):
        super().__init__()
        self.shape, self.eps = (n, S), c.norm_eps
        self.w1 = nn.Linear(c.d_model, n * S, bias=False)
        self.w2 = nn.Linear(n * S, n * S, bias=False)
        self.a = nn.Parameter(torch.empty(n, S))

    def forward(self, x):
        A = self.a + self.w2(F.gelu(self.w1(F.rms_norm(x, x.shape[-1:], eps=self.eps)))).unflatten(-1, self.shape)
        return A.type_as(x)                                                         # else the states would become fp32


def mix_sources(A, sources):
    """X^c = sum_j A[.., c, j] X_j: A (B, T, n, S) or (n, S), S sources X_j (B, T, C) -> n streams X^c (B, T, C)."""
    return [sum(a[..., None] * x for a, x in zip(row.unbind(-1), sources)) for row in A.unbind(-2)]


class DenseConnections(nn.Module):
    """What the next block reads, (B, T, C) for each of `streams`, from the outputs X_0 .. X_i of the earlier ones."""

    def __init__(self, c, i, streams):
        super().__init__()
        self.streams, self.sources = streams, list(range(i + 1))                    # for probes/
        self.weights = DynamicWeights(c, len(streams), i + 1)

    def forward(self, outputs):
        return mix_sources(self.weights(outputs[-1]), outputs)


class Block(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.q_in_norm = nn.LayerNorm(c.d_model, c.norm_eps)                        # block 1 has one input and one norm
        self.k_in_norm = nn.LayerNorm(c.d_model, c.norm_eps) if layer > 0 else self.q_in_norm
        self.v_in_norm = nn.LayerNorm(c.d_model, c.norm_eps) if layer > 0 else self.q_in_norm
        self.attn = Attention(c, layer)
        self.mlp_norm = nn.LayerNorm(c.d_model, c.norm_eps)
        self.mlp = MLP(c.d_model, block_width(c, layer))

    def forward(self, x_q, x_k, x_v, x, rope, cache=None):
        attn = self.attn(self.q_in_norm(x_q), self.k_in_norm(x_k), self.v_in_norm(x_v), rope, cache)
        return x + attn + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(c.n_layer))
        self.aggregate = nn.ModuleDict({str(i): DenseConnections(c, i, "qkvr" if i < c.n_layer else "r")
                                        for i in range(1, c.n_layer + 1)})          # i: after block i, counting from 1
        self.final_norm = nn.LayerNorm(c.d_model, c.norm_eps)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        if c.tie_embeddings:
            self.head.weight = self.embed.weight
        R = c.d_head // 4
        freqs = c.rope_theta ** (-torch.arange(0, R, 2, dtype=torch.float64) / R)
        angles = torch.arange(c.max_len, dtype=torch.float64)[:, None, None] * freqs     # (max_len, 1, R/2)
        self.register_buffer("cos", angles.cos().to(torch.get_default_dtype()), persistent=False)
        self.register_buffer("sin", angles.sin().to(torch.get_default_dtype()), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Sets every parameter by the name of the module it is in; a name it does not know is an error."""
        c = self.config
        for name, p in self.named_parameters():
            module, kind = f".{name}".split(".")[-2:]
            if kind == "bias" or module == "w2":
                p.zero_()
            elif kind == "a":
                p.zero_()
                p[:, -1] = 1.0                                                      # X^c = X_i
            elif module == "w1":
                nn.init.normal_(p, std=c.d_model ** -0.5)
            elif module.endswith("norm"):
                p.fill_(1.0)
            elif module in ("wo", "w_down"):
                nn.init.normal_(p, std=2 / (c.n_layer * math.sqrt(c.d_model)))
            elif module in ("embed", "wq", "wk", "wv", "w_up", "head"):
                nn.init.normal_(p, std=math.sqrt(2 / (5 * c.d_model)))
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
        outputs, streams = [x], (x, x, x, x)
        for block, aggregate in zip(self.blocks, self.aggregate.values()):
            outputs.append(block(*streams, rope, cache))
            streams = aggregate(outputs)
        return self.output(streams[-1], targets, cache)

    def rope(self, T, cache):
        """cos, sin (T, 1, R/2) of the next T positions."""
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
    """(parameters, forward FLOPs per token, numbers read per token) more than pythia.py's, in a context of T tokens."""
    C, L = c.d_model, c.n_layer
    sizes = [4 * (i + 1) for i in range(1, L)] + [L + 1]                            # n S of A_1 .. A_L
    weights = sum(C * size + size * size for size in sizes)                         # w1 and w2
    wider = sum(block_width(c, layer) - c.d_ff for layer in range(L))               # of all MLPs: 0 but for rounding
    return (weights + sum(sizes) + 4 * C * (L - 1) + (2 * C + 1) * wider,
            2 * (weights + C * sum(sizes) + 2 * C * wider), sum(range(1, L + 1)) * C)


def neutral(model):
    """Nothing to set. ValueError for settings that are never the baseline's."""
    if model.config.ffn_realloc:
        raise ValueError("ffn_realloc gives the MLPs other widths than pythia.py's")


if __name__ == "__main__":                      # its size, and one training step on random tokens
    model = Model(Config(vocab_size=256, n_layer=4, n_head=4, d_model=128))
    optimizer, idx = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.randint(256, (4, 65))
    model(idx[:, :-1], idx[:, 1:])[1].backward()
    optimizer.step()
    loss = model(idx[:, :-1], idx[:, 1:])[1]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters; loss after a step: {loss:.4f}")
