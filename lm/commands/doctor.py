"""The verb `lm doctor`."""

import argparse
import functools

from lm.commands.verb import Call, Verb


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'paths',
        nargs='*',
        metavar='PATH',
        help='a run directory, a token store, or a folder or bucket that a run is to write',
    )
    parser.add_argument('--json', action='store_true', help='print JSON')


def make_call(arguments: argparse.Namespace) -> Call:
    from lm.doctor.doctor import examine

    return functools.partial(examine, arguments.paths, as_json=arguments.json)


VERB = Verb(
    place=120,
    help='examine this machine and its storage before a paid start, or for a bug report',
    example='lm doctor gs://my-bucket/runs',
    only_prints=True,
)
