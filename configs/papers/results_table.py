#!/usr/bin/env python3
"""Prints the table of a sweep over seeds.

    python configs/papers/results_table.py runs/real_text

A Markdown row stands for all points that differ in the seed alone, the best first: mean and standard deviation
(n - 1) over the finished seeds.
"""

import collections
import statistics
import sys

from etils import epath

from lm.errors import LmError
from lm.runs.sweep_file import read_rows
from lm.text import make_markdown_table

COLUMNS = {'perplexity': '.2f', 'bits_per_byte': '.4f', 'accuracy': '.4f', 'tokens_per_second': ',.0f'}


def table(points: list[dict]) -> str:
    """Returns Markdown from the points of sweep.json; rows without a finished run say how many are missing."""
    groups = collections.defaultdict(list)
    for point in points:
        settings = {k: v for k, v in point['settings'].items() if k != 'train.seed'}
        groups[' '.join(settings.values())].append(point)
    columns = {name: style for name, style in COLUMNS.items() if any(p[name] is not None for p in points)}
    rows = []
    for name, members in groups.items():
        done = [p for p in members if p['status'] == 'done']
        cells = [name, f'{len(done)} of {len(members)}']
        for column, style in columns.items():
            values = [p[column] for p in done if isinstance(p[column], int | float)]
            spread = f' ± {statistics.stdev(values):{style}}' if len(values) > 1 else ''
            cells.append(f'{statistics.mean(values):{style}}{spread}' if values else 'not measured')
        losses = [p['loss'] for p in done if isinstance(p['loss'], int | float)]
        rows.append((statistics.mean(losses) if losses else float('inf'), cells))
    headings = ['mechanism', 'seeds', *(name.replace('_', ' ') for name in columns)]
    return make_markdown_table([cells for _, cells in sorted(rows, key=lambda row: row[0])], headings)


if __name__ == '__main__':
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    found = epath.Path(sys.argv[1]) / 'sweep.json'
    if not found.exists():
        sys.exit(f'{found}: no such file; name the folder of a sweep')
    try:
        print(table(read_rows(found.parent)))
    except LmError as error:
        sys.exit(str(error))
