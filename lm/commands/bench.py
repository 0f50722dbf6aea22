"""The verb `lm bench`, each part of which has flags and a call of its own."""

import argparse
import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

from lm.bench.options import (
    AttentionOptions,
    CheckpointOptions,
    ChipOptions,
    ComparedOptions,
    DataOptions,
    ModelOptions,
    StepOptions,
)
from lm.commands.flags import (
    add_gin_flags,
    add_job_flags,
    add_option_flags,
    add_parser,
    find_given,
    job_address,
    refuse,
)
from lm.commands.verb import Call, Verb


@dataclasses.dataclass(frozen=True)
class BenchPart:
    """One `lm bench PART`; `help` and `example` mean the same as in `Verb`.

    Attributes:
        options: a dataclass, whose fields are the flags.
        work: module:function of the options, which does the work.
        has_job: several processes may share the work; the function then takes the address of the job, too.
        check: raises ConfigError for flags that do not go together.
    """

    help: str
    example: str
    options: type[ModelOptions | DataOptions]
    work: str
    has_job: bool = False
    check: Callable[[argparse.Namespace, Any], None] = lambda arguments, options: None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the parts, as parsers of their own."""
    parts = parser.add_subparsers(dest='part', metavar='PART', title='parts', parser_class=type(parser))
    for name, part in PARTS.items():
        sub = add_parser(parts, name, part.help, part.example)
        add_option_flags(sub, part.options)
        # The name of --save in version 0.1. In all other verbs --json prints JSON in place of tables.
        sub.add_argument('--json', dest='save', metavar='FILE', help=argparse.SUPPRESS)
        if issubclass(part.options, ModelOptions):
            add_gin_flags(sub)
        if part.has_job:
            add_job_flags(sub)


def make_call(arguments: argparse.Namespace) -> Call:
    if arguments.part is None:
        return functools.partial(print_help, arguments.parser)
    part = PARTS[arguments.part]
    given = find_given(arguments, *(field.name for field in dataclasses.fields(part.options)))
    options = part.options(**given)
    part.check(arguments, options)
    module, _, name = part.work.partition(':')
    job = (job_address(arguments),) if part.has_job else ()
    return functools.partial(getattr(importlib.import_module(module), name), options, *job)


def print_help(parser: argparse.ArgumentParser) -> int:
    """Prints the parts in place of running one; returns 2."""
    parser.print_help()
    return 2


def _check_step(arguments: argparse.Namespace, options: StepOptions) -> None:
    if options.topology:
        why = 'is of steps that run; with --topology the step is compiled alone'
        refuse(arguments, ('steps', 'repeats', 'coordinator_address', 'process_count', 'process_id'), why)


def _check_data(arguments: argparse.Namespace, options: DataOptions) -> None:
    if options.path is not None:
        refuse(arguments, ('tokens',), 'is of the store that is made; leave this or --path out')
        if options.text is None:
            why = 'is of a text; add --text, or leave --path out'
            refuse(arguments, ('megabytes', 'document_bytes', 'vocab_size'), why)


PARTS = {
    'attention': BenchPart(
        'one layer of each mechanism at several context lengths: latency and memory',
        'lm bench attention --mechanisms polysketch,gated_linear,softmax --contexts 1024,8192 --out figures',
        AttentionOptions,
        'lm.bench.attention:bench_attention',
    ),
    'step': BenchPart(
        'whole training steps per second at constant tokens per step, over context lengths',
        'lm bench step --mechanisms softmax,polysketch --contexts 512,2048 --save step.json',
        StepOptions,
        'lm.bench.step:bench_step',
        has_job=True,
        check=_check_step,
    ),
    'precision': BenchPart(
        'whether the kernels of this machine compute what XLA alone computes: loss and gradients of a small model',
        'lm bench precision --mechanisms softmax,configs/attention/polysketch.gin',
        ComparedOptions,
        'lm.bench.precision:bench_precision',
        has_job=True,
    ),
    'chips': BenchPart(
        'a burn-in that looks for chips that compute wrongly: their units, memory and links, and the training step',
        'lm bench chips --minutes 30 --gin_file configs/models/small.gin',
        ChipOptions,
        'lm.bench.chips:bench_chips',
        has_job=True,
    ),
    'data': BenchPart(
        'how fast lm prepare tokenises, beside SentencePiece alone, and how fast batches are read',
        'lm bench data --text book.txt',
        DataOptions,
        'lm.bench.data:bench_data',
        check=_check_data,
    ),
    'checkpoint': BenchPart(
        'how long saving and restoring the training state takes, and how much host memory',
        'lm bench checkpoint --gin_file configs/models/small.gin',
        CheckpointOptions,
        'lm.bench.checkpoint:bench_checkpoint',
    ),
}

VERB = Verb(
    place=100,
    help='measure attention, training steps, precision, data and checkpoints on this machine',
    example='lm bench attention --mechanisms softmax,polysketch --contexts 1024,4096',
)
