"""A tile of tokens in the TPU kernels of the sketch networks: its forward pass, and its backward pass in two halves.

Matrix units take products in the order in which they are written. Products, which load them, alternate with gelu and
its derivative, which load the vector units. So the backward kernel writes the products of two tiles by turns: `ahead`
computes a tile's hidden units while `behind` computes the gradients of the tile before it.

Letters as in `kernels`. Derivatives and hidden units lie between the halves in VMEM, in the dtype of the products.
"""

from collections.abc import Generator, Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops.formulas import EPSILON
from lm.ops.sketch_networks.folding import LINEAR, LevelMaps, gelu
from lm.ops.sketch_networks.tpu.plan import NodePlan
from lm.ops.sketch_networks.types import ByLevel
from lm.ops.tpu import LANES, SUBLANES, dot

OFFSET = 0.5
"""Added to standardized inputs, whose sum over the rows is 0: a number added to all columns of a map then is a bias."""


Pair = tuple[jax.Ref, jax.Ref]
"""A ref for each of the two networks of a node."""


class Kept(NamedTuple):
    """Arrays that the backward pass of a tile needs, in VMEM.

    Attributes:
        standard: standardized inputs, S of [M, T], float32.
        inverse: the factors of their deviations, S of [1, T].
        between: standardized inputs of the upper level, one for each network, [r, T], float32.
        between_inverse: likewise.
        hidden: of each level, the hidden units of the two networks, [E, T], `packed`.
        slopes: derivatives of the hidden units, likewise.
        dfs: gradients of the networks' outputs, [r, T].
    """

    standard: tuple[jax.Ref, ...]
    inverse: tuple[jax.Ref, ...]
    between: Pair
    between_inverse: Pair
    hidden: ByLevel[Pair]
    slopes: ByLevel[Pair]
    dfs: Pair


def kept_shapes(plan: NodePlan, n_inputs: int, size: int, hidden: int, r: int, dtype: jnp.dtype) -> Any:
    """Returns the memory for a `Kept`."""

    def some(count, rows, dtype=jnp.float32):
        return tuple(pltpu.VMEM((rows, plan.tile), dtype) for _ in range(count))

    large: object = ByLevel(*(tuple(packed(hidden, plan.tile, dtype) for _ in range(2)) for _ in range(2)))
    shapes = (some(n_inputs, size), some(n_inputs, 1), some(2, r), some(2, 1), large, large, some(2, r, dtype))
    return Kept(*cast(Any, shapes))


def packed(rows: int, tokens: int, dtype: jnp.dtype) -> Any:
    """Returns memory for [rows, tokens], bfloat16 as pairs of rows.

    v5e keeps bfloat16 in halves of registers else, which have to be joined whenever they are read.
    """
    if dtype == jnp.bfloat16:
        return pltpu.VMEM((rows // 2, tokens), jnp.uint32)
    return pltpu.VMEM((rows, tokens), dtype)


def first_level(plan: NodePlan, inputs, maps: LevelMaps[jax.Ref], units: Pair, ys: Pair) -> Iterator[float]:
    """Writes the standardized inputs of the upper level, [r, T] for each network, to `ys`; units: memory."""
    xs = [_shifted(_standardize(x.astype(jnp.float32))[0], x.dtype) for x in inputs]
    outputs = yield from _level(plan, xs, maps, units)
    for ref, y in zip(ys, outputs, strict=True):
        ref[...] = _shifted(_standardize(y)[0], ref.dtype)


def second_level(plan: NodePlan, ys, maps: LevelMaps[jax.Ref], units: Pair, psi: jax.Ref) -> Iterator[float]:
    """Writes ψ [r, T]."""
    first, second = yield from _level(plan, ys, maps, units)
    r = psi.shape[0]
    psi[...] = (r**0.5 * jnp.tanh(r**-0.5 * first * second)).astype(psi.dtype)


def _level(plan: NodePlan, xs, maps: LevelMaps[jax.Ref], units: Pair) -> Generator[float, None, list[jax.Array]]:
    """Returns the outputs of both networks for the inputs xs of a level."""
    wide, narrow = maps
    (r, hidden), dtype = narrow.shape[1:], xs[0].dtype
    progress = _Progress(2 * hidden + 2 * _rows(r, hidden))
    for i in range(2):
        _put(units[i], slice(0, hidden), _gelu(plan, dot(wide[i], xs[i % len(xs)], (1, 0))).astype(dtype))
        yield progress.advance(hidden)
    outputs = []
    for i in range(2):
        outputs.append(dot(narrow[i], _get(units[i], dtype), (1, 0)))
        yield progress.advance(_rows(r, hidden))
    return outputs


def interleave(*works: Iterator[float]) -> None:
    """Runs all works to their ends, in turn; each yields the part of it that is done."""
    done = dict.fromkeys(works, 0.0)
    while done:
        work = min(done, key=done.__getitem__)
        part = next(work, None)
        if part is None:
            del done[work]
        else:
            done[work] = part


def ahead(
    plan: NodePlan, inputs, dpsi_RxT: jax.Array, counts: jax.Array, maps: ByLevel[LevelMaps[jax.Ref]], kept: Kept
) -> Iterator[float]:
    """Computes what the backward pass of a tile needs.

    `counts` is 0.0 where the tile is to have no gradients, else 1.0.
    """
    (r, hidden), dtype = maps.lower.narrow.shape[1:], dpsi_RxT.dtype
    progress = _Progress(4 * hidden + 4 * _rows(r, hidden))
    xs = []
    for x, standard, inverse in zip(inputs, kept.standard, kept.inverse, strict=True):
        standard[...], inverse[...] = _standardize(x.astype(jnp.float32))
        xs.append(_shifted(standard[...], dtype))
    outputs = []
    for level, (wide, narrow) in enumerate(maps):
        units, slopes = kept.hidden[level], kept.slopes[level]
        for i in range(2):
            for rows in _pieces(hidden, plan.rows):
                h, slope = _gelu_and_slope(plan, dot(wide[i, rows], xs[i % len(xs)], (1, 0)))
                _put(units[i], rows, h.astype(dtype))
                _put(slopes[i], rows, slope.astype(dtype))
                yield progress.advance(plan.rows)
        outputs = []
        for i in range(2):
            outputs.append(dot(narrow[i], _get(units[i], dtype), (1, 0)))
            if level == 0:
                yield progress.advance(_rows(r, hidden))
        if level == 0:
            xs = []
            for i, y in enumerate(outputs):
                kept.between[i][...], kept.between_inverse[i][...] = _standardize(y)
                xs.append(_shifted(kept.between[i][...], dtype))
    first, second = outputs
    bounded = jnp.tanh(r**-0.5 * first * second)
    dproduct = counts * dpsi_RxT.astype(jnp.float32) * (1.0 - bounded * bounded)
    for ref, other in zip(kept.dfs, (second, first), strict=True):
        ref[...] = (dproduct * other).astype(dtype)
    yield progress.advance(2 * _rows(r, hidden))


def behind(
    plan: NodePlan,
    kept: Kept,
    turned: ByLevel[LevelMaps[jax.Ref]],
    into: Sequence[jax.Ref],
    beside: Sequence[jax.Ref | None],
    sums: ByLevel[LevelMaps[jax.Ref]],
    dzs: ByLevel[Pair],
    fresh: jax.Array | None,
) -> Iterator[float]:
    """Writes the gradients of a tile's inputs to `into`, and adds the gradients of the maps to `sums`.

    Args:
        plan: how the kernels are cut.
        kept: from `ahead`.
        turned: the maps with swapped axes.
        into: memory for the gradients of the inputs.
        beside: of each input a gradient to which its own is added, or None.
        sums: gradients of the maps.
        dzs: memory for gradients of hidden units.
        fresh: whether the sums begin after this tile, which then adds nothing; None: they do not.
    """
    size, (r, hidden), dtype = into[0].shape[0], sums.lower.narrow.shape[1:], into[0].dtype
    progress = _Progress(4 * hidden + 8 * _rows(r, hidden) + 4 * _rows(size, hidden))

    def add(ref, i, product):
        total = ref[i] + product
        ref[i] = total if fresh is None else jnp.where(fresh, 0.0, total)

    dys = [d[...] for d in kept.dfs]
    for level in (1, 0):
        (wide, narrow), (dwide, dnarrow) = turned[level], sums[level]
        units, slopes, dz = kept.hidden[level], kept.slopes[level], dzs[level]
        standard, inverse = (kept.between, kept.between_inverse) if level else (kept.standard, kept.inverse)
        wide_rows = _rows(r if level else size, hidden)
        for i in range(2):
            for rows in _pieces(hidden, plan.rows):
                dh = dot(narrow[i, rows], dys[i], (1, 0))
                _put(dz[i], rows, _times(plan, dh, _get(slopes[i], dtype, rows)))
                yield progress.advance(plan.rows)
            add(dnarrow, i, dot(dys[i], _get(units[i], dtype), (1, 1)))
            yield progress.advance(_rows(r, hidden))
        if level:
            dys = []
            for i in range(2):
                dy = dot(wide[i], _get(dz[i], dtype), (1, 0))
                dys.append(_standardize_backward(standard[i][...], inverse[i][...], dy).astype(dtype))
                yield progress.advance(wide_rows)
                add(dwide, i, dot(_shifted(standard[i][...], dtype), _get(dz[i], dtype), (1, 1)))
                yield progress.advance(wide_rows)
        else:
            dxs = []
            for i in range(2):
                dxs.append(dot(wide[i], _get(dz[i], dtype), (1, 0)))
                yield progress.advance(wide_rows)
            for i, d in enumerate([dxs[0] + dxs[1]] if len(into) == 1 else dxs):
                dx, other = _standardize_backward(standard[i][...], inverse[i][...], d), beside[i]
                into[i][...] = (dx if other is None else dx + other[...].astype(jnp.float32)).astype(dtype)
            for i in range(2):
                x = _shifted(standard[i % len(into)][...], dtype)
                add(dwide, i, dot(x, _get(dz[i], dtype), (1, 1)))
                yield progress.advance(wide_rows)


class _Progress:
    """Counts what part of `total` rows of products is done."""

    def __init__(self, total: int):
        self._total, self._done = total, 0

    def advance(self, rows: int) -> float:
        self._done += rows
        return self._done / self._total


def _rows(size: int, hidden: int) -> int:
    """Returns the rows that a matrix unit of 128 takes for a product with `size` rows or columns over hidden units."""
    return size * hidden // LANES


def _pieces(hidden: int, rows: int) -> list[slice]:
    return [slice(at, min(at + rows, hidden)) for at in range(0, hidden, rows)]


def _put(ref, rows: slice, a_ExT: jax.Array):
    if ref.dtype == a_ExT.dtype:
        ref[rows] = a_ExT
    else:
        ref[rows.start // 2 : rows.stop // 2] = pltpu.bitcast(a_ExT, ref.dtype)


def _get(ref, dtype, rows: slice | None = None) -> jax.Array:
    """Returns the array that `_put` wrote.

    It is read at an offset, 0, that the compiler does not know: else it would keep what was put there in registers, of
    which there are too few, and store that a second time.
    """
    pairs = 1 if ref.dtype == dtype else 2
    start, size = (0, ref.shape[0]) if rows is None else (rows.start // pairs, (rows.stop - rows.start) // pairs)
    zero = SUBLANES * jnp.minimum(pl.program_id(2), 0)
    values = ref[pl.ds(pl.multiple_of(zero + start, SUBLANES), size)]
    return values if pairs == 1 else pltpu.bitcast(values, dtype)


def _gelu(plan: NodePlan, z: jax.Array) -> jax.Array:
    return gelu(z.astype(jnp.bfloat16) if plan.narrow else z)


def _gelu_and_slope(plan: NodePlan, z: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`_gelu` and its derivative. Of several ways to write it this is the one that schedules best."""
    if plan.narrow:
        z = z.astype(jnp.bfloat16)
    square = z * z
    t = jnp.tanh(z * (LINEAR + square))
    p = 1.0 + t
    h = z * p
    return h, p + h * (1.0 - t) * (LINEAR + 3.0 * square)


def _times(plan: NodePlan, dh: jax.Array, slope: jax.Array) -> jax.Array:
    if plan.narrow:
        return dh.astype(slope.dtype) * slope
    return (dh * slope.astype(jnp.float32)).astype(slope.dtype)


def _shifted(x_MxT: jax.Array, dtype) -> jax.Array:
    return (x_MxT + OFFSET).astype(dtype)


def _standardize(x_MxT: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns x with mean 0 and variance 1 over the rows, and the factor of its deviations."""
    centred = x_MxT - jnp.mean(x_MxT, axis=0, keepdims=True)
    inverse_1xT = lax.rsqrt(jnp.mean(centred * centred, axis=0, keepdims=True) + EPSILON)
    return centred * inverse_1xT, inverse_1xT


def _standardize_backward(standard_MxT: jax.Array, inverse_1xT: jax.Array, d_MxT: jax.Array) -> jax.Array:
    d_MxT -= jnp.mean(d_MxT, axis=0, keepdims=True)
    return inverse_1xT * (d_MxT - standard_MxT * jnp.mean(d_MxT * standard_MxT, axis=0, keepdims=True))
