"""Factors of decay in the recurrent GPU kernels, within a tile of T tokens."""

import jax
import jax.numpy as jnp

from lm.ops.gpu import TILE, by_column, by_row, load_columns, load_rows, together
from lm.ops.linear_attention.gpu.features import masked as causal


class Fading:
    """The factors between the tokens of a tile, from t, the sums of their logs from its first token on."""

    def __init__(self, t_smem):
        self._smem, self._t_T = t_smem, load_rows(t_smem)
        end = t_smem[TILE - 1]
        self.since_start = jnp.exp(self._t_T)
        """From the tile's start to after each token."""
        self.until_end = jnp.exp(end - self._t_T)
        """From each token to the tile's end."""
        self.whole = jnp.exp(end)

    def between(self, keys: int) -> jax.Array:
        """From a key to a query [T, T], where the key is not the later one; `keys`: their axis."""
        # Were both loaded here, the compiler would load once, in a layout that suits one of them.
        difference = by_row(self._t_T, TILE) - by_column(load_columns(self._smem), TILE)
        return jnp.exp(jnp.minimum(difference if keys == 1 else -difference, 0.0))


def masked(weights: jax.Array, fading: Fading | None, keys: int) -> jax.Array:
    """[T, T] faded, and zero where a key comes after its query; `keys`: their axis."""
    return causal(weights if fading is None else weights * fading.between(keys), 0, keys)


def met(before: list, inside: list, factor_T: jax.Array | None, more: jax.Array | float = 0.0, spare=()) -> jax.Array:
    """factor · (Σ before + more) + Σ inside, of pairs of operands as in `together`; a factor None is 1."""
    if factor_T is None:
        return together(before + inside, spare=spare)[0] + more
    before, inside = together(before, inside, spare=spare)
    return (before + more) * by_row(factor_T, before.shape[1]) + inside
