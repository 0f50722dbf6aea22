"""The verb `lm bench`, each part of which has flags and a call of its own."""

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lm.commands.flags import add_gin_flags, add_job_flags, job_address
from lm.commands.verb import Call, Verb
from lm.errors import ConfigError

if TYPE_CHECKING:
    from lm.bench.candidates import Selection
    from lm.bench.results import Output


@dataclasses.dataclass(frozen=True)
class BenchPart:
    """One `lm bench PART`; its fields mean the same as in `Verb`."""

    help: str
    example: str
    add_flags: Callable[[argparse.ArgumentParser], None]
    make_call: Callable[[argparse.Namespace], Call]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the parts, as parsers of their own."""
    parts = parser.add_subparsers(dest='part', metavar='PART', title='parts', parser_class=type(parser))
    for name, part in PARTS.items():
        sub = parts.add_parser(
            name,
            help=part.help,
            description=f'{part.help[0].upper()}{part.help[1:]}.',
            epilog=f'example:\n  {part.example}',
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        part.add_flags(sub)
        sub.add_argument('--json', metavar='FILE', help='also write everything to this file')
        sub.add_argument('--debug', action='store_true', help='show the traceback of an error')
        sub.set_defaults(parser=sub)


def make_call(arguments: argparse.Namespace) -> Call:
    if arguments.part is None:
        return functools.partial(print_help, arguments.parser)
    return PARTS[arguments.part].make_call(arguments)


def print_help(parser: argparse.ArgumentParser) -> int:
    """Prints the parts in place of running one; returns 2."""
    parser.print_help()
    return 2


# ----------------------------------------------------------------------------------------------------------- attention


def _add_attention_flags(parser: argparse.ArgumentParser) -> None:
    _add_measuring_flags(parser)
    parser.add_argument('--tokens', type=_count, metavar='N', help='tokens a call: the rows of a batch make up for it')
    parser.add_argument('--heads', type=_count, metavar='N', help='default: 12, and 4 on a CPU')
    parser.add_argument('--head_dim', type=_count, default=64, metavar='N', help='default: 64')
    parser.add_argument('--dtype', choices=('float32', 'bfloat16'), help='default: bfloat16, and float32 on a CPU')
    parser.add_argument(
        '--passes',
        type=_list(str),
        default=['forward', 'forward+backward'],
        metavar='NAMES',
        help='forward, forward+backward; default: both',
    )
    parser.add_argument(
        '--features_given',
        action='store_true',
        help='the operation of linear mechanisms alone, without what they make of its arguments, such as sketches',
    )
    add_gin_flags(parser)


def _call_attention(arguments: argparse.Namespace) -> Call:
    from lm.bench.attention import AttentionOptions, bench_attention

    names = ('contexts', 'tokens', 'heads', 'head_dim', 'dtype', 'passes', 'features_given', 'repeats')
    options = AttentionOptions(_selection(arguments), _output(arguments), **_given(arguments, *names))
    return functools.partial(bench_attention, options)


# ---------------------------------------------------------------------------------------------------------------- step


def _add_step_flags(parser: argparse.ArgumentParser) -> None:
    _add_measuring_flags(parser)
    parser.add_argument(
        '--tokens_per_step', type=_count, metavar='N', help='over all devices; the same at all contexts'
    )
    parser.add_argument(
        '--microbatch_tokens',
        type=_count,
        metavar='N',
        help='of one device at a time; default: 16384, with --topology 32768, or a sequence',
    )
    parser.add_argument(
        '--topology',
        type=_list(str),
        metavar='NAMES',
        help='without a TPU: the step compiled for one chip of v4, v5e, v5p, v6e, v7x (with commas), and the time of '
        'each of its parts by a model',
    )
    parser.add_argument('--steps', type=_count, metavar='N', help='steps timed together; default: 3, and 1 on a CPU')
    add_gin_flags(parser)
    add_job_flags(parser)


def _call_step(arguments: argparse.Namespace) -> Call:
    given = _selection(arguments), _output(arguments)
    names = ('contexts', 'tokens_per_step', 'microbatch_tokens')
    if arguments.topology:
        why = 'is of steps that run; with --topology the step is compiled alone'
        _refuse(arguments, ('steps', 'repeats', 'coordinator_address', 'process_count', 'process_id'), why)
        from lm.bench.forecast import ForecastOptions, forecast_steps

        forecast = ForecastOptions(*given, arguments.topology, **_given(arguments, *names))
        return functools.partial(forecast_steps, forecast)
    from lm.bench.step import StepOptions, bench_step

    options = StepOptions(*given, job_address(arguments), **_given(arguments, *names, 'steps', 'repeats'))
    return functools.partial(bench_step, options)


# ----------------------------------------------------------------------------------------------------------- precision


def _add_precision_flags(parser: argparse.ArgumentParser) -> None:
    _add_candidate_flags(parser)
    add_gin_flags(parser)
    add_job_flags(parser)


def _call_precision(arguments: argparse.Namespace) -> Call:
    from lm.bench.precision import PrecisionOptions, bench_precision

    given = _selection(arguments), _output(arguments), job_address(arguments)
    return functools.partial(bench_precision, PrecisionOptions(*given, arguments.contexts))


# ------------------------------------------------------------------------------------------------------------- kernels


def _add_kernel_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--topology', type=_list(str), default=['v5e'], metavar='NAMES', help='v4, v5e, v5p, v6e, v7x; with commas'
    )
    parser.add_argument('--parts', type=_count, default=1, metavar='N', help='chips that share a window; default: 1')
    parser.add_argument('cases', nargs='*', metavar='CASE', help='which kernels; default: all')


def _call_kernels(arguments: argparse.Namespace) -> Call:
    from lm.bench.kernels import KernelOptions, bench_kernels

    options = KernelOptions(_output(arguments), arguments.topology, arguments.cases, arguments.parts)
    return functools.partial(bench_kernels, options)


# ---------------------------------------------------------------------------------------------------------------- data


def _add_data_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--text', metavar='FILE', help='UTF-8 text to tokenise; default: made from the documentation')
    parser.add_argument('--megabytes', type=_number, metavar='X', help='of text; default: the file, or 4')
    parser.add_argument('--document_bytes', type=_count, metavar='N', help='of a document; default: 8192')
    parser.add_argument('--vocab_size', type=_count, metavar='N', help='default: 32000, or what the text gives')
    parser.add_argument(
        '--path', metavar='STORE', help='read batches from this store; prepare is then measured with --text alone'
    )
    parser.add_argument('--context_length', type=_count, metavar='N', help='of batches; default: 2048')
    parser.add_argument('--tokens', type=_count, metavar='N', help='of the store that is made; default: 67108864')
    parser.add_argument('--tokens_per_step', type=_count, metavar='N', help='of a batch; default: 524288')
    parser.add_argument('--repeats', type=_count, metavar='N', help='a figure is a median of N; default: 5')


def _call_data(arguments: argparse.Namespace) -> Call:
    if arguments.path is not None:
        _refuse(arguments, ('tokens',), 'is of the store that is made; leave this or --path out')
        if arguments.text is None:
            why = 'is of a text; add --text, or leave --path out'
            _refuse(arguments, ('megabytes', 'document_bytes', 'vocab_size'), why)
    from lm.bench.data import DataOptions, bench_data

    names = ('text', 'megabytes', 'document_bytes', 'vocab_size', 'path', 'context_length', 'tokens')
    options = DataOptions(_output(arguments), **_given(arguments, *names, 'tokens_per_step', 'repeats'))
    return functools.partial(bench_data, options)


# ---------------------------------------------------------------------------------------------------------- checkpoint


def _add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--folder', metavar='DIR', help='where it is written; default: with temporary files')
    add_gin_flags(parser)


def _call_checkpoint(arguments: argparse.Namespace) -> Call:
    from lm.bench.checkpoint import CheckpointOptions, bench_checkpoint

    gin = arguments.gin_file, arguments.gin_param, arguments.allow_gin_imports
    options = CheckpointOptions(_output(arguments), *gin, _local(arguments.folder, '--folder'))
    return functools.partial(bench_checkpoint, options)


# -------------------------------------------------------------------------------------------------------------- shared


def _add_candidate_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--mechanisms',
        type=_list(str),
        metavar='NAMES',
        help='with commas: registered mechanisms (also scope/name), set by --gin_param, or gin files of them; '
        'attention also has plain and scan, polysketch computed in other ways',
    )
    parser.add_argument('--contexts', type=_list(_count), metavar='LENGTHS', help='tokens a sequence, with commas')


def _add_measuring_flags(parser: argparse.ArgumentParser) -> None:
    _add_candidate_flags(parser)
    parser.add_argument('--repeats', type=_count, metavar='N', help='a figure is a median of N; default: 5')
    parser.add_argument('--out', metavar='DIR', help='draw pictures (PNG and PDF) in this folder')


def _selection(arguments: argparse.Namespace) -> 'Selection':
    from lm.bench.candidates import Selection

    return Selection(arguments.mechanisms, arguments.gin_file, arguments.gin_param, arguments.allow_gin_imports)


def _output(arguments: argparse.Namespace) -> 'Output':
    from lm.bench.results import Output

    return Output(_local(arguments.json, '--json'), _local(getattr(arguments, 'out', None), '--out'))


def _local(path: str | None, flag: str) -> str | None:
    from lm.files import local_path

    return None if path is None else str(local_path(path, flag))


def _given(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Returns the flags that are given; the options know the defaults of others."""
    return {name: value for name in names if (value := getattr(arguments, name)) is not None}


def _refuse(arguments: argparse.Namespace, names: tuple[str, ...], why: str) -> None:
    """Raises ConfigError for a flag that would be ignored."""
    for name, value in _given(arguments, *names).items():
        raise ConfigError(f'--{name} {value}: {why}')


def _list(kind: Callable[[str], Any]) -> Callable[[str], list]:
    def parse(text: str) -> list:
        return [kind(part.strip()) for part in text.split(',') if part.strip()]

    parse.__name__ = f'list of {kind.__name__.strip("_")}s'
    return parse


def _count(text: str) -> int:
    value = int(text.replace('_', ''))
    if value < 1:
        raise ValueError
    return value


def _number(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError
    return value


PARTS = {
    'attention': BenchPart(
        'one layer of each mechanism at several context lengths: latency and memory',
        'lm bench attention --mechanisms polysketch,plain,softmax --contexts 1024,8192 --out figures',
        _add_attention_flags,
        _call_attention,
    ),
    'step': BenchPart(
        'whole training steps a second at constant tokens a step, over context lengths',
        'lm bench step --mechanisms softmax,polysketch --contexts 512,2048 --json step.json',
        _add_step_flags,
        _call_step,
    ),
    'precision': BenchPart(
        'whether the kernels of this machine compute what XLA alone computes: loss and gradients of a small model',
        'lm bench precision --mechanisms softmax,configs/attention/polysketch.gin',
        _add_precision_flags,
        _call_precision,
    ),
    'kernels': BenchPart(
        'cycles of the TPU kernels, read from what the compiler schedules: needs libtpu, no TPU',
        'lm bench kernels --topology v5e,v6e',
        _add_kernel_flags,
        _call_kernels,
    ),
    'data': BenchPart(
        'how fast lm prepare tokenises, beside SentencePiece alone, and how fast batches are read',
        'lm bench data --text book.txt',
        _add_data_flags,
        _call_data,
    ),
    'checkpoint': BenchPart(
        'how long saving and restoring the training state takes, and how much host memory',
        'lm bench checkpoint --gin_file configs/models/small.gin',
        _add_checkpoint_flags,
        _call_checkpoint,
    ),
}

VERB = Verb(
    name='bench',
    place=100,
    help='measure attention, training steps, TPU kernels (without a TPU) and data on this machine',
    example='lm bench attention --mechanisms softmax,polysketch --contexts 1024,4096',
    add_flags=add_flags,
    make_call=make_call,
)
