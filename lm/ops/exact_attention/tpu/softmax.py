"""Softmax attention on TPUs: a running maximum and base-2 logarithms in the kernels of `flash`.

Scores are multiplied by scale · log2 e, so that a weight is one power of two. The sums of a query are brought to its
new maximum with each block of keys (Milakov and Gimelshein 2018); the logarithm of the sum is kept.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from lm.ops.exact_attention.tpu import flash, plan
from lm.ops.exact_attention.tpu.pairs import Hide
from lm.ops.exact_attention.types import SoftmaxCall
from lm.ops.tpu import SUBLANES

LOG2_E = math.log2(math.e)
HIDDEN = -1e30
"""The score of a hidden key: less than any other, and its difference to itself is a number."""


@dataclasses.dataclass(frozen=True)
class SoftmaxRule:
    """A `WeightRule`: weights exp(scale · score). It keeps the base-2 logarithm of the sum of each query's weights.

    Attributes:
        scale: factor of the scores.
        cap: c, where c tanh(scale · score / c) stands for scale · score; None: no cap.
    """

    scale: float
    cap: float | None = None
    keeps_levels = True
    lowest = HIDDEN

    @property
    def gradient_scale(self) -> float:
        return self.scale

    @property
    def factor(self) -> float:
        """The factor before a power of two, or before the hyperbolic tangent of a cap."""
        return self.scale * LOG2_E if self.cap is None else self.scale / self.cap

    def score(self, s_KxQ: jax.Array, seen: Hide) -> jax.Array:
        return seen(s_KxQ if self.cap is None else jnp.tanh(s_KxQ) * (self.cap * LOG2_E), HIDDEN)

    def level(self, scores: list[jax.Array], before_1xQ: jax.Array) -> tuple[jax.Array, jax.Array]:
        folded = [s_KxQ.reshape(-1, SUBLANES, s_KxQ.shape[1]).max(0) for s_KxQ in scores]
        highest_1xQ = jnp.max(functools.reduce(jnp.maximum, folded), axis=0, keepdims=True)
        now_1xQ = jnp.maximum(before_1xQ, highest_1xQ)
        return now_1xQ, jnp.exp2(before_1xQ - now_1xQ)

    def weigh(self, s_KxQ: jax.Array, level_1xQ: jax.Array, seen: Hide) -> jax.Array:
        return jnp.exp2(s_KxQ - level_1xQ)

    def finish(self, total_1xQ: jax.Array, level_1xQ: jax.Array) -> tuple[jax.Array, jax.Array]:
        return 1.0 / total_1xQ, level_1xQ + jnp.log(total_1xQ) * LOG2_E

    def kept_for_gradients(self, kept_Nx1xL: jax.Array) -> jax.Array:
        return kept_Nx1xL

    def gradients(self, s_KxQ: jax.Array, dw_KxQ: jax.Array, kept_1xQ: jax.Array) -> tuple[jax.Array, jax.Array]:
        if self.cap is None:
            w_KxQ = jnp.exp2(s_KxQ * self.factor - kept_1xQ)
            return w_KxQ, w_KxQ * dw_KxQ
        bent_KxQ = jnp.tanh(s_KxQ * self.factor)
        w_KxQ = jnp.exp2(bent_KxQ * (self.cap * LOG2_E) - kept_1xQ)
        return w_KxQ, w_KxQ * dw_KxQ * (1.0 - bent_KxQ * bent_KxQ)


def softmax_attention(call: SoftmaxCall) -> jax.Array:
    """Computes calls that `unsupported` does not refuse."""
    sinks_H = None if call.sinks_H is None else call.sinks_H.astype(jnp.float32) * LOG2_E
    return flash.attention(plan.plan_for(SoftmaxRule(call.scale, call.score_cap), call), call, sinks_H)


def unsupported(call: SoftmaxCall) -> str | None:
    """Returns why the kernels cannot compute this call, or None."""
    return plan.unsupported(call)
