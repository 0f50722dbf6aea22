"""The verb `lm inspect`."""

import argparse
import functools

from lm.commands.flags import add_imports_flag
from lm.commands.verb import Call, Verb


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('path', metavar='PATH', help='a run directory, a sweep or a token store')
    parser.add_argument('--verify', action='store_true', help='read everything and compare checksums')
    parser.add_argument('--json', action='store_true', help='print JSON instead of tables')
    add_imports_flag(parser)


def make_call(arguments: argparse.Namespace) -> Call:
    from lm.summary.inspect import inspect_path

    return functools.partial(
        inspect_path,
        arguments.path,
        verify=arguments.verify,
        as_json=arguments.json,
        allow_imports=arguments.allow_gin_imports,
    )


VERB = Verb(
    name='inspect',
    place=110,
    help='show what a run, a sweep or a token store holds',
    example='lm inspect runs/tiny --verify',
    add_flags=add_flags,
    make_call=make_call,
    only_prints=True,
)
