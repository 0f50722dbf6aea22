"""Causal polysketch attention on Hopper GPUs: fused Mosaic GPU kernels, forward and backward.

Supports φ(x) = x ⊗ x in bfloat16, with or without an exact polynomial kernel inside each block. All blocks are computed
at once, by many small thread blocks: sums over each block, their running totals (plain XLA), then every tile of
queries against the sums before its block and the keys inside it. Expanded features never reach the GPU's memory.
"""

import functools

import jax
import jax.numpy as jnp

from lm.ops import platform
from lm.ops.dots import in_three
from lm.ops.linear_attention.gpu.plan import GROUP, TILE, GpuPlan, squares
from lm.ops.linear_attention.types import LOCAL_BLOCK, SQUARE, LinearCall, LinearResult, Options, PolynomialKernel
from lm.ops.residuals import saved

DEGREES = (2, 4, 8)
SIZES = (32, 64)


def linear_attention(call: LinearCall) -> LinearResult:
    """Computes the call, which `unsupported` must not refuse."""
    arrays = [call.q_BxLxHxE, call.k_BxLxKxE, call.v_BxLxKxD, *(call.local or ())]
    function = platform.per_device(functools.partial(_by_head, call.options), split=(True,) * len(arrays))
    return LinearResult(function(*arrays), None)


def unsupported(call: LinearCall) -> str | None:
    """Returns why the kernels cannot compute this call, or None."""
    options, local = call.options, call.options.local
    if reason := platform.without_mosaic_gpu():
        return reason
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
    if dtypes := {a.dtype for a in arrays} - {jnp.dtype('bfloat16')}:
        return f'takes arrays that are all bfloat16, not {", ".join(sorted(map(str, dtypes)))}'
    if (widest := max(a.shape[-1] for a in arrays)) > TILE:
        return f'takes features and heads of up to {TILE}, not {widest}'
    return platform.uneven_batch(call.q_BxLxHxE.shape[0])


def one_block(length: int) -> int:
    """The shortest block that holds so many tokens."""
    return -(-length // TILE) * TILE


def _block(options: Options) -> int:
    # Without an exact kernel the block does not matter to the result: as long a one is the fastest, too.
    return options.block or LOCAL_BLOCK


def _by_head(options: Options, q_BxLxHxE, k_BxLxKxE, v_BxLxKxD, *local) -> jax.Array:
    batch, length, heads, _ = q_BxLxHxE.shape
    if local and length <= _block(options):
        (q_BxLxHxE, k_BxLxKxE), local = local, ()
    plan = plan_for(options, length, exact_local=bool(local))
    padded = -(-length // plan.block) * plan.block

    def heads_apart(a_BxLxHxF, sizes):
        # Zero tokens after the last are exact: their weights are 0. So are zero features.
        size = next(s for s in sizes if s >= a_BxLxHxF.shape[3])
        a_BxLxHxF = jnp.pad(a_BxLxHxF, ((0, 0), (0, padded - length), (0, 0), (0, size - a_BxLxHxF.shape[3])))
        a_BxHxLxF = jnp.repeat(a_BxLxHxF.swapaxes(1, 2), heads // a_BxLxHxF.shape[2], axis=1)
        return a_BxHxLxF.reshape(batch * heads, padded, size)

    x_y = [heads_apart(a, SIZES) for a in (q_BxLxHxE, k_BxLxKxE)]
    o_NxLxD = attend(plan, *x_y, heads_apart(v_BxLxKxD, (TILE,)), *(heads_apart(a, SIZES) for a in local))
    o_BxHxLxD = o_NxLxD.reshape(batch, heads, padded, TILE)[:, :, :length, : v_BxLxKxD.shape[-1]]
    return o_BxHxLxD.swapaxes(1, 2)


def plan_for(options: Options, length: int, exact_local: bool) -> GpuPlan:
    """How `length` tokens are computed; `exact_local`: the exact kernel has arrays of its own."""
    local = options.local
    wanted = _block(options)
    return GpuPlan(
        block=one_block(length) if length <= wanted else wanted,
        exact_local=exact_local,
        degree=2 if local is None else local.degree,
        scale=1.0 if local is None else local.scale,
        denominator_bias=options.denominator_bias,
        single_block=length <= wanted,
        interpreted=platform.target_platform() != 'gpu',
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(plan: GpuPlan, x: jax.Array, y: jax.Array, v: jax.Array, *local: jax.Array) -> jax.Array:
    """The kernels on heads apart: x, y [N, L, R], v [N, L, 64], local a, b [N, L, C] → [N, L, 64].

    R and C are 32 or 64, L a multiple of plan.block.
    """
    return _forward(plan, x, y, v, *local)[0]


def _attend_forward(plan, *inputs):
    o, *sums = map(saved, _forward(plan, *inputs))
    return o, (inputs, o, *sums)


# Compiled as one function, which all layers share: lowering the kernels takes seconds.
@functools.partial(jax.jit, static_argnums=0)
def _forward(plan, x, y, v, *local):
    """Outputs, inverse denominators and, unless plan.single_block, the moment's and the state's operands."""
    # Mosaic GPU takes half a second to import, and only runs that use it shall wait for it.
    from lm.ops.linear_attention.gpu.forward import block_sums, outputs

    moment_state = ()
    if not plan.single_block:
        sums = block_sums(plan, y, y.swapaxes(1, 2), v)
        moment_state = moment_operand(earlier(moments(plan, y, y))), as_operand(earlier(sums))
    return *outputs(plan, x, x.swapaxes(1, 2), *(local or (x, y)), v, *moment_state), *moment_state


@functools.partial(jax.jit, static_argnums=0)
def _attend_backward(plan, residuals, do):
    from lm.ops.linear_attention.gpu.backward import key_gradients, query_gradients
    from lm.ops.linear_attention.gpu.forward import block_sums

    (x, y, v, *local), o, inverse, *moment_state = residuals
    a, b = local or (x, y)
    do = do.astype(jnp.float32)
    e = -inverse * jnp.sum(do * o.astype(jnp.float32), axis=-1)
    g = (do * inverse[..., None]).astype(v.dtype)
    xt, yt = x.swapaxes(1, 2), y.swapaxes(1, 2)
    later_moment_state = ()
    if not plan.single_block:
        moment_state = moment_state[0], mirrored(moment_state[1])
        ex = (x.astype(jnp.float32) * e[..., None]).astype(x.dtype)
        sums = block_sums(plan, x, xt, g)
        later_moment_state = moment_operand(later(moments(plan, ex, x))), mirrored(as_operand(later(sums)))
    dx, *da = query_gradients(plan, x, xt, a, b, v, g, e, *moment_state)
    dv, dy, *db = key_gradients(plan, y, yt, a, b, v, g, e, *later_moment_state)
    return dx, dy, dv, *da, *db


attend.defvjp(_attend_forward, _attend_backward)


def moments(plan: GpuPlan, x_NxLxR: jax.Array, y_NxLxR: jax.Array) -> jax.Array:
    """Σ x yᵀ over the tokens of each block, float32 [N, L / block, R, R]."""
    n, length, size = x_NxLxR.shape
    shape = (n, length // plan.block, plan.block, size)
    x, y = x_NxLxR.reshape(shape), y_NxLxR.reshape(shape)
    return jnp.einsum('nbtr,nbts->nbrs', x, y, preferred_element_type=jnp.float32)


def earlier(sums: jax.Array) -> jax.Array:
    """The totals over the blocks (axis 1) before each."""
    return jnp.concatenate([jnp.zeros_like(sums[:, :1]), jnp.cumsum(sums[:, :-1], axis=1)], axis=1)


def later(sums: jax.Array) -> jax.Array:
    """The totals over the blocks (axis 1) after each."""
    return jnp.flip(earlier(jnp.flip(sums, axis=1)), axis=1)


def moment_operand(moment_NxBxRxR: jax.Array) -> jax.Array:
    """The parts below each other, bfloat16 [N, B, 3R, R]."""
    return jnp.concatenate(in_three(moment_NxBxRxR), axis=2)


def as_operand(state_NxBxMxDxS: jax.Array) -> jax.Array:
    """The state rounded to bfloat16, squares cut in two: [N, B, 2M, S / 2, D]."""
    n, blocks, count, head_dim, products = state_NxBxMxDxS.shape
    return state_NxBxMxDxS.astype(jnp.bfloat16).swapaxes(3, 4).reshape(n, blocks, 2 * count, products // 2, head_dim)


def mirrored(state_NxBxMxSxD: jax.Array) -> jax.Array:
    """The state with the squares below the diagonal too, still column by column and cut in two."""
    n, blocks, count, _, head_dim = state_NxBxMxSxD.shape
    pairs = next(squares(size) for size in SIZES if 2 * len(squares(size)) == count)
    groups = 1 + pairs[-1][1]
    state = state_NxBxMxSxD.reshape(n, blocks, count // 2, GROUP, GROUP, head_dim)
    both = [(row, column) for column in range(groups) for row in range(groups)]
    parts = [state[:, :, pairs.index((min(p), max(p)))] for p in both]
    parts = [s if row <= column else s.swapaxes(2, 3) for s, (row, column) in zip(parts, both, strict=True)]
    return jnp.stack(parts, axis=2).reshape(n, blocks, 2 * groups**2, -1, head_dim)
