"""What denseformer.py costs, when it is gpt.py, and what to watch in a trained one."""
import torch


def costs(c, T):
    """A parameter, a product and a sum for each source of each Y_i; all sources but X_i are read once more."""
    earlier = [i // c.dilation for i in range(c.period, c.n_layer + 1, c.period)]   # sources of Y_i beside X_i
    n = sum(earlier) + len(earlier)
    return n, 2 * n * c.d_model, sum(earlier) * c.d_model


def neutral(model):
    """Nothing to set."""


def stats(model, idx):
    alphas = [average.alpha for average in model.average.values()]
    return {"on_last": [a[-1].item() for a in alphas],                          # weight of X_i; 1 at the start
            "on_earlier": [a[:-1].abs().sum().item() for a in alphas]}


def depth_matrix(model, record):
    """With X_i and what blocks read as sums of outputs: rows of n numbers, one per output."""
    n, like = len(record.reads), record.outputs[0]
    eye, A = torch.eye(n, dtype=like.dtype, device=like.device), like.new_zeros(n, n)
    X = [eye[0]]
    A[0] = eye[0]
    for i in range(1, len(model.blocks) + 1):
        A[2 * i - 1] = A[2 * i - 2] + eye[2 * i - 1]
        X.append(A[2 * i - 1] + eye[2 * i])
        A[2 * i] = X[i]
        if str(i) in model.average:
            average = model.average[str(i)]
            A[2 * i] = sum(a * X[j] for a, j in zip(average.alpha, average.sources))
    return {"r": A.expand(*like.shape[:2], n, n)}
