"""The verb `lm prepare`."""

import argparse
import functools

from lm.commands.flags import add_gin_flags, bindings, pick, read_experiment
from lm.commands.verb import Call, Verb


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--strict', action='store_true', default=None, help='stop at the first bad record')
    parser.add_argument('--processes', type=int, metavar='N', help='worker processes; default: one a CPU core')
    add_gin_flags(parser)


def make_call(arguments: argparse.Namespace) -> Call:
    from lm.data.prepare.run import run_prepare

    experiment = read_experiment(arguments, bindings('prepare', pick(arguments, 'strict', 'processes')))
    return functools.partial(run_prepare, experiment.prepare, experiment.data.path)


VERB = Verb(
    name='prepare',
    place=10,
    help='turn text into a token store',
    example='lm prepare --gin_file data/quickstart.gin',
    add_flags=add_flags,
    make_call=make_call,
)
