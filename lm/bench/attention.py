"""`lm bench attention`: one layer of each mechanism, from queries, keys and values to its output and all gradients.

The number of tokens of a call is the same at every context length (the batch makes up for it), as in PolySketchFormer's
Figure 1; all candidates take turns in random order, so that ratios hold on a busy machine too. `plain` is polysketch
with the formulas of the paper's §3 as they read (`lm.ops.linear_attention.reference.plain_blocks`): the yardstick.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lm.attention import HeadDims
from lm.attention.polysketch import Polysketch, PolysketchAttention
from lm.bench import results, timing
from lm.bench.candidates import Candidate, of_arguments
from lm.errors import ConfigError
from lm.ops.linear_attention.reference import plain_blocks

PASSES = ('forward', 'forward+backward')
BASELINES = ('softmax', 'plain')
"""Ratios are of these, where they are among the candidates."""
CPU_CONTEXTS, CONTEXTS = (512, 1024, 2048, 4096), (512, 1024, 2048, 4096, 8192, 16_384, 32_768)


@dataclasses.dataclass(frozen=True)
class Row:
    """One mechanism at one context length.

    Attributes:
        passes: 'forward' or 'forward+backward'.
        sequences: rows of the batch; `sequences` × `context` is the number of tokens of a call.
        out_of_memory: then there are no times.
        milliseconds: of a call, the median.
        least_milliseconds: the shortest.
        cpu_milliseconds: of all cores of the host.
        temporary_mib: memory beside arguments and results.
        peak_mib: all memory.
        speed_over: baseline → its time over this one, in the same run.
    """

    mechanism: str
    context: int
    passes: str
    sequences: int
    out_of_memory: bool
    milliseconds: float | None = None
    least_milliseconds: float | None = None
    cpu_milliseconds: float | None = None
    tokens_per_second: float | None = None
    microseconds_per_token: float | None = None
    temporary_mib: float | None = None
    peak_mib: float | None = None
    speed_over: dict[str, float] = dataclasses.field(default_factory=dict)


class PlainPolysketch(PolysketchAttention):
    """Polysketch whose attention is computed as the paper's formulas read."""

    def __call__(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, v_BxLxKxD: jax.Array) -> jax.Array:
        found = self._arguments(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD)
        block = min(self.config.block, q_BxLxHxD.shape[1])
        return plain_blocks(*found.values(), degree=self.config.degree, block=block, bias=self.config.bias)


def run(arguments: Any) -> int:
    """The command."""
    results.check_writable(arguments.json, arguments.out)
    found = of_arguments(arguments, default=('softmax', 'polysketch'), formulations={'plain': 'polysketch'})
    is_cpu = jax.default_backend() == 'cpu'
    contexts = sorted(set(arguments.contexts or (CPU_CONTEXTS if is_cpu else CONTEXTS)))
    tokens = arguments.tokens or (8192 if is_cpu else 2**17)
    heads = arguments.heads or (4 if is_cpu else 12)
    dtype = arguments.dtype or ('float32' if is_cpu else 'bfloat16')
    if unknown := set(arguments.passes) - set(PASSES):
        raise ConfigError(f'--passes {min(unknown)}: must be of {", ".join(PASSES)}')
    printer, machine = results.Printer(), results.machine() | {'device_count': 1}
    printer.line(results.heading('lm bench attention', machine))
    printer.line(f'one layer, {heads} heads of {arguments.head_dim}, {dtype}, at least {tokens:,} tokens a call')
    dims = HeadDims(heads, heads, arguments.head_dim)
    rows = measure(found, contexts, arguments.passes, tokens, dims, jnp.dtype(dtype), arguments.repeats)
    printer.table([_printed(row) for row in rows], COLUMNS)
    for line in summary(rows):
        printer.line(line)
    settings = {
        'tokens': tokens,
        'heads': heads,
        'head_dim': arguments.head_dim,
        'dtype': dtype,
        'repeats': arguments.repeats,
        'mechanisms': {c.name: str(c.experiment.model.pattern[0]) for c in found},
    }
    results.write_json(arguments.json, 'attention', machine, settings, rows)
    for name in draw(rows, arguments.out) if arguments.out else ():
        printer.line(f'wrote {name}')
    return 0


def measure(
    found: Sequence[Candidate],
    contexts: Sequence[int],
    passes: Sequence[str],
    tokens: int,
    dims: HeadDims,
    dtype: Any,
    repeats: int,
) -> list[Row]:
    """Compiles and times everything; a row each, by pass, context and mechanism.

    Args:
        tokens: of a call; a longer context is one sequence.
    """
    built = {candidate.name: _build(candidate, dims) for candidate in found}
    shapes = {context: (max(1, tokens // context), context) for context in contexts}
    inputs = {}
    for rows, context in shapes.values():
        keys = jax.random.split(jax.random.key(0), 4)
        shape = (rows * context, dims.n_heads, dims.head_dim)
        inputs.setdefault(rows * context, tuple(jax.random.normal(key, shape, dtype) for key in keys))
    calls, memory = {}, {}
    for step in passes:
        for context, (rows, _) in shapes.items():
            for candidate in found:
                key = (step, context, candidate.name)
                function, weights = built[candidate.name]
                _check_block(candidate, context)
                arrays = inputs[rows * context]
                program = _program(function, step, (rows, context))
                compiled, memory[key] = timing.compile_if_fits(jax.jit(program).lower(weights, *arrays))
                if compiled is not None:
                    calls[key] = lambda compiled=compiled, weights=weights, arrays=arrays: compiled(weights, *arrays)
    times = timing.in_turns(calls, repeats)
    return [_row(key, shapes[key[1]][0], times, memory[key], [candidate.name for candidate in found]) for key in memory]


def _build(candidate: Candidate, dims: HeadDims) -> tuple[Callable, Any]:
    """(function of (weights, q, k, v), weights) of one layer; weights are (parameters, buffers)."""
    pattern = candidate.experiment.model.pattern
    if len(pattern) > 1:
        names = ', '.join(attention.gin_name for attention in pattern)
        raise ConfigError(f'--mechanisms {candidate.name}: has layers of {names}; name one of them (lm bench step can)')
    (attention,) = pattern
    if candidate.formulation:
        if not (isinstance(attention, Polysketch) and attention.local):
            raise ConfigError('--mechanisms plain: needs polysketch.local = True')
        layer = PlainPolysketch(attention, dims, nnx.Rngs(0))
    else:
        layer = attention.build(dims, nnx.Rngs(0))
    graph, parameters, buffers = nnx.split(layer, nnx.Param, ...)

    def function(weights, q, k, v):
        return nnx.merge(graph, *weights)(q, k, v)

    return function, (parameters, buffers)


def _check_block(candidate: Candidate, context: int) -> None:
    block = getattr(candidate.experiment.model.pattern[0], 'block', 1)
    if candidate.formulation and context % min(context, block):
        raise ConfigError(f'--contexts {context}: must be a multiple of polysketch.block = {block} for plain')


def _program(function: Callable, step: str, shape: tuple[int, int]) -> Callable:
    """What is compiled: tokens [T, H, D] in, as `shape` sequences; the output, and all gradients of one like `do`."""

    def split(x):
        return x.reshape(*shape, *x.shape[1:])

    def forward(weights, q, k, v, do):
        return function(weights, *map(split, (q, k, v)))

    def backward(weights, q, k, v, do):
        parameters, buffers = weights

        def of(parameters, q, k, v):
            return function((parameters, buffers), q, k, v)

        o, vjp = jax.vjp(of, parameters, *map(split, (q, k, v)))
        return o, vjp(split(do).astype(o.dtype))

    return forward if step == 'forward' else backward


def _row(key: tuple, sequences: int, times: dict, memory: dict[str, float], names: list[str]) -> Row:
    step, context, name = key
    found, n = times.get(key), sequences * context
    if found is None:
        return Row(name, context, step, sequences, True, **memory)
    others = {base: times.get((step, context, base)) for base in BASELINES if base in names and base != name}
    return Row(
        mechanism=name,
        context=context,
        passes=step,
        sequences=sequences,
        out_of_memory=False,
        milliseconds=1e3 * found.seconds,
        least_milliseconds=1e3 * found.least,
        cpu_milliseconds=1e3 * found.cpu_seconds,
        tokens_per_second=n / found.seconds,
        microseconds_per_token=1e6 * found.seconds / n,
        speed_over={base: other.seconds / found.seconds for base, other in others.items() if other},
        **memory,
    )


COLUMNS = {
    'passes': ('pass', str),
    'context': ('context', '{:,}'.format),
    'mechanism': ('mechanism', str),
    'time': ('ms', str),
    'microseconds_per_token': ('µs/token', '{:.3g}'.format),
    'tokens_per_second': ('tokens/s', '{:,.0f}'.format),
    'temporary_mib': ('temp. MiB', '{:,.1f}'.format),
    'peak_mib': ('peak MiB', '{:,.1f}'.format),
    **{base: (f'{base} ÷ this', '{:.2f}×'.format) for base in BASELINES},
}


def _printed(row: Row) -> dict[str, Any]:
    time = 'OOM' if row.out_of_memory else f'{row.milliseconds:,.3g}' if row.milliseconds < 100 else None
    return dataclasses.asdict(row) | {'time': time or f'{row.milliseconds:,.0f}'} | row.speed_over


def summary(rows: Sequence[Row]) -> list[str]:
    """How the time per token of each mechanism changes between the shortest and the longest context."""
    lines = []
    for step in dict.fromkeys(row.passes for row in rows):
        for name in dict.fromkeys(row.mechanism for row in rows):
            own = [r for r in rows if (r.passes, r.mechanism) == (step, name) and not r.out_of_memory]
            if len(own) > 1:
                first, last = own[0], own[-1]
                ratio = last.microseconds_per_token / first.microseconds_per_token
                values = [r.microseconds_per_token for r in own]
                lines.append(
                    f'{step}, {name}: time per token at {last.context:,} over that at {first.context:,}: {ratio:.2f}; '
                    f'largest over smallest: {max(values) / min(values):.2f}'
                )
    return lines


def draw(rows: Sequence[Row], out: str) -> list[str]:
    """A picture a pass, as PolySketchFormer's Figure 1."""
    written = []
    for step in dict.fromkeys(row.passes for row in rows):
        points: dict[str, list[tuple[int, float]]] = {}
        for row in rows:
            own = points.setdefault(row.mechanism, [])
            if row.passes == step and not row.out_of_memory and math.isfinite(row.microseconds_per_token):
                own.append((row.context, row.microseconds_per_token))
        path = pathlib.Path(out, f'attention_{step.replace("+", "_")}')
        written += results.draw_contexts(path, points, 'time per token (µs)')
    return written
