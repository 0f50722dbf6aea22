"""`lm bench attention`: one layer of each mechanism, from queries, keys and values to its output and all gradients.

A call has whole sequences: the same number of tokens at every context length that divides it, as in PolySketchFormer's
Figure 1. All candidates take turns in random order, so that ratios hold on a busy machine too.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lm.attention import DEFAULT, HeadDims
from lm.attention.linear import LinearAttention, LinearModule
from lm.bench import results, timing
from lm.bench.candidates import BASELINE, read_candidates
from lm.bench.options import AttentionOptions
from lm.errors import ConfigError
from lm.experiment import Experiment
from lm.ops import linear_attention
from lm.ops.linear_attention import LinearCall
from lm.text import format_count, format_digits

PASSES = ('forward', 'forward+backward')
TOKENS = ('q_BxLxHxE', 'k_BxLxKxE', 'v_BxLxKxD', 'q_local_BxLxHxC', 'k_local_BxLxKxC', 'log_decay_BxLxK')
"""The arrays of a call of linear attention that have one entry per token."""
HEAD_DIM = 64
CPU_CONTEXTS, CONTEXTS = (512, 1024, 2048, 4096), (512, 1024, 2048, 4096, 8192, 16_384, 32_768)


@dataclasses.dataclass(frozen=True)
class LayerRow:
    """One mechanism at one context length.

    Attributes:
        passes: 'forward' or 'forward+backward'.
        sequences: rows of the batch; `sequences` × `context` is the number of tokens per call.
        out_of_memory: True means that there are no times.
        milliseconds: of a call, the median.
        least_milliseconds, greatest_milliseconds: the shortest and the longest.
        cpu_milliseconds: processor time, on all cores together; on CPUs only.
        temporary_mib: memory beside arguments and results.
        peak_mib: all memory.
        speed_over: baseline → its time over this mechanism's time, in the same run.
        cpu_over: the same for processor time, which other work on the machine changes less; on CPUs only.
    """

    mechanism: str
    context: int
    passes: str
    sequences: int
    out_of_memory: bool
    milliseconds: float | None = None
    least_milliseconds: float | None = None
    greatest_milliseconds: float | None = None
    cpu_milliseconds: float | None = None
    tokens_per_second: float | None = None
    microseconds_per_token: float | None = None
    temporary_mib: float | None = None
    peak_mib: float | None = None
    speed_over: dict[str, float] = dataclasses.field(default_factory=dict)
    cpu_over: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A function to time: `function(weights, *arrays)`, arrays [B, L, H, …] → [B, L, H, D].

    Attributes:
        weights: parameters, which get gradients, and buffers.
        arrays: makes the arrays of queries, keys and values.
    """

    function: Callable
    weights: tuple[Any, Any]
    arrays: Callable = lambda *qkv: qkv


def bench_attention(options: AttentionOptions) -> None:
    """Prints a table, and writes and draws what the options ask for."""
    output = results.Output(options.save, options.out)
    found = read_candidates(options)
    is_cpu = jax.default_backend() == 'cpu'
    contexts = sorted(set(options.contexts or (CPU_CONTEXTS if is_cpu else CONTEXTS)))
    tokens = options.tokens or (4096 if is_cpu else 2**17)
    dtype = options.dtype or ('float32' if is_cpu else 'bfloat16')
    if unknown := set(options.passes) - set(PASSES):
        raise ConfigError(f'--passes {min(unknown)}: must be of {", ".join(PASSES)}')
    printer, machine = results.Printer(), results.machine() | {'device_count': 1}
    printer.line(results.heading('lm bench attention', machine))
    what = 'the operation of a layer, its arguments given' if options.features_given else 'one layer'
    dims = choose_dims(options, found, is_cpu)
    size = f'{format_count(dims.n_heads, "head")} of {dims.head_dim}'
    if dims.n_kv_heads != dims.n_heads:
        size += f' ({dims.n_kv_heads} of keys and values)'
    counts = sorted({max(1, tokens // context) * context for context in contexts})
    per_call = ' to '.join(f'{count:,}' for count in dict.fromkeys((counts[0], counts[-1])))
    printer.line(f'{what}, {size}, {dtype}, {per_call} tokens per call')
    given = options.features_given
    for name, experiment in found.items():
        check(name, experiment, given)
    layers = {name: build(experiment, dims, given) for name, experiment in found.items()}
    sizes = contexts, options.passes, tokens, dims, jnp.dtype(dtype), options.repeats
    rows = measure(layers, *sizes, say=printer.progress)
    printer.progress()
    printer.table([make_cells(row) for row in rows], COLUMNS)
    for line in summary(rows):
        printer.line(line)
    settings = {
        'tokens': tokens,
        'heads': dims.n_heads,
        'kv_heads': dims.n_kv_heads,
        'head_dim': dims.head_dim,
        'dtype': dtype,
        'repeats': options.repeats,
        'features_given': options.features_given,
        'mechanisms': {name: str(experiment.model.pattern[0]) for name, experiment in found.items()},
    }
    output.write('attention', machine, settings, rows)
    for name in draw(rows, output.pictures, dtype) if output.pictures else ():
        printer.line(f'wrote {name}')


def choose_dims(options: AttentionOptions, found: Mapping[str, Experiment], is_cpu: bool) -> HeadDims:
    """Returns the heads of the model that `--gin_file` configures, or as many as the flags say.

    Raises ConfigError if flags and model are given together.
    """
    model = next(iter(found.values())).model
    dims = model.resolve(next(iter(model.pattern))).dims
    if options.gin_file and (options.heads or options.head_dim):
        raise ConfigError('--heads and --head_dim: the model of --gin_file has its heads; set model.n_heads there')
    if not options.gin_file:
        heads = options.heads or (4 if is_cpu else 12)
        dims = HeadDims(heads, heads, options.head_dim or HEAD_DIM, model.causal)
    return dims


def measure(
    layers: Mapping[str, Layer],
    contexts: Sequence[int],
    passes: Sequence[str],
    tokens: int,
    dims: HeadDims,
    dtype: DTypeLike,
    repeats: int,
    say: Callable[[str], None] = lambda text: None,
) -> list[LayerRow]:
    """Compiles and times everything; returns one row per pass, context and mechanism.

    Args:
        tokens: per call at most; a longer context is one sequence.
        say: called with reports of progress.
    """
    shapes = {context: (max(1, tokens // context), context) for context in contexts}
    inputs = {
        (n, name): _inputs(n, layer, dims, dtype)
        for n in {a * b for a, b in shapes.values()}
        for name, layer in layers.items()
    }
    calls, memory = {}, {}
    for step in passes:
        for context, (rows, _) in shapes.items():
            for name, layer in layers.items():
                key = (step, context, name)
                count = len(passes) * len(shapes) * len(layers)
                say(f'compiling {len(memory) + 1} of {count}: {step}, {context}, {name}')
                arguments = (layer.weights, *inputs[rows * context, name])
                program = _program(layer.function, step, (rows, context))
                compiled, memory[key] = timing.compile_if_fits(jax.jit(program).lower(*arguments))
                if compiled is not None:
                    calls[key] = functools.partial(compiled, *arguments)
    times = timing.in_turns(calls, repeats, say=say)
    return [_row(key, shapes[key[1]][0], times, memory[key]) for key in memory]


def check(name: str, experiment: Experiment, given: bool) -> None:
    """Raises ConfigError unless the candidate is one layer that can be measured."""
    pattern = experiment.model.pattern
    if len(pattern) > 1:
        names = ', '.join(attention.gin_name for attention in pattern)
        raise ConfigError(f'--mechanisms {name}: has layers of {names}; name one of them (lm bench step can)')
    attention = next(iter(pattern))
    if given and not isinstance(attention, LinearAttention | DEFAULT):
        raise ConfigError(f'--features_given: {name} is neither linear nor {BASELINE}; leave it out')


def build(
    experiment: Experiment,
    dims: HeadDims,
    given: bool = False,
    compute: Callable[[LinearCall], jax.Array] | None = None,
) -> Layer:
    """Returns the layer of a candidate as a model calls it; with `given`, only the operation of a linear mechanism.

    `compute`: computes the operation of a linear mechanism in another way (`scripts.kernels.formulations`).
    """
    (attention,) = experiment.model.pattern
    layer = attention.build(dims, nnx.Rngs(0))
    graph, parameters, buffers = nnx.split(layer, nnx.Param, ...)
    if given and isinstance(layer, LinearModule):
        by_layer = lambda call: linear_attention.compute(call, layer.implementation).o_BxLxHxD  # noqa: E731
        return _operation(layer, dims, compute or by_layer)

    def whole(weights, *qkv):
        layer = nnx.merge(graph, *weights)
        return compute(_make_call(cast(LinearModule, layer), *qkv)) if compute else layer(*qkv)

    return Layer(whole, (parameters, buffers))


def _operation(layer: LinearModule, dims: HeadDims, compute: Callable) -> Layer:
    """Returns the call of the operation; the layer's intermediate arrays are its inputs."""
    graph, parameters, buffers = nnx.split(layer, nnx.Param, ...)

    def make_small_call(layer, dtype):
        q, k = (jnp.zeros((1, 1, n, dims.head_dim), dtype) for n in (dims.n_heads, dims.n_kv_heads))
        return _make_call(layer, q, k, jnp.zeros((1, 1, dims.n_kv_heads, dims.value_size), dtype))

    small = make_small_call(layer, jnp.float32)
    names = [name for name in TOKENS if getattr(small, name) is not None]

    def tokens(*qkv):
        call = _make_call(layer, *qkv)
        return tuple(getattr(call, name) for name in names)

    def operation(weights, *arrays):
        given = dict(zip(names, arrays, strict=True))
        # Only the parameters and options of the layer's call remain.
        return compute(
            dataclasses.replace(make_small_call(nnx.merge(graph, *weights), given['v_BxLxKxD'].dtype), **given)
        )

    return Layer(operation, (parameters, buffers), tokens)


def _make_call(layer: LinearModule, q: jax.Array, k: jax.Array, v: jax.Array) -> LinearCall:
    return layer.make_call(*layer.normalize(q, k), v)


def _inputs(n: int, layer: Layer, dims: HeadDims, dtype: DTypeLike) -> tuple[jax.Array, ...]:
    """Returns the arrays of n tokens [n, H, …], and last the gradient of the output."""
    keys = jax.random.split(jax.random.key(0), 4)
    queries, keys_and_values = (dims.n_heads, dims.head_dim), (dims.n_kv_heads, dims.head_dim)
    sizes = queries, keys_and_values, (dims.n_kv_heads, dims.value_size), (dims.n_heads, dims.value_size)
    *qkv, do = (jax.random.normal(key, (1, n, *size), dtype) for key, size in zip(keys, sizes, strict=True))
    return tuple(x[0] for x in (*jax.jit(layer.arrays)(*qkv), do))


def _program(function: Callable, step: str, shape: tuple[int, int]) -> Callable:
    """Returns the function to compile. It takes weights and arrays [T, …], which it splits into sequences of `shape`.

    The last array is the gradient of the output. A backward pass also returns gradients of all but the buffers.
    """

    def split(x):
        return x.reshape(*shape, *x.shape[1:])

    def forward(weights, *arrays):
        return function(weights, *map(split, arrays[:-1]))

    def backward(weights, *arrays):
        parameters, buffers = weights

        def of(parameters, *arrays):
            return function((parameters, buffers), *arrays)

        o, vjp = jax.vjp(of, parameters, *map(split, arrays[:-1]))
        return o, vjp(split(arrays[-1]).astype(o.dtype))

    return forward if step == 'forward' else backward


def _row(key: tuple, sequences: int, times: dict, memory: dict[str, float]) -> LayerRow:
    step, context, name = key
    is_cpu = jax.default_backend() == 'cpu'
    found, n = times.get(key), sequences * context
    sizes = memory.get('temporary_mib'), memory.get('peak_mib')
    row = LayerRow(name, context, step, sequences, True, temporary_mib=sizes[0], peak_mib=sizes[1])
    if found is None:
        return row
    base = times.get((step, context, BASELINE)) if name != BASELINE else None
    return dataclasses.replace(
        row,
        out_of_memory=False,
        milliseconds=1e3 * found.seconds,
        least_milliseconds=1e3 * found.least,
        greatest_milliseconds=1e3 * found.greatest,
        cpu_milliseconds=1e3 * found.cpu_seconds if is_cpu else None,
        tokens_per_second=n / found.seconds,
        microseconds_per_token=1e6 * found.seconds / n,
        speed_over={BASELINE: base.seconds / found.seconds} if base else {},
        cpu_over={BASELINE: base.cpu_seconds / found.cpu_seconds} if base and is_cpu else {},
    )


COLUMNS = {
    'passes': ('pass', str),
    'context': ('context', '{:,}'.format),
    'mechanism': ('mechanism', str),
    'time': ('ms', str),
    'cpu_milliseconds': ('CPU ms', format_digits),
    'microseconds_per_token': ('µs/token', format_digits),
    'tokens_per_second': ('tokens/s', '{:,.0f}'.format),
    'temporary_mib': ('temp. MiB', '{:,.1f}'.format),
    'peak_mib': ('peak MiB', '{:,.1f}'.format),
    BASELINE: (f'{BASELINE} ÷ this', str),
}


def make_cells(row: LayerRow) -> dict[str, Any]:
    """Returns what `COLUMNS` show of a row."""
    time = 'OOM' if row.milliseconds is None else format_digits(row.milliseconds)
    ratios = {base: f'{ratio:.2f}×' for base, ratio in row.speed_over.items()}
    ratios |= {base: f'{ratios[base]} ({ratio:.2f}× CPU)' for base, ratio in row.cpu_over.items()}
    return dataclasses.asdict(row) | {'time': time} | ratios


def summary(rows: Sequence[LayerRow]) -> list[str]:
    """Describes the change of each mechanism's time per token between the shortest and the longest context."""
    lines = []
    for step in dict.fromkeys(row.passes for row in rows):
        for name in dict.fromkeys(row.mechanism for row in rows):
            own = [r for r in rows if (r.passes, r.mechanism) == (step, name)]
            by_clock, by_processor = find_costs(own), find_costs(own, of_processor=True)
            if len(by_clock) > 1:
                first, last = by_clock[0], by_clock[-1]
                contexts = f'at {last.context:,} over that at {first.context:,}'
                line = f'{step}, {name}: time per token {contexts}: {last.value / first.value:.2f}'
                if by_processor:
                    line += f', by CPU time {by_processor[-1].value / by_processor[0].value:.2f}'
                lines.append(line)
    return lines


def find_costs(rows: Sequence[LayerRow], of_processor: bool = False) -> list[results.ContextFigure]:
    """Returns microseconds per token at each context, by the clock or of the processor, for rows that have times."""
    found = []
    for row in rows:
        by_clock = row.milliseconds, row.least_milliseconds, row.greatest_milliseconds
        times = (row.cpu_milliseconds,) * 3 if of_processor else by_clock
        if costs := [1e3 * time / (row.sequences * row.context) for time in times if time is not None]:
            found.append(results.ContextFigure(row.context, *costs))
    return found


def draw(rows: Sequence[LayerRow], out: pathlib.Path, dtype: str = '') -> list[str]:
    """Draws one picture per pass, like PolySketchFormer's Figure 1."""
    written = []
    for step in dict.fromkeys(row.passes for row in rows):
        points = {
            name: find_costs([row for row in rows if (row.passes, row.mechanism) == (step, name)])
            for name in dict.fromkeys(row.mechanism for row in rows)
        }
        path = out / f'attention_{step.replace("+", "_")}'
        written += results.draw_contexts(path, points, 'time per token (µs)', dtype, devices=1)
    return written
