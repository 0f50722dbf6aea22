"""The calls of exact attention, as all implementations take them.

B batch, L queries, M keys, H query heads, K key and value heads, D head size.
"""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class ExactCall:
    """The arrays of a call, and which keys each query sees; meanings as in `lm.ops.exact_attention.softmax_attention`.

    Windows that are split over devices have been resolved: the keys are all that the queries of this device see.
    """

    q_BxLxHxD: jax.Array
    k_BxMxKxD: jax.Array
    v_BxMxKxD: jax.Array
    _: dataclasses.KW_ONLY
    scale: float
    window: int | None = None
    causal: bool = True
    q_offset: jax.Array | int = 0
    k_start: jax.Array | int = 0
    starts_BxL: jax.Array | None = None
    log_decay_BxMxK: jax.Array | None = None
    block: int | None = None

    @property
    def is_whole(self) -> bool:
        """True if queries and keys belong to the same tokens, and no key is hidden because of its index alone."""
        hides_none = all(isinstance(n, int) and n == 0 for n in (self.q_offset, self.k_start))
        return self.q_BxLxHxD.shape[1] == self.k_BxMxKxD.shape[1] and hides_none

    def beyond_causal(self, parts: int = 1) -> str | None:
        """Returns why a kernel that has the causal mask of whole windows, and no decay, cannot compute this call.

        Args:
            parts: how many parts the window has, of which the queries are one. The kernel has that mask, too.
        """
        if not self.causal:
            return 'takes the causal mask only'
        if self.log_decay_BxMxK is not None:
            return 'has no decay'
        if parts == 1 and not self.is_whole:
            return 'takes as many queries as keys'
        return None


@dataclasses.dataclass(frozen=True)
class SoftmaxCall(ExactCall):
    """Weights exp(scale ⟨q_i, k_j⟩) / Σ_j' exp(scale ⟨q_i, k_j'⟩), with sinks and a cap where they are given."""

    _: dataclasses.KW_ONLY
    score_cap: float | None = None
    sinks_H: jax.Array | None = None


@dataclasses.dataclass(frozen=True)
class PolynomialCall(ExactCall):
    """Weights (scale ⟨q_i, k_j⟩)^degree / (denominator_bias + Σ_j' (scale ⟨q_i, k_j'⟩)^degree), without a window."""

    _: dataclasses.KW_ONLY
    degree: int
    denominator_bias: float = 1.0
    scale: float = 1.0
