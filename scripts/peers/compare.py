"""Compiles TPU kernels of other packages beside ours, and writes what both cost. No TPU is needed.

python -m scripts.peers.compare --save scripts/peers/results.json --page docs/lab/peers.md

Install the packages beside jax[tpu] in an environment of Python 3.13, where `lm` is importable. Both sides are compiled
there, by one compiler. A peer is left out only by name (`--peers`): one that is missing, refuses a call or does not
compile has a row that says so. Rows in the file that the same versions made are not made again.
"""

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import time
from collections.abc import Iterator, Sequence

import jax

from lm import __version__
from lm.files import write_atomically
from lm.hardware import LIBTPU_ENVIRONMENT
from scripts.peers.measure import measure
from scripts.peers.operations import OPERATIONS, Shape
from scripts.peers.packages import PEERS, Peer
from scripts.peers.page import make_page
from scripts.peers.rows import OURS, Row, read_rows, write_rows

GENERATIONS, HEADS, LENGTHS = ('v5e', 'v6e', 'v7x'), ('12x64', '16x128', '32x128'), (4096, 32_768)


def list_calls(arguments: argparse.Namespace) -> Iterator[tuple[str, str, int, str]]:
    """Yields (operation, heads, length, generation)."""
    for operation in arguments.operations:
        for heads in arguments.heads:
            for length in arguments.lengths:
                for generation in arguments.generations:
                    yield operation, heads, length, generation


def measure_row(row: Row, peer: Peer | None) -> Row:
    """Returns the row with its figures, or with the reason why there are none."""
    operation = OPERATIONS[row.operation]
    try:
        compute = operation.compute if peer is None else peer.operations()[row.operation]
        figures = measure(compute, operation.inputs(Shape.parse(row.heads, row.length)), row.generation)
    except Exception as error:  # packages and compilers raise many kinds
        lines = str(error).strip().splitlines() or ['no message']
        return dataclasses.replace(row, reason=f'{type(error).__name__}: {lines[0][:200]}')
    return dataclasses.replace(row, figures=figures)


def list_peers(names: Sequence[str], adapters: Sequence[str]) -> list[Peer]:
    """Returns the peers with these names (none: all), of `PEERS` and of the files' own `PEERS`."""
    found = list(PEERS)
    for n, file in enumerate(adapters):
        spec = importlib.util.spec_from_file_location(f'adapter{n}', file)
        assert spec is not None, file
        assert spec.loader is not None, file
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found += module.PEERS
    return [peer() for peer in found if not names or peer.package in names]


def compiler() -> str:
    return ', '.join(f'{name} {importlib.metadata.version(name)}' for name in ('jax', 'libtpu'))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--save', type=pathlib.Path, required=True, metavar='FILE', help='JSON; rows are added to it')
    parser.add_argument('--page', type=pathlib.Path, metavar='FILE', help='also write the tables, as Markdown')
    parser.add_argument('--peers', nargs='*', default=[], metavar='PACKAGE', help='default: all')
    parser.add_argument('--adapter', action='append', default=[], metavar='FILE', help='Python with more PEERS')
    parser.add_argument('--folder', action='append', default=[], metavar='DIR', help='sources that precede packages')
    parser.add_argument('--operations', nargs='*', default=list(OPERATIONS), choices=list(OPERATIONS))
    parser.add_argument('--heads', nargs='*', default=list(HEADS), metavar='NxD', help=f'default: {" ".join(HEADS)}')
    parser.add_argument('--lengths', nargs='*', type=int, default=list(LENGTHS), metavar='TOKENS')
    parser.add_argument('--generations', nargs='*', default=list(GENERATIONS), choices=GENERATIONS)
    arguments = parser.parse_args(argv)
    sys.path[:0] = arguments.folder
    os.environ.update(LIBTPU_ENVIRONMENT)
    jax.config.update('jax_platforms', 'cpu')
    rows, peers = read_rows(arguments.save), list_peers(arguments.peers, arguments.adapter)
    for call in list_calls(arguments):
        for peer in (None, *peers):
            row = start_row(call, peer)
            if row is None or row.key in {known.key for known in rows}:
                continue
            begun = time.monotonic()
            rows.append(row if row.reason else measure_row(row, peer))
            write_rows(arguments.save, rows)
            print(*row.key[:5], f'{time.monotonic() - begun:.0f} s', rows[-1].reason, file=sys.stderr, flush=True)
    if arguments.page:
        write_atomically(arguments.page, make_page(rows))
    return 0


def start_row(call: tuple[str, str, int, str], peer: Peer | None) -> Row | None:
    """Returns the row of a call without figures; None where the peer has no such operation."""
    if peer is None:
        return Row(*call, OURS, __version__, compiler())
    try:
        version = peer.version
        if call[0] not in peer.operations():
            return None
    except ImportError as error:  # also a package that is not installed
        return Row(*call, peer.name, '', compiler(), reason=f'{type(error).__name__}: {error}')
    return Row(*call, peer.name, version, compiler(), peer.differs.get(call[0], ''))


if __name__ == '__main__':
    sys.exit(main())
