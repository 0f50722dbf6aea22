"""Polynomial attention: an even power of the scores of layer-normalized queries and keys (PolySketchFormer §2.1)."""

from typing import Any

import jax
from flax import nnx

from lm.attention.base import (
    Attention,
    HeadDims,
    NormedModule,
    exact_flops_per_token,
    score_scale,
    score_start,
)
from lm.attention.recurrent.gate import GATED, forget_gate, gate_projections
from lm.config.configurable import configurable, field
from lm.ops.exact_attention import cache, polynomial_attention


@configurable('polynomial')
class Polynomial(Attention):
    """Weights ⟨q'_i, k'_j⟩^degree / (b + Σ_j' ⟨q'_i, k'_j'⟩^degree), where ' is layer normalization."""

    degree: int = field(
        default=4,
        minimum=2,
        maximum=16,
        even=True,
        help='power of the scores; from 4 on close to softmax, in heads of 64',
    )
    denominator_bias: float = field(default=1.0, above=0, formerly='bias', help='b: keeps the denominator from zero')
    offset: float = field(default=2.0, minimum=0, help='first mean of scores, in their standard deviations')

    gate: bool = field(
        default=False, help='each token decides, for each key head, how much it leaves of all weights before it'
    )

    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'PolynomialAttention':
        return PolynomialAttention(self, dims, rngs)

    def projections(self, dims: HeadDims) -> dict[str, int]:
        return gate_projections(self.gate, dims.n_kv_heads)

    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        return exact_flops_per_token(dims, length)

    def why_causal(self) -> str | None:
        return GATED.format('polynomial') if self.gate else None

    def weights(self, head_dim: int) -> dict[str, Any]:
        """Arguments of `polynomial_attention`: its weights."""
        scale = score_scale(self.degree, head_dim)
        return {
            'degree': self.degree,
            'scale': scale,
            'denominator_bias': self.denominator_bias * scale**self.degree,
        }


class PolynomialAttention(NormedModule):
    """The layer normalizations, and the gate."""

    def __init__(self, config: Polynomial, dims: HeadDims, rngs: nnx.Rngs):
        self.config = config
        self.dims = dims
        self.make_norms(dims.head_dim, rngs, **score_start(config.offset, dims.head_dim))
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
        weights = self.config.weights(self.dims.head_dim)
        decay = self.gate and self.gate.log_decay(k_BxLxKxD, gate_BxLxK)
        options = {'starts_BxL': starts_BxL, 'log_decay_BxMxK': decay, 'causal': self.dims.causal}
        return polynomial_attention(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, **weights, **options)

    def init_state(self, batch: int, max_length: int, dtype: Any, documents: bool = False) -> cache.Cache:
        """A cache of `max_length` normalized keys and values."""
        return cache.empty(batch, max_length, self.dims.n_kv_heads, self.dims.head_dim, dtype, self.config.gate)

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
        decay = self.gate and self.gate.log_decay(k_BxTxKxD, gate_BxLxK)
        state, seen = cache.append(state, k_BxTxKxD, v_BxTxKxD, decay)
        o_BxTxHxD = polynomial_attention(
            q_BxTxHxD,
            seen.k_BxMxKxD,
            seen.v_BxMxKxD,
            **self.config.weights(self.dims.head_dim),
            q_offset=seen.q_offset,
            k_start=seen.k_start,
            starts_BxL=None if starts_BxT is None else seen.q_offset + starts_BxT,
            log_decay_BxMxK=seen.log_decay_BxMxK,
            implementation='xla',
        )
        return state, o_BxTxHxD
