"""The paper's table with ours beside it, and the rank correlation of both orders."""

import csv
import io
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm import plots
from lm.files import write_atomically
from lm.plots import Curve
from lm.report.measures import Measures
from lm.report.out_folder import HEAD, check_folder
from lm.report.page import SortableTable, TableCell, format_page
from lm.report.paper import name_column
from lm.report.published import Figure
from lm.reproduce.descriptions import PAPER_SCALE, Description
from lm.reproduce.runs import TableChoice, TableRow, TableRun, name_axis
from lm.runs.records import Run, is_run
from lm.sweep.sweep import Sweep
from lm.text import format_si, make_markdown_table, print_table

FEWEST_RANKED = 3
"""Rows that a rank correlation needs."""
NAMES = ('report.md', 'report.html', 'table.csv', 'table.png', 'table.pdf')


class CellResult(NamedTuple):
    """A cell of the table.

    Attributes:
        column: its heading; '' where there is one column.
        measure: perplexity, accuracy or steps_per_second, or the task that is scored.
        printed: the paper's number or text; None: it has none.
        ours: seed → our figure, of finished runs.
        planned: how many runs the cell has.
    """

    row: TableRow
    column: str
    measure: str
    printed: float | str | None
    ours: dict[int, float]
    planned: int

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.ours.values()) if self.ours else None

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.ours.values()) if len(self.ours) > 1 else None

    def format_ours(self) -> str:
        """Returns the mean, with the deviation over seeds if there are several."""
        if self.mean is None:
            return '–'
        spread = f' ± {self.deviation:.2f}' if self.deviation is not None else ''
        return f'{self.mean:.2f}{spread}'


class RankCorrelation(NamedTuple):
    """Spearman's correlation of the paper's order of rows and ours in one column, by seed."""

    column: str
    rows: int
    by_seed: dict[int, float]
    of_means: float

    def describe(self) -> str:
        values = list(self.by_seed.values())
        text = f'{self.of_means:+.2f}' if len(values) < 2 else f'{self.of_means:+.2f} of the means'
        if len(values) > 1:
            text += f', {min(values):+.2f} to {max(values):+.2f} over {len(values)} seeds'
            text += f' (standard deviation {statistics.stdev(values):.2f})'
        return f'{text}, {self.rows} rows'


class ReproducedTable:
    """The paper's table with ours beside it.

    Args:
        cells: what they measured (`collect`).
    """

    def __init__(
        self, description: Description, choice: TableChoice, runs: Sequence[TableRun], cells: Sequence[CellResult]
    ):
        self.description, self.choice, self.runs, self.cells = description, choice, runs, list(cells)
        self.tables = list(dict.fromkeys(cell.table for run in runs for cell in run.cells))

    @property
    def measures(self) -> list[str]:
        return list(dict.fromkeys(cell.measure for cell in self.cells))

    @property
    def columns(self) -> dict[tuple[str, str], str]:
        """(Column, measure) → heading."""
        pairs = dict.fromkeys((cell.column, cell.measure) for cell in self.cells)
        names = [column for column, _ in pairs]
        return {
            (column, measure): column if column and names.count(column) == 1 else f'{column} {measure}'.strip()
            for column, measure in pairs
        }

    def correlate(self) -> list[RankCorrelation]:
        """Returns the rank correlation of each column with enough numbers on both sides."""
        found = []
        for key, heading in self.columns.items():
            cells = [cell for cell in self.cells if (cell.column, cell.measure) == key and cell.ours]
            cells = [(cell.printed, cell) for cell in cells if isinstance(cell.printed, int | float)]
            printed = [number for number, _ in cells]
            if len(set(printed)) < 2 or len(cells) < FEWEST_RANKED:
                continue
            seeds = sorted(set.intersection(*(set(cell.ours) for _, cell in cells)))
            by_seed = {seed: correlate_ranks(printed, [cell.ours[seed] for _, cell in cells]) for seed in seeds}
            means = correlate_ranks(printed, [statistics.fmean(cell.ours.values()) for _, cell in cells])
            found.append(RankCorrelation(heading, len(cells), by_seed, means))
        return found

    def list_remarks(self) -> list[str]:
        """Returns sentences on scale, state, order, and what they do not show."""
        done, planned = sum(len(c.ours) for c in self.cells), sum(c.planned for c in self.cells)
        lines = [] if done == planned else [f'{done} of {planned} figures are there; the same command goes on.']
        if self.choice.scale not in (PAPER_SCALE, *self.description.scales):
            lines.append(
                f'Scale {self.choice.scale}: a small form of the experiments, without the proportions of the paper '
                '(configs/papers/README.md).'
            )
        elif self.choice.scale != PAPER_SCALE and self.runs:
            run = self.runs[0]
            ours, theirs = (p.experiment for p in (run.point, run.original))
            factor = theirs.model.d_model // ours.model.d_model
            tokens = [e.train.steps * e.train.tokens_per_step for e in (ours, theirs)]
            text = f'text files ({self.choice.text})' if self.choice.text else 'Python sources'
            lines.append(
                f'Scale {self.choice.scale}: lengths of the paper (context, block, sketch, width, head, vocabulary) '
                f'divided by {factor}, {format_si(tokens[0])} training tokens in place of {format_si(tokens[1])}, on '
                f'{text}. Columns have the names of the paper.'
            )
        axis = name_axis(self.tables)
        for found in self.correlate():
            where = f' at {axis} {found.column}'.replace('  ', ' ').rstrip()
            lines.append(f"Rank correlation with the paper's order{where}: {found.describe()}.")
        if self.choice.scale != PAPER_SCALE:
            lines.append(
                'A model this small may rank otherwise than the paper: differences below the spread of the seeds say '
                'nothing, and an order here neither confirms nor refutes the order at the size of the paper.'
            )
        return lines

    def make_rows(self) -> list[list[str]]:
        """Returns the cells as texts: a row per row of the paper."""
        found = {
            (cell.row, cell.column, cell.measure): f'{"–" if cell.printed is None else cell.printed} / '
            + cell.format_ours()
            for cell in self.cells
        }
        rows = dict.fromkeys(cell.row for cell in self.cells)
        return [[*row, *(found.get((row, *key), '') for key in self.columns)] for row in rows]

    def make_headings(self) -> list[str]:
        """Returns the headings of `make_rows`."""
        return ['', 'row', *self.columns.values()]

    def print(self) -> None:
        """Prints the table."""
        headings, title = self.make_headings(), f"{self.description.title}: the paper's number / ours"
        print_table(headings, self.make_rows(), left=headings[:2], title=title)

    def format_markdown(self) -> str:
        sources = [f'{table.title}, {table.unit} ({table.source})' for table in self.tables]
        table = make_markdown_table(self.make_rows(), self.make_headings(), left=2)
        axis = f' Columns: {name_axis(self.tables)}.' if self.tables else ''
        head = [*HEAD, f"**{self.description.title}**: the paper's number / ours.{axis}", '', *sources, '']
        return '\n'.join([*head, table, '', *(f'- {line}' for line in self.list_remarks()), ''])

    def format_csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator='\n')
        writer.writerow(['group', 'row', 'column', 'measure', 'paper', 'ours', 'deviation', 'seeds', 'runs_planned'])
        for cell in self.cells:
            seeds = ' '.join(map(str, cell.ours))
            figures = [cell.printed, cell.mean, cell.deviation, seeds, cell.planned]
            writer.writerow([*cell.row, cell.column, cell.measure, *figures])
        return text.getvalue()

    def format_html(self) -> str:
        rows = [[TableCell(text, text) for text in row] for row in self.make_rows()]
        table = SortableTable(self.description.title, self.make_headings(), rows, 2, self.list_remarks())
        return format_page([table], [], [], NAMES, None)

    def draw(self, path: Path) -> bool:
        """Draws our figure against the paper's, a mark per cell; returns whether there was one to draw."""
        curves = []
        for i, row in enumerate(dict.fromkeys(cell.row for cell in self.cells)):
            cells = [c for c in self.cells if c.row == row and isinstance(c.printed, int | float) and c.ours]
            if cells:
                points = [(c.printed, c.mean, min(c.ours.values()), max(c.ours.values())) for c in cells]
                x, y, low, high = np.array(points, float).T
                curves.append(Curve(row.label, i, x, y, low, high, joined=False))
        if curves:
            unit = ' or '.join(self.measures)
            plots.draw_lines(path, curves, f'the paper: {unit}', f'ours: {unit}', markers=True)
        return bool(curves)

    def write(self, folder: Path, pictures: bool = True) -> list[str]:
        """Writes the files of the table into a folder, and returns their names."""
        check_folder(folder, NAMES)
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / 'report.md', self.format_markdown())
        write_atomically(folder / 'report.html', self.format_html())
        write_atomically(folder / 'table.csv', self.format_csv())
        drawn = pictures and self.draw(folder / 'table')
        return [name for name in NAMES if drawn or not name.endswith(('.png', '.pdf'))]


def correlate_ranks(first: Sequence[float], second: Sequence[float]) -> float:
    """Returns Spearman's rank correlation; equal numbers share the mean of their ranks. NaN where all are equal."""
    ranks = []
    for values in (np.array(first), np.array(second)):
        below, up_to = (np.sum(compare(values[:, None], values), axis=1) for compare in (np.greater, np.greater_equal))
        ranks.append((below + up_to) / 2)
    if any(np.ptp(r) == 0 for r in ranks):
        return math.nan
    return float(np.corrcoef(*ranks)[0, 1])


def collect(runs: Sequence[TableRun], sweep: Sweep) -> list[CellResult]:
    """Returns the cells of the runs, with the figures of those that are finished in the folder of the sweep."""
    found: dict[tuple[TableRow, str, str], CellResult] = {}
    for run in runs:
        if run.is_start:
            continue
        path = sweep.root / run.point.name
        record = Run.read(path) if is_run(path) and sweep.is_finished(run.point) else None
        for column, measure, printed, value in _measure(run, record):
            key = run.row, column, measure
            cell = found.get(key) or CellResult(*key, printed, {}, 0)
            if value is not None:
                cell.ours[run.seed] = value
            found[key] = cell._replace(planned=cell.planned + 1)
    return list(found.values())


def read_figure(run: TableRun, record: Run, figure: Figure) -> float | None:
    """Returns a figure of a finished run; None where it was not measured."""
    measures = Measures()
    if figure.measure == 'steps_per_second':
        tokens = run.original.experiment.train.tokens_per_step
        return record.tokens_per_second and record.tokens_per_second / tokens
    if figure.measure and figure.set is None:
        return {'perplexity': measures.perplexity, 'accuracy': measures.accuracy}[figure.measure](record)
    return measures.figure(record, figure)


def _measure(run: TableRun, record: Run | None) -> list[tuple[str, str, float | str | None, float | None]]:
    """Returns column, measure, the paper's number and ours, of each figure of a run."""
    found = []
    for cell in run.cells:
        figure, column = cell.figure, cell.column
        name = name_column(column)
        measure = figure.measure or figure.task or name
        found.append((name, measure, cell.printed, record and read_figure(run, record, figure)))
    if not run.cells:
        measure = 'accuracy' if run.point.experiment.data.task else 'perplexity'
        found.append(('', measure, None, record and read_figure(run, record, Figure(measure=measure))))
    return found
