"""Attention and its gradients in double precision with NumPy, and the bound of docs/method.md: what the Python tests judge by."""
import numpy as np

ROWS = 64  # of a block that has a bound of its own


def normal(rng, *shape):
    return rng.standard_normal(shape)


def to_bf16(x):
    """x rounded to bfloat16, by the definition: 8 bits of significand, to nearest, ties to even. float64 in and out."""
    x = np.asarray(x, np.float64)
    step = np.exp2(np.floor(np.log2(np.where(x == 0, 1, np.abs(x)))) - 7)
    return np.where(x == 0, 0, np.rint(x / step) * step)


def rounding(element):
    """The function that rounds float64 to the element type and back."""
    return to_bf16 if element == "bf16" else lambda x: np.asarray(x).astype(np.float16).astype(np.float64)


def per_query_head(x, heads):
    """K or V with a head for each query head."""
    return np.repeat(x.astype(np.float64), heads // x.shape[1], axis=1)


def probabilities(q, k, causal, scale):
    """P and L: (b, h, nq, nk), (b, h, nq)."""
    heads, (nq, nk) = q.shape[1], (q.shape[2], k.shape[2])
    scores = scale * (q.astype(np.float64) @ per_query_head(k, heads).swapaxes(2, 3))
    if causal:
        scores[..., np.arange(nk)[None, :] > np.arange(nq)[:, None] + nk - nq] = -np.inf
    most = scores.max(axis=3, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(most), most, 0)[..., None])
    sums = weights.sum(axis=3)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(sums[..., None] > 0, weights / sums[..., None], 0), most + np.log(sums)


def forward(q, k, v, causal, scale, element):
    """(O exact, O with P and O rounded, L)."""
    p, lse = probabilities(q, k, causal, scale)
    values, to16 = per_query_head(v, q.shape[1]), rounding(element)
    return p @ values, to16(to16(p) @ values), lse


def over_group(x, kv_heads):
    """A gradient by every query head's K or V, summed over the query heads of a KV head."""
    return x.reshape(x.shape[0], kv_heads, -1, *x.shape[2:]).sum(axis=2)


def backward(d_o, q, k, v, o, causal, scale, element):
    """For dQ, dK, dV: (exact, rounded, what fp32 may cost in dP - D by docs/method.md)."""
    p, _ = probabilities(q, k, causal, scale)
    heads, kv_heads, to16 = q.shape[1], k.shape[1], rounding(element)
    keys, values = per_query_head(k, heads), per_query_head(v, heads)
    d_o, o, queries = (x.astype(np.float64) for x in (d_o, o, q))
    d_s = p * (d_o @ values.swapaxes(2, 3) - (d_o * o).sum(axis=3, keepdims=True))

    def gradients(p, d_s):
        return (scale * (d_s @ keys), over_group(scale * (d_s.swapaxes(2, 3) @ queries), kv_heads),
                over_group(p.swapaxes(2, 3) @ d_o, kv_heads))

    norm = lambda x: np.sqrt((x * x).sum(axis=3))
    cost = p * 2.0**-20 * norm(d_o)[..., None] * (norm(values)[:, :, None, :] + norm(o)[..., None]) * abs(scale)
    of_q = cost.sum(axis=3, keepdims=True) * np.abs(keys).max(initial=0)
    of_k = over_group(cost.sum(axis=2)[..., None], kv_heads) * np.abs(queries).max(initial=0)
    exact, rounded = gradients(p, d_s), gradients(to16(p), to16(d_s))
    return [(x, to16(r), c) for x, r, c in zip(exact, rounded, (of_q, of_k, np.zeros((1, 1, 1, 1))))]


def worst(got, exact, rounded, element, cost=None):
    """The largest |got - exact| as a share of the bound, over the blocks of ROWS rows; NaN counts as infinite. Shapes
    (b, h, n, d); `cost` is added to the bound."""
    bits, smallest = (7, -126) if element == "bf16" else (10, -14)
    share = 0.0
    for at in np.ndindex(exact.shape[:2]):
        for i in range(0, exact.shape[2], ROWS):
            rows = (*at, slice(i, i + ROWS))
            most = np.abs(exact[rows]).max()
            ulp = 2.0 ** (max(smallest, np.floor(np.log2(most)) if most > 0 else smallest) - bits)
            bound = 2 * np.abs(rounded[rows] - exact[rows]).max() + 2 * ulp
            bound += 0 if cost is None else np.broadcast_to(cost, (*exact.shape[:3], 1))[rows].max()
            error = np.abs(got[rows].astype(np.float64) - exact[rows]).max()
            share = max(share, error / bound) if error >= 0 else np.inf
    return share
