"""The base of mechanisms with exact weights: what they share besides the operation that computes them."""

import abc
from typing import Any

import jax
from jax.typing import DTypeLike

from lm.attention.base import AttentionModule, HeadDims
from lm.attention.recurrent.gate import Gated
from lm.ops.exact_attention import cache


class ExactModule(AttentionModule):
    """Exact attention, whose decoding state is a cache of keys and values. It has no parameters besides the gate."""

    window: int | None = None
    """The tokens that a query sees, itself included; None: all."""

    def __init__(self, config: Gated, dims: HeadDims):
        self.config = config
        self.dims = dims
        self.gate = config.build_gate(dims)

    @abc.abstractmethod
    def compute(self, q_BxLxHxD: jax.Array, k_BxMxKxD: jax.Array, v_BxMxKxD: jax.Array, **options: Any) -> jax.Array:
        """Calls the operation with the weights of the mechanism, and with `options` for masks and implementation."""

    def mix(
        self,
        q_BxLxHxD: jax.Array,
        k_BxLxKxD: jax.Array,
        v_BxLxKxD: jax.Array,
        gate_BxLxK: jax.Array | None = None,
        *,
        starts_BxL: jax.Array | None = None,
    ) -> jax.Array:
        decay = self.gate and self.gate.log_decay(k_BxLxKxD, gate_BxLxK)
        masks = {'starts_BxL': starts_BxL, 'log_decay_BxMxK': decay, 'causal': self.dims.causal}
        return self.compute(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, **masks)

    def init_state(self, batch: int, max_length: int, dtype: DTypeLike, documents: bool = False) -> cache.Cache:
        """Returns a cache of `max_length` normalized keys and values, or of the window where that is shorter."""
        length = min(max_length, self.window or max_length)
        dims = self.dims
        decays = self.gate is not None
        return cache.empty(batch, length, dims.n_kv_heads, dims.head_dim, dtype, decays, value_dim=dims.value_size)

    def decode_step(
        self,
        state: cache.Cache,
        q_BxTxHxD: jax.Array,
        k_BxTxKxD: jax.Array,
        v_BxTxKxD: jax.Array,
        gate_BxLxK: jax.Array | None = None,
        *,
        starts_BxT: jax.Array | None = None,
    ) -> tuple[cache.Cache, jax.Array]:
        q_BxTxHxD, k_BxTxKxD = self.normalize(q_BxTxHxD, k_BxTxKxD)
        store = cache.append if self.window is None else cache.slide
        state, seen = store(state, k_BxTxKxD, v_BxTxKxD, self.gate and self.gate.log_decay(k_BxTxKxD, gate_BxLxK))
        o_BxTxHxD = self.compute(
            q_BxTxHxD,
            **seen,
            starts_BxL=None if starts_BxT is None else seen['q_offset'] + starts_BxT,
            implementation='xla',
        )
        return state, o_BxTxHxD
