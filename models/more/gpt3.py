"""GPT-3: the Transformer of 2019/20 that papers call "the original", as a second baseline.   arXiv:2005.14165

It has a LayerNorm before each sublayer, learned absolute positions, and a GELU MLP four times as wide as the stream.
Every norm and every linear map but the head has a bias. For tokens idx (B, T):
    x  = embed[idx] + pos_embed[0 .. T-1]
    x <- x + wo( softmax( q k^T / sqrt(d_head) + causal ) v ),   q, k, v = wq, wk, wv( norm(x) )
    x <- x + w_down( gelu( w_up( norm(x) ) ) ),   gelu in its tanh form
    logits = head( norm(x) )
Weights start as N(0, 0.02), those of wo and w_down as N(0, 0.02 / sqrt(2 L)), and biases at zero.
GPT-2 is tie_embeddings=True. The "Transformer" of MUDDFormer's scaling runs is untied.

Changed from gpt.py: Config, Config.__post_init__, RMSNorm, RMSNorm.__init__, RMSNorm.forward, apply_rope,
    Attention.__init__, Attention.forward, MLP.__init__, MLP.forward, Block.__init__, Block.forward, Model.__init__,
    Model.init_weights, Model.forward, Model.rope
Optimizer: as gpt.py; Muon trains the matrices of the blocks, AdamW embeddings, positions, norms, biases and the head.
Paper and code: GPT-3 alternates full with banded sparse attention. The papers that compare with it use full attention.
GPT-2's released norms have an eps of 1e-5; here norm_eps is 1e-6, as in every baseline. Unlike GPT-2's paper, nanoGPT
and Hugging Face, its code (github.com/openai/gpt-2) does not scale wo and w_down. It starts positions at N(0, 0.01).
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
    max_len: int = 2048             # longest sequence, in training and in generation; each position is learned
    norm_eps: float = 1e-6          # added to the variance in every LayerNorm
    tie_embeddings: bool = False    # head and embedding share one matrix
    z_loss: float = 0.0             # weight of the penalty mean(logsumexp(logits)^2), in training only

    def __post_init__(self):
        self.n_kv_head = self.n_head if self.n_kv_head is None else self.n_kv_head
        self.d_ff = 4 * self.d_model if self.d_ff is None else self.d_ff
        if self.d_model % self.n_head or self.n_head % self.n_kv_head:
            raise ValueError(f"d_model {self.d_model} must be a multiple of n_head {self.n_head}, "
                             f"and that a multiple of n_kv_head {self.n_kv_head}")

    @property
    def d_head(self):
        return self.d_model // self.n_head


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
        self.wq = nn.Linear(c.d_model, c.n_head * c.d_head)
        self.wk = nn.Linear(c.d_model, c.n_kv_head * c.d_head)
        self.wv = nn.Linear(c.d_model, c.n_kv_head * c.d_head)
        self.wo = nn.Linear(c.n_head * c.d_head, c.d_model)

    def forward(self, x, cache=None):
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, self.n_head, self.d_head)                         # (B, T, H, D)
        k = self.wk(x).view(B, T, self.n_kv_head, self.d_head)                      # (B, T, K, D)
        v = self.wv(x).view(B, T, self.n_kv_head, self.d_head)                      # (B, T, K, D)
        y = attend(q, k, v, self.layer, cache)                                      # (B, T, H, D)
        return self.wo(y.reshape(B, T, -1))                                         # (B, T, C)


class MLP(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w_up = nn.Linear(d_model, d_ff)
        self.w_down = nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.w_down(F.gelu(self.w_up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, c, layer):
        super().__init__()
        self.attn_norm = nn.LayerNorm(c.d_model, c.norm_eps)
        self.attn = Attention(c, layer)
        self.mlp_norm = nn.LayerNorm(c.d_model, c.norm_eps)
        self.mlp = MLP(c.d_model, c.d_ff)

    def forward(self, x, cache=None):
        x = x + self.attn(self.attn_norm(x), cache)
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = c = config
        self.embed = nn.Embedding(c.vocab_size, c.d_model)
        self.pos_embed = nn.Embedding(c.max_len, c.d_model)
        self.blocks = nn.ModuleList(Block(c, layer) for layer in range(c.n_layer))
        self.final_norm = nn.LayerNorm(c.d_model, c.norm_eps)
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        if c.tie_embeddings:
            self.head.weight = self.embed.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """Initialises every parameter by the name of its module; an unknown name is an error."""
        for name, p in self.named_parameters():
            module = name.split(".")[-2] if name.endswith(".weight") else ""       # "wq" of "blocks.0.attn.wq.weight"
            if name.endswith(".bias"):
                p.zero_()
            elif module.endswith("norm"):
                p.fill_(1.0)
            elif module in ("wo", "w_down"):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * self.config.n_layer))    # 2 L of them add up
            elif module in ("embed", "pos_embed", "wq", "wk", "wv", "w_up", "head"):
                nn.init.normal_(p, std=0.02)
            else:
                raise ValueError(f"init_weights gives {name} no value")

    def forward(self, idx, targets=None, cache=None):
        """Logits (B, T, V) of the next token, and the loss () if targets are given, else None.

        idx, targets: int64 (B, T); targets of -1 are ignored. cache: a Cache that holds what came before idx.
        The loss is the mean cross-entropy in nats per token; training adds z_loss * mean(logsumexp(logits)^2).
        With targets the logits carry no gradient. ValueError if T exceeds max_len.
        """
        x = self.embed(idx) + self.pos_embed(self.positions(idx.size(1), cache))
        x = x.to(compute_dtype(self.embed.weight))                                  # (B, T, C)
        for block in self.blocks:
            x = block(x, cache)
        return self.output(x, targets, cache)

    def positions(self, T, cache):
        """Positions (T,) of the next T tokens."""
        if T > self.config.max_len:
            raise ValueError(f"{T} tokens are more than max_len {self.config.max_len}")
        at = torch.arange(T, device=self.embed.weight.device)
        return at if cache is None else cache.pos + at

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
