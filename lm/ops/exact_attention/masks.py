"""What the kernels of exact attention can mask."""

from typing import Any

import jax


def is_whole(q: jax.Array, k: jax.Array, q_offset: jax.Array | int, k_start: jax.Array | int) -> bool:
    """Whether queries and keys are those of the same tokens, and no key is hidden because of its index alone."""
    return q.shape[1] == k.shape[1] and all(isinstance(n, int) and n == 0 for n in (q_offset, k_start))


def beyond_causal(
    q: jax.Array,
    k: jax.Array,
    *,
    causal: bool = True,
    q_offset: jax.Array | int = 0,
    k_start: jax.Array | int = 0,
    log_decay_BxMxK: jax.Array | None = None,
    parts: int = 1,
    **rest: Any,
) -> str | None:
    """Why a kernel that has the causal mask of whole windows, and no decay, cannot compute a call, or None; if `parts`
    are several, queries are one of so many of the window, and it has that mask, too."""
    if not causal:
        return 'takes the causal mask only'
    if log_decay_BxMxK is not None:
        return 'has no decay'
    if parts == 1 and not is_whole(q, k, q_offset, k_start):
        return 'takes as many queries as keys'
    return None
