"""The way of attention's output to the residual stream: norm of each head, gate, and output matrix."""

import jax
from flax import nnx

from lm.attention.options import GATES
from lm.model.dense import Dense, LowRank
from lm.model.options import ResolvedLayer
from lm.model.parts.maker import Maker


def make_output_norm(maker: Maker) -> nnx.RMSNorm | None:
    own = maker.options
    return maker.rms_norm(own.dims.value_size, 'head') if own.output_norm else None


def make_output_gate(maker: Maker) -> Dense | LowRank | None:
    gate, sizes = maker.options.gate, (maker.options.width,)
    if gate is None:
        return None
    if gate.rank is None:
        return maker.linear(gate.inputs, sizes, 'embed', 'all_heads', part='attention')
    down = maker.linear(gate.inputs, (gate.rank,), 'embed', 'logits', part='attention')
    return LowRank(down, maker.linear(gate.rank, sizes, 'logits', 'all_heads', part='attention'))


def make_output(maker: Maker) -> Dense:
    own, sizes = maker.options, (maker.config.d_model,)
    return maker.linear(own.width, sizes, 'all_heads', 'embed', part='attention', is_last=True)


def gate_output(
    gate: Dense | LowRank | None, y_BxLxN: jax.Array, normed_BxLxD: jax.Array, own: ResolvedLayer
) -> jax.Array:
    """Returns what attention gives, times the gate of the layer's normalized input, if there is a gate."""
    if gate is None or own.gate is None:
        return y_BxLxN
    return y_BxLxN * GATES[own.gate.form](gate(normed_BxLxD[..., : own.gate.inputs]))
