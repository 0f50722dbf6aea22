"""The verb `lm help`."""

import argparse
import functools

from lm.commands.verb import Call, Verb


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'words',
        nargs='*',
        metavar='NAME',
        help='the name of a section, field, value or folder of gin files, or words to look for',
    )


def make_call(arguments: argparse.Namespace) -> Call:
    from lm.summary.names import show_help

    return functools.partial(show_help, arguments.words)


VERB = Verb(
    place=140,
    help='show the fields, values and gin files of a name, or the topics',
    example='lm help polysketch',
    only_prints=True,
)
