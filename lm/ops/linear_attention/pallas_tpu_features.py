"""What the TPU kernels of linear attention are made of: products, packed features, weights inside a block.

Everything lies feature by token ([F, T], tokens on the 128 lanes), because sketches of 32 or 64 features and heads of
64 would leave half of the lanes idle; a feature of x ⊗ x is then a row times eight rows, without moving a lane.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

SUBLANES = 8
"""Rows of a vector register, and so the grain of the symmetric packing."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What the kernels compute, and how they cut it into steps.

    Attributes:
        block: tokens a grid step; inside one the weights are ⟨q, k⟩^degree, before it ⟨φ(q), φ(k)⟩.
        tile: tokens a side of the squares into which a block's weights are cut.
        heads: heads a grid step; the compiler overlaps their work.
        squared: φ(x) = x ⊗ x, formed in VMEM; else φ(x) = x.
        degree: of the weights inside a block.
        exact_local: the weights inside a block come from arrays of their own, not from those that φ takes.
        bias: what the denominator starts from.
        vmem_limit_bytes: what a kernel may use; None leaves it to the compiler.
        interpret: how Pallas interprets the kernels where there is no TPU; False compiles them.
    """

    block: int
    tile: int
    heads: int
    squared: bool
    degree: int
    exact_local: bool
    bias: float
    vmem_limit_bytes: int | None = None
    interpret: object = False

    def width(self, features: int) -> int:
        """Rows of the state for `features` rows of x."""
        return packed_width(features) if self.squared else features


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """a · b over one axis of each, accumulated in float32; float32 operands are not rounded."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    axes = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(a, b, axes, precision=precision, preferred_element_type=jnp.float32)


def packed_width(rows: int) -> int:
    """Rows of `pack`: 640 for 32, 2304 for 64, where x ⊗ x has 1024 and 4096."""
    groups = rows // SUBLANES
    return SUBLANES**2 * groups * (groups + 1) // 2


def pack(x_FxT: jax.Array, weighted: bool) -> jax.Array:
    """x ⊗ x without the half that symmetry repeats: row i times the rows from its group of eight onwards.

    ⟨pack(x, weighted=True), pack(y, weighted=False)⟩ = ⟨x, y⟩²: a pair of two groups stands for its mirror image too,
    and so is doubled on the weighted side.
    """
    rows = x_FxT.shape[0]
    beyond_FxT = 2.0 * x_FxT if weighted else x_FxT
    parts = []
    for i in range(rows):
        low = i // SUBLANES * SUBLANES
        high = low + SUBLANES
        parts.append(x_FxT[i : i + 1] * x_FxT[low:high])
        if high < rows:
            parts.append(x_FxT[i : i + 1] * beyond_FxT[high:])
    return jnp.concatenate(parts, axis=0)


def unpack_gradient(x_FxT: jax.Array, gradient_PxT: jax.Array) -> jax.Array:
    """The gradient of x [F, T] from that of `pack(x, weighted=True)` [P, T].

    The gradient of two features that are mirror images inside one group of eight must be the same, as it is for
    every state made of `pack`; then all of it carries the factor 2.
    """
    rows, groups = x_FxT.shape[0], x_FxT.shape[0] // SUBLANES
    sums: list = [0.0] * groups
    offset = 0
    for group in range(groups):
        low, high = group * SUBLANES, (group + 1) * SUBLANES
        across = []
        for i in range(low, high):
            x_1xT = x_FxT[i : i + 1]
            sums[group] += x_1xT * gradient_PxT[offset : offset + SUBLANES]
            offset += SUBLANES
            if high < rows:
                part = gradient_PxT[offset : offset + rows - high]
                offset += rows - high
                for other in range(group + 1, groups):
                    at = other * SUBLANES - high
                    sums[other] += x_1xT * part[at : at + SUBLANES]
                across.append(jnp.sum(x_FxT[high:] * part, axis=0, keepdims=True))
        if across:
            sums[group] += jnp.concatenate(across, axis=0)
    return 2.0 * jnp.concatenate(sums, axis=0)


def power(s: jax.Array, degree: int) -> jax.Array:
    """s ** degree for degree 1, 2, 4 or 8."""
    while degree > 1:
        s, degree = s * s, degree // 2
    return s


def power_and_slope(s: jax.Array, degree: int) -> tuple[jax.Array, jax.Array | None]:
    """s ** degree and s ** (degree - 1), which is None where it is 1."""
    slope = None
    while degree > 1:
        slope = s if slope is None else slope * s
        s, degree = s * s, degree // 2
    return s, slope


def causal(weights_KxQ: jax.Array, diagonal: bool) -> jax.Array:
    """Zero where the key (row) comes after the query (column), in a tile on the diagonal."""
    if not diagonal:
        return weights_KxQ
    key = lax.broadcasted_iota(jnp.int32, weights_KxQ.shape, 0)
    query = lax.broadcasted_iota(jnp.int32, weights_KxQ.shape, 1)
    return jnp.where(key <= query, weights_KxQ, 0.0)


def in_three(x: jax.Array) -> list[jax.Array]:
    """Three bfloat16 arrays whose sum is the float32 array x to 24 bits."""
    parts = []
    for _ in range(3):
        parts.append(x.astype(jnp.bfloat16))
        x = x - parts[-1].astype(jnp.float32)
    return parts


def exact_rows(moment: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The float32 matrix `moment` as left operand of an unrounded product with `stacked(x)`."""
    return moment if dtype == jnp.float32 else jnp.concatenate(in_three(moment), axis=1)


def stacked(x_FxT: jax.Array) -> jax.Array:
    """x three times over, to meet the parts of `exact_rows`: one pass, for the contraction has room to spare."""
    return x_FxT if x_FxT.dtype == jnp.float32 else jnp.concatenate([x_FxT] * 3, axis=0)


def tiles(plan: Plan) -> list[tuple[slice, list[tuple[slice, bool]]]]:
    """For every tile of queries its tokens, and those of the key tiles it sees, with whether they are on the diagonal."""
    cut = [slice(i, i + plan.tile) for i in range(0, plan.block, plan.tile)]
    return [(queries, [(keys, i == j) for j, keys in enumerate(cut[: i + 1])]) for i, queries in enumerate(cut)]


def per_head(plan: Plan, body: Callable[[int], None]) -> None:
    for head in range(plan.heads):
        body(head)
