"""The flags of `lm report`. Imports nothing heavy: every `lm --help` reads it."""

import argparse


def report_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('paths', nargs='+', metavar='PATH', help='run directories, sweeps, or globs of them')
    parser.add_argument('--out', required=True, metavar='DIR', help='a folder for the tables and pictures')
    parser.add_argument('--split', help='which evaluations count; default: those of training')
    parser.add_argument(
        '--paper', choices=('pg19', 'wiki40b', 'none'), help="the paper's table to compare with; default: by the data"
    )
    parser.add_argument('--no_pictures', dest='pictures', action='store_false', help='tables only')
