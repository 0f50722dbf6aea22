"""Factors of decay in the recurrent GPU kernels, within a tile of T tokens."""

import jax
import jax.numpy as jnp

from lm.ops.gpu import TILE, load_columns, load_rows, repeat_per_column, repeat_per_row, sum_products
from lm.ops.linear_attention.gpu.features import mask
from lm.ops.linear_attention.gpu.recurrent.plan import Ref


class TileFactors:
    """The factors between the tokens of a tile.

    Attributes:
        since_start: factors from the tile's start to after each token, [T].
        until_end: factors from each token to the tile's end, [T].
        whole: the factor from the tile's start to its end.
    """

    def __init__(self, t_T: Ref):
        """Loads the factors; `t_T` holds running sums of the tile's log factors, in shared memory."""
        self._memory, self._t_T = t_T, load_rows(t_T)
        end = t_T[TILE - 1]
        self.since_start = jnp.exp(self._t_T)
        self.until_end = jnp.exp(end - self._t_T)
        self.whole = jnp.exp(end)

    @classmethod
    def load(cls, t_T: Ref | None) -> 'TileFactors | None':
        """Loads the factors; None without decay."""
        return None if t_T is None else cls(t_T)

    def between(self, keys: int) -> jax.Array:
        """Computes the factors from keys to queries [T, T], where the key is not later; `keys` is the keys' axis."""
        # If both were loaded here, the compiler would load once, in a layout that suits one of them.
        difference = repeat_per_row(self._t_T, TILE) - repeat_per_column(load_columns(self._memory), TILE)
        return jnp.exp(jnp.minimum(difference if keys == 1 else -difference, 0.0))


def mask_weights(weights: jax.Array, factors: TileFactors | None, keys: int) -> jax.Array:
    """Multiplies weights [T, T] by the factors, and sets them to zero where a key comes after its query.

    `keys` is the axis of the keys.
    """
    return mask(weights if factors is None else weights * factors.between(keys), 0, keys)


def accumulate_with_decay(
    before: list, inside: list, factor_T: jax.Array | None, more: jax.Array | float = 0.0
) -> jax.Array:
    """Computes factor · (Σ before + more) + Σ inside, from pairs of operands as in `sum_products`; no factor: 1."""
    if factor_T is None:
        return sum_products(before + inside)[0] + more
    of_sums, of_tile = sum_products(before, inside)
    return (of_sums + more) * repeat_per_row(factor_T, of_sums.shape[1]) + of_tile
