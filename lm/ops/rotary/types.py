"""The call of the rotation, as all implementations take it.

B batch, L length, H query heads, K key heads, N = H + K, C head size, P = C / 2 pairs of numbers; A stands for no axis,
or for the batch where each row has positions of its own.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Rotation(NamedTuple):
    """Cosine and sine of the rotary angles of each position, float32."""

    cos_AxLx1xP: jax.Array
    sin_AxLx1xP: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RootNorms:
    """The root-mean-square normalizations of queries and of keys before the rotation, each shared by its heads.

    `epsilon` is added to the mean of the squares.
    """

    q_gain_C: jax.Array
    k_gain_C: jax.Array
    epsilon: float = dataclasses.field(metadata={'static': True})

    def spread(self, heads: int, n_queries: int) -> jax.Array:
        """Returns the gain of each head, [N, C]."""
        return jnp.where(jnp.arange(heads)[:, None] < n_queries, self.q_gain_C, self.k_gain_C)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadNorms:
    """The layer normalizations of queries and of keys, each shared by its heads.

    `dtype` is the type of the results; None: the type of the vectors that are normalized.
    """

    q_scale_C: jax.Array
    q_bias_C: jax.Array
    k_scale_C: jax.Array
    k_bias_C: jax.Array
    dtype: jax.typing.DTypeLike | None = dataclasses.field(default=None, metadata={'static': True})


@dataclasses.dataclass(frozen=True)
class RotaryCall:
    """The arguments of `lm.ops.rotary.rotate`; a call has at least one of rotation, norms and roots."""

    qk_BxLxNxC: jax.Array
    rotation: Rotation | None
    n_heads: int
    norms: HeadNorms | None = None
    roots: RootNorms | None = None

    @property
    def dtype(self) -> jax.typing.DTypeLike:
        """The type of the results."""
        return self.qk_BxLxNxC.dtype if self.norms is None or self.norms.dtype is None else self.norms.dtype
