"""The verb `lm reproduce`."""

import argparse
import functools
from typing import TYPE_CHECKING, Any

from lm.commands.flags import add_binding_flags, add_option_flags, find_given, find_options
from lm.commands.verb import Call, Verb
from lm.errors import ConfigError
from lm.sweep.options import ClusterOptions, SweepOptions

if TYPE_CHECKING:
    from lm.reproduce.runs import TableChoice

CHOICES = ('scale', 'rows', 'columns', 'seeds', 'text')
"""Flags of what is reproduced; others are of how."""
ON = ('tpu', 'jobset', 'slurm', 'skypilot')


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('table', nargs='?', metavar='PAPER/TABLE', help='the table, as --list names it')
    parser.add_argument('--list', action='store_true', help='print every table and figure with its verdict and stop')
    parser.add_argument('--scale', help="paper, or a smaller scale with the paper's proportions; default: paper")
    parser.add_argument(
        '--rows', metavar='LIST', help='rows by number from 1, range, or part of the label: 1-4,learned'
    )
    parser.add_argument('--columns', metavar='LIST', help='columns by number from 1, or by value: 1,8k')
    parser.add_argument('--seeds', type=int, metavar='N', help='runs per cell, from seed 0; default: 1')
    parser.add_argument(
        '--text', metavar='DIR', help='text files of smaller scales, in train/ and validation/; default: Python sources'
    )
    parser.add_argument('--run_dir', metavar='ROOT', help='default: runs/reproduce/PAPER/TABLE/SCALE')
    parser.add_argument('--no_pictures', dest='pictures', action='store_false', help='no PNG and PDF files')
    add_binding_flags(parser.add_argument_group('bindings of all runs', 'which then differ from the paper'))
    parser.add_argument(
        '--price', action='store_true', help='print memory, hours, chip-hours, stores and preparation, and stop'
    )
    parser.add_argument(
        '--price_per_chip_hour', type=float, metavar='X', help='with --price: the price of a chip-hour, in any currency'
    )
    parser.add_argument('--on', choices=ON, help='hand the runs to this launcher in place of this machine')
    parser.add_argument(
        '--manifests', metavar='DIR', help='with --on jobset, slurm or skypilot: the folder for manifests'
    )
    parser.add_argument(
        '--no_check', dest='check', action='store_false', help='with --on: do not compile the runs for their TPUs first'
    )
    add_option_flags(parser, SweepOptions)
    machines = parser.add_argument_group(
        'the machines of each run (--price, --on)', 'a format refuses what it does not use'
    )
    add_option_flags(machines, ClusterOptions)


def make_call(arguments: argparse.Namespace) -> Call:
    if arguments.list:
        from lm.reproduce.claims import print_tables

        return print_tables
    if not arguments.table:
        raise ConfigError('PAPER/TABLE: name a table; lm reproduce --list shows all')
    from lm.reproduce.descriptions import PAPER_SCALE, find_description

    description, choice = find_description(arguments.table), read_choice(arguments)
    description.check_scale(choice.scale)
    root = arguments.run_dir or f'runs/reproduce/{description.name}/{choice.scale}'
    if arguments.price:
        from lm.hardware import parse
        from lm.reproduce.price import print_price

        named = arguments.topology or (description.topology if choice.scale == PAPER_SCALE else None)
        topology = parse(named) if named else None
        return functools.partial(print_price, description, choice, root, topology, arguments.price_per_chip_hour)
    if arguments.price_per_chip_hour is not None:
        raise ConfigError(f'--price_per_chip_hour {arguments.price_per_chip_hour:g}: is of --price')
    if arguments.on:
        return make_hand_over_call(arguments, root)
    from lm.reproduce.run import reproduce

    for flag, value in find_options(arguments, ClusterOptions).items():
        raise ConfigError(f'--{flag} {value}: is of machines elsewhere; add --on')
    if not arguments.check:
        raise ConfigError('--no_check: is of --on')
    options = SweepOptions(**find_options(arguments, SweepOptions))
    return functools.partial(reproduce, description, choice, root, options, arguments.pictures)


def make_hand_over_call(arguments: argparse.Namespace, root: str) -> Call:
    """Returns the call of --on."""
    from lm.commands.sweep import read_cluster_options
    from lm.reproduce.descriptions import find_description
    from lm.reproduce.hand_over import hand_over

    table, choice, options = find_description(arguments.table), read_choice(arguments), read_cluster_options(arguments)
    how = arguments.on, arguments.manifests, bool(arguments.retry_failed), arguments.check
    return functools.partial(hand_over, table, choice, root, options, *how)


def read_choice(arguments: argparse.Namespace) -> 'TableChoice':
    """Returns what of the table is asked for. Raises ConfigError for an impossible number of seeds."""
    from lm.reproduce.runs import TableChoice

    if arguments.seeds is not None and arguments.seeds < 1:
        raise ConfigError(f'--seeds {arguments.seeds}: must be at least 1')
    given: dict[str, Any] = find_given(arguments, *CHOICES)
    for name in ('rows', 'columns'):
        if name in given:
            given[name] = tuple(part.strip() for part in given[name].split(','))
    return TableChoice(**given, gin_params=tuple(arguments.gin_param))


VERB = Verb(
    place=85,
    help="repeat a table of a paper: data, runs, and the paper's numbers beside ours",
    example='lm reproduce polysketchformer/table_2 --scale tiny --columns 1',
    resumes=True,
)
