"""Flags that several verbs share."""

import argparse


def gin_flags(parser: argparse.ArgumentParser) -> None:
    """What every verb with a configuration takes."""
    group = parser.add_argument_group('configuration')
    group.add_argument('--gin_file', action='append', default=[], metavar='FILE', help='a gin file; later ones win')
    group.add_argument(
        '--gin_param', action='append', default=[], metavar="'X.Y = 1'", help='one binding; wins over files'
    )
    imports_flag(group)


def imports_flag(parser: argparse._ActionsContainer) -> None:
    """What a verb needs that reads the configuration of a run."""
    parser.add_argument(
        '--allow_gin_imports', action='store_true', help='let gin files import modules: they then run code'
    )


def distributed_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        'several processes', 'all three or none; Cloud TPU pods are detected without them'
    )
    group.add_argument('--coordinator_address', metavar='HOST:PORT', help='where process 0 listens')
    group.add_argument('--process_count', type=int, metavar='N')
    group.add_argument('--process_id', type=int, metavar='I', help='from 0')
