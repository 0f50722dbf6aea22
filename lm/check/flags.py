"""The flags of `lm check`. Imports nothing heavy: every `lm --help` reads it."""

import argparse
import math

from lm.errors import ConfigError


def check_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--topology',
        action='append',
        default=[],
        metavar='NAME',
        help="compile for this TPU slice: 'v5e:4x8', 'v4:2x4x4', 'v6e-64', …, or for several, '2*v5e:8x8'; may be "
        'repeated; needs libtpu, no TPU',
    )
    parser.add_argument(
        '--no_advice', dest='advice', action='store_false', help='try no changes when a step does not fit'
    )
    parser.add_argument(
        '--best',
        action='store_true',
        help='try all changes of microbatches, remat and fsdp, also of a step that fits, the fastest unrolled, too, '
        'and print the fastest as gin',
    )
    parser.add_argument(
        '--price_per_chip_hour', type=float, metavar='X', help='multiplies chip-hours of --topology; in any currency'
    )
    parser.add_argument(
        '--if_possible',
        action='store_true',
        help='compile nothing where libtpu is missing or does not know the slice, and check nothing where the run that '
        'is changed is not to be seen from here',
    )
    parser.add_argument(
        '--run_dir', metavar='RUN', help='as of lm train: what this run says counts if no --gin_file is given'
    )
    parser.add_argument('--branch_from', metavar='RUN', help='as of lm train: what this run says counts')
    parser.add_argument('--sweep_file', action='append', default=[], metavar='FILE', help='a sweep: check its --index')
    parser.add_argument('--index', type=int, metavar='I', help='the point of the sweep, from 0; default: 0')
    parser.add_argument('--json', action='store_true', help='print JSON instead of a table')


def check_together(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for a flag that would be ignored, and for a price that is none."""
    price, index = arguments.price_per_chip_hour, arguments.index
    if arguments.best and not arguments.advice:
        raise ConfigError('--best and --no_advice: give one of them')
    if not arguments.topology:
        for flag, given in (('--best', arguments.best), (f'--price_per_chip_hour {price}', price is not None)):
            if given:
                raise ConfigError(f'{flag}: needs --topology, such as --topology v5e:4x8')
    if price is not None and not (price >= 0 and math.isfinite(price)):
        raise ConfigError(f'--price_per_chip_hour {price}: must be a number of at least 0')
    if index is not None and not arguments.sweep_file:
        raise ConfigError(f'--index {index}: is of a sweep; add --sweep_file')
    for flag in ('run_dir', 'branch_from') if arguments.sweep_file else ():
        if (run := getattr(arguments, flag)) is not None:
            raise ConfigError(f'--{flag} {run}: the points of a sweep are new runs; leave this or --sweep_file out')
