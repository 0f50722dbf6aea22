"""What the kernels of exact attention can mask."""

import jax


def is_whole(q: jax.Array, k: jax.Array, q_offset: jax.Array | int, k_start: jax.Array | int) -> bool:
    """Whether queries and keys are those of the same tokens, and no key is hidden because of its index alone."""
    return q.shape[1] == k.shape[1] and all(isinstance(n, int) and n == 0 for n in (q_offset, k_start))
