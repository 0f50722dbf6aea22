"""Gated units on TPUs: one Pallas kernel forward and one backward, whose units reach HBM before their activation alone.

Arrays of tokens in HBM are [B, rows, L], feature by token, as the attention kernels want them; tokens fill the lanes.
The matrix units hold a tile of tokens, and the matrices of the layer stream through them, some units at a time. The
backward kernel adds up the gradients of the matrices in float32 on chip, so a chip's memory limits their size.

D width of the model, F width of the units, S of them per grid step, T tokens of a tile.
"""

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import tpu as pltpu

from lm.ops import platform
from lm.ops.chips import limits_of
from lm.ops.custom_vjp import custom_vjp
from lm.ops.gated_units.types import ACTIVATIONS, UnitsCall
from lm.ops.norms import Norm
from lm.ops.residuals import PRODUCT_NAME, save_residual
from lm.ops.tpu import LANES, MIB, ROWS, dot

UNITS = 1408
"""The most units per grid step."""


@dataclasses.dataclass(frozen=True)
class UnitsPlan:
    """How the kernels are cut into steps.

    Attributes:
        activation: of the gates.
        tile: tokens per grid step.
        units: units per grid step.
        parts: into how many parts the tokens are split, each with sums of its own.
        centred: whether the norm subtracts the mean.
        epsilon: added to the variance of the norm.
    """

    activation: str
    tile: int
    units: int
    parts: int
    centred: bool
    epsilon: float


Matrices = tuple[jax.Array, jax.Array, jax.Array]
"""The matrices to values [D, F], to gates [D, F] and from units [F, D]."""


def gated_units(call: UnitsCall) -> jax.Array:
    """Computes calls that `unsupported` does not refuse."""
    run = platform.per_device(functools.partial(_run_on_device, call.activation), split=(True, False, False, False))
    return run(call.x_TxD, call.into_DxN, call.out_FxD, call.norm)


def unsupported(call: UnitsCall) -> str | None:
    """Returns why the kernels cannot compute this call, or None."""
    if platform.target_platform() != 'tpu':
        return 'needs a TPU'
    if reason := platform.not_bfloat16(*call[:3]) or platform.uneven_batch(call.x_TxD.shape[0]):
        return reason
    width, units = call.x_TxD.shape[-1], call.out_FxD.shape[0]
    if width % LANES:
        return f'takes a model whose width is a multiple of {LANES}, not {width}'
    length = call.x_TxD.shape[-2] // (platform.batch_shards() if call.x_TxD.ndim == 2 else 1)
    if all(length % n for n in range(_most_tokens() // 2, _most_tokens() + 1, LANES)):
        return f'takes a multiple of {_most_tokens() // 2} tokens, not {length}'
    if not any(find_tile(length, width, units)):
        return f'would not fit its VMEM with {units} units of a model of width {width}'
    return None


def find_tile(length: int, width: int, units: int) -> tuple[int, int]:
    """Returns the tokens and the units per grid step that take the least time; zeros: nothing fits on chip.

    While the tokens are on chip, HBM has time to bring the matrices, so they are never few. A product of so many tokens
    and units takes about the time of half a matrix unit more of each.

    Args:
        length: tokens of a row.
        width: of the model.
        units: of the layer.
    """
    side, most = platform.matrix_side(), _most_tokens()
    tokens = [n for n in range(most, most // 2 - 1, -LANES) if length % n == 0]

    def estimate_time(pair: tuple[int, int]) -> float:
        tile, step = pair
        return (tile + side / 2) / tile * (step + side / 2) * -(-units // step)

    pairs = itertools.product(tokens, range(UNITS, 2 * side - 1, -LANES))
    fitting = [pair for pair in pairs if vmem_estimate(*pair, width, units) <= 0.93 * vmem()]
    return min(fitting, key=estimate_time, default=(0, 0))


def vmem() -> int:
    """Returns the bytes of on-chip memory that the kernels may use: most of it."""
    chip = limits_of(platform.device_kind())
    return (64 if chip is None else chip.vmem_mib) * MIB * 15 // 16


def count_cores() -> int:
    """Returns the cores of one device."""
    chip = limits_of(platform.device_kind())
    return 1 if chip is None else chip.device_cores


def vmem_estimate(tile: int, step: int, width: int, units: int) -> int:
    """Returns the bytes of VMEM that the backward kernel, the larger one, takes: about what the compiler reports."""
    matrices = 3 * step * width * (2 + (4 if count_cores() > 1 else 2))
    gains = 2 * 4 * 2 * width * LANES
    blocks = 2 * (2 * (4 * width * tile + 2 * step * tile) + matrices + gains)
    sums = 4 * width * (3 * step * -(-units // step) + tile)
    return blocks + sums + 2 * 4 * step * tile


def _most_tokens() -> int:
    return 1024 if platform.matrix_side() > LANES else 512


def _run_on_device(
    activation: str, x_TxD: jax.Array, into_DxN: jax.Array, out_FxD: jax.Array, norm: Norm | None
) -> jax.Array:
    (width, _), length, cores = into_DxN.shape, x_TxD.shape[-2], count_cores()
    x_BxLxD = x_TxD.reshape(-1, length, width)
    tile, step = find_tile(length, width, len(out_FxD))
    tiles = x_BxLxD.shape[0] * length // tile
    epsilon, centred = (0.0, False) if norm is None else (norm.epsilon, norm.centred)
    plan = UnitsPlan(activation, tile, step, cores if tiles % cores == 0 else 1, centred, epsilon)
    values_DxF, gates_DxF = jnp.split(into_DxN, 2, axis=1)
    if idle := -len(out_FxD) % step:
        values_DxF, gates_DxF = (jnp.pad(matrix, ((0, 0), (0, idle))) for matrix in (values_DxF, gates_DxF))
        out_FxD = jnp.pad(out_FxD, ((0, idle), (0, 0)))
    gains_2xD = None
    if norm is not None:
        bias_D = jnp.zeros_like(norm.gain_D) if norm.bias_D is None else norm.bias_D
        gains_2xD = jnp.stack([norm.gain_D, bias_D]).astype(jnp.float32)
    y_BxDxL = _run(plan, x_BxLxD.swapaxes(1, 2), (values_DxF, gates_DxF, out_FxD), gains_2xD)
    return y_BxDxL.swapaxes(1, 2).reshape(x_TxD.shape)


@custom_vjp(0)
def _run(plan: UnitsPlan, x_BxDxL: jax.Array, matrices: Matrices, gains_2xD: jax.Array | None) -> jax.Array:
    """Returns y, [B, D, L]."""
    return _forward(plan, x_BxDxL, matrices, gains_2xD)[0]


def _run_forward(plan, x_BxDxL, matrices, gains_2xD):
    y_BxDxL, *hidden = _forward(plan, x_BxDxL, matrices, gains_2xD)
    kept = tuple(save_residual(part_BxFxL, PRODUCT_NAME) for part_BxFxL in hidden)
    return y_BxDxL, (x_BxDxL, kept, matrices, gains_2xD)


def _run_backward(plan, residuals, dy_BxDxL):
    x_BxDxL, hidden, matrices, gains_2xD = residuals
    return _backward(plan, x_BxDxL, hidden, matrices, gains_2xD, dy_BxDxL)


_run.defvjp(_run_forward, _run_backward)


def _forward(
    plan: UnitsPlan, x_BxDxL: jax.Array, matrices: Matrices, gains_2xD: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns y, [B, D, L], then the values and the gates of the units, [B, F, L]."""
    batch, width, length = x_BxDxL.shape
    turned = tuple(matrix.T for matrix in matrices)
    units, n = len(turned[0]), length // plan.tile
    hidden = jax.ShapeDtypeStruct((batch, units, length), x_BxDxL.dtype)
    outputs = (jax.ShapeDtypeStruct(x_BxDxL.shape, x_BxDxL.dtype), hidden, hidden)
    tokens = pl.BlockSpec((None, width, plan.tile), lambda t, s: (t // n, 0, t % n))
    of_units = pl.BlockSpec((None, plan.units, plan.tile), lambda t, s: (t // n, s, t % n))
    rows = pl.BlockSpec((plan.units, width), lambda t, s: (s, 0))
    columns = pl.BlockSpec((width, plan.units), lambda t, s: (0, s))
    gains = _on_lanes(gains_2xD)
    return pl.pallas_call(
        functools.partial(_forward_kernel, plan),
        name='gated_units_forward',
        grid=(batch * n, units // plan.units),
        in_specs=[tokens, (rows, rows, columns), _gains_spec(gains)],
        out_specs=(tokens, of_units, of_units),
        out_shape=outputs,
        scratch_shapes=_scratch(plan, x_BxDxL, gains),
        compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=vmem()),
        cost_estimate=_cost(1, x_BxDxL, units, (x_BxDxL, *turned, *outputs)),
    )(x_BxDxL, turned, gains)


def _forward_kernel(plan, x_ref, matrices, gains_ref, y_ref, v_ref, g_ref, sum_ref, normed_ref, rates_ref):
    """Computes one step; the first one of a tile computes the norm, and the last one writes the sum."""
    values_ref, gates_ref, out_ref = matrices
    step, tokens_ref = pl.program_id(1), x_ref if gains_ref is None else normed_ref

    @pl.when(step == 0)
    def _():
        sum_ref[...] = jnp.zeros(sum_ref.shape, sum_ref.dtype)
        if gains_ref is not None:
            _normalize(plan, x_ref, gains_ref, normed_ref, rates_ref)

    v_SxT = dot(values_ref[...], tokens_ref[...], (1, 0))
    g_SxT = dot(gates_ref[...], tokens_ref[...], (1, 0))
    v_ref[...], g_ref[...] = v_SxT.astype(v_ref.dtype), g_SxT.astype(g_ref.dtype)
    units_SxT = (v_SxT * ACTIVATIONS[plan.activation](g_SxT)).astype(x_ref.dtype)
    sum_ref[...] += dot(out_ref[...], units_SxT, (1, 0))

    @pl.when(step == pl.num_programs(1) - 1)
    def _():
        y_DxT = sum_ref[...] if gains_ref is None else sum_ref[...] + x_ref[...].astype(jnp.float32)
        y_ref[...] = y_DxT.astype(y_ref.dtype)


def _backward(
    plan: UnitsPlan,
    x_BxDxL: jax.Array,
    hidden: tuple[jax.Array, jax.Array],
    matrices: Matrices,
    gains_2xD: jax.Array | None,
    dy_BxDxL: jax.Array,
) -> tuple[jax.Array, Matrices, jax.Array | None]:
    """Returns the gradients of x, of the matrices and of the gains."""
    batch, width, length = x_BxDxL.shape
    units, n = len(matrices[2]), length // plan.tile
    tiles, steps = batch * n // plan.parts, units // plan.units
    # The sums of several parts are added up before they are rounded.
    dtype = matrices[0].dtype if plan.parts == 1 else jnp.float32
    sum_of_rows = jax.ShapeDtypeStruct((plan.parts, units, width), dtype)
    gains = _on_lanes(gains_2xD)
    dgains = None if gains is None else jax.ShapeDtypeStruct((plan.parts, *gains.shape), jnp.float32)
    outputs = (jax.ShapeDtypeStruct(x_BxDxL.shape, x_BxDxL.dtype), (sum_of_rows,) * 3, dgains)

    def find_tokens(p, t):
        row = p * tiles + t
        return row // n, row % n

    def place_tokens(p, t, s):
        b, j = find_tokens(p, t)
        return b, 0, j

    def place_units(p, t, s):
        b, j = find_tokens(p, t)
        return b, s, j

    def place_sum(p, t, s):
        """The last tile of tokens writes the sums."""
        return p, jnp.where(t == tiles - 1, s, 0), 0

    tokens = pl.BlockSpec((None, width, plan.tile), place_tokens)
    of_units = pl.BlockSpec((None, plan.units, plan.tile), place_units)
    columns = pl.BlockSpec((width, plan.units), lambda p, t, s: (0, s))
    rows = pl.BlockSpec((plan.units, width), lambda p, t, s: (s, 0))
    sums = pl.BlockSpec((None, plan.units, width), place_sum)
    gain_sums = None if gains is None else pl.BlockSpec((None, *gains.shape), lambda p, t, s: (p, 0, 0, 0))
    dx_BxDxL, dmatrices, dgains = pl.pallas_call(
        functools.partial(_backward_kernel, plan),
        name='gated_units_backward',
        grid=(plan.parts, tiles, steps),
        in_specs=[tokens, (of_units, of_units), tokens, (columns, columns, rows), _gains_spec(gains)],
        out_specs=(tokens, (sums,) * 3, gain_sums),
        out_shape=outputs,
        scratch_shapes=(*_scratch(plan, x_BxDxL, gains), (pltpu.VMEM((steps, plan.units, width), jnp.float32),) * 3),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary', 'arbitrary'), vmem_limit_bytes=vmem()
        ),
        cost_estimate=_cost(2, x_BxDxL, units, (x_BxDxL, *hidden, dy_BxDxL, *matrices, *jax.tree.leaves(outputs))),
    )(x_BxDxL, hidden, dy_BxDxL, matrices, gains)
    dvalues, dgates, dout = (part.sum(0).astype(matrices[0].dtype) for part in dmatrices)
    # XLA would lay the parameters and the state of the optimizer out like a transposed gradient, by copies of them all.
    dinto = (with_layout_constraint(part.T, Layout(major_to_minor=(0, 1))) for part in (dvalues, dgates))
    return dx_BxDxL, (*dinto, dout), None if dgains is None else dgains.sum((0, 3))


def _backward_kernel(plan, x_ref, hidden, dy_ref, matrices, gains_ref, dx_ref, results, dgains_ref, *scratch):
    """Computes one step; the last tile writes the gradients of the matrices."""
    (v_ref, g_ref), (values_ref, gates_ref, out_ref) = hidden, matrices
    sum_ref, normed_ref, rates_ref, (sum_of_values, sum_of_gates, sum_of_out) = scratch
    tile, step, dtype = pl.program_id(1), pl.program_id(2), x_ref.dtype
    tokens_ref = x_ref if gains_ref is None else normed_ref

    @pl.when(tile == 0)
    def _():
        for ref in (sum_of_values, sum_of_gates, sum_of_out):
            ref[step] = jnp.zeros(ref.shape[1:], ref.dtype)

    @pl.when(step == 0)
    def _():
        sum_ref[...] = jnp.zeros(sum_ref.shape, sum_ref.dtype)
        if gains_ref is not None:
            _normalize(plan, x_ref, gains_ref, normed_ref, rates_ref)

    dunits_SxT = dot(out_ref[...], dy_ref[...], (1, 0))
    v_SxT, g_SxT = v_ref[...].astype(jnp.float32), g_ref[...].astype(jnp.float32)
    activated_SxT, slope_SxT = jax.jvp(ACTIVATIONS[plan.activation], (g_SxT,), (jnp.ones_like(g_SxT),))
    dv_SxT = (dunits_SxT * activated_SxT).astype(dtype)
    dg_SxT = (dunits_SxT * v_SxT * slope_SxT).astype(dtype)
    sum_of_out[step] += dot((v_SxT * activated_SxT).astype(dtype), dy_ref[...], (1, 1))
    sum_of_values[step] += dot(dv_SxT, tokens_ref[...], (1, 1))
    sum_of_gates[step] += dot(dg_SxT, tokens_ref[...], (1, 1))
    sum_ref[...] += dot(values_ref[...], dv_SxT, (1, 0)) + dot(gates_ref[...], dg_SxT, (1, 0))

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        if gains_ref is None:
            dx_ref[...] = sum_ref[...].astype(dx_ref.dtype)
        else:
            _differentiate_norm(plan, x_ref, dy_ref, gains_ref, sum_ref, rates_ref, dx_ref, dgains_ref)

    @pl.when(tile == pl.num_programs(1) - 1)
    def _():
        for result, ref in zip(results, (sum_of_values, sum_of_gates, sum_of_out), strict=True):
            result[...] = ref[step].astype(result.dtype)


def _normalize(plan: UnitsPlan, x_ref, gains_ref, normed_ref, rates_ref) -> None:
    """Writes the normalized tokens x r − s, times gain, plus bias; and r and s of each token."""
    sums: list[tuple[Any, Any]] = [(0.0, 0.0) for _ in _registers(plan)]
    for rows in _rows(x_ref):
        for i, at in enumerate(_registers(plan)):
            x = x_ref[rows, at].astype(jnp.float32)
            sums[i] = sums[i][0] + x, sums[i][1] + x * x
    for (total, squares), at in zip(sums, _registers(plan), strict=True):
        mean, variance = _average(total, x_ref) if plan.centred else 0.0, _average(squares, x_ref)
        rate = lax.rsqrt(jnp.maximum(0.0, variance - mean * mean) + plan.epsilon)
        rates_ref[:, at] = jnp.concatenate([rate, mean * rate], axis=0)
    for rows in _rows(x_ref):
        gain, bias = gains_ref[0, rows], gains_ref[1, rows]
        for at in _registers(plan):
            standard = _standardize(x_ref, rates_ref, rows, at)
            normed_ref[rows, at] = (standard * gain + bias).astype(normed_ref.dtype)


def _differentiate_norm(plan: UnitsPlan, x_ref, dy_ref, gains_ref, dnormed_ref, rates_ref, dx_ref, dgains_ref) -> None:
    """Writes the gradient of a residual branch, and adds the gradients of gain and bias to their sums."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        dgains_ref[...] = jnp.zeros(dgains_ref.shape, dgains_ref.dtype)

    sums: list[tuple[Any, Any]] = [(0.0, 0.0) for _ in _registers(plan)]
    for rows in _rows(x_ref):
        gain, dgain, dbias = gains_ref[0, rows], dgains_ref[0, rows], dgains_ref[1, rows]
        for i, at in enumerate(_registers(plan)):
            standard, d = _standardize(x_ref, rates_ref, rows, at), dnormed_ref[rows, at]
            dgain, dbias = dgain + d * standard, dbias + d
            d = d * gain
            sums[i] = sums[i][0] + d, sums[i][1] + d * standard
        dgains_ref[0, rows], dgains_ref[1, rows] = dgain, dbias
    means = [(_average(total, x_ref) if plan.centred else 0.0, _average(along, x_ref)) for total, along in sums]
    for rows in _rows(x_ref):
        gain = gains_ref[0, rows]
        for (mean, along), at in zip(means, _registers(plan), strict=True):
            d = dnormed_ref[rows, at] * gain - mean - _standardize(x_ref, rates_ref, rows, at) * along
            dx_ref[rows, at] = (rates_ref[:1, at] * d + dy_ref[rows, at].astype(jnp.float32)).astype(dx_ref.dtype)


def _average(sum_RxT: jax.Array, x_ref: jax.Ref) -> jax.Array:
    """Returns the mean over the width of the model, of sums over its parts."""
    return jnp.sum(sum_RxT, axis=0, keepdims=True) / x_ref.shape[0]


def _standardize(x_ref: jax.Ref, rates_ref: jax.Ref, rows: slice, at: slice) -> jax.Array:
    """Returns tokens without their mean, where the norm is centred, over their root mean square."""
    return x_ref[rows, at].astype(jnp.float32) * rates_ref[:1, at] - rates_ref[1:, at]


def _rows(x_ref: jax.Ref) -> list[slice]:
    """Returns the rows of one bfloat16 register at a time: sums of all tokens of a tile then stay in registers."""
    return [slice(start, start + ROWS) for start in range(0, x_ref.shape[0], ROWS)]


def _registers(plan: UnitsPlan) -> list[slice]:
    return [slice(start, start + LANES) for start in range(0, plan.tile, LANES)]


def _on_lanes(gains_2xD: jax.Array | None) -> jax.Array | None:
    """Returns the gain and the bias of a norm on equal lanes, [2, D, W]."""
    return None if gains_2xD is None else jnp.broadcast_to(gains_2xD[..., None], (*gains_2xD.shape, LANES))


def _gains_spec(gains_2xDxW: jax.Array | None) -> pl.BlockSpec | None:
    return None if gains_2xDxW is None else pl.BlockSpec(gains_2xDxW.shape, lambda *steps: (0, 0, 0))


def _scratch(plan: UnitsPlan, x_BxDxL: jax.Array, gains: jax.Array | None) -> tuple:
    """Returns the memory of a tile: of the sum over units; and for a norm of its tokens, and of two numbers each."""
    shape = x_BxDxL.shape[1], plan.tile
    norm = pltpu.VMEM(shape, x_BxDxL.dtype), pltpu.VMEM((2, plan.tile), jnp.float32)
    return pltpu.VMEM(shape, jnp.float32), *((None, None) if gains is None else norm)


def _cost(passes: int, x_BxDxL: jax.Array, units: int, arrays: Sequence) -> pl.CostEstimate:
    batch, width, length = x_BxDxL.shape
    return pl.CostEstimate(
        flops=passes * 6 * batch * length * width * units,
        transcendentals=batch * length * units,
        bytes_accessed=sum(array.size * array.dtype.itemsize for array in arrays),
    )
