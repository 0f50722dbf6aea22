"""Short convolutions on TPUs: one pass over the tokens in each direction, in Pallas kernels.

Of the gradient XLA writes a product for each token that a convolution sees. Arrays in HBM are [B, N, L], tokens on
lanes. A register's width of tokens meets those before it as the same registers, rotated: what was rotated out of the
earlier ones fills the first lanes. The forward kernel walks from the first token to the last, the backward one back.
"""

import functools
import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops import platform
from lm.ops.tpu import LANES, ROWS
from lm.ops.tpu.order import ahead

CHANNELS, TOKENS = 128, 1024
"""Of a grid step, at most."""
AHEAD = 8
"""Registers of tokens whose dz is made before dx of the first is: of one alone each step would wait for the last."""


def short_convolution(
    x_BxLxN: jax.Array, kernel_SxN: jax.Array, before_BxRxN: jax.Array | None, reach_BxL: jax.Array | None
) -> jax.Array:
    """Arguments as in `lm.ops.short_convolution`; calls that `unsupported` refuses are wrong here."""
    run = platform.per_device(_of_device, split=(True, False, True, True))
    return run(x_BxLxN, kernel_SxN, before_BxRxN, reach_BxL)


def unsupported(x: jax.Array, kernel: jax.Array, before: jax.Array | None, reach: jax.Array | None) -> str | None:
    """Why the kernels cannot compute this call, or None."""
    batch, length, channels = x.shape
    if platform.target_platform() != 'tpu':
        return 'needs a TPU'
    if length % LANES:
        return f'takes a multiple of {LANES} tokens, not {length}'
    if channels % ROWS:
        return f'takes a multiple of {ROWS} channels, not {channels}'
    if len(kernel) > LANES:
        return f'sees at most {LANES} tokens, not {len(kernel)}'
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f'takes arrays that are bfloat16 or float32, not {x.dtype}'
    return platform.uneven_batch(batch)


def block_sizes(channels: int, length: int) -> tuple[int, int]:
    """Channels and tokens of a grid step."""
    rows = next(n for n in range(CHANNELS, 0, -ROWS) if channels % n == 0)
    return rows, next(n for n in range(TOKENS, 0, -LANES) if length % n == 0)


def _of_device(x_BxLxN, kernel_SxN, before_BxRxN, reach_BxL):
    x_BxNxL = x_BxLxN.swapaxes(1, 2)
    before = None
    if before_BxRxN is not None:  # on the last lanes
        before = before_BxRxN.astype(x_BxLxN.dtype).swapaxes(1, 2)
        before = jnp.pad(before, ((0, 0), (0, 0), (LANES - before.shape[2], 0)))
    kernel = jnp.broadcast_to(kernel_SxN.astype(jnp.float32)[..., None], (*kernel_SxN.shape, LANES))
    reach = None if reach_BxL is None else reach_BxL.astype(jnp.int32)[:, None]
    return _run(x_BxNxL, kernel, before, reach).swapaxes(1, 2)


@jax.custom_vjp
def _run(x, kernel, before, reach):
    """y, [B, N, L]: of x [B, N, L], kernel [S, N, LANES] with equal lanes, before [B, N, LANES], reach [B, 1, L]."""
    return _call(_forward_kernel, 'forward', [x], [x], kernel, before, reach)[0]


def _run_forward(*inputs):
    return _run(*inputs), inputs


def _run_backward(inputs, dy):
    x, kernel, before, reach = inputs
    sums = jax.ShapeDtypeStruct((x.shape[0], *kernel.shape), jnp.float32)
    outputs = [x, sums] if before is None else [x, sums, before]
    dx, dkernel, *dbefore = _call(_backward_kernel, 'backward', [x, dy], outputs, kernel, before, reach, back=True)
    return dx, dkernel.sum(0), *(dbefore or [None]), None


_run.defvjp(_run_forward, _run_backward)


def _call(function, name, arrays, outputs, kernel, before, reach, back=False):
    """The kernel `function`; `back`: from the last token to the first, with the tokens before each block as well."""
    x = arrays[0]
    batch, channels, length = x.shape
    rows, block = block_sizes(channels, length)
    steps = length // block

    def at(j):
        return steps - 1 - j if back else j

    def earlier(j):
        """The number of the register before the block; for the first block it counts for nothing."""
        return jnp.maximum(at(j) * (block // LANES) - 1, 0)

    def spec(a):
        if a.ndim == 4:
            return pl.BlockSpec((None, len(kernel), rows, LANES), lambda b, n, j: (b, 0, n, 0))
        if a.shape[2] == length:
            return pl.BlockSpec((None, rows, block), lambda b, n, j: (b, n, at(j)))
        return pl.BlockSpec((None, rows, LANES), lambda b, n, j: (b, n, 0))

    inputs, specs = [*arrays], [spec(a) for a in arrays]
    if back:
        inputs.append(x)
        specs.append(pl.BlockSpec((None, rows, LANES), lambda b, n, j: (b, n, earlier(j))))
    inputs.append(kernel)
    specs.append(pl.BlockSpec((len(kernel), rows, LANES), lambda b, n, j: (0, n, 0)))
    if before is not None:
        inputs.append(before)
        specs.append(spec(before))
    if reach is not None:
        inputs.append(reach)
        specs.append(pl.BlockSpec((None, 1, block), lambda b, n, j: (b, 0, at(j))))
    return pl.pallas_call(
        functools.partial(function, before is not None, reach is not None),
        name=f'short_convolution_{name}',
        grid=(batch, channels // rows, steps),
        in_specs=specs,
        out_specs=[spec(a) for a in outputs],
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in outputs],
        scratch_shapes=[pltpu.VMEM((len(kernel), rows, LANES), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'parallel', 'arbitrary'), vmem_limit_bytes=platform.vmem()[1]
        ),
        cost_estimate=_cost(*inputs, *outputs),
    )(*inputs)


def _cost(*arrays):
    moved = sum(a.size * a.dtype.itemsize for a in arrays)
    return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved)


def _forward_kernel(follows, limited, x_ref, kernel_ref, *refs):
    refs = list(refs)
    before_ref, reach_ref = (refs.pop(0) if there else None for there in (follows, limited))
    y_ref, rolled_ref = refs
    shifts = range(1, len(kernel_ref))

    @pl.when(pl.program_id(2) == 0)
    def _():
        for s in shifts:
            rolled_ref[s] = _rolled(_wide(before_ref[...]), s) if follows else jnp.zeros(rolled_ref.shape[1:])

    for rows in _pieces(x_ref, 0):
        kernel = [kernel_ref[s, rows] for s in range(len(kernel_ref))]
        rolled = {s: rolled_ref[s, rows] for s in shifts}
        for at in _pieces(x_ref, 1):
            x = _wide(x_ref[rows, at])
            rolled_before, rolled = rolled, _all_rolled(x, shifts)
            z = _sum(kernel, _terms(x, rolled_before, rolled, _reach(reach_ref, at)))
            y_ref[rows, at] = (z * _sigmoid(z)).astype(y_ref.dtype)
        for s in shifts:
            rolled_ref[s, rows] = rolled[s]


def _backward_kernel(follows, limited, x_ref, dy_ref, earlier_ref, kernel_ref, *refs):
    refs = list(refs)
    before_ref, reach_ref = (refs.pop(0) if there else None for there in (follows, limited))
    dx_ref, dkernel_ref, *dbefore_ref, later_ref = refs
    is_first = pl.program_id(2) == pl.num_programs(2) - 1

    @pl.when(pl.program_id(2) == 0)
    def _():
        dkernel_ref[...] = jnp.zeros_like(dkernel_ref)
        later_ref[...] = jnp.zeros_like(later_ref)

    def rows_in_turns(rows) -> Iterator[tuple[Callable, Callable]]:
        """What gives dz of a register of tokens, and what makes dx of it, of each register from the last on."""
        kernel = [kernel_ref[s, rows] for s in range(len(kernel_ref))]
        first = jnp.where(is_first, _wide(before_ref[rows]) if follows else 0.0, _wide(earlier_ref[rows]))
        later = {s: later_ref[s, rows] for s in range(1, len(kernel))}
        registers = _pieces(x_ref, 1)
        x = _wide(x_ref[rows, registers[-1]])
        known = {'x': x, 'rolled': _all_rolled(x, later)}

        def of_sums(i):
            x, rolled = known['x'], known['rolled']
            known['x'] = _wide(x_ref[rows, registers[i - 1]]) if i else first
            known['rolled'] = _all_rolled(known['x'], later)
            terms = _terms(x, known['rolled'], rolled, _reach(reach_ref, registers[i]))
            z = _sum(kernel, terms)
            rate = _sigmoid(z)
            dz = _wide(dy_ref[rows, registers[i]]) * (rate + z * (rate - rate * rate))
            for s, term in enumerate(terms):
                dkernel_ref[s, rows] += dz * term
            return dz

        def to_inputs(i, dz):
            dx = kernel[0] * dz
            for s in later:
                seen = dz if reach_ref is None else jnp.where(_reach(reach_ref, registers[i]) >= s, dz, 0.0)
                rolled = _rolled(seen, -s)
                dx += kernel[s] * jnp.where(_lane(dz) < LANES - s, rolled, later[s])
                later[s] = rolled
            dx_ref[rows, registers[i]] = dx.astype(dx_ref.dtype)
            if i == 0:
                for s in later:
                    later_ref[s, rows] = later[s]
                for ref in dbefore_ref:
                    seen = (kernel[s] * jnp.where(_lane(dz) < LANES - s, 0.0, later[s]) for s in later)
                    ref[rows] = sum(seen).astype(ref.dtype)

        for i in reversed(range(len(registers))):
            yield functools.partial(of_sums, i), functools.partial(to_inputs, i)

    pairs = itertools.chain.from_iterable(map(rows_in_turns, _pieces(x_ref, 0)))
    for piece in ahead(pairs, AHEAD):
        piece()


def _pieces(ref, axis):
    """Slices of an axis that stay in registers: a few rows, the lanes of one register."""
    size = (ROWS, LANES)[axis]
    return [slice(start, start + size) for start in range(0, ref.shape[axis], size)]


def _reach(reach_ref, at):
    return None if reach_ref is None else reach_ref[:, at]


def _sum(kernel, terms):
    return sum(w * term for w, term in zip(kernel, terms, strict=True))


def _terms(x, rolled_before, rolled, reach):
    """x and the tokens 1, 2, … before each, of what the register before it and x itself are when rotated."""
    terms = [x]
    for s in rolled:
        term = jnp.where(_lane(x) < s, rolled_before[s], rolled[s])
        terms.append(term if reach is None else jnp.where(reach >= s, term, 0.0))
    return terms


def _all_rolled(x, shifts):
    return {s: _rolled(x, s) for s in shifts}


def _rolled(x, by):
    return pltpu.roll(x, by % LANES, 1)


def _lane(x):
    return lax.broadcasted_iota(jnp.int32, x.shape, 1)


def _wide(x):
    return x.astype(jnp.float32)


def _sigmoid(z):
    # One instruction, where an exponential is followed by a division.
    return 0.5 * jnp.tanh(0.5 * z) + 0.5
