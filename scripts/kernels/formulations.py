"""Compares our operation of polysketch with other ways to compute it, forward and backward, with features given.

    python -m scripts.kernels.formulations --contexts 8192 --tokens 8192 --gin_param 'polysketch.block = 256'

- plain: the formulas of PolySketchFormer §3, literally
- loop: the same formulas block by block, as one would write them by hand: a `lax.scan` of a `jax.checkpoint`
- scan: our blocks, all at once, with an associative scan over their sums

Each is a function of the layer's call of `lm.ops.linear_attention`. The call holds sketches of queries and keys,
values, the normalized vectors for the exact weights, and options. The block must divide the length.
"""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from lm.attention import HeadDims
from lm.bench import results
from lm.bench.attention import COLUMNS, HEAD_DIM, TOKENS, LayerRow, build, measure
from lm.bench.candidates import candidates, featured
from lm.experiment import Experiment
from lm.ops.linear_attention import LOCAL_BLOCK, LinearCall, PolynomialKernel, xla
from lm.ops.linear_attention.block import BlockTokens, Shape, fold, group, move_tokens_last, read, ungroup
from lm.ops.linear_attention.types import Sides


def plain(call: LinearCall) -> jax.Array:
    """Returns [B, L, H, D]."""
    block, degree = _exact_kernel(call)
    return plain_blocks(*_tokens(call), degree=degree, block=block, denominator_bias=call.options.denominator_bias)


def plain_blocks(
    x_BxLxHxF: jax.Array,
    y_BxLxHxF: jax.Array,
    v_BxLxHxD: jax.Array,
    q_local_BxLxHxC: jax.Array,
    k_local_BxLxHxC: jax.Array,
    *,
    degree: int,
    block: int,
    denominator_bias: float = 1.0,
) -> jax.Array:
    """Computes PolySketchFormer §3 as its formulas read, in linear time: the yardstick of the fast implementations.

    The self-tensors of all keys, multiplied with [v 1], are summed over each block (H_l) and accumulated over all
    blocks (Z_l); weights inside a block are exact. The block must divide the length.
    """
    batch, length, heads, _ = x_BxLxHxF.shape

    def cut(a):
        return a.reshape(batch, length // block, block, heads, -1).transpose(0, 3, 1, 2, 4)

    x, y, q, k = (cut(a) for a in (x_BxLxHxF, y_BxLxHxF, q_local_BxLxHxC, k_local_BxLxHxC))
    v1 = cut(jnp.concatenate([v_BxLxHxD, jnp.ones_like(v_BxLxHxD[..., :1])], axis=-1))
    sums = jnp.einsum('bhnti,bhntj,bhntd->bhnijd', y, y, v1)
    earlier = jnp.cumsum(sums, axis=2) - sums
    weights = jnp.tril(jnp.einsum('bhntc,bhnsc->bhnts', q, k) ** degree)
    total = weights @ v1 + jnp.einsum('bhnti,bhntj,bhnijd->bhntd', x, x, earlier)
    o = total[..., :-1] / (denominator_bias + total[..., -1:])
    return o.transpose(0, 2, 3, 1, 4).reshape(v_BxLxHxD.shape)


def loop(call: LinearCall) -> jax.Array:
    """Returns [B, L, H, D]. Keeps the sums of all blocks, and no features."""
    arrays = _tokens(call)
    batch, length, heads, values = call.v_BxLxKxD.shape
    (block, degree), bias = _exact_kernel(call), call.options.denominator_bias

    @jax.checkpoint
    def step(sums_BxHxRxRxD, tokens):
        x, y, v, q, k = tokens
        v1 = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1)
        weights = jnp.tril(jnp.einsum('bthc,bshc->bhts', q, k) ** degree)
        near = jnp.einsum('bhts,bshd->bthd', weights, v1)
        total = near + jnp.einsum('bthi,bthj,bhijd->bthd', x, x, sums_BxHxRxRxD)
        sums_BxHxRxRxD += jnp.einsum('bthi,bthj,bthd->bhijd', y, y, v1)
        return sums_BxHxRxRxD, total[..., :-1] / (bias + total[..., -1:])

    size = arrays[0].shape[-1]
    none = jnp.zeros((batch, heads, size, size, values + 1), jnp.float32)
    blocks = tuple(a.reshape(batch, length // block, block, *a.shape[2:]).swapaxes(0, 1) for a in arrays)
    return lax.scan(step, none, blocks)[1].swapaxes(0, 1).reshape(arrays[2].shape)


def scan(call: LinearCall) -> jax.Array:
    """Returns [B, L, H, D]. JAX differentiates it and keeps the sums of all blocks."""
    q_BxLxHxE, k_BxLxHxE, v_BxLxHxD, q_local_BxLxHxC, k_local_BxLxHxC = _tokens(call)
    batch, length, heads, _ = v_BxLxHxD.shape
    block, _ = _exact_kernel(call)
    blocks = length // block
    shape = Shape(call.options, xla.TILE['cpu'], True, v_BxLxHxD.dtype)

    def cut(x):
        return x.reshape(batch * blocks, block, *x.shape[2:])

    def earlier(sums):
        each = sums.reshape(batch, blocks, *sums.shape[1:])
        return (lax.associative_scan(jnp.add, each, axis=1) - each).reshape(sums.shape)

    k, v, k_local = (move_tokens_last(cut(x)) for x in (k_BxLxHxE, v_BxLxHxD, k_local_BxLxHxC))
    q, q_local = (group(cut(x), heads) for x in (q_BxLxHxE, q_local_BxLxHxC))
    tokens = BlockTokens(v, k, k_local, q, q_local)
    sums = jax.tree.map(earlier, fold(shape, tokens, None))
    num, den = read(shape, tokens, sums, parameters=Sides(None, None))
    return ungroup(num / den[:, :, None]).reshape(v_BxLxHxD.shape).astype(v_BxLxHxD.dtype)


def _tokens(call: LinearCall) -> list[jax.Array]:
    """Returns the arrays of a call without decay."""
    arrays = (getattr(call, name) for name in TOKENS)
    return [x for x in arrays if x is not None]


def _exact_kernel(call: LinearCall) -> tuple[int, int]:
    """Returns the tokens per block and the degree of the exact weights."""
    degree = cast(PolynomialKernel, call.options.local).degree
    return min(call.options.block or LOCAL_BLOCK, call.q_BxLxHxE.shape[1]), degree


FORMULATIONS: dict[str, Callable[[LinearCall], jax.Array]] = {'plain': plain, 'loop': loop, 'scan': scan}


def compare(
    found: Mapping[str, Experiment],
    dims: HeadDims,
    contexts: Sequence[int],
    tokens: int,
    repeats: int,
    given: bool = True,
) -> list[LayerRow]:
    """Times our operation and the other ways, or the whole layers without `given`, in turns, in float32."""
    layers = {name: build(experiment, dims, given) for name, experiment in found.items()}
    for experiment in found.values():
        layers |= {name: build(experiment, dims, given, compute) for name, compute in FORMULATIONS.items()}
    return measure(layers, contexts, ['forward+backward'], tokens, dims, jnp.float32, repeats)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--contexts', type=lambda text: [int(n) for n in text.split(',')], default=[8192])
    parser.add_argument('--tokens', type=int, default=8192, help='per call')
    parser.add_argument('--heads', type=int, default=4)
    parser.add_argument('--head_dim', type=int, default=HEAD_DIM)
    parser.add_argument('--repeats', type=int, default=5)
    parser.add_argument('--gin_param', action='append', default=[])
    parser.add_argument('--whole', action='store_true', help='whole layers, which also make the features')
    parser.add_argument('--save', help='also write everything to this file, as JSON')
    arguments = parser.parse_args(argv)
    output, printer, machine = results.Output(arguments.save), results.Printer(), results.machine()
    found = candidates([featured()], [], arguments.gin_param)
    dims = HeadDims(arguments.heads, arguments.heads, arguments.head_dim)
    rows = compare(found, dims, arguments.contexts, arguments.tokens, arguments.repeats, given=not arguments.whole)
    printer.line(results.heading('formulations', machine))
    printer.table([{'time': f'{row.milliseconds:.1f}'} | vars(row) for row in rows if row.milliseconds], COLUMNS)
    output.write('formulations', machine, vars(arguments), rows)
    return 0


if __name__ == '__main__':
    sys.exit(main())
