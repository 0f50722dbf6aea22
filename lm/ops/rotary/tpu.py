"""Rotation and normalizations on TPUs: one pass over queries and keys in each direction, in Pallas kernels.

XLA takes two for a rotation, for it writes halves and then joins them, and two more for the gradient of a
normalization. Arrays in HBM are [B, N, C, L], feature by token, as the attention kernels want them.
"""

import dataclasses
import functools
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
from lm.ops.rotary.types import HeadNorms, RootNorms, RotaryCall, Rotation
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
        epsilon: added to the mean of squares before its root; 0 where no root is taken.
    """

    n_heads: int
    block: int
    dtype: jnp.dtype
    epsilon: float


Held = TypeVar('Held')


Constants = tuple[Held | None, Held | None, Held | None]
"""Arrays that all heads share, refs or block specs of them; None where a call has no such array.

They are angles [A, C, L], cosines above sines, where A is 1 or B; gains [4, C, W]: scale and bias of the norm of
queries, then scale and bias for keys, on W equal lanes; and gains [2, C, W] of the norms before the rotation.
"""
Incoming = tuple[Held | None, Held, Held]
"""Queries and keys [B, N, C, L], which the backward kernel needs for the norms alone, else None; and the gradients of
queries [B, H, C, L] and of keys [B, K, C, L]."""


def rotate(call: RotaryCall) -> tuple[jax.Array, jax.Array]:
    """Computes calls that `unsupported` does not refuse."""
    by_row = call.rotation is not None and call.rotation.cos_AxLx1xP.ndim == 4

    def on_device(
        qk_BxLxNxC: jax.Array, rotation: Rotation | None, norms: HeadNorms | None, roots: RootNorms | None
    ) -> tuple[jax.Array, jax.Array]:
        return _rotate(RotaryCall(qk_BxLxNxC, rotation, call.n_heads, norms, roots))

    run = platform.per_device(on_device, split=(True, by_row, False, False))
    return run(call.qk_BxLxNxC, call.rotation, call.norms, call.roots)


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
    arrays, constants = 3 * heads * size * block, size * (block + 2 * 6 * LANES)
    return 2 * 4 * (arrays + constants) <= platform.vmem()[0]


def _rotate(call: RotaryCall) -> tuple[jax.Array, jax.Array]:
    _, length, heads, size = call.qk_BxLxNxC.shape
    epsilon = call.roots.epsilon if call.roots else 0.0
    plan = Plan(call.n_heads, block_size(length, heads, size), jnp.dtype(call.dtype), epsilon)
    angles = gains = roots = None
    if call.rotation is not None:
        angles = jnp.concatenate(call.rotation, axis=-1).reshape(-1, length, size).swapaxes(1, 2)
    if (norms := call.norms) is not None:
        gains = jnp.stack([norms.q_scale_C, norms.q_bias_C, norms.k_scale_C, norms.k_bias_C]).astype(jnp.float32)
    if call.roots is not None:
        roots = jnp.stack([call.roots.q_gain_C, call.roots.k_gain_C]).astype(jnp.float32)
    q_BxHxCxL, k_BxKxCxL = _run(plan, call.qk_BxLxNxC.transpose(0, 2, 3, 1), (angles, gains, roots))
    return q_BxHxCxL.transpose(0, 3, 1, 2), k_BxKxCxL.transpose(0, 3, 1, 2)


@custom_vjp(0)
def _run(plan: Plan, qk_BxNxCxL: jax.Array, constants: Constants[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns queries and keys, [B, H, C, L] and [B, K, C, L]. Gains have no lanes here."""
    return _forward(plan, qk_BxNxCxL, constants)


def _run_forward(plan, qk_BxNxCxL, constants):
    # Without a normalization the gradient does not depend on the vectors.
    needed = qk_BxNxCxL if jax.tree.leaves(constants[1:]) else None
    return _forward(plan, qk_BxNxCxL, constants), (needed, constants)


def _run_backward(plan, residuals, cotangents):
    needed, constants = residuals
    dqk, dgains, droots = _backward(plan, (needed, *cotangents), _on_lanes(constants))
    return dqk, (None, dgains, droots)


_run.defvjp(_run_forward, _run_backward)


def _forward(plan: Plan, qk_BxNxCxL: jax.Array, constants: Constants[jax.Array]) -> tuple[jax.Array, jax.Array]:
    batch, heads, size, length = qk_BxNxCxL.shape
    outputs = [jax.ShapeDtypeStruct((batch, n, size, length), plan.dtype) for n in (plan.n_heads, heads - plan.n_heads)]
    constants = _on_lanes(constants)
    q_BxHxCxL, k_BxKxCxL = pl.pallas_call(
        functools.partial(_forward_kernel, plan),
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
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Returns the gradients of queries and keys together, and of the gains [4, C] and [2, C]."""
    (_, dq_BxHxCxL, dk_BxKxCxL), read = incoming, jax.tree.leaves(incoming)
    batch, n_heads, size, length = dq_BxHxCxL.shape
    steps = length // plan.block
    dqk = jax.ShapeDtypeStruct((batch, n_heads + dk_BxKxCxL.shape[1], size, length), read[0].dtype)

    def of_step(gains: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, steps, *gains.shape), jnp.float32)

    def step_spec(gains: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, *gains.shape), lambda b, j: (b, j, 0, 0, 0))

    outputs = (dqk, jax.tree.map(of_step, constants[1:]))
    dqk_BxNxCxL, sums = pl.pallas_call(
        functools.partial(_backward_kernel, plan),
        name='rotary_backward',
        grid=(batch, steps),
        in_specs=[jax.tree.map(lambda a: _tokens(plan, a), incoming), _constant_specs(plan, constants)],
        out_specs=(_tokens(plan, dqk), jax.tree.map(step_spec, constants[1:])),
        out_shape=outputs,
        compiler_params=_params(),
        cost_estimate=_cost(*read, *jax.tree.leaves(outputs)),
    )(incoming, constants)
    dgains, droots = jax.tree.map(lambda x: x.sum((0, 1, 4)), sums)
    return dqk_BxNxCxL, dgains, droots


def _forward_kernel(plan: Plan, qk_ref: jax.Ref, constants: Constants[jax.Ref], q_ref: jax.Ref, k_ref: jax.Ref) -> None:
    angles, gains, roots = constants
    for kind, out_ref in enumerate((q_ref, k_ref)):
        first_head = kind * q_ref.shape[0]

        def compute(n, tokens, kind=kind, out_ref=out_ref, first_head=first_head):
            x = qk_ref[first_head + n, :, tokens].astype(jnp.float32)
            if roots is not None:
                x = x * _find_rate(plan, x) * roots[kind]
            x = _turned(x, angles, tokens)
            if gains is not None:
                x = _standard(x)[0] * gains[2 * kind] + gains[2 * kind + 1]
            out_ref[n, :, tokens] = x.astype(out_ref.dtype)

        _each(out_ref.shape, compute)


def _backward_kernel(
    plan: Plan,
    incoming: Incoming[jax.Ref],
    constants: Constants[jax.Ref],
    dqk_ref: jax.Ref,
    sums: tuple[jax.Ref | None, jax.Ref | None],
) -> None:
    x_ref, *cotangents = incoming
    (angles, gains, roots), (dgains, droots) = constants, sums
    for ref in jax.tree.leaves(sums):
        ref[...] = jnp.zeros(ref.shape, ref.dtype)
    for kind, d_ref in enumerate(cotangents):
        first_head = kind * cotangents[0].shape[0]

        def compute(n, tokens, kind=kind, d_ref=d_ref, first_head=first_head):
            at = first_head + n
            d = d_ref[n, :, tokens].astype(jnp.float32)
            x = None if x_ref is None else x_ref[at, :, tokens].astype(jnp.float32)
            root_rate = None
            if x is not None and roots is not None:
                root_rate = _find_rate(plan, x)
                x = x * root_rate
            if x is not None and gains is not None and dgains is not None:
                turned = _turned(x if roots is None else x * roots[kind], angles, tokens)
                standard, rate = _standard(turned)
                dgains[2 * kind] += d * standard
                dgains[2 * kind + 1] += d
                d = d * gains[2 * kind]
                along = jnp.mean(d * standard, axis=0, keepdims=True)
                d = rate * (d - jnp.mean(d, axis=0, keepdims=True) - standard * along)
            d = _turned(d, angles, tokens, back=True)
            if x is not None and roots is not None and droots is not None:
                droots[kind] += d * x
                d = d * roots[kind]
                d = root_rate * (d - x * jnp.mean(d * x, axis=0, keepdims=True))
            dqk_ref[at, :, tokens] = d.astype(dqk_ref.dtype)

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


def _find_rate(plan: Plan, x_CxT: jax.Array) -> jax.Array:
    """Returns the factor that gives x a root mean square of 1."""
    return lax.rsqrt(jnp.mean(x_CxT * x_CxT, axis=0, keepdims=True) + plan.epsilon)


def _on_lanes(constants: Constants[jax.Array]) -> Constants[jax.Array]:
    """Returns the constants with gains on equal lanes."""
    angles, *gains = constants
    return angles, *jax.tree.map(lambda x: jnp.broadcast_to(x[..., None], (*x.shape, LANES)), gains)


def _constant_specs(plan: Plan, constants: Constants[jax.Array]) -> Constants[pl.BlockSpec]:
    """Returns the blocks that a grid step takes of the arrays that all heads share."""
    angles, *gains = constants
    angle_spec = None
    if angles is not None:
        by_row = angles.shape[0] > 1
        block = (None, angles.shape[1], plan.block)
        angle_spec = pl.BlockSpec(block, lambda b, j: (b if by_row else 0, 0, j))
    return angle_spec, *jax.tree.map(lambda x: pl.BlockSpec(x.shape, lambda b, j: (0, 0, 0)), gains)


def _tokens(plan: Plan, a_BxNxCxL: jax.Array | jax.ShapeDtypeStruct) -> pl.BlockSpec:
    """Returns the block of tokens of all heads."""
    return pl.BlockSpec((None, *a_BxNxCxL.shape[1:3], plan.block), lambda b, j: (b, 0, 0, j))


def _params() -> pltpu.CompilerParams:
    return pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel'), vmem_limit_bytes=platform.vmem()[1])


def _cost(*arrays: jax.Array | jax.ShapeDtypeStruct) -> pl.CostEstimate:
    moved = sum(a.size * a.dtype.itemsize for a in arrays)
    return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved)
