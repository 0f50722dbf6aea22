"""What exact mechanisms differ by, as the kernels of `flash` ask for it."""

from typing import Protocol

import jax

from lm.ops.exact_attention.tpu.pairs import Hide


class WeightRule(Protocol):
    """How scores become weights; hashable. K keys and Q queries of a pair of blocks.

    Attributes:
        keeps_levels: whether weights are relative to a level, which rises with the scores that a query sees.
        lowest: the level of a query that has seen no key.
        gradient_scale: factor of the gradients of queries and keys that `gradients` leaves out.
    """

    keeps_levels: bool
    lowest: float
    gradient_scale: float

    def score(self, s_KxQ: jax.Array, seen: Hide) -> jax.Array:
        """Products of keys and queries as `level` and `weigh` take them."""

    def level(self, scores: list[jax.Array], before_1xQ: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """(level of queries with these scores too, factor of what they have gathered before; None: it stays)."""

    def weigh(self, s_KxQ: jax.Array, level_1xQ: jax.Array, seen: Hide) -> jax.Array:
        """The weights, relative to the level."""

    def finish(self, total_1xQ: jax.Array, level_1xQ: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of the sum of all weights: what the gathered values are multiplied by, and what is kept of each query."""

    def kept_for_gradients(self, kept_Nx1xL: jax.Array) -> jax.Array:
        """What `gradients` takes of each query, made from what `finish` kept."""

    def gradients(self, s_KxQ: jax.Array, dw_KxQ: jax.Array, kept_1xQ: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Normalised weights, and the gradient of the products of keys and queries ÷ gradient_scale.

        Args:
            s_KxQ: these products.
            dw_KxQ: the gradient of the normalised weights, that of their sum included.
        """
