"""The operations that are compared, and our calls of them.

Arrays arrive as models have them: [B, L, H, D] bfloat16, with gates and log factors in float32. A peer whose function
takes another order pays for the change around its kernels. All heads have keys of their own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lm.ops import delta_rule, exact_attention, linear_attention


@dataclasses.dataclass(frozen=True)
class Shape:
    """The heads and tokens of one sequence."""

    heads: int
    head_dim: int
    length: int

    @classmethod
    def parse(cls, heads: str, length: int) -> 'Shape':
        """Reads '12x64'."""
        count, _, size = heads.partition('x')
        return cls(int(count), int(size), length)

    def __str__(self) -> str:
        return f'{self.heads} × {self.head_dim}'

    @property
    def vectors(self) -> jax.ShapeDtypeStruct:
        """Queries, keys or values [1, L, H, D]."""
        return jax.ShapeDtypeStruct((1, self.length, self.heads, self.head_dim), jnp.bfloat16)

    @property
    def gates(self) -> jax.ShapeDtypeStruct:
        """A number per token and head [1, L, H]."""
        return jax.ShapeDtypeStruct((1, self.length, self.heads), jnp.float32)

    @property
    def channel_gates(self) -> jax.ShapeDtypeStruct:
        """A number per token and key channel [1, L, H, D]."""
        return jax.ShapeDtypeStruct((1, self.length, self.heads, self.head_dim), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation, and how `lm` computes it.

    Attributes:
        title: its name in a table.
        inputs: its arguments at a shape: queries, keys, values, and what follows them.
        compute: those arguments → outputs [1, L, H, D].
    """

    title: str
    inputs: Callable[[Shape], tuple[Any, ...]]
    compute: Callable[..., jax.Array]


def _vectors(shape: Shape) -> tuple[Any, ...]:
    return (shape.vectors,) * 3


def _delta(q, k, v, beta, **decay) -> jax.Array:
    call = delta_rule.DeltaCall(q, k, v, beta, query_length=q.shape[-1] ** -0.5, **decay)
    return delta_rule.compute(call).o_BxLxHxD


def _linear(q, k, v, **decay) -> jax.Array:
    options = linear_attention.Options(normalize=False)
    return linear_attention.compute(linear_attention.LinearCall(q, k, v, options=options, **decay)).o_BxLxHxD


OPERATIONS = {
    'linear': Operation('linear attention', _vectors, _linear),
    'gated_linear': Operation(
        'gated linear attention, a factor per head',
        lambda shape: (*_vectors(shape), shape.gates),
        lambda q, k, v, log_decay: _linear(q, k, v, log_decay_BxLxK=log_decay),
    ),
    'channel_linear': Operation(
        'gated linear attention, a factor per channel',
        lambda shape: (*_vectors(shape), shape.channel_gates),
        lambda q, k, v, log_decay: _linear(q, k, v, channel_log_decay_BxLxKxE=log_decay),
    ),
    'delta': Operation(
        'gated delta rule',
        lambda shape: (*_vectors(shape), shape.gates, shape.gates),
        lambda q, k, v, log_decay, beta: _delta(q, k, v, beta, log_decay_BxLxK=log_decay),
    ),
    'kda': Operation(
        'Kimi delta attention',
        lambda shape: (*_vectors(shape), shape.channel_gates, shape.gates),
        lambda q, k, v, log_decay, beta: _delta(q, k, v, beta, channel_log_decay_BxLxKxE=log_decay),
    ),
    'softmax': Operation('softmax attention', _vectors, exact_attention.softmax_attention),
}
