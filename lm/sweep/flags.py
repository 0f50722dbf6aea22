"""The flags of `lm sweep`. Imports nothing heavy: every `lm --help` reads it."""

import argparse


def sweep_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--run_dir', metavar='ROOT', help='the folder that gets a run directory for each point')
    parser.add_argument(
        '--sweep_file',
        action='append',
        default=[],
        metavar='FILE',
        help='a gin file whose lists are the axes of a grid; those of one scope zip/, zip_a/, … vary together',
    )
    parser.add_argument('--dry_run', action='store_true', help='print the list of runs and stop')
    parser.add_argument('--count', action='store_true', help='print the number of points and stop')
    parser.add_argument('--jobs', type=int, default=1, metavar='N', help='points at a time; default: 1')
    parser.add_argument('--gpus_per_job', type=int, metavar='K', help='share the GPUs out, K to a point')
    parser.add_argument('--index', type=int, metavar='I', help='run only point I, from 0, in this process')
    parser.add_argument('--retry_failed', action='store_true', help='run points again that diverged or were refused')
