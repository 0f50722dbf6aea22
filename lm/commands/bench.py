"""The verb `lm bench`, each part of which has flags of its own."""

import argparse
import functools
import importlib
from collections.abc import Callable
from typing import Any

from lm.commands.flags import add_gin_flags, add_job_flags, job_address
from lm.commands.verb import Call, Verb
from lm.errors import ConfigError

EXAMPLES = {
    'attention': (
        'one layer of each mechanism at several context lengths: latency and memory',
        'lm bench attention --mechanisms polysketch,plain,softmax --contexts 1024,8192 --out figures',
    ),
    'step': (
        'whole training steps a second at constant tokens a step, over context lengths',
        'lm bench step --mechanisms softmax,polysketch --contexts 512,2048 --json step.json',
    ),
    'precision': (
        'whether the kernels of this machine compute what XLA alone computes: loss and gradients of a small model',
        'lm bench precision --mechanisms softmax,configs/attention/polysketch.gin',
    ),
    'kernels': (
        'cycles of the TPU kernels, read from what the compiler schedules: needs libtpu, no TPU',
        'lm bench kernels --topology v5e,v6e',
    ),
    'data': (
        'how fast lm prepare tokenises, beside SentencePiece alone, and how fast batches are read',
        'lm bench data --text book.txt',
    ),
    'checkpoint': (
        'how long saving and restoring the training state takes, and how much host memory',
        'lm bench checkpoint --gin_file configs/models/small.gin',
    ),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The parts of `lm bench` as parsers of their own."""
    parts = parser.add_subparsers(dest='part', metavar='PART', title='parts', parser_class=type(parser))
    for name, (text, example) in EXAMPLES.items():
        part = parts.add_parser(
            name,
            help=text,
            description=f'{text[0].upper()}{text[1:]}.',
            epilog=f'example:\n  {example}',
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        FLAGS[name](part)
        part.add_argument('--json', metavar='FILE', help='also write everything to this file')
        part.add_argument('--debug', action='store_true', help='show the traceback of an error')
        part.set_defaults(parser=part)


def _candidates(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--mechanisms',
        type=_list(str),
        metavar='NAMES',
        help='with commas: registered mechanisms (also scope/name), set by --gin_param, or gin files of them; '
        'attention also has plain and scan, polysketch computed in other ways',
    )
    parser.add_argument('--contexts', type=_list(_count), metavar='LENGTHS', help='tokens a sequence, with commas')


def _measuring(parser: argparse.ArgumentParser) -> None:
    _candidates(parser)
    parser.add_argument('--repeats', type=_count, metavar='N', help='a figure is a median of N; default: 5')
    parser.add_argument('--out', metavar='DIR', help='draw pictures (PNG and PDF) in this folder')


def _attention(parser: argparse.ArgumentParser) -> None:
    _measuring(parser)
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


def _step(parser: argparse.ArgumentParser) -> None:
    _measuring(parser)
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


def _precision(parser: argparse.ArgumentParser) -> None:
    _candidates(parser)
    add_gin_flags(parser)
    add_job_flags(parser)


def _kernels(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--topology', type=_list(str), default=['v5e'], metavar='NAMES', help='v4, v5e, v5p, v6e, v7x; with commas'
    )
    parser.add_argument('--parts', type=_count, default=1, metavar='N', help='chips that share a window; default: 1')
    parser.add_argument('cases', nargs='*', metavar='CASE', help='which kernels; default: all')


def _data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--text', metavar='FILE', help='UTF-8 text to tokenise; default: made from the documentation')
    parser.add_argument('--megabytes', type=_number, metavar='X', help='of text; default: the file, or 4')
    parser.add_argument('--document_bytes', type=_count, metavar='N', help='of a document; default: 8192')
    parser.add_argument('--vocab_size', type=_count, metavar='N', help='default: 32000, or what the text gives')
    parser.add_argument(
        '--path', metavar='STORE', help='read batches from this store; prepare is then measured with --text alone'
    )
    parser.add_argument('--context_length', type=_count, default=2048, metavar='N', help='of batches; default: 2048')
    parser.add_argument('--tokens', type=_count, metavar='N', help='of the store that is made; default: 67108864')
    parser.add_argument(
        '--tokens_per_step', type=_count, default=2**19, metavar='N', help='of a batch; default: 524288'
    )
    parser.add_argument('--repeats', type=_count, default=5, metavar='N', help='a figure is a median of N; default: 5')


def _checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--folder', metavar='DIR', help='where it is written; default: with temporary files')
    add_gin_flags(parser)


FLAGS: dict[str, Callable[[argparse.ArgumentParser], None]] = {
    'attention': _attention,
    'step': _step,
    'precision': _precision,
    'kernels': _kernels,
    'data': _data,
    'checkpoint': _checkpoint,
}

DEFAULTS: dict[str, dict[str, int]] = {
    'attention': {'repeats': 5},
    'step': {'repeats': 5},
    'data': {'document_bytes': 8192, 'tokens': 2**26},
}
"""Part → defaults of flags that `_check_together` must know to have been left out."""


def make_call(arguments: argparse.Namespace) -> Call:
    if arguments.part is None:
        return functools.partial(print_help, arguments.parser)
    from lm.files import local_path

    _check_together(arguments)
    for flag, default in DEFAULTS.get(arguments.part, {}).items():
        if getattr(arguments, flag) is None:
            setattr(arguments, flag, default)
    for flag in ('json', 'out', 'folder'):
        if (path := getattr(arguments, flag, None)) is not None:
            setattr(arguments, flag, str(local_path(path, f'--{flag}')))
    if arguments.part in ('step', 'precision'):
        arguments.job = job_address(arguments)
    part = 'forecast' if arguments.part == 'step' and arguments.topology else arguments.part
    return functools.partial(importlib.import_module(f'lm.bench.{part}').run, arguments)


def print_help(parser: argparse.ArgumentParser) -> int:
    """Prints the parts in place of running one; returns 2."""
    parser.print_help()
    return 2


def _check_together(arguments: Any) -> None:
    """Raises ConfigError for a flag that would be ignored."""
    given = {name for name, value in vars(arguments).items() if value is not None}
    void: dict[str, tuple[str, ...]] = {}
    if arguments.part == 'step' and arguments.topology:
        flags = ('steps', 'repeats', 'coordinator_address', 'process_count', 'process_id')
        void['is of steps that run; with --topology the step is compiled alone'] = flags
    if arguments.part == 'data' and arguments.path is not None:
        void['is of the store that is made; leave this or --path out'] = ('tokens',)
        if arguments.text is None:
            void['is of a text; add --text, or leave --path out'] = ('megabytes', 'document_bytes', 'vocab_size')
    for why, flags in void.items():
        if found := [flag for flag in flags if flag in given]:
            raise ConfigError(f'--{found[0]} {getattr(arguments, found[0])}: {why}')


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


VERB = Verb(
    name='bench',
    place=100,
    help='measure attention, training steps, TPU kernels (without a TPU) and data on this machine',
    example='lm bench attention --mechanisms softmax,polysketch --contexts 1024,4096',
    add_flags=add_flags,
    make_call=make_call,
)
