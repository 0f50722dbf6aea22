"""The verb `lm demo`."""

import argparse
import functools

from lm.commands.verb import Call, Verb


def add_flags(parser: argparse.ArgumentParser) -> None:
    help = 'the folder of the figures and of their picture; default: demo'
    parser.add_argument('--out', metavar='DIR', default='demo', help=help)


def make_call(arguments: argparse.Namespace) -> Call:
    from lm.bench.demo import show_costs

    return functools.partial(show_costs, arguments.out)


VERB = Verb(
    place=130,
    help='draw what a token costs at growing context lengths, with softmax and with linear attention, in a minute',
    example='lm demo --out demo',
)
