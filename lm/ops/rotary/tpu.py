"""Rotation and layer normalization on TPUs: one pass over queries and keys in each direction, in Pallas kernels.

XLA takes two for a rotation, for it writes halves and then joins them, and two more for the gradient of a
normalization. Arrays in HBM are [B, N, C, L], feature by token, as the attention kernels want them.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops import platform
from lm.ops.custom_vjp import custom_vjp
from lm.ops.formulas import EPSILON
from lm.ops.rotary.types import HeadNorms, RotaryCall, Rotation
from lm.ops.tpu import LANES, ROWS

BLOCK = 512
"""The most tokens per grid step."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the kernels are cut into steps.

    Attributes:
        n_heads: how many heads are queries.
        block: tokens per grid step.
        dtype: the type of the results.
    """

    n_heads: int
    block: int
    dtype: jnp.dtype


Held = TypeVar('Held')


Constants = tuple[Held | None, Held | None]
"""Arrays that all heads share, refs or block specs of them; None where a call has no such array.

They are angles [A, C, L], cosines above sines, where A is 1 or B; and gains [4, C, W]: scale and bias of the norm of
queries, then scale and bias for keys, on W equal lanes.
"""
Incoming = tuple[Held | None, Held, Held]
"""Queries and keys [B, N, C, L], which the backward kernel needs for the norms alone, else None; and the gradients of
queries [B, H, C, L] and of keys [B, K, C, L]."""


def rotate(call: RotaryCall) -> tuple[jax.Array, jax.Array]:
    """Computes calls that `unsupported` does not refuse."""
    by_row = call.rotation is not None and call.rotation.cos_AxLx1xP.ndim == 4

    def on_device(
        qk_BxLxNxC: jax.Array, rotation: Rotation | None, norms: HeadNorms | None
    ) -> tuple[jax.Array, jax.Array]:
        return _rotate(RotaryCall(qk_BxLxNxC, rotation, call.n_heads, norms))

    return platform.per_device(on_device, split=(True, by_row, False))(call.qk_BxLxNxC, call.rotation, call.norms)


def unsupported(call: RotaryCall) -> str | None:
    """Returns why the kernels cannot compute this call, or None."""
    qk = call.qk_BxLxNxC
    if platform.target_platform() != 'tpu':
        return 'needs a TPU'
    batch, length, heads, size = qk.shape
    if size % (2 * ROWS):
        return f'takes heads whose size is a multiple of {2 * ROWS}, not {size}'
    if length % LANES:
        return f'takes a multiple of {LANES} tokens, not {length}'
    if reason := platform.mixed_types(qk):
        return reason
    if not _fits(LANES, heads, size):
        return f'would not fit its VMEM with {heads} heads of {size}'
    return platform.uneven_batch(batch)


def block_size(length: int, heads: int, size: int) -> int:
    """Returns the tokens per grid step."""
    return next(n for n in range(BLOCK, 0, -LANES) if length % n == 0 and _fits(n, heads, size))


def _fits(block: int, heads: int, size: int) -> bool:
    """Returns whether a grid step may take so many tokens.

    It counts the three arrays of a backward step as if they were float32, and the angles, gains and sums. Each counts
    twice.
    """
    arrays, constants = 3 * heads * size * block, size * (block + 2 * 4 * LANES)
    return 2 * 4 * (arrays + constants) <= platform.vmem()[0]


def _rotate(call: RotaryCall) -> tuple[jax.Array, jax.Array]:
    _, length, heads, size = call.qk_BxLxNxC.shape
    plan = Plan(call.n_heads, block_size(length, heads, size), jnp.dtype(call.dtype))
    angles = gains = None
    if call.rotation is not None:
        angles = jnp.concatenate(call.rotation, axis=-1).reshape(-1, length, size).swapaxes(1, 2)
    if (norms := call.norms) is not None:
        gains = jnp.stack([norms.q_scale_C, norms.q_bias_C, norms.k_scale_C, norms.k_bias_C]).astype(jnp.float32)
    q_BxHxCxL, k_BxKxCxL = _run(plan, call.qk_BxLxNxC.transpose(0, 2, 3, 1), angles, gains)
    return q_BxHxCxL.transpose(0, 3, 1, 2), k_BxKxCxL.transpose(0, 3, 1, 2)


@custom_vjp(0)
def _run(
    plan: Plan, qk_BxNxCxL: jax.Array, angles_AxCxL: jax.Array | None, gains_4xC: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns queries and keys, [B, H, C, L] and [B, K, C, L]."""
    return _forward(plan, qk_BxNxCxL, angles_AxCxL, gains_4xC)


def _run_forward(plan, qk_BxNxCxL, angles_AxCxL, gains_4xC):
    # Without a normalization the gradient does not depend on the vectors.
    needed = None if gains_4xC is None else qk_BxNxCxL
    return _forward(plan, qk_BxNxCxL, angles_AxCxL, gains_4xC), (needed, angles_AxCxL, gains_4xC)


def _run_backward(plan, residuals, cotangents):
    qk_BxNxCxL, angles_AxCxL, gains_4xC = residuals
    dq_BxHxCxL, dk_BxKxCxL = cotangents
    incoming = (qk_BxNxCxL, dq_BxHxCxL, dk_BxKxCxL)
    dqk, dgains = _backward(plan, incoming, (angles_AxCxL, _on_lanes(gains_4xC)))
    return dqk, None, dgains


_run.defvjp(_run_forward, _run_backward)


def _forward(
    plan: Plan, qk_BxNxCxL: jax.Array, angles_AxCxL: jax.Array | None, gains_4xC: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    batch, heads, size, length = qk_BxNxCxL.shape
    outputs = [jax.ShapeDtypeStruct((batch, n, size, length), plan.dtype) for n in (plan.n_heads, heads - plan.n_heads)]
    constants = (angles_AxCxL, _on_lanes(gains_4xC))
    q_BxHxCxL, k_BxKxCxL = pl.pallas_call(
        _forward_kernel,
        name='rotary_forward',
        grid=(batch, length // plan.block),
        in_specs=[_tokens(plan, qk_BxNxCxL), _constant_specs(plan, constants)],
        out_specs=[_tokens(plan, a) for a in outputs],
        out_shape=outputs,
        compiler_params=_params(),
        cost_estimate=_cost(qk_BxNxCxL, *outputs),
    )(qk_BxNxCxL, constants)
    return q_BxHxCxL, k_BxKxCxL


def _backward(
    plan: Plan, incoming: Incoming[jax.Array], constants: Constants[jax.Array]
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the gradients of queries and keys together, and of the gains [4, C]."""
    (_, dq_BxHxCxL, dk_BxKxCxL), (_, gains_4xCxW), read = incoming, constants, jax.tree.leaves(incoming)
    batch, n_heads, size, length = dq_BxHxCxL.shape
    steps = length // plan.block
    outputs = [jax.ShapeDtypeStruct((batch, n_heads + dk_BxKxCxL.shape[1], size, length), read[0].dtype)]
    out_specs = [_tokens(plan, outputs[0])]
    if gains_4xCxW is not None:
        shape = (batch, steps, *gains_4xCxW.shape)
        outputs.append(jax.ShapeDtypeStruct(shape, jnp.float32))
        out_specs.append(pl.BlockSpec((None, None, *shape[2:]), lambda b, j: (b, j, 0, 0, 0)))
    dqk_BxNxCxL, *sums = pl.pallas_call(
        _backward_kernel,
        name='rotary_backward',
        grid=(batch, steps),
        in_specs=[jax.tree.map(lambda a: _tokens(plan, a), incoming), _constant_specs(plan, constants)],
        out_specs=out_specs,
        out_shape=outputs,
        compiler_params=_params(),
        cost_estimate=_cost(*read, *outputs),
    )(incoming, constants)
    return dqk_BxNxCxL, sums[0].sum((0, 1, 4)) if sums else None


def _forward_kernel(qk_ref: jax.Ref, constants: Constants[jax.Ref], q_ref: jax.Ref, k_ref: jax.Ref) -> None:
    angles, gains = constants
    for kind, out_ref in enumerate((q_ref, k_ref)):
        first_head = kind * q_ref.shape[0]

        def compute(n, tokens, kind=kind, out_ref=out_ref, first_head=first_head):
            x = _turned(qk_ref[first_head + n, :, tokens].astype(jnp.float32), angles, tokens)
            if gains is not None:
                x = _standard(x)[0] * gains[2 * kind] + gains[2 * kind + 1]
            out_ref[n, :, tokens] = x.astype(out_ref.dtype)

        _each(out_ref.shape, compute)


def _backward_kernel(
    incoming: Incoming[jax.Ref], constants: Constants[jax.Ref], dqk_ref: jax.Ref, sums_ref: jax.Ref | None = None
) -> None:
    x_ref, *cotangents = incoming
    angles, gains = constants
    if sums_ref is not None:
        sums_ref[...] = jnp.zeros(sums_ref.shape, sums_ref.dtype)
    for kind, d_ref in enumerate(cotangents):
        first_head = kind * cotangents[0].shape[0]

        def compute(n, tokens, kind=kind, d_ref=d_ref, first_head=first_head):
            at = first_head + n
            d = d_ref[n, :, tokens].astype(jnp.float32)
            if x_ref is not None and gains is not None and sums_ref is not None:
                standard, rate = _standard(_turned(x_ref[at, :, tokens].astype(jnp.float32), angles, tokens))
                sums_ref[2 * kind] += d * standard
                sums_ref[2 * kind + 1] += d
                d = d * gains[2 * kind]
                along = jnp.mean(d * standard, axis=0, keepdims=True)
                d = rate * (d - jnp.mean(d, axis=0, keepdims=True) - standard * along)
            dqk_ref[at, :, tokens] = _turned(d, angles, tokens, back=True).astype(dqk_ref.dtype)

        _each(d_ref.shape, compute)


def _each(shape: tuple[int, ...], compute: Callable[[int, slice], None]) -> None:
    """Calls compute(head, slice of tokens) for all heads, a register's width of tokens at a time."""
    heads, _, block = shape
    for start in range(0, block, LANES):
        for head in range(heads):
            compute(head, slice(start, start + LANES))


def _turned(x_CxT: jax.Array, angles_ref: jax.Ref | None, tokens: slice, back: bool = False) -> jax.Array:
    """Returns x rotated; `back`: by the negative angles, which also gives its gradient."""
    if angles_ref is None:
        return x_CxT
    half = x_CxT.shape[0] // 2
    a, b = x_CxT[:half], x_CxT[half:]
    cos, sin = angles_ref[:half, tokens], angles_ref[half:, tokens]
    turned = (a * cos + b * sin, b * cos - a * sin) if back else (a * cos - b * sin, b * cos + a * sin)
    return jnp.concatenate(turned, axis=0)


def _standard(x_CxT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns x with mean 0 and variance 1, and the factor of its deviations."""
    centred = x_CxT - jnp.mean(x_CxT, axis=0, keepdims=True)
    rate_1xT = lax.rsqrt(jnp.mean(centred * centred, axis=0, keepdims=True) + EPSILON)
    return centred * rate_1xT, rate_1xT


def _on_lanes(gains_4xC: jax.Array | None) -> jax.Array | None:
    return None if gains_4xC is None else jnp.broadcast_to(gains_4xC[..., None], (*gains_4xC.shape, LANES))


def _constant_specs(plan: Plan, constants: Constants[jax.Array]) -> Constants[pl.BlockSpec]:
    """Returns the blocks that a grid step takes of the arrays that all heads share."""
    angles, gains = constants
    angle_spec = gain_spec = None
    if angles is not None:
        by_row = angles.shape[0] > 1
        block = (None, angles.shape[1], plan.block)
        angle_spec = pl.BlockSpec(block, lambda b, j: (b if by_row else 0, 0, j))
    if gains is not None:
        gain_spec = pl.BlockSpec(gains.shape, lambda b, j: (0, 0, 0))
    return angle_spec, gain_spec


def _tokens(plan: Plan, a_BxNxCxL: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
    """Returns the block of tokens of all heads."""
    return pl.BlockSpec((None, *a_BxNxCxL.shape[1:3], plan.block), lambda b, j: (b, 0, 0, j))


def _params() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel'), vmem_limit_bytes=platform.vmem()[1])


def _cost(*arrays: jax.Array | jax.ShapeDtypeStruct) -> pl.CostEstimate:
    moved = sum(a.size * a.dtype.itemsize for a in arrays)
    return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved)
