"""Causal polysketch attention on Hopper GPUs: fused Mosaic GPU kernels, forward and backward.

Supports φ(x) = x ⊗ x in bfloat16, with or without an exact polynomial kernel inside each block. All blocks are computed
at once, by many small thread blocks. Sums over each block come first, then their running totals (plain XLA). Then every
tile of queries meets the sums before its block and the keys inside it. Expanded features never reach the GPU's memory.
"""

import dataclasses
import functools
from typing import cast

import jax
import jax.numpy as jnp

from lm.ops import platform
from lm.ops.custom_vjp import custom_vjp
from lm.ops.dots import in_parts
from lm.ops.linear_attention.gpu.plan import (
    GROUP,
    TILE,
    FarTokens,
    GpuPlan,
    NearTokens,
    SquareInputs,
    list_squares,
)
from lm.ops.linear_attention.types import (
    LOCAL_BLOCK,
    SQUARE,
    LinearCall,
    LinearResult,
    Options,
    PolynomialKernel,
)
from lm.ops.residuals import save_residual

DEGREES = (2, 4, 8)
SIZES = (32, 64)


def linear_attention(call: LinearCall) -> LinearResult:
    """Computes the call, which `unsupported` must not refuse."""
    if call.options.local is None:
        call = dataclasses.replace(call, q_local_BxLxHxC=None, k_local_BxLxKxC=None)
    return LinearResult(platform.per_device(_attend_by_head, split=(True,))(call), None)


def unsupported(call: LinearCall) -> str | None:
    """Returns why the kernels cannot compute this call, or None."""
    options, local = call.options, call.options.local
    if reason := platform.without_mosaic_gpu():
        return reason
    if call.channel_log_decay_BxLxKxE is not None:
        return 'takes one factor per token and head, not one per key channel'
    if not options.causal or not options.normalize:
        return 'is causal and normalised only'
    if call.log_decay_BxLxK is not None:
        return 'has no decay'
    if call.initial_state is not None or call.with_state:
        return 'takes no state in and gives none out'
    if options.feature_map is not None:
        return 'takes features, not a feature map'
    if tuple(options.powers) != SQUARE:
        return f'takes powers {SQUARE}, not {tuple(options.powers)}'
    if options.denominator_bias < 0:
        return f'takes no negative denominator_bias, {options.denominator_bias}'
    arrays = [call.q_BxLxHxE, call.k_BxLxKxE, call.v_BxLxKxD, *(call.local or ())]
    if local is not None:
        if options.window is not None:
            return 'takes exact blocks, not a window'
        if not isinstance(local, PolynomialKernel) or local.degree not in DEGREES:
            return f'takes a polynomial of degree {DEGREES} as exact kernel'
    if _block(options) % TILE and call.q_BxLxHxE.shape[1] > _block(options):
        return f'takes blocks that are multiples of {TILE}, not {options.block}'
    if reason := platform.not_bfloat16(*arrays):
        return reason
    if (widest := max(a.shape[-1] for a in arrays)) > TILE:
        return f'takes features and heads of up to {TILE}, not {widest}'
    return platform.uneven_batch(call.q_BxLxHxE.shape[0])


def fit_block(length: int) -> int:
    """Returns the shortest block that holds so many tokens."""
    return -(-length // TILE) * TILE


def _block(options: Options) -> int:
    # Without an exact kernel the block does not matter to the result: the same length is the fastest, too.
    return options.block or LOCAL_BLOCK


def _attend_by_head(call: LinearCall) -> jax.Array:
    batch, length, heads, _ = call.q_BxLxHxE.shape
    if call.local is not None and length <= _block(call.options):
        # One block of exact weights needs no other weights.
        q, k = call.local
        call = dataclasses.replace(call, q_BxLxHxE=q, k_BxLxKxE=k, q_local_BxLxHxC=None, k_local_BxLxKxC=None)
    plan = make_plan(call.options, length, exact_local=call.local is not None)
    padded = -(-length // plan.block) * plan.block

    def split_heads(a_BxLxHxF, sizes):
        # Zero tokens after the last are exact: their weights are 0. So are zero features.
        size = next(s for s in sizes if s >= a_BxLxHxF.shape[3])
        a_BxLxHxF = jnp.pad(a_BxLxHxF, ((0, 0), (0, padded - length), (0, 0), (0, size - a_BxLxHxF.shape[3])))
        a_BxHxLxF = jnp.repeat(a_BxLxHxF.swapaxes(1, 2), heads // a_BxLxHxF.shape[2], axis=1)
        return a_BxHxLxF.reshape(batch * heads, padded, size)

    inputs = SquareInputs(
        split_heads(call.q_BxLxHxE, SIZES), split_heads(call.k_BxLxKxE, SIZES), split_heads(call.v_BxLxKxD, (TILE,))
    )
    if call.local is not None:
        a, b = (split_heads(x, SIZES) for x in call.local)
        inputs = inputs._replace(a_NxLxC=a, b_NxLxC=b)
    o_NxLxD = attend(plan, inputs)
    o_BxHxLxD = o_NxLxD.reshape(batch, heads, padded, TILE)[:, :, :length, : call.v_BxLxKxD.shape[-1]]
    return o_BxHxLxD.swapaxes(1, 2)


def make_plan(options: Options, length: int, exact_local: bool) -> GpuPlan:
    """Plans the kernels for `length` tokens; `exact_local`: the exact kernel has separate arrays."""
    local, block = options.local, _block(options)
    degree, scale = (local.degree, local.scale) if isinstance(local, PolynomialKernel) else (2, 1.0)
    return GpuPlan(
        block=fit_block(length) if length <= block else block,
        exact_local=exact_local,
        degree=degree,
        scale=scale,
        denominator_bias=options.denominator_bias,
        single_block=length <= block,
    )


@custom_vjp(0)
def attend(plan: GpuPlan, inputs: SquareInputs) -> jax.Array:
    """Runs the kernels on separate heads, and returns outputs [N, L, D]."""
    return _forward(plan, inputs)[0]


def _attend_forward(plan: GpuPlan, inputs: SquareInputs):
    o, inverse, before = jax.tree.map(save_residual, _forward(plan, inputs))
    return o, (inputs, (o, inverse), before)


# It is compiled as one function, which all layers share: lowering the kernels takes seconds.
@functools.partial(jax.jit, static_argnums=0)
def _forward(plan: GpuPlan, inputs: SquareInputs) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None]:
    """Computes outputs, inverse denominators, and moment and state before each block; None with plan.single_block."""
    # Mosaic GPU takes half a second to import: only runs that use it wait for it.
    from lm.ops.linear_attention.gpu.forward import outputs, sum_blocks

    x, y, v = inputs.x_NxLxR, inputs.y_NxLxR, inputs.v_NxLxD
    before, far = None, None
    if not plan.single_block:
        sums = sum_blocks(plan, y, y.swapaxes(1, 2), v)
        moment = make_moment_operand(sum_earlier(sum_moments(plan, y, y)))
        before = moment, make_state_operand(sum_earlier(sums))
        far = FarTokens(x, x.swapaxes(1, 2), *before)
    o, inverse = outputs(plan, NearTokens(inputs.queries, inputs.keys, v), far)
    return o, inverse, before


@functools.partial(jax.jit, static_argnums=0)
def _attend_backward(plan: GpuPlan, residuals, do: jax.Array) -> tuple[SquareInputs]:
    from lm.ops.linear_attention.gpu.backward import differentiate_keys, differentiate_queries
    from lm.ops.linear_attention.gpu.forward import sum_blocks

    inputs, (o, inverse), before = residuals
    x, y, v = inputs.x_NxLxR, inputs.y_NxLxR, inputs.v_NxLxD
    do = do.astype(jnp.float32)
    e = -inverse * jnp.sum(do * o.astype(jnp.float32), axis=-1)
    g = (do * inverse[..., None]).astype(v.dtype)
    far_queries, far_keys = None, None
    if before is not None:
        xt, yt = x.swapaxes(1, 2), y.swapaxes(1, 2)
        moment, state = before
        far_queries = FarTokens(x, xt, moment, mirror(state))
        ex = (x.astype(jnp.float32) * e[..., None]).astype(x.dtype)
        sums = sum_blocks(plan, x, xt, g)
        moment = make_moment_operand(sum_later(sum_moments(plan, ex, x)))
        far_keys = FarTokens(y, yt, moment, mirror(make_state_operand(sum_later(sums))))
    queries = differentiate_queries(plan, NearTokens(inputs.queries, inputs.keys, v, g, e), far_queries)
    keys = differentiate_keys(plan, NearTokens(inputs.keys, inputs.queries, v, g, e), far_keys)
    dv = cast(jax.Array, keys.values)
    return (SquareInputs(queries.features, keys.features, dv, queries.compared, keys.compared),)


attend.defvjp(_attend_forward, _attend_backward)


def sum_moments(plan: GpuPlan, x_NxLxR: jax.Array, y_NxLxR: jax.Array) -> jax.Array:
    """Computes Σ x yᵀ over the tokens of each block, float32 [N, L / block, R, R]."""
    n, length, size = x_NxLxR.shape
    shape = (n, length // plan.block, plan.block, size)
    x, y = x_NxLxR.reshape(shape), y_NxLxR.reshape(shape)
    return jnp.einsum('nbtr,nbts->nbrs', x, y, preferred_element_type=jnp.float32)


def sum_earlier(sums: jax.Array) -> jax.Array:
    """Computes the totals over the blocks (axis 1) before each block."""
    return jnp.concatenate([jnp.zeros_like(sums[:, :1]), jnp.cumsum(sums[:, :-1], axis=1)], axis=1)


def sum_later(sums: jax.Array) -> jax.Array:
    """Computes the totals over the blocks (axis 1) after each block."""
    return jnp.flip(sum_earlier(jnp.flip(sums, axis=1)), axis=1)


def make_moment_operand(moment_NxBxRxR: jax.Array) -> jax.Array:
    """Stacks the three bfloat16 parts of the moment, [N, B, 3R, R]."""
    return jnp.concatenate(in_parts(moment_NxBxRxR, 3, in_kernel=False), axis=2)


def make_state_operand(state_NxBxMxDxS: jax.Array) -> jax.Array:
    """Rounds the state to bfloat16, squares cut in two: [N, B, 2M, S / 2, D]."""
    n, blocks, count, head_dim, products = state_NxBxMxDxS.shape
    return state_NxBxMxDxS.astype(jnp.bfloat16).swapaxes(3, 4).reshape(n, blocks, 2 * count, products // 2, head_dim)


def mirror(state_NxBxMxSxD: jax.Array) -> jax.Array:
    """Adds the squares below the diagonal to the state, still column by column and cut in two."""
    n, blocks, count, _, head_dim = state_NxBxMxSxD.shape
    pairs = next(list_squares(size) for size in SIZES if 2 * len(list_squares(size)) == count)
    groups = 1 + pairs[-1][1]
    state = state_NxBxMxSxD.reshape(n, blocks, count // 2, GROUP, GROUP, head_dim)
    both = [(row, column) for column in range(groups) for row in range(groups)]
    parts = [state[:, :, pairs.index((min(p), max(p)))] for p in both]
    parts = [s if row <= column else s.swapaxes(2, 3) for s, (row, column) in zip(parts, both, strict=True)]
    return jnp.stack(parts, axis=2).reshape(n, blocks, 2 * groups**2, -1, head_dim)
