#!/usr/bin/env python3
"""Prints the table of a sweep over seeds.

    python configs/papers/results_table.py runs/real_text
    python configs/papers/results_table.py runs/options --baseline none

A Markdown row stands for all points that differ in the seed alone, the best first: mean and standard deviation
(n - 1) over the finished seeds. With a baseline, the last column has the loss above the baseline of the same seed.
"""

import argparse
import collections
import statistics
from collections.abc import Mapping
from typing import Any

from etils import epath

from lm.errors import LmError
from lm.runs.sweep_file import read_rows
from lm.text import make_markdown_table

COLUMNS = {'perplexity': '.2f', 'bits_per_byte': '.4f', 'accuracy': '.4f', 'tokens_per_second': ',.0f'}
SEED = 'train.seed'
Row = Mapping[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('root', metavar='ROOT', help='the folder of lm sweep')
    parser.add_argument(
        '--baseline', metavar='ROW', help='the row with which others are compared, as the table names it'
    )
    given = parser.parse_args()
    found = epath.Path(given.root) / 'sweep.json'
    if not found.exists():
        parser.exit(2, f'{found}: no such file; name the folder of a sweep\n')
    try:
        groups = group_rows(read_rows(found.parent))
    except LmError as error:
        parser.exit(error.exit_code, f'{error}\n')
    if given.baseline not in (None, *groups):
        parser.exit(2, f'--baseline {given.baseline}: no such row; the rows are {", ".join(groups)}\n')
    print(make_table(groups, given.baseline))


def group_rows(rows: list[dict[str, Any]]) -> dict[str, list[Row]]:
    """Returns the points of each row of the table by its name: their settings but for the seed."""
    groups: dict[str, list[Row]] = collections.defaultdict(list)
    for row in rows:
        groups[' '.join(value for name, value in row['settings'].items() if name != SEED)].append(row)
    return groups


def make_table(groups: Mapping[str, list[Row]], baseline: str | None = None) -> str:
    """Returns Markdown; rows without a finished run say how many are missing."""
    points = [point for group in groups.values() for point in group]
    columns = {name: style for name, style in COLUMNS.items() if any(p[name] is not None for p in points)}
    rows = []
    for name, members in groups.items():
        cells = [name, f'{len(_list_losses(members))} of {len(members)}']
        for column, style in columns.items():
            cells.append(_summarize([p[column] for p in members if p['status'] == 'done'], style))
        if baseline is not None:
            known = _list_losses(groups[baseline])
            above = [loss - known[seed] for seed, loss in _list_losses(members).items() if seed in known]
            cells.append('' if name == baseline else _summarize(above, '+.3f'))
        losses = _list_losses(members).values()
        rows.append((statistics.mean(losses) if losses else float('inf'), cells))
    headings = ['points', 'seeds', *(name.replace('_', ' ') for name in columns)]
    headings += [] if baseline is None else [f'nats above {baseline}']
    return make_markdown_table([cells for _, cells in sorted(rows, key=lambda row: row[0])], headings)


def _list_losses(members: list[Row]) -> dict[str, float]:
    """Returns seed → loss of the finished runs."""
    done = [p for p in members if p['status'] == 'done' and isinstance(p['loss'], int | float)]
    return {p['settings'].get(SEED, ''): p['loss'] for p in done}


def _summarize(values: list[Any], style: str) -> str:
    """Returns mean ± deviation of the values that are numbers."""
    numbers = [value for value in values if isinstance(value, int | float)]
    if not numbers:
        return 'not measured'
    spread = f' ± {statistics.stdev(numbers):{style.lstrip("+")}}' if len(numbers) > 1 else ''
    return f'{statistics.mean(numbers):{style}}{spread}'


if __name__ == '__main__':
    main()
