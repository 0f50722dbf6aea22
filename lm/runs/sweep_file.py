"""sweep.json, the results of a sweep: one row per point. `lm sweep` writes it.

ROOT/sweep.json          {"kind": "sweep", "points": [row, …]}; a search has "search": {"sampler": "tpe", …} too
ROOT/points/NAME.json    how a point failed: {"exit_code": 43, "error": "…"}, or {"pruned_at": 40, …}
ROOT/points/machines/MACHINE.json    the point that ended there because the machine computes wrongly
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath

from lm.errors import Diverged, MismatchError
from lm.files import open_path, write_atomically
from lm.folders import SWEEP
from lm.runs.records import read_json, to_json
from lm.text import format_si, print_table

NAME, NOTES, MACHINES = SWEEP, 'points', 'machines'
MEASURES = ('loss', 'perplexity', 'word_perplexity', 'bits_per_byte', 'accuracy')
"""The measures of an evaluation that rows hold."""
Row = dict[str, Any]
"""A row of the table, as JSON holds it."""


def is_sweep(root: epath.Path) -> bool:
    return (root / NAME).exists()


def find_sweeps(paths: Iterable[str]) -> list[epath.Path]:
    """Returns the folders of sweeps among paths; globs name runs, not sweeps."""
    return [root for path in paths if '*' not in path and is_sweep(root := epath.Path(open_path(path)))]


def read_rows(root: epath.Path) -> list[Row]:
    """Returns the rows of a sweep. Raises MismatchError where the file is not one of `lm sweep`."""
    found = read_json(root / NAME)
    rows = found.get('points') if isinstance(found, dict) else None
    needed = {'point', 'status', 'step', 'steps'}
    if not isinstance(rows, list) or not all(isinstance(row, dict) and needed <= row.keys() for row in rows):
        raise MismatchError(f'{root / NAME}: is not a table of lm sweep; run the same lm sweep again, which writes it')
    optional = ('settings', 'split', *MEASURES, 'tokens_per_second', 'exit_code', 'error')
    return [dict.fromkeys(optional) | row for row in rows]


def write_rows(root: epath.Path, rows: list[Row], facts: Mapping[str, object] | None = None) -> None:
    """Writes the table, with further facts about the sweep; None: how its points were drawn stays as it is."""
    root.mkdir(parents=True, exist_ok=True)
    if facts is None:
        facts = {'search': search} if (search := read_search(root)) else {}
    write_atomically(root / NAME, to_json({'kind': 'sweep', **facts, 'points': rows}) + '\n')


def read_search(root: epath.Path) -> dict[str, object]:
    """Returns how the points of a search were drawn (`lm.sweep.search`); {} for a grid."""
    found = read_json(root / NAME)
    search = found.get('search') if isinstance(found, dict) else None
    return search if isinstance(search, dict) else {}


def is_pruned(failure: Mapping[str, object]) -> bool:
    """Returns whether the note on a point (`read_failure`) says that a search ended it early."""
    return isinstance(failure.get('pruned_at'), int)


def read_failure(root: epath.Path, point: str) -> dict[str, object]:
    """Returns how a point failed: exit_code and error; {} where it did not."""
    found = read_json(root / NOTES / f'{point}.json')
    return found if isinstance(found, dict) else {}


def record_wrong_machine(root: epath.Path, machine: str, point: str, error: str) -> None:
    """Notes that a machine computed wrongly. Raises OSError where that cannot be written."""
    folder = root / NOTES / MACHINES
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub('[^A-Za-z0-9._-]+', '-', machine).strip('.') or 'machine'
    write_atomically(folder / f'{name}.json', to_json({'machine': machine, 'point': point, 'error': error}) + '\n')


def read_wrong_machines(root: epath.Path) -> list[str]:
    """Returns the machines that computed wrongly. Delete the file of a machine that was repaired."""
    folder = root / NOTES / MACHINES
    found = [read_json(path) for path in sorted(folder.glob('*.json'))] if folder.exists() else []
    return [note['machine'] for note in found if isinstance(note, dict) and isinstance(note.get('machine'), str)]


def describe_status(status: str, exit_code: object) -> str:
    """Returns 'done', 'diverged (43)', 'failed (44)', …"""
    if status != 'failed':
        return status
    return f'{"diverged" if exit_code == Diverged.exit_code else "failed"} ({exit_code})'


def print_results(rows: list[Row]) -> None:
    """Prints the results."""
    measures = [m for m in ('perplexity', 'accuracy') if any(row[m] is not None for row in rows)] or ['perplexity']
    split = ', '.join(sorted({row['split'] for row in rows if row['split']}))
    headings = ('point', 'status', 'steps', *(f'{split} {m}'.strip() for m in measures), 'tokens/s', 'error')
    cells = [
        (
            row['point'],
            describe_status(row['status'], row['exit_code']),
            f'{row["step"]:,}/{row["steps"]:,}',
            *('–' if row[m] is None else f'{row[m]:.3f}' for m in measures),
            '–' if row['tokens_per_second'] is None else format_si(row['tokens_per_second']),
            row['error'] or '',
        )
        for row in rows
    ]
    print_table(headings, cells, left=('point', 'status', 'error'))
