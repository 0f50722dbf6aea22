"""The TPU kernels of the sketch networks: a node of the tree, forward and backward.

M input size, E hidden units, r outputs, T tokens of a tile, S the networks' inputs: 1 where both read the same, else 2.
Arrays in HBM are [B, H, rows, L], feature by token, as the attention kernels want them; tokens fill the 128 lanes.

The layer normalizations' scale and bias are folded into the map that follows, which meets the standardized input plus
`OFFSET`. The hidden layers exist only tile by tile in VMEM. The backward kernel computes them again and adds up the
gradients of the weights in float32, in blocks that stay in VMEM.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops.sketch_networks.types import EPSILON
from lm.ops.tpu import dot

OFFSET = 0.5
"""Added to standardized inputs, whose sum over the rows is 0: a number added to all columns of a map then is a bias."""

CUBIC = (4.0 * 0.044715 * 2.0 * math.sqrt(2.0 / math.pi)) ** (1 / 3)
LINEAR = 2.0 * math.sqrt(2.0 / math.pi) / CUBIC
"""gelu(x) = z (1 + tanh(z (LINEAR + z²))) / CUBIC with z = CUBIC x / 2: the maps around it multiply and divide."""


@dataclasses.dataclass(frozen=True)
class NodePlan:
    """How the kernels are cut into steps.

    Attributes:
        block: tokens a grid step.
        tile: tokens at a time in the backward kernel.
        forward_tile: tokens at a time in the forward kernel.
        heads: heads that share a sketch (G).
        parts: runs of blocks whose weight gradients are added up apart, for chips with two cores.
        slopes_again: whether the backward kernel keeps what hidden units were made of, in place of their derivatives.
        vmem_limit_bytes: what the compiler may use; None: its default.
    """

    block: int
    tile: int
    forward_tile: int
    heads: int
    parts: int
    slopes_again: bool = False
    vmem_limit_bytes: int | None = None


def forward(plan: NodePlan, inputs: Sequence[jax.Array], maps: Sequence[jax.Array]) -> jax.Array:
    """ψ, [B, N · G, r, L].

    Args:
        plan: L is a multiple of its block times its parts.
        inputs: S arrays [B, N · G, M, L].
        maps: [N, 2, E, M], [N, 2, r, E], [N, 2, E, r], [N, 2, r, E]; the first and third halved.
    """
    r = maps[-1].shape[2]
    output = jax.ShapeDtypeStruct((*inputs[0].shape[:2], r, inputs[0].shape[3]), inputs[0].dtype)
    return pl.pallas_call(
        functools.partial(_forward_kernel, plan, len(inputs)),
        name='sketch_networks_forward',
        grid=_grid(plan, maps, inputs[0]),
        in_specs=[_tokens(plan, a) for a in inputs] + [_whole(a) for a in maps],
        out_specs=_tokens(plan, output),
        out_shape=output,
        compiler_params=_compiler_params(plan),
        cost_estimate=_cost(1, maps, (*inputs, output)),
    )(*inputs, *maps)


def backward(
    plan: NodePlan, inputs: Sequence[jax.Array], maps: Sequence[jax.Array], dpsi: jax.Array
) -> list[jax.Array]:
    """The gradients of the inputs and, in float32 and for each of plan.parts, of the maps.

    Returns:
        S arrays like the inputs; then [N, parts, 2, M, E], [N, parts, 2, r, E], [N, parts, 2, r, E] and
        [N, parts, 2, r, E]: those of the halved maps turned over.
    """
    n = maps[0].shape[0]
    turned = [m.swapaxes(2, 3) for m in maps]
    shapes = [m.shape[1:] if i % 2 else (2, m.shape[3], m.shape[2]) for i, m in enumerate(maps)]
    sums = [jax.ShapeDtypeStruct((n, plan.parts, *shape), jnp.float32) for shape in shapes]
    outputs = [*(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in inputs), *sums]
    read = (*maps, *turned)
    return pl.pallas_call(
        functools.partial(_backward_kernel, plan, len(inputs)),
        name='sketch_networks_backward',
        grid=_grid(plan, maps, inputs[0]),
        in_specs=[_tokens(plan, a) for a in (*inputs, dpsi)] + [_whole(a) for a in read],
        out_specs=[_tokens(plan, a) for a in inputs]
        + [pl.BlockSpec((None, None, *a.shape[2:]), lambda i, p, b, h, j: (i, p, 0, 0, 0)) for a in sums],
        out_shape=outputs,
        compiler_params=_compiler_params(plan),
        cost_estimate=_cost(3, maps, (*inputs, dpsi, *outputs)),
    )(*inputs, dpsi, *read)


def _grid(plan: NodePlan, maps: Sequence[jax.Array], x_BxHxMxL: jax.Array) -> tuple[int, ...]:
    """Sketches, parts, batch, heads of a sketch, blocks of a part."""
    batch, _, _, length = x_BxHxMxL.shape
    return maps[0].shape[0], plan.parts, batch, plan.heads, length // (plan.block * plan.parts)


def _tokens(plan: NodePlan, a_BxHxFxL) -> pl.BlockSpec:
    steps = a_BxHxFxL.shape[3] // (plan.block * plan.parts)
    shape = (None, None, a_BxHxFxL.shape[2], plan.block)
    return pl.BlockSpec(shape, lambda i, p, b, h, j: (b, i * plan.heads + h, 0, p * steps + j))


def _whole(a_NxAxBxC) -> pl.BlockSpec:
    return pl.BlockSpec((None, *a_NxAxBxC.shape[1:]), lambda i, p, b, h, j: (i, 0, 0, 0))


def _compiler_params(plan: NodePlan) -> pltpu.CompilerParams:
    return pltpu.CompilerParams(
        dimension_semantics=('parallel', 'parallel', 'arbitrary', 'arbitrary', 'arbitrary'),
        vmem_limit_bytes=plan.vmem_limit_bytes,
    )


def _cost(passes: int, maps: Sequence[jax.Array], arrays) -> pl.CostEstimate:
    batch, heads, _, length = arrays[0].shape
    vectors = batch * heads * length
    weights, hidden = sum(m[0].size for m in maps), 2 * sum(m.shape[2] for m in maps[::2])
    return pl.CostEstimate(
        flops=2 * passes * vectors * weights,
        transcendentals=vectors * hidden,
        bytes_accessed=sum(a.size * a.dtype.itemsize for a in (*arrays, *maps)),
    )


def _forward_kernel(plan: NodePlan, n_inputs: int, *refs):
    inputs, (w1, v1, w2, v2), psi = refs[:n_inputs], refs[n_inputs:-1], refs[-1]
    r, dtype = psi.shape[0], psi.dtype
    for at in range(0, plan.block, plan.forward_tile):
        tokens = slice(at, at + plan.forward_tile)
        xs = [_shifted(_standardize(x[:, tokens].astype(jnp.float32))[0], dtype) for x in inputs]
        ys = _both(v1, [_gelu(z).astype(dtype) for z in _both(w1, xs)])
        ys = [_shifted(_standardize(y)[0], dtype) for y in ys]
        first, second = _both(v2, [_gelu(z).astype(dtype) for z in _both(w2, ys)])
        psi[:, tokens] = (r**0.5 * jnp.tanh(r**-0.5 * first * second)).astype(dtype)


def _backward_kernel(plan: NodePlan, n_inputs: int, *refs):
    inputs, dpsi, refs = refs[:n_inputs], refs[n_inputs], refs[n_inputs + 1 :]
    (w1, v1, w2, v2, *turned), refs = refs[:8], refs[8:]
    dxs, (dw1, dv1, dw2, dv2) = refs[:n_inputs], refs[n_inputs:]
    r, dtype = dpsi.shape[0], dpsi.dtype

    @pl.when((pl.program_id(2) == 0) & (pl.program_id(3) == 0) & (pl.program_id(4) == 0))
    def _():
        for sums in (dw1, dv1, dw2, dv2):
            sums[...] = jnp.zeros_like(sums)

    for at in range(0, plan.block, plan.tile):
        tokens = slice(at, at + plan.tile)
        standard = [_standardize(x[:, tokens].astype(jnp.float32)) for x in inputs]
        xs = [_shifted(x, dtype) for x, _ in standard]
        lower = [_hidden(plan, z, dtype) for z in _both(w1, xs)]
        between = [_standardize(y) for y in _both(v1, [h for h, _ in lower])]
        ys = [_shifted(y, dtype) for y, _ in between]
        upper = [_hidden(plan, z, dtype) for z in _both(w2, ys)]
        first, second = _both(v2, [h for h, _ in upper])
        bounded = jnp.tanh(r**-0.5 * first * second)
        dproduct = dpsi[:, tokens].astype(jnp.float32) * (1.0 - bounded * bounded)
        dfs = [(dproduct * other).astype(dtype) for other in (second, first)]
        dys = _level_backward(dfs, ys, upper, turned[2:], dw2, dv2)
        dys = [_standardize_backward(*y, dy).astype(dtype) for y, dy in zip(between, dys, strict=True)]
        dx = _level_backward(dys, xs, lower, turned[:2], dw1, dv1)
        for i, d in enumerate([dx[0] + dx[1]] if n_inputs == 1 else dx):
            dxs[i][:, tokens] = _standardize_backward(*standard[i], d).astype(dtype)


def _both(maps, xs: list[jax.Array]) -> list[jax.Array]:
    """The products of both networks, one after the other: while the vector units are at work on what comes of the
    first, the matrix units compute the second. They keep the order in which products are written."""
    return [dot(maps[i], xs[i % len(xs)], (1, 0)) for i in range(2)]


def _gelu(z: jax.Array) -> jax.Array:
    return z + z * jnp.tanh(z * (LINEAR + z * z))


def _hidden(plan: NodePlan, z: jax.Array, dtype) -> tuple[jax.Array, Callable[[], jax.Array]]:
    """`_gelu`, rounded, and what gives its derivative."""
    if not plan.slopes_again:
        h, slope = _gelu_and_slope(z)
        return h.astype(dtype), lambda: slope
    kept = z.astype(dtype)
    return _gelu(z).astype(dtype), lambda: _gelu_and_slope(kept.astype(jnp.float32))[1]


def _gelu_and_slope(z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`_gelu` and its derivative. Of several ways to write it this is the one that schedules best."""
    inner = LINEAR + z * z
    slope = z * (3.0 * inner - 2.0 * LINEAR)
    p = 1.0 + jnp.tanh(z * inner)
    return z * p, p * (1.0 + (2.0 - p) * slope)


def _level_backward(dys, xs, hidden, turned, dw, dv) -> list[jax.Array]:
    """The gradients of both networks' standardized inputs to a level; those of its maps are added to dw and dv."""
    dzs, dxs = [], []
    for i in range(2):
        h_ExT, slope = hidden[i]
        dzs.append((dot(turned[1][i], dys[i], (1, 0)) * slope()).astype(h_ExT.dtype))
        dv[i] += dot(dys[i], h_ExT, (1, 1))
    for i in range(2):
        dxs.append(dot(turned[0][i], dzs[i], (1, 0)))
        dw[i] += dot(xs[i % len(xs)], dzs[i], (1, 1))
    return dxs


def _shifted(x_MxT: jax.Array, dtype) -> jax.Array:
    return (x_MxT + OFFSET).astype(dtype)


def _standardize(x_MxT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x with mean 0 and variance 1 over the rows, and what its deviations were multiplied by."""
    centred = x_MxT - jnp.mean(x_MxT, axis=0, keepdims=True)
    inverse_1xT = lax.rsqrt(jnp.mean(centred * centred, axis=0, keepdims=True) + EPSILON)
    return centred * inverse_1xT, inverse_1xT


def _standardize_backward(standard_MxT: jax.Array, inverse_1xT: jax.Array, d_MxT: jax.Array) -> jax.Array:
    d_MxT -= jnp.mean(d_MxT, axis=0, keepdims=True)
    return inverse_1xT * (d_MxT - standard_MxT * jnp.mean(d_MxT * standard_MxT, axis=0, keepdims=True))
