"""The verb `lm export`."""

import argparse
import functools

from lm.commands.flags import add_gin_flags, add_run_flags, read_experiment_of_run
from lm.commands.verb import Call, Verb

FORMATS = ('safetensors', 'huggingface', 'native')


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_run_flags(parser)
    parser.add_argument(
        '--format',
        choices=FORMATS,
        default='safetensors',
        help='huggingface: with what transformers needs to run the model; native: as a class that transformers has; '
        'default: safetensors',
    )
    parser.add_argument('--out', required=True, metavar='DIR', help='a new or empty folder')
    add_gin_flags(parser)


def make_call(arguments: argparse.Namespace) -> Call:
    experiment = read_experiment_of_run(arguments)

    from lm.interop.export_run import export_run

    run = experiment, arguments.run_dir, arguments.step
    return functools.partial(export_run, *run, format_name=arguments.format, out=arguments.out)


VERB = Verb(
    name='export',
    place=50,
    help='write the weights of a run for other programs',
    example='lm export --run_dir runs/tiny --format huggingface --out exports/tiny',
    add_flags=add_flags,
    make_call=make_call,
)
