"""The pictures of a search: its history, the importance of its parameters, and its trials along parallel axes."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm import plots
from lm.plots import Curve
from lm.report.curves import name_bindings
from lm.report.page import SortableTable, TableCell, make_cell
from lm.report.pictures import Picture
from lm.runs import sweep_file
from lm.text import format_digits


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """A search as its sweep.json tells it: `facts` say how its trials were drawn, each of which has a row."""

    name: str
    facts: dict[str, Any]
    rows: Sequence[dict[str, Any]]

    @property
    def finished(self) -> list[dict[str, Any]]:
        """The trials that have a loss at their last step."""
        return [r for r in self.rows if r['status'] == 'done' and r['loss'] is not None and math.isfinite(r['loss'])]

    @property
    def importance(self) -> dict[str, float]:
        """The parameters by their importance, the largest first."""
        found = self.facts.get('importance')
        return dict(sorted(found.items(), key=lambda pair: -pair[1])) if isinstance(found, dict) else {}

    def list_axes(self) -> list[str]:
        """Returns the searched parameters, the most important first."""
        space = self.facts.get('space')
        keys = list(space) if isinstance(space, dict) else []
        return sorted(keys, key=lambda key: -self.importance.get(key, 0.0))


def read_searches(paths: Iterable[str]) -> list[SearchResult]:
    """Returns the searches among the folders of sweeps that `paths` name."""
    return [
        SearchResult(root.name, facts, sweep_file.read_rows(root))
        for root in sweep_file.find_sweeps(paths)
        if (facts := sweep_file.read_search(root))
    ]


class Bars(Picture):
    """A bar per curve, as long as its first point."""

    def draw(self, out: Path) -> None:
        labels = [curve.label for curve in self.curves]
        plots.draw_bars(out / self.name, labels, {'importance': np.array([c.x[0] for c in self.curves])}, self.x_label)


class ParallelAxes(Picture):
    """A line per trial over axes side by side. The options are the arguments of `lm.plots.draw_parallel`."""

    def draw(self, out: Path) -> None:
        plots.draw_parallel(out / self.name, [curve.y for curve in self.curves], **self.options)


def make_search_pictures(search: SearchResult, suffix: str = '') -> list[Picture]:
    """Returns the pictures for which there are data. `suffix` tells the files of several searches apart."""
    finished = search.finished
    if len(finished) < 2:
        return []
    x = np.array([row['index'] for row in finished], float)
    losses = np.array([row['loss'] for row in finished])
    curves = [
        Curve('trials', 0, x, losses, joined=False),
        Curve('best so far', 1, x, np.minimum.accumulate(losses), marked=False),
    ]
    count = f'{len(finished)} of {len(search.rows)} trials'
    caption = f'Search {search.name}: loss of each trial that was trained to its end ({count}).'
    label = 'loss (nats per token)'
    made = [Picture(f'search_history{suffix}', caption, curves, 'trial', label, {'markers': True})]
    if search.importance:
        titles = name_bindings(list(search.importance))
        shares = [Curve(titles[k], 0, np.array([v]), np.zeros(1)) for k, v in search.importance.items()]
        caption = f'Search {search.name}: importance of the parameters by PED-ANOVA ({count}).'
        made.append(Bars(f'search_importance{suffix}', caption, shares, 'share of the importance', None))
    made.append(_make_parallel(search, finished, suffix))
    return made


def _make_parallel(search: SearchResult, finished: list[dict[str, Any]], suffix: str) -> Picture:
    """Returns the lines of the trials, the worst first, so that the best lie above the others."""
    shown = sorted(finished, key=lambda row: -row['loss'])
    axes, ticks, heights = search.list_axes(), [], []
    for key in axes:
        values = [row['settings'].get(key) if row['settings'] else None for row in shown]
        found, marks = _place(values, str(search.facts['space'].get(key)).startswith('log_'))
        heights.append(found)
        ticks.append(marks)
    found, marks = _place([repr(row['loss']) for row in shown], False)
    lines = np.array([*heights, found]).T
    curves = [Curve(row['point'], 0, np.arange(len(axes) + 1.0), line) for row, line in zip(shown, lines, strict=True)]
    options = {
        'labels': [*name_bindings(axes).values(), 'loss'],
        'ticks': [*ticks, marks],
        'colours': [row['loss'] for row in shown],
        'colour_label': 'loss (nats per token)',
    }
    caption = f'Search {search.name}: the drawn values of {len(finished)} trials; darker lines have less loss.'
    return ParallelAxes(f'search_values{suffix}', caption, curves, 'parameter', None, options)


def _place(values: Sequence[str | None], logarithmic: bool) -> tuple[np.ndarray, list[tuple[float, str]]]:
    """Returns heights from 0 to 1, NaN for None, and (height, text) of the marks of an axis.

    Numbers lie by their size or logarithm, other values at equal distances.
    """
    given = [value for value in values if value is not None]
    try:
        numbers = np.array([math.nan if value is None else float(value) for value in values])
    except ValueError:
        names = list(dict.fromkeys(sorted(given)))
        places = {name: i / max(1, len(names) - 1) for i, name in enumerate(names)}
        heights = np.array([math.nan if value is None else places[value] for value in values])
        return heights, [(place, name.replace('@', '').replace('()', '')) for name, place in places.items()]
    if not given:
        return numbers, []
    low, high = float(np.nanmin(numbers)), float(np.nanmax(numbers))
    marks = [(0.0, format_digits(low)), *([(1.0, format_digits(high))] if high > low else [])]
    scaled, ends = (np.log(numbers), (math.log(low), math.log(high))) if logarithmic else (numbers, (low, high))
    return (scaled - ends[0]) / ((ends[1] - ends[0]) or 1.0), marks


def make_search_table(search: SearchResult) -> SortableTable | None:
    """Returns the table of the parameters for the page; None before there are enough trials."""
    if not search.importance:
        return None
    rows = [
        [make_cell(key), make_cell(share, '{:.0%}'.format), TableCell(str(search.facts['space'].get(key)))]
        for key, share in search.importance.items()
    ]
    note = 'Importance: by PED-ANOVA, over the trials that were trained to their end.'
    return SortableTable(f'Search {search.name}', ['parameter', 'importance', 'drawn from'], rows, 1, [note])
