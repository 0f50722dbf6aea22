"""The flags of `lm inspect`. Imports nothing heavy: every `lm --help` reads it."""

import argparse

from lm.config.flags import imports_flag


def inspect_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('path', metavar='PATH', help='a run directory, a sweep or a token store')
    parser.add_argument('--verify', action='store_true', help='read everything and compare checksums')
    parser.add_argument('--json', action='store_true', help='print JSON instead of tables')
    imports_flag(parser)
