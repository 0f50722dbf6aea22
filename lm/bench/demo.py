"""`lm demo`: what a token costs at growing context lengths, with softmax and with attention that is linear in them.

It is `lm bench attention` with settings that take less than a minute of processor time on two cores.
"""

import importlib.util
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from lm.attention import HeadDims
from lm.bench import results
from lm.bench.attention import COLUMNS, Layer, build, find_costs, make_cells, measure
from lm.bench.candidates import BASELINE, FEATURED, read_candidates
from lm.bench.options import AttentionOptions
from lm.errors import MissingPackageError
from lm.files import local_path

LINEAR = 'configs/attention/gated_linear.gin'
"""The mechanism beside the featured one: it has no exact blocks, so its curve is level from the first context on."""
BLOCK = 256
PASS = 'forward+backward'


def show_costs(
    out: str,
    contexts: Sequence[int] = (512, 2048, 8192),
    dims: HeadDims = HeadDims(2, 2, 64),  # noqa: B008
    repeats: int = 3,
) -> None:
    """Prints the figures, and writes them and their picture to a folder.

    Args:
        contexts: tokens per sequence.
        repeats: timed calls of each mechanism at each context.

    Raises ConfigError if the folder cannot be written.
    """
    is_cpu = jax.default_backend() == 'cpu'  # processor time counts there: other work disturbs the clock
    folder = results.make_folder(local_path(out, '--out'))
    printer, machine = results.Printer(), results.machine() | {'device_count': 1}
    printer.line(results.heading('lm demo', machine))
    printer.line('One layer of attention and its gradients, in less than a minute of processor time on two idle cores.')
    sizes = contexts, (PASS,), max(contexts), dims, jnp.dtype('float32'), repeats
    rows = measure(_build_layers(dims), *sizes, say=printer.progress)
    printer.progress()
    printer.table(
        [make_cells(row) for row in rows],
        {name: COLUMNS[name] for name in ('context', 'mechanism', 'time', 'cpu_milliseconds')},
    )
    costs = {
        name: find_costs([row for row in rows if row.mechanism == name], is_cpu)
        for name in dict.fromkeys(row.mechanism for row in rows)
    }
    for name, points in costs.items():
        printer.line(describe_growth(name, points, is_cpu))
    settings = {'repeats': repeats, 'heads': dims.n_heads, 'head_dim': dims.head_dim, 'dtype': 'float32'}
    settings |= {'polysketch.block': BLOCK, 'tokens': max(contexts), 'pass': PASS}
    output = results.Output(str(folder / 'demo.json'))
    output.write('demo', machine, settings, rows)
    if importlib.util.find_spec('matplotlib') is None:
        printer.line(str(MissingPackageError('the picture', 'matplotlib', 'report', ', then run this again')))
    else:
        results.draw_contexts(folder / 'demo', costs, _label(is_cpu), 'float32', devices=1)
        printer.line(f'The picture: {folder / "demo.png"}')
    printer.line('Next: docs/explanation/which_attention.md, or lm bench attention --help for sizes of your own')


def _build_layers(dims: HeadDims) -> dict[str, Layer]:
    names = (BASELINE, FEATURED, LINEAR)
    options = AttentionOptions(mechanisms=names, gin_param=[f'polysketch.block = {BLOCK}'])
    return {name: build(experiment, dims) for name, experiment in read_candidates(options).items()}


def describe_growth(name: str, points: Sequence[results.ContextFigure], is_cpu: bool) -> str:
    """Returns a sentence on the growth from the first context to the last."""
    first, last = points[0], points[-1]
    growth = f'{last.value / first.value:.1f} times the {"processor " if is_cpu else ""}time at {first.context:,}'
    return f'{name}: {last.value:.1f} µs per token at {last.context:,} tokens, {growth}'


def _label(is_cpu: bool) -> str:
    return f'{"processor " if is_cpu else ""}time per token (µs)'
