"""The flags of `lm prepare`. Imports nothing heavy: every `lm --help` reads it."""

import argparse


def prepare_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--strict', action='store_true', default=None, help='stop at the first bad record')
    parser.add_argument('--processes', type=int, metavar='N', help='worker processes; default: one a CPU core')
