"""The call of the cross-entropy, as all implementations take it, and its results.

B batch, L length, D width, V vocabulary, P devices among which the batch is split.
"""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CrossEntropyCall:
    """The arguments of `lm.ops.cross_entropy.cross_entropy`: arrays are the pytree's leaves, the others are static."""

    x_BxLxD: jax.Array
    embedding_VxD: jax.Array
    bias_V: jax.Array | None
    targets_BxL: jax.Array
    _: dataclasses.KW_ONLY
    cap: float | None = dataclasses.field(default=None, metadata={'static': True})
    normalizer: bool = dataclasses.field(default=False, metadata={'static': True})
    chunk: int | None = dataclasses.field(default=None, metadata={'static': True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WeightedCall(CrossEntropyCall):
    """The arguments of `lm.ops.cross_entropy.weighted_cross_entropy`."""

    _: dataclasses.KW_ONLY
    weights_BxL: jax.Array
    z_loss: float = dataclasses.field(default=0.0, metadata={'static': True})
