"""Attention by its definition, in float64: all weights at once, with explicit gradients. Nothing of `lm` is in it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Array = Any
Weigh = Callable[..., tuple[np.ndarray, Sequence[np.ndarray], np.ndarray | float]]


def attend(pairs: Sequence[tuple[Array, Array]], v: Array, do: Array, weigh: Weigh) -> list[np.ndarray]:
    """Computes outputs and gradients of attention with weights w: o_i = Σ_j w_ij v_j / (bias_i + Σ_j w_ij).

    Args:
        pairs: queries [B, L, H, E] and keys [B, M, K, E]; each head of keys and values serves as many query heads.
        v: values, [B, M, K, D].
        do: gradients of the outputs, [B, L, H, D].
        weigh: takes the inner products of each pair, [B, H, L, M]. It returns the weights, their slopes by the inner
            products of each pair, and the bias, which has an axis for keys.

    Returns:
        [outputs, gradients of values, of the bias [B, H, L, 1], and of the queries and the keys of each pair].
    """
    v, do = (np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in (v, do))
    groups = do.shape[1] // v.shape[1]

    def fold(d_BxHxMxE: np.ndarray) -> np.ndarray:
        """Adds up the gradients of query heads that share a head."""
        batch, _, *sizes = d_BxHxMxE.shape
        return d_BxHxMxE.reshape(batch, -1, groups, *sizes).sum(2).transpose(0, 2, 1, 3)

    v = np.repeat(v, groups, axis=1)
    pairs = [[np.asarray(x, np.float64).transpose(0, 2, 1, 3) for x in pair] for pair in pairs]
    pairs = [(q, np.repeat(k, groups, axis=1)) for q, k in pairs]
    w, slopes, bias = weigh(*(q @ k.swapaxes(2, 3) for q, k in pairs))
    total = bias + w.sum(-1, keepdims=True)
    o = w @ v / total
    # d/dw_ij of o_i = Σ w_ij v_j / total_i is (v_j - o_i) / total_i.
    dbias = -(do * o).sum(-1, keepdims=True) / total
    dw = do @ v.swapaxes(2, 3) / total + dbias
    found = [o.transpose(0, 2, 1, 3), fold((w / total).swapaxes(2, 3) @ do), dbias]
    for (q, k), slope in zip(pairs, slopes, strict=True):
        ds = slope * dw
        found += [(ds @ k).transpose(0, 2, 1, 3), fold(ds.swapaxes(2, 3) @ q)]
    return found
