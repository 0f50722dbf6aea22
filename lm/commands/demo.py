"""The verb `lm demo`."""

import argparse
import functools

from lm.bench.options import DemoOptions
from lm.commands.flags import add_option_flags, find_options
from lm.commands.verb import Call, Verb


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_option_flags(parser, DemoOptions)


def make_call(arguments: argparse.Namespace) -> Call:
    from lm.bench.demo import show_costs

    return functools.partial(show_costs, DemoOptions(**find_options(arguments, DemoOptions)))


VERB = Verb(
    name='demo',
    place=130,
    help='draw what a token costs at growing context lengths, with softmax and with linear attention, in a minute',
    example='lm demo --out demo',
    add_flags=add_flags,
    make_call=make_call,
)
