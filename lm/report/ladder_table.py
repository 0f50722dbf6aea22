"""The table of a ladder: a row per series and size, with the sentences below it."""

from collections.abc import Callable, Sequence
from typing import Any

from lm.report.ladder import FEWEST_SIZES, Ladder, format_power
from lm.report.page import SortableTable, TableCell, make_cell
from lm.text import format_count, format_digits


def make_ladder_table(ladder: Ladder) -> SortableTable:
    """Returns the table of the page."""
    cells = [[make(row) for make in COLUMNS.values()] for row in ladder.list_rows()]
    return SortableTable('Ladder', list(COLUMNS), cells, 1, list_notes(ladder))


def list_notes(ladder: Ladder) -> list[str]:
    """Returns the sentences that say what the curve is, how well it fits, and what it leaves out."""
    sizes = ladder.sizes
    notes = [
        'Effective speed-up: the compute with which the baseline reaches the loss of a run, over the compute of the '
        'run. Compute: training tokens times the FLOPs per token of lm check. In brackets: extremes over seeds.',
        f'Baseline {ladder.name}: {ladder.law}, in nats per token, by least squares of the mean losses of '
        f'{len(sizes)} sizes ({format_count(len(ladder.baseline), "run")}) from {format_power(sizes[0])} to '
        f'{format_power(sizes[-1])} FLOPs.{_describe_residuals(ladder)}',
        'The curve ends with the ladder: < and > mark bounds, from the compute of its smallest and largest size.',
    ]
    if any(row['time_speedup'] is not None for row in ladder.list_rows()):
        notes.append(
            'Speed-up in time: the same with training time in place of compute, on equal devices. '
            'Training time: tokens over the median of tokens/s.'
        )
    if ladder.missing:
        notes.append(f'Not compared with the baseline: {"; ".join(ladder.missing)}.')
    return notes


def _describe_residuals(ladder: Ladder) -> str:
    text = ''
    if ladder.deviation is not None:
        ends = (ladder.sizes[0], ladder.sizes[-1])
        factors = sorted(ladder.law.convert_to_factor(ladder.deviation, size) for size in ends)
        bounds = ' to '.join(dict.fromkeys(map(format_digits, factors)))
        text = f' The residuals deviate by {ladder.deviation:.2g} nats, a factor of {bounds} in compute.'
    if not ladder.law.limit:
        text += ' The limit is at its bound, 0: these sizes do not show where the loss ends.'
    if len(ladder.sizes) == FEWEST_SIZES:
        text += ' Some curve passes through any three sizes, so residuals show the spread of seeds alone.'
    return text


def _add_range(row: dict[str, Any], key: str, form: Any) -> str:
    """Returns a figure, with its extremes over the seeds where there are several."""
    ends: Sequence[str] = [form(row[f'{key}_{end}']) for end in ('low', 'high')]
    return f'{form(row[key])} ({" to ".join(ends)})' if row['runs'] > 1 else form(row[key])


COLUMNS: dict[str, Callable[[dict[str, Any]], TableCell]] = {
    'series': lambda row: make_cell(row['series']),
    'parameters': lambda row: make_cell(row['parameters'], lambda v: f'{v / 1e6:.3g}M'),
    'FLOPs': lambda row: make_cell(row['compute'], format_power),
    'runs': lambda row: make_cell(row['runs']),
    'loss': lambda row: TableCell(_add_range(row, 'loss', '{:.3f}'.format), row['loss']),
    'loss of the curve': lambda row: make_cell(row['loss_of_curve'], '{:.3f}'.format),
    'effective speed-up': lambda row: TableCell(
        _add_range(row, 'effective_speedup', str), row['effective_speedup'].value
    ),
    'speed-up in time': lambda row: make_cell(row['time_speedup'], format_digits),
}
"""Heading → what makes its cell from a row of `Ladder.list_rows`."""
