"""The call of the cross-entropy, as all implementations take it, and its results.

B batch, L length, D width, V vocabulary, P devices among which the batch is split.
"""

import dataclasses
from typing import NamedTuple, Protocol

import jax

from lm.ops.platform import Implementation


@dataclasses.dataclass(frozen=True)
class CrossEntropyCall:
    """The arguments of `lm.ops.cross_entropy.cross_entropy`."""

    x_BxLxD: jax.Array
    embedding_VxD: jax.Array
    bias_V: jax.Array | None
    targets_BxL: jax.Array
    _: dataclasses.KW_ONLY
    cap: float | None = None
    normalizer: bool = False
    chunk: int | None = None


@dataclasses.dataclass(frozen=True)
class WeightedCall(CrossEntropyCall):
    """The arguments of `lm.ops.cross_entropy.weighted_cross_entropy`."""

    _: dataclasses.KW_ONLY
    weights_BxL: jax.Array
    z_loss: float = 0.0


class TokenLosses(NamedTuple):
    """The loss of every token in nats, and log Σ_v exp(logit_v) where the call asks for it; float32."""

    nats_BxL: jax.Array
    log_normalizers_BxL: jax.Array | None


class WeightedLosses(NamedTuple):
    """The parts of a weighted sum on each device, and the loss of every token in nats, which has no gradient."""

    total_Px1: jax.Array
    nats_BxL: jax.Array


class CrossEntropyImplementation(Implementation[CrossEntropyCall], Protocol):
    """A module that computes cross-entropies."""

    def cross_entropy(self, call: CrossEntropyCall) -> TokenLosses:
        """Computes the losses of all tokens."""
        ...

    def weighted_cross_entropy(self, call: WeightedCall) -> WeightedLosses:
        """Computes the weighted sum."""
        ...
