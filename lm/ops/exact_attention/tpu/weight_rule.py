"""The rule by which exact mechanisms differ, as the kernels of `flash` use it."""

from typing import Protocol

import jax

from lm.ops.exact_attention.tpu.pairs import Hide


class WeightRule(Protocol):
    """Turns scores into weights inside the kernels: one class for softmax, one for powers.

    Kernels work on a block of Q queries and a block of K keys at a time. A rule is hashable: programs are compiled for
    it.

    Attributes:
        factor: of the products of keys and queries, which the forward kernel applies before `score`.
        keeps_levels: whether weights are relative to a level, which rises with the scores that a query sees.
        lowest: the level of a query that has seen no key.
        gradient_scale: factor of the gradients of queries and keys that `gradients` leaves out.
    """

    @property
    def factor(self) -> float: ...

    @property
    def keeps_levels(self) -> bool: ...

    @property
    def lowest(self) -> float: ...

    @property
    def gradient_scale(self) -> float: ...

    def score(self, s_KxQ: jax.Array, seen: Hide) -> jax.Array:
        """Returns the products of keys and queries, times `factor`, as `level` and `weigh` take them."""
        ...

    def level(self, scores: list[jax.Array], before_1xQ: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns the level of queries with these scores too, and the factor of the sums that they had before.

        The factor is None where the sums stay.
        """
        ...

    def weigh(self, s_KxQ: jax.Array, level_1xQ: jax.Array, seen: Hide) -> jax.Array:
        """Returns the weights, relative to the level."""
        ...

    def finish(self, total_1xQ: jax.Array, level_1xQ: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the factor of the sum of weighted values, and a number that is kept of each query."""
        ...

    def kept_for_gradients(self, kept_Nx1xL: jax.Array) -> jax.Array:
        """Returns the number per query that `gradients` takes, made from the number that `finish` kept."""
        ...

    def gradients(self, s_KxQ: jax.Array, dw_KxQ: jax.Array, kept_1xQ: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns normalized weights, and the gradient of the products of keys and queries ÷ gradient_scale.

        Args:
            s_KxQ: these products.
            dw_KxQ: the gradient of the normalized weights, with the part of their sum.
            kept_1xQ: from `kept_for_gradients`.
        """
        ...
