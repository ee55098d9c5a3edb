"""depth_attention.py against its equations in float64, arXiv:2606.05014."""
import torch
from reference import equations, float64, gpt, norm, softmax  # noqa: F401  (float64: autouse)


def depth_attention(p, c, x):
    """Without rotation: a query and a key of one position are rotated alike."""
    stored, stride = [], c.stride or c.n_layer // 2                                 # [layer][token][head]: (key, value)

    def mix(n, a, S):
        at, group, own = f"blocks.{n}.attn", c.n_head // c.n_kv_head, []

        def ready(s, u):
            return norm(p, f"{at}.{s}_norm", u, c) if c.qk_norm else u

        for t in range(len(a)):
            own.append([])
            for h in range(c.n_kv_head):
                q = sum(ready("q", u) for u in S["q"][t][h * group:(h + 1) * group]) / group
                read = [stored[j][t][h] for j in range(0, n, stride)] + [(ready("k", S["k"][t][h]), S["v"][t][h])]
                weights = softmax([torch.dot(q, k) / len(q) ** 0.5 for k, _ in read])
                own[t].append((read[-1][0], sum(w * v for w, (_, v) in zip(weights, read, strict=True))))
        stored.append(own)
        return {**S, "v": [[v for _, v in token] for token in own]}

    return gpt(p, c, x, mix)


test_equations = equations(depth_attention, "depth_attention", [
    dict(), dict(n_layer=5, stride=1, n_kv_head=1), dict(n_layer=5, qk_norm=False, stride=None),
    dict(stride=3, n_kv_head=4, gate="elementwise"), dict(tie_embeddings=True, gate="headwise")], n_layer=4, stride=2)
