"""Polynomial attention: an even power of the scores of layer-normalized queries and keys (PolySketchFormer §2.1)."""

from typing import Any

import jax
from flax import nnx

from lm.attention.base import HeadDims, NormedModule, exact_flops_per_token, score_scale, score_start
from lm.attention.exact import ExactModule
from lm.attention.recurrent.gate import Gated
from lm.config.configurable import configurable, field
from lm.ops.exact_attention import polynomial_attention


@configurable('polynomial')
class Polynomial(Gated):
    """Weights ⟨q'_i, k'_j⟩^degree / (b + Σ_j' ⟨q'_i, k'_j'⟩^degree), where ' is layer normalization."""

    degree: int = field(
        default=4,
        minimum=2,
        maximum=16,
        even=True,
        help='power of the scores; from 4 on close to softmax, in heads of 64',
    )
    denominator_bias: float = field(
        default=1.0, minimum=0, formerly='bias', help='b: keeps the denominator from zero; 0, as the first draft has it'
    )
    offset: float = field(default=2.0, minimum=0, help='first mean of scores, in their standard deviations')
    score_norm: str = field(
        default='separate',
        choices=('separate', 'tied'),
        help="'separate': one layer norm for queries, one for keys; 'tied': one for both, as in the published code",
    )

    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'PolynomialAttention':
        return PolynomialAttention(self, dims, rngs)

    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        return exact_flops_per_token(dims, length)


class PolynomialAttention(NormedModule, ExactModule):
    """The layer normalizations, and the gate."""

    config: Polynomial

    def __init__(self, config: Polynomial, dims: HeadDims, rngs: nnx.Rngs):
        super().__init__(config, dims)
        tied = config.score_norm == 'tied'
        self.make_norms(dims.head_dim, rngs, **score_start(config.offset, dims.head_dim), tied=tied)

    def compute(self, q_BxLxHxD: jax.Array, k_BxMxKxD: jax.Array, v_BxMxKxD: jax.Array, **options: Any) -> jax.Array:
        degree, scale = self.config.degree, score_scale(self.config.degree, self.dims.head_dim)
        weights = {'degree': degree, 'scale': scale, 'denominator_bias': self.config.denominator_bias * scale**degree}
        return polynomial_attention(q_BxLxHxD, k_BxMxKxD, v_BxMxKxD, **weights, **options)
