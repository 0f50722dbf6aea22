"""The steps into which the TPU kernels of linear attention cut a call, and the arrays that they take."""

import dataclasses
import math
from typing import Any, Generic, NamedTuple, TypeVar, cast

import jax

from lm.ops import platform
from lm.ops.linear_attention.feature_maps import FeatureMap, ProductMap
from lm.ops.linear_attention.types import LOCAL_BLOCK, SQUARE, LinearCall, Options, PolynomialKernel
from lm.ops.tpu import LANES, ROWS, SUBLANES, padded_rows

WIDE = 1024
"""Features of a map beyond which more than two heads per grid step gain nothing and take long to compile."""
UNUSED = (SUBLANES, LANES)
"""The smallest scratch array, where a plan has no use for one."""

Ref = Any
"""A reference to an array in VMEM, inside a kernel."""
A = TypeVar('A')
"""jax.Array, or inside a kernel `Ref`."""


class KernelInputs(NamedTuple):
    """Arrays that lie feature by token. F, C and D are multiples of 16.

    Attributes:
        x_NxFxL: features of queries; with plan.feature_map the inputs of the map [N, E, L].
        y_NxFxL: features of keys, likewise.
        v_NxDxL: values.
        a_NxCxL: the queries that the exact kernel compares; None unless plan.exact_local.
        b_NxCxL: the keys that the exact kernel compares; None unless plan.exact_local.
        c_Nx1xL: running sums of log factors in each block, float32 (`lm.ops.tpu.decay`); None unless plan.decay.
        rest_Nx1xL: the rest that their rounding has left; None unless v is float32 too. It has no gradient.
    """

    x_NxFxL: jax.Array
    y_NxFxL: jax.Array
    v_NxDxL: jax.Array
    a_NxCxL: jax.Array | None = None
    b_NxCxL: jax.Array | None = None
    c_Nx1xL: jax.Array | None = None
    rest_Nx1xL: jax.Array | None = None


class KernelSums(NamedTuple, Generic[A]):
    """Sums over tokens, [N, rows, columns] float32 of `plan.sums_shapes`; saved ones are rounded, one set per block.

    Attributes:
        state: Σ v φ(y)ᵀ; for plain features `ROWS` rows below hold Σ φ(y), all the same.
        moment: Σ y yᵀ, from which the denominator comes if φ is squared; None where there is no use for it.
    """

    state: A
    moment: A | None


@dataclasses.dataclass(frozen=True)
class TpuPlan:
    """The computation of the kernels, and its steps.

    Attributes:
        block: tokens per grid step. Inside a block the weights are (scale ⟨a, b⟩)^degree, before it ⟨φ(x), φ(y)⟩.
        tile: tokens at a time, queries as well as keys.
        heads: heads per grid step; the compiler overlaps their work.
        squared: φ(x) holds x ⊗ x, formed in VMEM; else φ is the map's or φ(x) = x.
        exact_local: a and b are separate arrays; else they are x and y.
        degree: the degree of the weights inside a block, a power of two.
        scale: the scale of the weights inside a block.
        denominator_bias: the constant that is added to the denominator.
        series: (c0, c1, c2), where φ is squared and ⟨φ(x), φ(y)⟩ = c0 + c1 s + c2 s² with s = ⟨x, y⟩; (): it is s².
        feature_map: makes the features of x in the kernels; None: x is features.
        features: the number of features that the map makes.
        projection_rows: rows of the map's matrix.
        single_block: the sequence is one block, so that nothing is summed.
        normalize: divide by the denominators.
        decay: True where there are log factors.
        part: tokens of a part of a window, with sums over keys before it; 0: the tokens are a whole window.
        sums_again: the backward pass forms the sums before each block again, instead of keeping them.
        joined: products of values and gradients also add gradients of denominators; there is room for more rows.
        columns: columns of the state that the backward kernel multiplies at a time, in turn with others; 0: all.
        bfloat16_vectors: the vector units multiply bfloat16 numbers.
        vmem_limit_bytes: VMEM that the compiler may use; None: its default.
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

    @property
    def has_moment(self) -> bool:
        return self.squared and self.normalize

    @property
    def learned_map(self) -> ProductMap | None:
        """The feature map, if its matrix has a gradient."""
        return self.feature_map if self.feature_map is not None and self.feature_map.learns else None

    def state_shape(self, features: int, head_dim: int) -> tuple[int, int]:
        """Returns rows and columns of Σ v φ(y)ᵀ."""
        if self.single_block:
            return UNUSED
        if not self.squared:
            return head_dim + ROWS, features
        return head_dim, packed_width(features) + (features + ROWS if self.series else 0)

    def moment_shape(self, features: int) -> tuple[int, int]:
        """Returns rows and columns of Σ y yᵀ; with a series y has a one below."""
        if self.single_block or not self.has_moment:
            return UNUSED
        size = features + ROWS if self.series else features
        return size, size

    def sums_shapes(self, features: int, head_dim: int) -> KernelSums[tuple[int, int]]:
        """Returns the shapes of the sums over keys."""
        moment = self.moment_shape(features) if self.has_moment else None
        return KernelSums(self.state_shape(features, head_dim), moment)

    @property
    def near_series(self) -> tuple[float, ...]:
        """The series, where it makes the weights inside a block too."""
        return () if self.exact_local else self.series


def packed_width(rows: int) -> int:
    """Returns the rows of `pack`: 640 for 32, 2304 for 64, where x ⊗ x has 1024 and 4096."""
    groups = rows // SUBLANES
    return SUBLANES**2 * groups * (groups + 1) // 2


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of a call that decide how the kernels cut it.

    Attributes:
        options: the options of the call.
        length: tokens.
        heads: query heads of all sequences.
        input_rows: rows of x, padded.
        head_dim: rows of v, padded.
        compared: rows of a and b, padded; 0 where they are x and y.
        itemsize: bytes of a number of v.
        features: the number of features that the feature map makes; 0 without one.
        projection_rows: rows of the map's matrix.
        decay: True where there are log factors.
        part: True where the tokens are a part of a window, with sums over keys before it.
    """

    options: Options
    length: int
    heads: int
    input_rows: int
    head_dim: int
    compared: int
    itemsize: int
    features: int = 0
    projection_rows: int = 0
    decay: bool = False
    part: bool = False

    @classmethod
    def of_call(cls, call: LinearCall, part: bool = False) -> 'Sizes':
        batch, length, heads, size = call.q_BxLxHxE.shape
        features, projection_rows = count_made(call.options.feature_map, call.q_BxLxHxE, call.q_parameters)
        return cls(
            call.options,
            length,
            heads=batch * heads,
            input_rows=padded_rows(size),
            head_dim=padded_rows(call.v_BxLxKxD.shape[-1]),
            compared=0 if call.local is None else padded_rows(call.local.queries.shape[-1]),
            itemsize=call.v_BxLxKxD.dtype.itemsize,
            features=features,
            projection_rows=projection_rows,
            decay=call.log_decay_BxLxK is not None,
            part=part,
        )

    @property
    def squared(self) -> bool:
        return is_quadratic(self.options.powers)


def is_quadratic(powers: tuple[float, ...]) -> bool:
    return len(powers) == 3 and min(powers) >= 0 and powers[2] > 0


def count_made(feature_map: FeatureMap | None, x: jax.Array, parameters: object) -> tuple[int, int]:
    """Counts the features that a `ProductMap` makes, and the rows of its matrix; 0 and 0 where there is no map."""
    if feature_map is None:
        return 0, 0
    one = jax.ShapeDtypeStruct((1, 1, 1, x.shape[-1]), x.dtype)
    matrix = jax.eval_shape(cast(ProductMap, feature_map).matrix, parameters)
    features = jax.eval_shape(lambda parameters, x: feature_map(parameters, x, False), parameters, one)
    return features.shape[-1], cast(jax.Array, matrix).shape[0]


def choose_block(sizes: Sizes) -> int:
    """Chooses the tokens of a block, a multiple of the lanes."""
    if sizes.options.local is not None:
        block = sizes.options.block or LOCAL_BLOCK
    elif sizes.features > WIDE and sizes.itemsize == 4:
        block = LANES
    else:
        # The block does not matter to the result. Wider blocks save fewer sums, and shorter blocks compute less.
        block = 512 if sizes.squared and sizes.input_rows > 32 else 256
    return -(-min(block, sizes.length) // LANES) * LANES


def choose_heads(plan: TpuPlan, sizes: Sizes) -> int:
    """Chooses the heads of a grid step: as many as fit and divide the heads of the call."""
    margin = 1.2 if sizes.features else 1.4  # features take most of the memory, and their size is known
    for heads in (4, 3, 2) if sizes.features <= WIDE else (2,):
        bytes_needed = margin * estimate_vmem(dataclasses.replace(plan, heads=heads), sizes)
        if sizes.heads % heads == 0 and bytes_needed <= platform.vmem()[0]:
            return heads
    return 1


def make_plan(sizes: Sizes) -> TpuPlan:
    """Plans the kernels of a call."""
    options, squared, block = sizes.options, sizes.squared, choose_block(sizes)
    degree, scale = 2 if squared else 1, 1.0
    if isinstance(options.local, PolynomialKernel):
        degree, scale = options.local.degree, options.local.scale
    # In a single block of exact weights the features have no part.
    has_series = squared and options.powers != SQUARE and (options.local is None or sizes.compared)
    plan = TpuPlan(
        block=block,
        tile=next(size for size in (256, LANES) if block % size == 0),
        heads=1,
        squared=squared,
        exact_local=sizes.compared > 0,
        degree=degree,
        scale=scale,
        denominator_bias=options.denominator_bias,
        series=options.powers if has_series else (),
        feature_map=options.feature_map if isinstance(options.feature_map, ProductMap) else None,
        features=sizes.features,
        projection_rows=sizes.projection_rows,
        single_block=sizes.length <= block and not sizes.part,
        normalize=options.normalize,
        decay=sizes.decay,
        part=sizes.length if sizes.part else 0,
        # The sums of so many features are several times as large as all other residuals of a layer.
        sums_again=sizes.features > WIDE and sizes.length > block and not sizes.part,
        joined=sizes.head_dim % platform.matrix_side() > 0,
        # Static cycles: r = 32 in blocks of 1,024 takes 5 % less of them on v6e, and on v5e 3 % more.
        columns=(sizes.features or 256) if platform.matrix_side() == 256 else 0,
        bfloat16_vectors=platform.matrix_side() == 256,
        vmem_limit_bytes=platform.vmem()[1],
    )
    return dataclasses.replace(plan, heads=choose_heads(plan, sizes))


def estimate_vmem(plan: TpuPlan, sizes: Sizes) -> int:
    """Estimates the bytes of VMEM that the backward kernel, the larger one, takes: about what the compiler reports."""
    itemsize, features = sizes.itemsize, plan.features or sizes.input_rows
    state = math.prod(plan.state_shape(features, sizes.head_dim))
    rows = 4 * sizes.input_rows + 5 * sizes.head_dim + 4 * sizes.compared
    blocks = 2 * itemsize * (rows * plan.block + state + (3 * features**2 if plan.squared else 0))
    sums = (12 if plan.part else 4) * (state + math.prod(plan.moment_shape(features)))
    expansion = 2 * plan.state_shape(features, sizes.head_dim)[1] * plan.block
    if plan.squared and itemsize == 4 and plan.vmem_limit_bytes is None:
        # v4 spills float32 expansions: 9.1 MiB at r = 32 in blocks of 1,024, 14.5 MiB at r = 64 in blocks of 512.
        expansion += 6 * plan.heads * expansion
    weights = (12 if plan.decay else 8) * plan.block * plan.tile + 2 * LANES * plan.block * plan.decay
    maps = 0
    if plan.feature_map is not None:
        # Each head has features, their gradients and products; W is in two buffers for queries and keys, and its
        # gradients likewise. Products of float32 numbers have bfloat16 parts, which take as much again.
        maps = (itemsize // 2) * ((6 + 2 * itemsize) * features + 8 * plan.projection_rows) * plan.block * plan.heads
        width = max(2 * sizes.input_rows, LANES)
        maps += (4 * itemsize + 16 * plan.feature_map.learns) * plan.projection_rows * width
    return plan.heads * (blocks + sums) + expansion + weights + maps
