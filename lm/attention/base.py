"""What every attention mechanism is: a configuration that a gin file names, and the module that it builds.

    configuration   a frozen dataclass, `@configurable('name') class Name(Attention)`; knows its own cost
    module          an `nnx.Module`; one per layer, shared by all heads of the layer

Adding a mechanism means adding one file with both. Nothing else names it.
"""

import dataclasses
from typing import Any, ClassVar

import jax
from flax import nnx


@dataclasses.dataclass(frozen=True)
class HeadDims:
    """The shape of a layer's heads: `n_heads` queries share `n_kv_heads` keys and values of size `head_dim`."""

    n_heads: int
    n_kv_heads: int
    head_dim: int


class Attention:
    """Base of the attention configurations (frozen dataclasses made by `@configurable`)."""

    kernels_declare_cost: ClassVar[bool] = True
    """Whether the compiler knows the FLOPs of its TPU kernels; where not, `lm check` takes `flops_per_token`."""

    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'AttentionModule':
        """The module of one layer. Parameters are drawn from `rngs.params()`, buffers from `rngs.projections()`."""
        raise NotImplementedError

    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        """Forward floating-point operations per token of one layer at context `length` (causal halving where the
        mechanism is quadratic; rematerialisation not counted; the q, k, v, o projections belong to the model)."""
        raise NotImplementedError


class AttentionModule(nnx.Module):
    """One layer's attention. B batch, L length, H query heads, K key/value heads, D head size."""

    def __call__(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, v_BxLxKxD: jax.Array) -> jax.Array:
        """Causal attention over whole sequences.

        Args:
            q_BxLxHxD: queries, after rotary embedding.
            k_BxLxKxD: keys, after rotary embedding; K divides H.
            v_BxLxKxD: values.

        Returns:
            [B, L, H, D] in the dtype of q.
        """
        raise NotImplementedError

    def init_state(self, batch: int, max_length: int, dtype: Any) -> Any:
        """The decoding state of an empty sequence: a pytree of arrays. Linear mechanisms ignore `max_length`."""
        raise NotImplementedError

    def decode_step(
        self, state: Any, q_BxTxHxD: jax.Array, k_BxTxKxD: jax.Array, v_BxTxKxD: jax.Array
    ) -> tuple[Any, jax.Array]:
        """Appends T tokens (one when decoding, a whole prompt when prefilling) and returns (state, [B, T, H, D]).

        Tokens at one call follow those of the calls before; the outputs equal `__call__` on the whole sequence.
        """
        raise NotImplementedError
