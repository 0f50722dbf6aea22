"""Softmax attention on TPUs: a running maximum and base-2 logarithms in the kernels of `flash`.

Scores are multiplied by scale · log2 e, so that a weight is one power of two. What a query has gathered is brought to
its new maximum with each block of keys (Milakov and Gimelshein 2018); the logarithm of the sum is kept.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from lm.ops.exact_attention.tpu import flash, plan
from lm.ops.exact_attention.tpu.pairs import Hide
from lm.ops.tpu import SUBLANES

HIDDEN = -1e30
"""The score of a hidden key: less than any other, and its difference to itself is a number."""


@dataclasses.dataclass(frozen=True)
class SoftmaxRule:
    """A `WeightRule`: weights exp(scale · score)."""

    scale: float
    keeps_levels = True
    lowest = HIDDEN

    @property
    def gradient_scale(self) -> float:
        return self.scale

    @property
    def _to_base_2(self) -> float:
        return self.scale * math.log2(math.e)

    def score(self, s_KxQ: jax.Array, seen: Hide) -> jax.Array:
        return seen(s_KxQ * self._to_base_2, HIDDEN)

    def level(self, scores: list[jax.Array], before_1xQ: jax.Array) -> tuple[jax.Array, jax.Array]:
        folded = [s_KxQ.reshape(-1, SUBLANES, s_KxQ.shape[1]).max(0) for s_KxQ in scores]
        highest_1xQ = jnp.max(functools.reduce(jnp.maximum, folded), axis=0, keepdims=True)
        now_1xQ = jnp.maximum(before_1xQ, highest_1xQ)
        return now_1xQ, jnp.exp2(before_1xQ - now_1xQ)

    def weigh(self, s_KxQ: jax.Array, highest_1xQ: jax.Array, seen: Hide) -> jax.Array:
        return jnp.exp2(s_KxQ - highest_1xQ)

    def finish(self, total_1xQ: jax.Array, highest_1xQ: jax.Array) -> tuple[jax.Array, jax.Array]:
        return 1.0 / total_1xQ, highest_1xQ + jnp.log(total_1xQ) * math.log2(math.e)

    def kept_for_gradients(self, log2_total_Nx1xL: jax.Array) -> jax.Array:
        return log2_total_Nx1xL

    def gradients(self, s_KxQ: jax.Array, dw_KxQ: jax.Array, log2_total_1xQ: jax.Array) -> tuple[jax.Array, jax.Array]:
        w_KxQ = jnp.exp2(s_KxQ * self._to_base_2 - log2_total_1xQ)
        return w_KxQ, w_KxQ * dw_KxQ


def softmax_attention(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, *, scale, starts=None, block=None, **rest) -> jax.Array:
    """Arguments as in `lm.ops.exact_attention`; calls that `unsupported` refuses are wrong here."""
    chosen = plan.plan_for(SoftmaxRule(scale), q_BxLxHxD, k_BxLxKxD, block)
    return flash.attention(chosen, q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, starts)


def unsupported(q, k, v, *, window=None, **options) -> str | None:
    """Why the kernels cannot compute this call, or None."""
    return 'has no windows' if window is not None else plan.unsupported(q, k, v, **options)
