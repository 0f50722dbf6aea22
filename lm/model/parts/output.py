"""The way of attention's output to the residual stream: norm of each head, gate, and output matrix."""

import jax
from flax import nnx

from lm.attention.options import GATES
from lm.model.dense import Dense, LowRank
from lm.model.options import ResolvedLayer
from lm.model.parts.maker import Maker
from lm.ops.tpu import tokens_on_lanes


def make_output_norm(maker: Maker) -> nnx.RMSNorm | None:
    own = maker.options
    return maker.rms_norm(own.dims.value_size, 'head') if own.output_norm else None


def make_output_gate(maker: Maker) -> Dense | LowRank | None:
    own, sizes, rank = maker.options, (maker.options.width,), maker.options.output_gate_rank
    if not own.output_gate:
        return None
    if rank is None:
        return maker.linear(own.gate_inputs, sizes, 'embed', 'all_heads', part='attention')
    down = maker.linear(own.gate_inputs, (rank,), 'embed', 'logits', part='attention')
    return LowRank(down, maker.linear(rank, sizes, 'logits', 'all_heads', part='attention'))


def make_output(maker: Maker) -> Dense:
    own, sizes = maker.options, (maker.config.d_model,)
    return maker.linear(own.width, sizes, 'all_heads', 'embed', part='attention', is_last=True)


def gate_output(
    gate: Dense | LowRank | None, y_BxLxN: jax.Array, normed_BxLxD: jax.Array, own: ResolvedLayer
) -> jax.Array:
    """Returns what attention gives, times the gate of the layer's normalized input, if there is a gate."""
    if gate is None:
        return y_BxLxN
    gate_BxLxN = tokens_on_lanes(gate(normed_BxLxD[..., : own.gate_inputs]))
    return y_BxLxN * GATES[own.output_gate_form](gate_BxLxN)
