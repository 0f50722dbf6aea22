"""What the implementations of the rotation share."""

import dataclasses

import jax

EPSILON = 1e-5
"""Of the layer normalizations."""

Rotation = tuple[jax.Array, jax.Array]
"""Cosine and sine of the rotary angles, float32: [L, 1, C/2], or [B, L, 1, C/2] where rows have positions of their
own."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadNorms:
    """The layer normalizations of queries and of keys, each shared by its heads.

    Attributes:
        q_scale, q_bias, k_scale, k_bias: [C].
        dtype: of the results; None: that of what is normalized.
    """

    q_scale: jax.Array
    q_bias: jax.Array
    k_scale: jax.Array
    k_bias: jax.Array
    dtype: jax.typing.DTypeLike | None = dataclasses.field(default=None, metadata={'static': True})
