"""Short convolutions on TPUs: one pass over the tokens in each direction, in Pallas kernels.

For the gradient XLA writes a product for each token that a convolution sees. Arrays in HBM are [B, N, L], tokens on
lanes. A register's width of tokens meets those before it as the same registers, rotated: what was rotated out of the
earlier ones fills the first lanes. The forward kernel walks from the first token to the last, the backward one back.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops import platform
from lm.ops.short_convolution.types import ConvolutionCall
from lm.ops.tpu import LANES, ROWS
from lm.ops.tpu.order import ahead

CHANNELS, TOKENS = 128, 1024
"""The most channels and tokens per grid step."""
AHEAD = 8
"""Registers of tokens whose dz is made before dx of the first is: with one alone each step would wait for the last."""

Held = TypeVar('Held')


class _Read(NamedTuple, Generic[Held]):
    """The arrays that a kernel reads, and refs and block specs of them; None where a call has no such array.

    Tokens are on lanes, W of them in a register. The kernel is halved, and has equal lanes. The tokens before x stand
    on the last.

    The backward kernel also takes the gradient of y, and x once more: the register of tokens before each block. For
    the first block that register counts for nothing.
    """

    x_BxNxL: Held
    dy_BxNxL: Held | None
    earlier_BxNxL: Held | None
    kernel_SxNxW: Held
    before_BxNxW: Held | None
    reach_Bx1xL: Held | None


_Gradients = tuple[Held, Held, Held | None]
"""The arrays that the backward kernel writes: dx [B, N, L]; dkernel [B, S, N, W], a sum for each row of the batch and
each lane; dbefore [B, N, W]."""


def short_convolution(call: ConvolutionCall) -> jax.Array:
    """Computes calls that `unsupported` does not refuse."""
    run = platform.per_device(_convolve_on_device, split=(True, False, True, True))
    return run(*call)


def unsupported(call: ConvolutionCall) -> str | None:
    """Returns why the kernels cannot compute this call, or None."""
    x, kernel = call.x_BxLxN, call.kernel_SxN
    batch, length, channels = x.shape
    if platform.target_platform() != 'tpu':
        return 'needs a TPU'
    if length % LANES:
        return f'takes a multiple of {LANES} tokens, not {length}'
    if channels % ROWS:
        return f'takes a multiple of {ROWS} channels, not {channels}'
    if len(kernel) > LANES:
        return f'sees at most {LANES} tokens, not {len(kernel)}'
    return platform.mixed_types(x) or platform.uneven_batch(batch)


def block_sizes(channels: int, length: int) -> tuple[int, int]:
    """Returns the channels and the tokens per grid step."""
    rows = next(n for n in range(CHANNELS, 0, -ROWS) if channels % n == 0)
    return rows, next(n for n in range(TOKENS, 0, -LANES) if length % n == 0)


def _convolve_on_device(x_BxLxN, kernel_SxN, before_BxRxN, reach_BxL) -> jax.Array:
    x_BxNxL = x_BxLxN.swapaxes(1, 2)
    before = None
    if before_BxRxN is not None:
        before = before_BxRxN.astype(x_BxLxN.dtype).swapaxes(1, 2)
        before = jnp.pad(before, ((0, 0), (0, 0), (LANES - before.shape[2], 0)))
    # With h half of the sum y is h (1 + tanh h). An exponential would be followed by a division.
    kernel = jnp.broadcast_to(0.5 * kernel_SxN.astype(jnp.float32)[..., None], (*kernel_SxN.shape, LANES))
    reach = None if reach_BxL is None else reach_BxL.astype(jnp.int32)[:, None]
    return _run(x_BxNxL, kernel, before, reach).swapaxes(1, 2)


@jax.custom_vjp
def _run(x, kernel, before, reach) -> jax.Array:
    """Returns y, [B, N, L], from the arrays of `_Read`."""
    return _call(_forward_kernel, 'forward', _Read(x, None, None, kernel, before, reach), x)


def _run_forward(x, kernel, before, reach):
    return _run(x, kernel, before, reach), _Read(x, None, None, kernel, before, reach)


def _run_backward(read: _Read[jax.Array], dy: jax.Array):
    x, kernel, before = read.x_BxNxL, read.kernel_SxNxW, read.before_BxNxW
    sums = jax.ShapeDtypeStruct((x.shape[0], *kernel.shape), jnp.float32)
    read = read._replace(dy_BxNxL=dy, earlier_BxNxL=x)
    dx, dkernel, dbefore = _call(_backward_kernel, 'backward', read, (x, sums, before))
    return dx, dkernel.sum(0), dbefore, None


_run.defvjp(_run_forward, _run_backward)


def _call(function: Callable[..., None], name: str, read: _Read[jax.Array], like: object) -> Any:
    """Runs a kernel whose results are `like` these arrays. If it reads gradients it starts with the last token."""
    batch, channels, length = read.x_BxNxL.shape
    rows, block = block_sizes(channels, length)
    steps, width = length // block, len(read.kernel_SxNxW)
    backwards = read.dy_BxNxL is not None

    def at(j):
        return steps - 1 - j if backwards else j

    def register_before(j):
        return jnp.maximum(at(j) * (block // LANES) - 1, 0)

    tokens = pl.BlockSpec((None, rows, block), lambda b, n, j: (b, n, at(j)))
    register = pl.BlockSpec((None, rows, LANES), lambda b, n, j: (b, n, 0))
    earlier = pl.BlockSpec((None, rows, LANES), lambda b, n, j: (b, n, register_before(j)))
    specs = _Read(
        x_BxNxL=tokens,
        dy_BxNxL=tokens if backwards else None,
        earlier_BxNxL=earlier if backwards else None,
        kernel_SxNxW=pl.BlockSpec((width, rows, LANES), lambda b, n, j: (0, n, 0)),
        before_BxNxW=None if read.before_BxNxW is None else register,
        reach_Bx1xL=None if read.reach_Bx1xL is None else pl.BlockSpec((None, 1, block), lambda b, n, j: (b, 0, at(j))),
    )
    out_specs = tokens
    if backwards:
        by_row = pl.BlockSpec((None, width, rows, LANES), lambda b, n, j: (b, 0, n, 0))
        out_specs = (tokens, by_row, specs.before_BxNxW)
    outputs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), like)
    (results,) = pl.pallas_call(
        function,
        name=f'short_convolution_{name}',
        grid=(batch, channels // rows, steps),
        in_specs=[specs],
        out_specs=[out_specs],
        out_shape=[outputs],
        scratch_shapes=[pltpu.VMEM((width, rows, LANES), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'parallel', 'arbitrary'), vmem_limit_bytes=platform.vmem()[1]
        ),
        cost_estimate=_cost(*jax.tree.leaves((read, outputs))),
    )(read)
    return results


def _cost(*arrays: jax.Array | jax.ShapeDtypeStruct) -> pl.CostEstimate:
    moved = sum(a.size * a.dtype.itemsize for a in arrays)
    return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved)


def _forward_kernel(read: _Read[jax.Ref], y_ref: jax.Ref, rolled_ref: jax.Ref) -> None:
    x_ref, kernel_ref, reach_ref = read.x_BxNxL, read.kernel_SxNxW, read.reach_Bx1xL
    shifts = range(1, len(kernel_ref))

    @pl.when(pl.program_id(2) == 0)
    def _():
        for s in shifts:
            before = read.before_BxNxW
            rolled_ref[s] = jnp.zeros(rolled_ref.shape[1:]) if before is None else _rolled(_wide(before[...]), s)

    for rows in _pieces(x_ref, 0):
        kernel = [kernel_ref[s, rows] for s in range(len(kernel_ref))]
        rolled = {s: rolled_ref[s, rows] for s in shifts}
        for at in _pieces(x_ref, 1):
            x = _wide(x_ref[rows, at])
            rolled_before, rolled = rolled, _all_rolled(x, shifts)
            half = _sum(kernel, _terms(x, rolled_before, rolled, _reach(reach_ref, at)))
            y_ref[rows, at] = (half + half * jnp.tanh(half)).astype(y_ref.dtype)
        for s in shifts:
            rolled_ref[s, rows] = rolled[s]


def _backward_kernel(read: _Read[jax.Ref], gradients: _Gradients[jax.Ref], later_ref: jax.Ref) -> None:
    x_ref, dy_ref, earlier_ref, kernel_ref, before_ref, reach_ref = read
    dx_ref, dkernel_ref, dbefore_ref = gradients
    assert dy_ref is not None
    assert earlier_ref is not None
    is_first = pl.program_id(2) == pl.num_programs(2) - 1

    @pl.when(pl.program_id(2) == 0)
    def _():
        dkernel_ref[...] = jnp.zeros(dkernel_ref.shape, dkernel_ref.dtype)
        later_ref[...] = jnp.zeros(later_ref.shape, later_ref.dtype)

    def rows_in_turns(rows: slice) -> Iterator[tuple[Callable, Callable]]:
        """Yields, from the last register of tokens to the first, functions that compute its dz, and dx from that."""
        kernel = [kernel_ref[s, rows] for s in range(len(kernel_ref))]
        first = jnp.where(is_first, 0.0 if before_ref is None else _wide(before_ref[rows]), _wide(earlier_ref[rows]))
        later = {s: later_ref[s, rows] for s in range(1, len(kernel))}
        registers = _pieces(x_ref, 1)
        x = _wide(x_ref[rows, registers[-1]])
        rolled = _all_rolled(x, later)

        def through_sums(i):
            nonlocal x, rolled
            x_now, rolled_now = x, rolled
            x = _wide(x_ref[rows, registers[i - 1]]) if i else first
            rolled = _all_rolled(x, later)
            terms = _terms(x_now, rolled, rolled_now, _reach(reach_ref, registers[i]))
            half = _sum(kernel, terms)
            slope = jnp.tanh(half)
            dz = _wide(dy_ref[rows, registers[i]]) * ((1.0 + slope) * (1.0 + (half - half * slope)))
            for s, term in enumerate(terms):
                dkernel_ref[s, rows] += dz * term
            return dz

        def to_inputs(i, dz):
            dx = kernel[0] * dz
            for s in later:
                reach = _reach(reach_ref, registers[i])
                seen = dz if reach is None else jnp.where(reach >= s, dz, 0.0)
                rolled = _rolled(seen, -s)
                dx += kernel[s] * jnp.where(_lane(dz) < LANES - s, rolled, later[s])
                later[s] = rolled
            dx_ref[rows, registers[i]] = dx.astype(dx_ref.dtype)
            if i == 0:
                for s in later:
                    later_ref[s, rows] = later[s]
                if dbefore_ref is not None:
                    seen = (jnp.where(_lane(dz) < LANES - s, 0.0, later[s]) for s in later)
                    dbefore_ref[rows] = _sum(kernel[1:], seen).astype(dbefore_ref.dtype)

        for i in reversed(range(len(registers))):
            yield functools.partial(through_sums, i), functools.partial(to_inputs, i)

    pairs = itertools.chain.from_iterable(map(rows_in_turns, _pieces(x_ref, 0)))
    for piece in ahead(pairs, AHEAD):
        piece()


def _pieces(ref: jax.Ref, axis: int) -> list[slice]:
    """Returns slices of an axis that stay in registers: a few rows, the lanes of one register."""
    size = (ROWS, LANES)[axis]
    return [slice(start, start + size) for start in range(0, ref.shape[axis], size)]


def _reach(reach_ref: jax.Ref | None, at: slice) -> jax.Array | None:
    return None if reach_ref is None else reach_ref[:, at]


def _sum(kernel: Sequence[jax.Array], terms: Iterable[jax.Array]) -> jax.Array:
    return cast(jax.Array, sum(w * term for w, term in zip(kernel, terms, strict=True)))  # of at least one term


def _terms(x, rolled_before, rolled, reach):
    """Returns x and the tokens 1, 2, … before each, from the rotated register before x and from x rotated."""
    terms = [x]
    for s in rolled:
        term = jnp.where(_lane(x) < s, rolled_before[s], rolled[s])
        terms.append(term if reach is None else jnp.where(reach >= s, term, 0.0))
    return terms


def _all_rolled(x: jax.Array, shifts: Iterable[int]) -> dict[int, jax.Array]:
    return {s: _rolled(x, s) for s in shifts}


def _rolled(x: jax.Array, by: int) -> jax.Array:
    return pltpu.roll(x, by % LANES, 1)


def _lane(x: jax.Array) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, x.shape, 1)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)
