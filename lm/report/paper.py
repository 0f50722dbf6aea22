"""Compares runs with the tables of papers: the cells that a run repeats, what differs, both numbers.

A run repeats the row whose fields its configuration has.
"""

import collections
import dataclasses
import functools
import statistics
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from lm.report.published import Figure, PaperTable, Row, load_tables, make_label
from lm.runs.records import Run
from lm.text import escape_markdown, format_digits, make_markdown_table, shorten

Measure = Callable[[Run], float | None]
ReadFigure = Callable[[Run, Figure], float | None]
SHORTEST = 100
"""Steps of a run whose perplexity is compared; shorter runs measure speed."""
FEWEST_INTERVALS = 10
"""Logged intervals behind a speed that is compared."""
SERIES = 'pg19'
"""The table whose labels and order the series of pictures have."""
SETTINGS = {
    'model.n_layers': 'layers',
    'model.d_model': 'width',
    'model.n_heads': 'heads',
    'model.causal': 'causal',
    'train.objective': 'objective',
    'data.task': 'task',
    'train.context_length': 'context',
    'train.tokens_per_step': 'tokens per step',
    'train.steps': 'steps',
}
"""Binding of a table → its name in a report."""


class Cell(NamedTuple):
    """A cell of a table."""

    table: PaperTable
    row: Row
    column: int | str | Figure

    @property
    def figure(self) -> Figure:
        """The figure that is measured."""
        return self.column if isinstance(self.column, Figure) else Figure(measure=self.table.measure)

    @property
    def printed(self) -> float | str:
        """The number of the paper, or its text where it has none."""
        return self.row.values[self.table.columns.index(self.column)]

    def setting(self, binding: str) -> Any:
        """Returns the value of a binding of the cell's runs."""
        value = self.row.settings[binding]
        return value[self.table.columns.index(self.column)] if isinstance(value, list) else value


class Comparison(NamedTuple):
    """A cell, the runs beside it, and the mean of their measure. `differs` says why a run does not repeat the cell."""

    cell: Cell
    runs: Sequence[Run]
    ours: float | None
    differs: str

    @property
    def devices(self) -> list[str]:
        """The devices of the runs, each kind once."""
        return sorted({name_devices(run) for run in self.runs})

    def as_row(self) -> dict[str, Any]:
        """Returns the row of paper.csv."""
        table, row, column = self.cell
        return {
            'table': table.key,
            'group': row.group,
            'row': row.label,
            'axis': _name_axis(table),
            'column': column.label if isinstance(column, Figure) else column,
            'measure': self.cell.figure.measure or self.cell.figure.task,
            'paper': None if isinstance(self.cell.printed, str) else self.cell.printed,
            'ours': self.ours,
            'runs': ' '.join(run.name for run in self.runs),
            'devices': '; '.join(self.devices),
            'differs': self.differs,
        }


# ------------------------------------------------------------------------------------------------ what a run repeats


def label_attention(run: Run) -> str | None:
    """Returns the attention of a run in the words of the table SERIES, for the mechanisms that it has, of any size."""
    name, scoped = _find_mechanism(run)
    template, fields = load_tables()[SERIES].labels.get(name, ('', {}))
    if not template or not _has_fields(run, scoped, fields):
        return None
    names = [field for _, field, _, _ in string.Formatter().parse(template) if field]
    return make_label(template, {field: run.value(f'{scoped}.{field}') for field in names})


def rank_attention(run: Run) -> int:
    """Returns the place of a run's attention among the rows of the table SERIES; all other runs come behind them."""
    labels = [row.label for row in load_tables()[SERIES].rows]
    label = label_attention(run)
    return labels.index(label) if label in labels else len(labels)


def find_corpus(run: Run) -> str | None:
    """Returns the corpus of a table that a run was trained on, by the name of its store or its source."""
    hints = ' '.join(run.config.get(name, '') for name in ('data.path', 'tfds.name', 'text_files.path', 'jsonl.path'))
    hints = hints.lower().replace('-', '').replace('_', '')
    corpora = {table.corpus for table in load_tables().values() if table.corpus}
    return next((corpus for corpus in sorted(corpora, key=len, reverse=True) if corpus in hints), None)


def select_tables(runs: Sequence[Run]) -> list[PaperTable]:
    """Returns the tables that count beside these runs; see `PaperTable.only_with`."""

    def counts(table: PaperTable) -> bool:
        needed = [row for row in table.rows if row.label == table.only_with]
        return not needed or any(_has_attention(run, table, row) for run in runs for row in needed)

    return [table for table in load_tables().values() if counts(table)]


def find_cells(run: Run, among: Sequence[PaperTable], corpus: str | None = None) -> list[Cell]:
    """Returns the cells, one per measure, whose attention, task or text, and column a run has: the nearest ones.

    A table of the run's text goes before a table of any text.

    A run on a text of one paper has no cell in tables of other papers, whatever the text.

    Args:
        among: the tables that count.
        corpus: the text that the run was trained on; None: see `find_corpus`.
    """
    text, near = corpus or find_corpus(run), {}
    papers = {table.paper for table in among if text and table.corpus == text}
    for table in among:
        if not _has_data(run, table, text) or (papers and table.paper not in papers):
            continue
        rows = [row for row in table.rows if _has_attention(run, table, row)]
        for cell in (Cell(table, row, column) for row in rows for column in _find_columns(run, table)):
            if cell.figure.measure == 'perplexity' and run.total_steps < SHORTEST:
                continue
            distance = table.corpus is None, len(list_differences(run, cell, corpus))
            near.setdefault(dataclasses.replace(cell.figure, label=''), []).append((distance, cell))
    return [min(cells, key=lambda pair: pair[0])[1] for cells in near.values()]


def _has_data(run: Run, table: PaperTable, text: str | None) -> bool:
    """Returns whether a table may have the task or the text of a run."""
    task = run.refer('data.task').rpartition('/')[2] or 'None'
    return table.corpus in (None, text) and (table.axis == 'data.task' or task == (table.task or 'None'))


def _find_columns(run: Run, table: PaperTable) -> list[int | str | Figure]:
    """Returns the columns of a table that a run fills."""
    if table.axis is None:
        return table.columns
    value = run.refer(table.axis).rpartition('/')[2] if table.axis == 'data.task' else run.value(table.axis)
    return [column for column in table.columns if column == value]


def _name_axis(table: PaperTable) -> str:
    return 'figure' if table.axis is None else SETTINGS[table.axis]


def name_column(column: float | str | Figure) -> str:
    """Returns the heading of a column."""
    if isinstance(column, Figure):
        return column.label
    return column if isinstance(column, str) else shorten(column)


def _say(value: Any) -> str:
    """Returns a value of a setting, with commas in numbers."""
    return f'{value:,}' if isinstance(value, int) and not isinstance(value, bool) else str(value)


def list_differences(run: Run, cell: Cell, corpus: str | None = None) -> list[str]:
    """Returns how a run differs from a cell, each as 'layers 1 (paper: 12)'; empty: the run repeats the cell."""
    found = []
    for binding in cell.row.settings:
        ours, value = run.value(binding), cell.setting(binding)
        if ours != value:
            found.append(f'{SETTINGS[binding]} {_say(ours)} (paper: {_say(value)})')
    text, trained_on = cell.table.corpus, find_corpus(run)
    if text and trained_on != text and (trained_on or corpus != text):
        found.append(f'data {run.config.get("data.path")} (paper: {text})')
    return found


def _find_mechanism(run: Run, beside: str | None = None) -> tuple[str, str]:
    """Returns (name, scope/name) of the one mechanism of a run, ('', '') for a pattern of several.

    With `beside` the pattern has that mechanism and one other.
    """
    found = run.mechanisms()
    if beside is not None:
        others = [name for name in found if name.rpartition('/')[2] != beside]
        found = others if len(others) < len(found) else []
    return (found[0].rpartition('/')[2], found[0]) if len(found) == 1 else ('', '')


def _has_attention(run: Run, table: PaperTable, row: Row) -> bool:
    name, scoped = _find_mechanism(run, table.beside)
    return name == row.mechanism and _has_fields(run, scoped, row.fields)


def _has_fields(run: Run, scoped: str, fields: Mapping[str, Any]) -> bool:
    return all(str(run.value(f'{scoped}.{name}')) == str(value) for name, value in fields.items())


# --------------------------------------------------------------------------------------------------- both numbers


def compare(
    runs: Sequence[Run],
    measures: Mapping[str, Measure],
    corpus: str | None = None,
    read: ReadFigure = lambda run, figure: None,
) -> list[Comparison]:
    """Returns every cell of a table of which a run repeats one, with the mean of the runs that repeat the cell. The
    runs that come near a cell follow, one by one, with what differs. Speeds of other devices than most are among them.

    Args:
        measures: the perplexity and the accuracy, in percent, of a run.
        corpus: see `find_cells`.
        read: the figure of a task of the harness or of a further text, of a run.
    """
    among = select_tables(runs)
    measure = functools.partial(_measure, measures, read)
    found = [(run, cell, _list_obstacles(run, cell, corpus)) for run in runs for cell in find_cells(run, among, corpus)]
    kinds = collections.defaultdict(collections.Counter)
    for run, cell, obstacles in found:
        if not obstacles:
            kinds[cell.table][name_devices(run)] += 1
    same: dict[Cell, list[Run]] = {}
    near: list[tuple[Cell, Run, list[str]]] = []
    for run, cell, obstacles in found:
        is_speed = cell.table.measure == 'steps_per_second'
        if not obstacles and is_speed and name_devices(run) != kinds[cell.table].most_common(1)[0][0]:
            obstacles = ['other devices than most runs']
        if obstacles:
            near.append((cell, run, obstacles))
        else:
            same.setdefault(cell, []).append(run)
    compared = []
    for table in among:
        if any(cell.table is table for cell in same):
            cells = [Cell(table, row, column) for row in table.rows for column in table.columns]
            compared += [_compare(cell, same.get(cell, []), measure, '') for cell in cells]
        compared += [_compare(c, [run], measure, '; '.join(found)) for c, run, found in near if c.table is table]
    return compared


def _list_obstacles(run: Run, cell: Cell, corpus: str | None) -> list[str]:
    """Returns why a run does not count for a cell: settings that differ, or too little measured."""
    found = list_differences(run, cell, corpus)
    if cell.table.measure != 'steps_per_second':
        if run.step < run.total_steps:
            found.append(f'at step {run.step:,} of {run.total_steps:,}')
    elif len(run.speeds) < FEWEST_INTERVALS:
        found.append(f'{len(run.speeds)} logged intervals (at least {FEWEST_INTERVALS})')
    return found


def _measure(measures: Mapping[str, Measure], read: ReadFigure, run: Run, cell: Cell) -> float | None:
    figure = cell.figure
    if figure.task or figure.set:
        return read(run, figure)
    if (known := measures.get(figure.measure or '')) is not None:
        return known(run)
    if figure.measure != 'steps_per_second':
        return None
    # As many steps as the run's tokens would have been with the paper's tokens per step.
    return run.tokens_per_second and run.tokens_per_second / cell.setting('train.tokens_per_step')


def _compare(cell: Cell, runs: Sequence[Run], measure: Callable[[Run, Cell], float | None], differs: str) -> Comparison:
    values = [value for run in runs if (value := measure(run, cell)) is not None]
    return Comparison(cell, runs, statistics.fmean(values) if values else None, differs)


def explain_no_match(compared: Sequence[Comparison], corpus: str | None) -> str:
    """Returns a line where no run repeats the table of the text `corpus` that was asked for, else ''."""
    table = load_tables().get(corpus or '')
    of_table = [c for c in compared if c.cell.table is table]
    if table is None or not all(c.differs for c in of_table):
        return ''
    near = f'; {len(of_table)} stand apart in report.md, with what differs' if of_table else ''
    return f'No run repeats a cell of {table.title}{near}.'


def format_tables(compared: Sequence[Comparison], corpus: str | None = None) -> list[str]:
    """Returns the lines of the tables in the papers' form: each cell the paper's number and ours; apart, what differs.

    Args:
        corpus: the text whose table was asked for; where no run repeats it, a line says so.
    """
    text = [missing, ''] if (missing := explain_no_match(compared, corpus)) else []
    if not compared:
        return text
    text = ['## Beside the paper', '', *text]
    text += [
        'Each cell: the paper\'s number / ours, "–" where there is none. Ours are the runs above that have its '
        'layers, width, data, tokens per step and steps; the others stand apart, with what differs. Where a table says '
        "nothing else, the paper's models have 110M to 120M parameters.",
        '',
    ]
    for table in dict.fromkeys(c.cell.table for c in compared):
        same = [c for c in compared if c.cell.table is table and not c.differs]
        others = [c for c in compared if c.cell.table is table and c.differs]
        text += [f'**{table.title}**, {table.unit} ({table.source})', '']
        if same:
            lines: dict[str | Row, list[str]] = {}
            for c in same:
                row = c.cell.row
                lines.setdefault(row.group, [f'*{row.group}*', *[''] * len(table.columns)])
                lines.setdefault(row, [row.label]).append(f'{_format(c.cell.printed)} / {_format(c.ours)}')
            text += [make_markdown_table([*lines.values()], ['', *map(name_column, table.columns)]), '']
            if table.measure == 'steps_per_second':
                devices = sorted({name for c in same for name in c.devices})
                text += [f'Ours on {escape_markdown("; ".join(devices))}.', '']
        if others:
            text += ['Apart, as they are not what the paper ran:', '']
            names = ('runs', 'devices', 'differs', 'row')
            cells = [[escape_markdown(str(c.as_row()[name])) for name in names] for c in others]
            figures = [[name_column(c.cell.column), _format(c.cell.printed), _format(c.ours)] for c in others]
            headings = ['run', 'on', 'differs', 'row', _name_axis(table), 'paper', 'ours']
            text += [make_markdown_table([a + b for a, b in zip(cells, figures, strict=True)], headings, left=4), '']
    return text


def name_devices(run: Run) -> str:
    """Returns the devices of a run, such as '32 × TPU v5 lite'."""
    return f'{run.info.get("device_count", "?")} × {run.info.get("device_kind", "?")}'


def _format(value: float | str | None) -> str:
    """Returns a number as tables print it, and a text as it is."""
    if value is None or isinstance(value, str):
        return value or '–'
    return f'{value:.2f}' if value >= 0.1 else format_digits(value)
