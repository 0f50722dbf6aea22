"""Polynomial attention on TPUs: even powers of the scores in the kernels of `flash`.

Weights are not negative and their sum stays far inside float32 (64^16 · 2^20 < 10^36), so there is no running maximum
and nothing to rescale. bfloat16 has float32's exponents: rounding a weight for the matrix unit costs 2^-9 of its own
size, whatever that is. So the forward kernel divides once, at the end. The backward kernel could lose small gradients
times tiny 1 / denominator; it takes (c s)^degree with c = denominator^(-1 / degree), which is the normalised weight.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops.exact_attention.tpu import flash, plan
from lm.ops.exact_attention.tpu.pairs import Hide
from lm.ops.exact_attention.tpu.plan import unsupported
from lm.ops.exact_attention.types import PolynomialCall
from lm.ops.powers import power_and_slope


@dataclasses.dataclass(frozen=True)
class PowerRule:
    """A `WeightRule`: weights (scale · score)^degree. It keeps the denominator of each query.

    Attributes:
        degree: even.
        denominator_bias: the denominator starts from it.
        scale: factor of the scores.
    """

    degree: int
    denominator_bias: float
    scale: float
    keeps_levels = False
    lowest = 0.0
    gradient_scale = 1.0

    @property
    def factor(self) -> float:
        return self.scale

    def score(self, s_KxQ: jax.Array, seen: Hide) -> jax.Array:
        return s_KxQ

    def level(self, scores: list[jax.Array], before_1xQ: jax.Array) -> tuple[jax.Array, None]:
        return before_1xQ, None

    def weigh(self, s_KxQ: jax.Array, level_1xQ: jax.Array, seen: Hide) -> jax.Array:
        return seen(power_and_slope(s_KxQ, self.degree)[0])

    def finish(self, total_1xQ: jax.Array, level_1xQ: jax.Array) -> tuple[jax.Array, jax.Array]:
        total_1xQ = self.denominator_bias + total_1xQ
        # Padding after the last token sees zero scores and, with denominator_bias 0, has no denominator.
        return jnp.where(total_1xQ == 0.0, 0.0, 1.0 / total_1xQ), total_1xQ

    def kept_for_gradients(self, kept_Nx1xL: jax.Array) -> jax.Array:
        return self.scale * _root(kept_Nx1xL, self.degree)

    def gradients(self, s_KxQ: jax.Array, dw_KxQ: jax.Array, kept_1xQ: jax.Array) -> tuple[jax.Array, jax.Array]:
        w_KxQ, slope_KxQ = power_and_slope(s_KxQ * kept_1xQ, self.degree)
        assert slope_KxQ is not None, 'an even degree is above 1'
        return w_KxQ, slope_KxQ * dw_KxQ * (self.degree * kept_1xQ)


def polynomial_attention(call: PolynomialCall) -> jax.Array:
    """Computes calls that `unsupported` does not refuse."""
    rule = PowerRule(call.degree, call.denominator_bias, call.scale)
    return flash.attention(plan.plan_for(rule, call), call)


def _root(total: jax.Array, degree: int) -> jax.Array:
    """Computes total ** (-1 / degree), 0 where total is; a Newton step makes up for what exp and log lose."""
    safe = jnp.where(total > 0.0, total, 1.0)
    root = jnp.exp(jnp.log(safe) * (-1.0 / degree))
    root += root * (1.0 - lax.integer_pow(root, degree) * safe) / degree
    return jnp.where(total > 0.0, root, 0.0)


__all__ = ['PowerRule', 'polynomial_attention', 'unsupported']
