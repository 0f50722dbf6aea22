"""Softmax attention, over all earlier tokens or a sliding window of them."""

from typing import Any

import jax
from flax import nnx

from lm.attention.base import (
    Attention,
    AttentionModule,
    HeadDims,
    exact_flops_per_token,
)
from lm.attention.recurrent.gate import GATED, forget_gate, gate_projections
from lm.config.configurable import configurable, field
from lm.ops.exact_attention import SOFTMAX, cache, softmax_attention


@configurable('softmax')
class Softmax(Attention):
    """Weights exp(scale ⟨q_i, k_j⟩) / Σ_j' exp(scale ⟨q_i, k_j'⟩) (PolySketchFormer §2.1); `gate` adds
    Σ_{j < m ≤ i} log a_m to the scores, as in the forgetting transformer (Lin et al. 2025)."""

    is_default = True

    scale: float | None = field(default=None, above=0, help='factor of the scores; None is 1 / sqrt(head size)')
    window: int | None = field(default=None, minimum=1, help='tokens that a query sees, itself included; None sees all')

    gate: bool = field(
        default=False, help='each token decides, for each key head, how much it leaves of all weights before it'
    )
    implementation: str | None = field(
        default=None,
        choices=tuple(SOFTMAX),
        resume=True,
        help="how it is computed; None: the platform's best; results agree",
    )

    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'SoftmaxAttention':
        return SoftmaxAttention(self, dims, rngs)

    def projections(self, dims: HeadDims) -> dict[str, int]:
        return gate_projections(self.gate, dims.n_kv_heads)

    def kernels_declare_cost(self, dims: HeadDims) -> bool:
        """JAX's kernels, for windows and for heads that are too wide for ours, do not declare it."""
        from lm.ops.tpu import LANES

        return self.window is None and self.implementation != 'splash' and dims.head_dim <= LANES

    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        return exact_flops_per_token(dims, length, self.window)

    def why_causal(self) -> str | None:
        if self.window is not None:
            return f'softmax.window = {self.window}: is one of earlier tokens; set it to None'
        return GATED.format('softmax') if self.gate else None


class SoftmaxAttention(AttentionModule):
    """Has no parameters besides the gate."""

    def __init__(self, config: Softmax, dims: HeadDims, rngs: nnx.Rngs):
        self.config = config
        self.dims = dims
        self.gate = forget_gate(config.gate, dims.n_kv_heads)

    def attend(
        self,
        q_BxLxHxD: jax.Array,
        k_BxLxKxD: jax.Array,
        v_BxLxKxD: jax.Array,
        gate_BxLxK: jax.Array | None = None,
        *,
        starts_BxL: jax.Array | None = None,
    ) -> jax.Array:
        config = self.config
        decay = self.gate and self.gate.log_decay(k_BxLxKxD, gate_BxLxK)
        options = {'scale': config.scale, 'window': config.window, 'implementation': config.implementation}
        masks = {'starts_BxL': starts_BxL, 'log_decay_BxMxK': decay, 'causal': self.dims.causal}
        return softmax_attention(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, **options, **masks)

    def init_state(self, batch: int, max_length: int, dtype: Any, documents: bool = False) -> cache.Cache:
        """A cache of `max_length` tokens, or of the window where that is shorter."""
        length = min(max_length, self.config.window or max_length)
        return cache.empty(batch, length, self.dims.n_kv_heads, self.dims.head_dim, dtype, self.config.gate)

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
        store = cache.append if self.config.window is None else cache.slide
        decay = self.gate and self.gate.log_decay(k_BxTxKxD, gate_BxLxK)
        state, seen = store(state, k_BxTxKxD, v_BxTxKxD, decay)
        o_BxTxHxD = softmax_attention(
            q_BxTxHxD,
            seen.k_BxMxKxD,
            seen.v_BxMxKxD,
            scale=self.config.scale,
            window=self.config.window,
            q_offset=seen.q_offset,
            k_start=seen.k_start,
            starts_BxL=None if starts_BxT is None else seen.q_offset + starts_BxT,
            log_decay_BxMxK=seen.log_decay_BxMxK,
            implementation='xla',
        )
        return state, o_BxTxHxD
