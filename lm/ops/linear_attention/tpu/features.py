"""What the TPU kernels of linear attention are made of: products, packed features, weights inside a block.

Everything lies feature by token ([F, T]): a feature of x ⊗ x is then a row times eight rows, without moving a lane. The
grain of its symmetric packing is `SUBLANES`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from lm.ops.dots import in_three
from lm.ops.linear_attention.types import ProductMap
from lm.ops.powers import power_and_slope
from lm.ops.tpu import LANES, ROWS, SUBLANES, dot

UNUSED = (SUBLANES, LANES)
"""The smallest scratch array, where a plan has no use for one."""


@dataclasses.dataclass(frozen=True)
class TpuPlan:
    """What the kernels compute, and how they cut it into steps.

    Attributes:
        block: tokens a grid step; inside one the weights are (scale ⟨a, b⟩)^degree, before it ⟨φ(x), φ(y)⟩.
        tile: tokens at a time, queries as well as keys.
        heads: heads a grid step; the compiler overlaps their work.
        squared: φ(x) holds x ⊗ x, formed in VMEM; else φ is the map's or φ(x) = x.
        exact_local: a and b are arrays of their own; else they are x and y.
        degree: of the weights inside a block, a power of two.
        scale: of the weights inside a block.
        denominator_bias: what the denominator starts from.
        series: (c0, c1, c2), where φ is squared and ⟨φ(x), φ(y)⟩ = c0 + c1 s + c2 s² with s = ⟨x, y⟩; (): it is s².
        feature_map: makes the features of x in the kernels; None: x is features.
        features: that the map makes.
        projection_rows: rows of its matrix.
        single_block: one block is all there is, so that nothing is summed.
        normalize: whether to divide by the denominators.
        decay: the last of the inputs are running sums of log factors, as `lm.ops.tpu.decay` has them.
        part: tokens, where they are one part of a window, with sums over keys before it; 0: all of a window.
        sums_again: whether the backward pass forms the sums before each block again, instead of keeping them.
        joined: whether products of values and gradients add those of denominators too: there is room for more rows.
        columns: of the state, those that the backward kernel multiplies at a time, in turn with others; 0: all.
        bfloat16_vectors: whether vector units multiply bfloat16 numbers.
        vmem_limit_bytes: what the compiler may use; None: its default.
    """

    block: int
    tile: int
    heads: int
    squared: bool
    exact_local: bool
    degree: int
    scale: float
    denominator_bias: float
    series: tuple[float, ...] = ()
    feature_map: ProductMap | None = None
    features: int = 0
    projection_rows: int = 0
    single_block: bool = False
    normalize: bool = True
    decay: bool = False
    part: int = 0
    sums_again: bool = False
    joined: bool = False
    columns: int = 0
    bfloat16_vectors: bool = False
    vmem_limit_bytes: int | None = None

    def state_shape(self, features: int, head_dim: int) -> tuple[int, int]:
        """Of Σ v φ(y)ᵀ; for plain features `ROWS` rows below hold Σ φ(y), all the same."""
        if self.single_block:
            return UNUSED
        if not self.squared:
            return head_dim + ROWS, features
        return head_dim, packed_width(features) + (features + ROWS if self.series else 0)

    def moment_shape(self, features: int) -> tuple[int, int]:
        """Of Σ y yᵀ, from which the denominator comes if φ is squared; with a series y has a one below."""
        if self.single_block or not self.squared or not self.normalize:
            return UNUSED
        return (features + ROWS if self.series else features,) * 2

    def sums_shapes(self, features: int, head_dim: int) -> list[tuple[int, int]]:
        """Of what is summed over the keys: state and, where denominators need it, moment."""
        shapes = [self.state_shape(features, head_dim), self.moment_shape(features)]
        return shapes if self.squared and self.normalize else shapes[:1]

    @property
    def near_series(self) -> tuple[float, ...]:
        """The series, where it makes the weights inside a block too."""
        return () if self.exact_local else self.series


def packed_width(rows: int) -> int:
    """Rows of `pack`: 640 for 32, 2304 for 64, where x ⊗ x has 1024 and 4096."""
    groups = rows // SUBLANES
    return SUBLANES**2 * groups * (groups + 1) // 2


def granules(rows: int) -> list[tuple[int, int]]:
    """What `pack` makes: (row, the group of eight that it multiplies), of 8 rows of the result each, in their order.

    Each group meets itself and those after it. Two that follow one another fill a bfloat16 register of 16 rows: they
    multiply two groups that share one, or the same group.
    """
    groups, order = rows // SUBLANES, []
    for i in range(0, rows, 2):
        group = i // SUBLANES
        alone = [] if group % 2 == 0 else [group]
        order += [(row, each) for each in alone for row in (i, i + 1)]
        order += [(row, other) for row in (i, i + 1) for other in range(group + len(alone), groups)]
    return order


def pack(x_FxT: jax.Array, weighted: bool, bfloat16_vectors: bool = False) -> jax.Array:
    """x ⊗ x without the half that symmetry repeats: each row times the rows from its group of eight onwards.

    ⟨pack(x, weighted=True), pack(y, weighted=False)⟩ = ⟨x, y⟩²: a pair of two groups stands for its mirror image too,
    and so is doubled on the weighted side. Formed in float32 and rounded once to the type of x, as vector units do that
    multiply bfloat16 numbers (`bfloat16_vectors`).
    """
    rows, dtype = x_FxT.shape[0], x_FxT.dtype
    wide_FxT = x_FxT.astype(jnp.float32)
    beyond_FxT = 2.0 * wide_FxT if weighted else wide_FxT
    order = granules(rows)

    def of_group(row: int, group: int) -> jax.Array:
        x = wide_FxT if group == row // SUBLANES else beyond_FxT
        return x[group * SUBLANES : (group + 1) * SUBLANES]

    if not (bfloat16_vectors and dtype == jnp.bfloat16):
        return jnp.concatenate([wide_FxT[i : i + 1] * of_group(i, group) for i, group in order], axis=0).astype(dtype)

    repeated = functools.cache(lambda i: jnp.broadcast_to(wide_FxT[i : i + 1], (SUBLANES, x_FxT.shape[1])))

    @functools.cache
    def left(i: int, j: int) -> jax.Array:
        return jnp.concatenate([repeated(i), repeated(j)], axis=0).astype(dtype)

    @functools.cache
    def right(*each: tuple[bool, int]) -> jax.Array:
        parts = [(wide_FxT if own else beyond_FxT)[g * SUBLANES : (g + 1) * SUBLANES] for own, g in each]
        return jnp.concatenate(parts, axis=0).astype(dtype)

    parts = [
        left(i, j) * right(*((row // SUBLANES == group, group) for row, group in ((i, of_i), (j, of_j))))
        for (i, of_i), (j, of_j) in zip(order[::2], order[1::2], strict=True)
    ]
    return jnp.concatenate(parts, axis=0)


def unpack_gradient(x_FxT: jax.Array, gradient_PxT: jax.Array) -> jax.Array:
    """The float32 gradient of x [F, T] from that of `pack(x, weighted=True)` [P, T].

    The gradients of two features that are mirror images inside one group of eight must be the same, as they are for
    every state made of `pack`; then all of it carries the factor 2.
    """
    rows = x_FxT.shape[0]
    x_FxT = x_FxT.astype(jnp.float32)
    groups = [x_FxT[at : at + SUBLANES] for at in range(0, rows, SUBLANES)]
    sums: list = [0.0] * len(groups)
    across: list = [0.0] * rows
    for number, (i, group) in enumerate(granules(rows)):
        part = gradient_PxT[number * SUBLANES : (number + 1) * SUBLANES]
        sums[group] += x_FxT[i : i + 1] * part
        if group > i // SUBLANES:
            across[i] += groups[group] * part
    for group in range(len(groups) - 1):
        sums[group] += row_sums(across[group * SUBLANES : (group + 1) * SUBLANES])
    return 2.0 * jnp.concatenate(sums, axis=0)


def row_sums(arrays: list[jax.Array]) -> jax.Array:
    """Of eight arrays [8, T]: row i is the sum over the rows of array i.

    Each step halves their number: a row of the result adds, of the array that it stands for, its own and one more row.
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
    """φ(x) of a squared plan: `pack`, with a series x and a one below. Its coefficients are the states' part."""
    packed_PxT = pack(x_FxT, weighted, plan.bfloat16_vectors)
    return jnp.concatenate([packed_PxT, x_FxT, one(x_FxT)], axis=0) if plan.series else packed_PxT


def expand_gradient(plan: TpuPlan, x_FxT: jax.Array, gradient_PxT: jax.Array) -> jax.Array:
    """The float32 gradient of x [F, T] from that of `expand(plan, x, weighted=True)` [P, T]."""
    if not plan.series:
        return unpack_gradient(x_FxT, gradient_PxT)
    width, rows = packed_width(x_FxT.shape[0]), x_FxT.shape[0]
    return unpack_gradient(x_FxT, gradient_PxT[:width]) + gradient_PxT[width : width + rows]


def one(x_FxT: jax.Array) -> jax.Array:
    """A row of ones, filled up with zeros to `ROWS` rows."""
    row = lax.broadcasted_iota(jnp.int32, (ROWS, x_FxT.shape[1]), 0)
    return jnp.where(row == 0, 1.0, 0.0).astype(x_FxT.dtype)


def with_one(plan: TpuPlan, x_FxT: jax.Array) -> jax.Array:
    """What the moment is made of and meets."""
    return jnp.concatenate([x_FxT, one(x_FxT)], axis=0) if plan.series else x_FxT


def moment_operand(plan: TpuPlan, moment_FxF: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The moment as left side of a product that keeps its 24 bits.

    Side by side its three parts meet three copies of x in one pass: the contraction has room to spare.
    The coefficients of a series are multiplied in, half of c1 on either side of the diagonal.
    """
    if plan.series:
        constant, linear, square = plan.series
        row, column = (lax.broadcasted_iota(jnp.int32, moment_FxF.shape, axis) for axis in (0, 1))
        size = moment_FxF.shape[0] - ROWS
        apart = jnp.where((row < size) | (column < size), linear / 2, constant)
        moment_FxF *= jnp.where((row < size) & (column < size), square, apart)
    return moment_FxF if dtype == jnp.float32 else jnp.concatenate(in_three(moment_FxF), axis=1)


def moment_times(operand: jax.Array, x_FxT: jax.Array) -> jax.Array:
    """moment · x in float32."""
    return dot(operand, x_FxT if x_FxT.dtype == jnp.float32 else jnp.concatenate([x_FxT] * 3, axis=0), (1, 0))


def state_operand(plan: TpuPlan, state: jax.Array, features: int, dtype: jnp.dtype) -> jax.Array:
    """The float32 state as an operand of the given type, with the coefficients of a series.

    The rows of Σ φ(y) become its three parts.
    """
    if plan.series:
        constant, linear, square = plan.series
        column = lax.broadcasted_iota(jnp.int32, (1, state.shape[1]), 1)
        others = jnp.where(column < state.shape[1] - ROWS, linear, constant)
        state *= jnp.where(column < packed_width(features), square, others)
    if plan.squared:
        return state.astype(dtype)
    values, sums = state[:-ROWS], state[-ROWS:]
    row = lax.broadcasted_iota(jnp.int32, sums.shape, 0)
    parts = [sums] if dtype == jnp.float32 else [part.astype(jnp.float32) for part in in_three(sums)]
    chosen = sum(jnp.where(row == i, part, 0.0) for i, part in enumerate(parts))
    return jnp.concatenate([values, chosen], axis=0).astype(dtype)


def extended(plan: TpuPlan, x_DxT: jax.Array, row_1xT: jax.Array | float) -> jax.Array:
    """What meets the state: x itself, or for plain features with `ROWS` equal rows below."""
    if plan.squared:
        return x_DxT
    rows = jnp.broadcast_to(jnp.asarray(row_1xT, jnp.float32), (ROWS, x_DxT.shape[1]))
    return jnp.concatenate([x_DxT, rows.astype(x_DxT.dtype)], axis=0)


def weights_and_slope(plan: TpuPlan, s: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """The weights inside a block of inner products s, and their slope / `slope_factor` (None: 1)."""
    if plan.near_series:
        constant, linear, square = plan.near_series
        return constant + s * (linear + square * s), linear + (2.0 * square) * s
    return power_and_slope(s if plan.scale == 1.0 else plan.scale * s, plan.degree)


def slope_factor(plan: TpuPlan) -> float:
    """What `weights_and_slope` leaves out of the slope."""
    return 1.0 if plan.near_series else plan.degree * plan.scale


def causal(weights: jax.Array, key_axis: int = 0) -> jax.Array:
    """Zero where the key comes after the query, both of the same tile."""
    key, query = (lax.broadcasted_iota(jnp.int32, weights.shape, axis) for axis in (key_axis, 1 - key_axis))
    return jnp.where(key <= query, weights, 0.0)


def tiles(plan: TpuPlan) -> list[slice]:
    """The tokens of each tile of a block."""
    return [slice(at, at + plan.tile) for at in range(0, plan.block, plan.tile)]
