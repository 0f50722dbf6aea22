"""The arithmetic inside the TPU kernels of linear attention: packed features, operands, weights inside a block.

Everything lies feature by token ([F, T]): a feature of x ⊗ x is then a row times eight rows, without moving a lane. Its
symmetric packing works in groups of `SUBLANES` rows.
"""

import functools
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from lm.ops.dots import in_parts
from lm.ops.linear_attention.tpu.plan import TpuPlan, packed_width
from lm.ops.powers import power_and_slope
from lm.ops.tpu import ROWS, SUBLANES, dot


class Granule(NamedTuple):
    """Eight rows of `pack`: one row of x times a group of eight rows."""

    row: int
    group: int

    @property
    def is_diagonal(self) -> bool:
        """True where the row belongs to the group."""
        return self.group == self.row // SUBLANES

    @property
    def group_rows(self) -> slice:
        return slice(self.group * SUBLANES, (self.group + 1) * SUBLANES)


def list_granules(rows: int) -> list[Granule]:
    """Lists the granules of `pack` in their order.

    Each group meets itself and the groups after it. Two granules that follow one another fill a bfloat16 register of 16
    rows: they multiply two groups that share a row, or the same group.
    """
    groups, order = rows // SUBLANES, []
    for i in range(0, rows, 2):
        group = i // SUBLANES
        alone = [] if group % 2 == 0 else [group]
        order += [Granule(row, each) for each in alone for row in (i, i + 1)]
        order += [Granule(row, other) for row in (i, i + 1) for other in range(group + len(alone), groups)]
    return order


def pack(x_FxT: jax.Array, weighted: bool, bfloat16_vectors: bool = False) -> jax.Array:
    """Computes x ⊗ x without the half that symmetry repeats: each row times the rows from its group of eight onwards.

    ⟨pack(x, weighted=True), pack(y, weighted=False)⟩ = ⟨x, y⟩²: a pair of two groups stands for its mirror image too,
    and so is doubled on the weighted side. The products are formed in float32 and rounded once to the type of x, as
    vector units do that multiply bfloat16 numbers (`bfloat16_vectors`).
    """
    dtype = x_FxT.dtype
    wide_FxT = x_FxT.astype(jnp.float32)
    beyond_FxT = 2.0 * wide_FxT if weighted else wide_FxT
    granules = list_granules(x_FxT.shape[0])

    def take_group(granule: Granule) -> jax.Array:
        return (wide_FxT if granule.is_diagonal else beyond_FxT)[granule.group_rows]

    if not (bfloat16_vectors and dtype == jnp.bfloat16):
        return jnp.concatenate([wide_FxT[g.row : g.row + 1] * take_group(g) for g in granules], axis=0).astype(dtype)

    # Operands that several pairs of granules share are formed once.
    repeat_row = functools.cache(lambda i: jnp.broadcast_to(wide_FxT[i : i + 1], (SUBLANES, x_FxT.shape[1])))
    left_sides, right_sides, parts = {}, {}, []
    for pair in zip(granules[::2], granules[1::2], strict=True):
        rows, groups = tuple(g.row for g in pair), tuple((g.is_diagonal, g.group) for g in pair)
        if rows not in left_sides:
            left_sides[rows] = jnp.concatenate([repeat_row(i) for i in rows], axis=0).astype(dtype)
        if groups not in right_sides:
            right_sides[groups] = jnp.concatenate([take_group(g) for g in pair], axis=0).astype(dtype)
        parts.append(left_sides[rows] * right_sides[groups])
    return jnp.concatenate(parts, axis=0)


def unpack_gradient(x_FxT: jax.Array, gradient_PxT: jax.Array) -> jax.Array:
    """Computes the float32 gradient of x [F, T] from the gradient of `pack(x, weighted=True)` [P, T].

    Two features that are mirror images inside one group of eight must have the same gradient. They have it for every
    state made of `pack`; then the whole gradient carries the factor 2.
    """
    rows = x_FxT.shape[0]
    x_FxT = x_FxT.astype(jnp.float32)
    groups = [x_FxT[at : at + SUBLANES] for at in range(0, rows, SUBLANES)]
    sums: list = [0.0] * len(groups)
    across: list = [0.0] * rows
    for number, granule in enumerate(list_granules(rows)):
        part = gradient_PxT[number * SUBLANES : (number + 1) * SUBLANES]
        sums[granule.group] += x_FxT[granule.row : granule.row + 1] * part
        if not granule.is_diagonal:
            across[granule.row] += groups[granule.group] * part
    for group in range(len(groups) - 1):
        sums[group] += sum_rows(across[group * SUBLANES : (group + 1) * SUBLANES])
    return 2.0 * jnp.concatenate(sums, axis=0)


def sum_rows(arrays: list[jax.Array]) -> jax.Array:
    """Sums the rows of each of eight arrays [8, T]: row i of the result is the sum over the rows of array i.

    Each step halves their number: a row of the result adds two rows of its array.
    """
    row = lax.broadcasted_iota(jnp.int32, arrays[0].shape, 0)
    for distance in (1, 2, 4):
        first = (row & distance) == 0
        arrays = [
            jnp.where(first, a, b) + pltpu.roll(jnp.where(first, b, a), SUBLANES - distance, 0)
            for a, b in zip(arrays[::2], arrays[1::2], strict=True)
        ]
    return arrays[0]


def expand(plan: TpuPlan, x_FxT: jax.Array, weighted: bool) -> jax.Array:
    """Computes φ(x) of a squared plan: `pack`, with a series x and a one below; the states hold its coefficients."""
    packed_PxT = pack(x_FxT, weighted, plan.bfloat16_vectors)
    return jnp.concatenate([packed_PxT, x_FxT, make_one(x_FxT)], axis=0) if plan.series else packed_PxT


def expand_gradient(plan: TpuPlan, x_FxT: jax.Array, gradient_PxT: jax.Array) -> jax.Array:
    """Computes the float32 gradient of x [F, T] from the gradient of `expand(plan, x, weighted=True)` [P, T]."""
    if not plan.series:
        return unpack_gradient(x_FxT, gradient_PxT)
    width, rows = packed_width(x_FxT.shape[0]), x_FxT.shape[0]
    return unpack_gradient(x_FxT, gradient_PxT[:width]) + gradient_PxT[width : width + rows]


def make_one(x_FxT: jax.Array) -> jax.Array:
    """Makes a row of ones, filled up with zeros to `ROWS` rows."""
    row = lax.broadcasted_iota(jnp.int32, (ROWS, x_FxT.shape[1]), 0)
    return jnp.where(row == 0, 1.0, 0.0).astype(x_FxT.dtype)


def append_one(plan: TpuPlan, x_FxT: jax.Array) -> jax.Array:
    """Returns the vectors that the moment sums and multiplies: x, with a series a one below."""
    return jnp.concatenate([x_FxT, make_one(x_FxT)], axis=0) if plan.series else x_FxT


def make_moment_operand(plan: TpuPlan, moment_FxF: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Makes the left side of a product from the moment, with its 24 bits.

    Side by side its three parts meet three copies of x in one pass: the contraction has room for them. The coefficients
    of a series are multiplied in, half of c1 on either side of the diagonal.
    """
    if plan.series:
        constant, linear, square = plan.series
        row, column = (lax.broadcasted_iota(jnp.int32, moment_FxF.shape, axis) for axis in (0, 1))
        size = moment_FxF.shape[0] - ROWS
        border = jnp.where((row < size) | (column < size), linear / 2, constant)
        moment_FxF *= jnp.where((row < size) & (column < size), square, border)
    return moment_FxF if dtype == jnp.float32 else jnp.concatenate(in_parts(moment_FxF, 3), axis=1)


def multiply_moment(operand: jax.Array, x_FxT: jax.Array) -> jax.Array:
    """Computes moment · x in float32."""
    return dot(operand, x_FxT if x_FxT.dtype == jnp.float32 else jnp.concatenate([x_FxT] * 3, axis=0), (1, 0))


def make_state_operand(plan: TpuPlan, state: jax.Array, features: int, dtype: jnp.dtype) -> jax.Array:
    """Makes an operand of the given type from the float32 state, with the coefficients of a series.

    The rows of Σ φ(y) become the three parts of Σ φ(y).
    """
    if plan.series:
        constant, linear, square = plan.series
        column = lax.broadcasted_iota(jnp.int32, (1, state.shape[1]), 1)
        others = jnp.where(column < state.shape[1] - ROWS, linear, constant)
        state *= jnp.where(column < packed_width(features), square, others)
    if plan.squared:
        return state.astype(dtype)
    values, sums, number_RxP = state[:-ROWS], state[-ROWS:], number_rows(state.shape[1])
    return jnp.concatenate([values, fill_rows(split_float32(sums, dtype), number_RxP)], axis=0).astype(dtype)


def split_float32(x: jax.Array, dtype: jnp.dtype) -> list[jax.Array]:
    """Splits a float32 array into arrays of the given type: itself, or its three bfloat16 parts."""
    return [x] if dtype == jnp.float32 else [part.astype(jnp.float32) for part in in_parts(x, 3)]


def number_rows(columns: int) -> jax.Array:
    """Makes `ROWS` rows [R, columns] of their numbers."""
    return lax.broadcasted_iota(jnp.int32, (ROWS, columns), 0)


def fill_rows(parts: list[jax.Array], number_RxT: jax.Array) -> jax.Array:
    """Fills rows: row i is row i of part i, which may have one row alone; the others are 0."""
    return cast(jax.Array, sum(jnp.where(number_RxT == i, part, 0.0) for i, part in enumerate(parts)))


def extend(plan: TpuPlan, x_DxT: jax.Array, row_1xT: jax.Array | float) -> jax.Array:
    """Returns the side of a product with the state: x, for plain features with `ROWS` equal rows below."""
    if plan.squared:
        return x_DxT
    rows = jnp.broadcast_to(jnp.asarray(row_1xT, jnp.float32), (ROWS, x_DxT.shape[1]))
    return jnp.concatenate([x_DxT, rows.astype(x_DxT.dtype)], axis=0)


def weigh(plan: TpuPlan, s: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Computes the weights inside a block of inner products s, and their slope / `slope_factor` (None: 1)."""
    if plan.near_series:
        constant, linear, square = plan.near_series
        return constant + s * (linear + square * s), linear + (2.0 * square) * s
    return power_and_slope(s if plan.scale == 1.0 else plan.scale * s, plan.degree)


def slope_factor(plan: TpuPlan) -> float:
    """Returns the factor that `weigh` leaves out of the slope."""
    return 1.0 if plan.near_series else plan.degree * plan.scale


def mask(weights: jax.Array, key_axis: int = 0) -> jax.Array:
    """Sets weights to zero where the key comes after the query, both of the same tile."""
    key, query = (lax.broadcasted_iota(jnp.int32, weights.shape, axis) for axis in (key_axis, 1 - key_axis))
    return jnp.where(key <= query, weights, 0.0)


def cut_tiles(plan: TpuPlan) -> list[slice]:
    """Returns the tokens of each tile of a block."""
    return [slice(at, at + plan.tile) for at in range(0, plan.block, plan.tile)]
