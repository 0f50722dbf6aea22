"""The runs of a table: each fills a row and a column, for one seed."""

import dataclasses
import functools
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from lm.config.checks import did_you_mean
from lm.config.text import dump
from lm.errors import ConfigError
from lm.experiment import load
from lm.report import paper
from lm.report.paper import SETTINGS, Cell, name_column
from lm.report.published import Figure, PaperTable, load_tables
from lm.reproduce.descriptions import PAPER_SCALE, Description, RunGroup, find_paths, load_scales
from lm.reproduce.scale import Scale
from lm.runs.config_diff import parse_bindings
from lm.runs.paths import check_name
from lm.runs.records import Run
from lm.runs.run_dir import RunDir
from lm.sweep.points import Point, make_points

SEED = 'train.seed'
START = 'train.init_from'
Column = int | str
"""A value on the axis of a table."""


@dataclasses.dataclass(frozen=True)
class TableChoice:
    """The part of a table that is asked for.

    Attributes:
        scale: paper, or a key of scales.toml.
        rows: numbers from 1, or parts of labels; empty: all.
        columns: numbers from 1, or the values that the table prints; empty: all.
        seeds: how many, from 0.
        text: a folder of text for the smaller scales; None: Python sources.
        gin_params: bindings that win over everything.
    """

    scale: str = PAPER_SCALE
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    seeds: int = 1
    text: str | None = None
    gin_params: tuple[str, ...] = ()


class TableRow(NamedTuple):
    """A row of a table: its heading, and its label."""

    group: str
    label: str


@dataclasses.dataclass(frozen=True)
class TableRun:
    """A run of a table.

    Attributes:
        row: which row it fills; without published numbers, the row of its own name.
        column: of the paper's axis; None: the table has none.
        cells: what the paper printed of it: one per figure.
        point: its name and experiment at the chosen scale.
        original: the experiment at the paper's size, of the same name.
        is_start: it fills no cell itself; others start from its weights.
    """

    row: TableRow
    column: Column | None
    cells: tuple[Cell, ...]
    seed: int
    point: Point
    original: Point
    is_start: bool = False


def list_runs(description: Description, choice: TableChoice, root: str = '') -> list[TableRun]:
    """Returns the runs that are asked for, row by row in the paper's order, behind those that they start from.

    Args:
        root: the folder of the runs, which those name that start from others.

    Raises ConfigError for a scale, row or column that the table does not have.
    """
    description.check_scale(choice.scale)
    tables = [load_tables()[key] for key in description.published]
    found = _fill_rows(description, choice.scale)
    rows = list(dict.fromkeys(_name_row(*one) for one in found))
    present = {column for *_, cells in found for column in list_columns(cells)}
    on_axes = [column for table in tables for column in table.columns if not isinstance(column, Figure)]
    columns = [column for column in dict.fromkeys(on_axes) if column in present]
    kept_rows, kept_columns = choose_rows(rows, choice.rows), choose_columns(columns, choice.columns)
    taken = [
        one
        for one in found
        if _name_row(*one) in kept_rows and (not list_columns(one[2]) or list_columns(one[2])[0] in kept_columns)
    ]
    scaled, labels = _find_scale(description, choice), [_identify(group, cells) for group, _, cells in found]
    runs, starts = [], []
    for group, point, cells in taken:
        for seed in range(choice.seeds):
            column = next(iter(list_columns(cells)), None)
            row = _name_row(group, point, cells)
            is_alone = bool(cells) and labels.count(_identify(group, cells)) == 1
            label = row.label if is_alone else point.name
            name = _make_name(group, label, column, seed)
            own = ()
            if group.starts_from:
                first, start = _find_start(description, group, point)
                start_name = _make_name(first, label, column, seed)
                own = (f'{START} = {os.path.join(root, start_name)!r}',)
                start_row = TableRow(row.group, f'{row.label}: {first.name}')
                points = _make_run_points(start_name, start, scaled, seed, choice.gin_params)
                starts.append(TableRun(start_row, column, (), seed, *points, is_start=True))
            points = _make_run_points(name, point, scaled, seed, choice.gin_params, own)
            runs.append(TableRun(row, column, cells, seed, *points))
    return number_runs([*starts, *runs])


def number_runs(runs: Sequence[TableRun]) -> list[TableRun]:
    """Returns the runs with the numbers of their places."""
    names = [run.point.name for run in runs]
    assert len(set(names)) == len(names), 'two runs have one name'
    return [dataclasses.replace(run, point=dataclasses.replace(run.point, index=i)) for i, run in enumerate(runs)]


def choose_rows(rows: Sequence[TableRow], asked: Sequence[str]) -> list[TableRow]:
    """Returns the rows of these numbers, ranges of numbers (2-4), or parts of labels. Raises ConfigError."""
    kept = []
    for text in asked:
        if match := re.fullmatch(r'(\d+)(?:-(\d+))?', text):
            first, last = int(match[1]), int(match[2] or match[1])
            if not 1 <= first <= last <= len(rows):
                raise ConfigError(f'--rows {text}: must be 1 to {len(rows)}')
            kept += rows[first - 1 : last]
        else:
            fitting = [row for row in rows if text.lower() in row.label.lower()]
            if not fitting:
                labels = [row.label for row in rows]
                raise ConfigError(f'--rows {text}: no row has this in its label{did_you_mean(text, labels)}')
            kept += fitting
    return [row for row in rows if row in kept or not asked]


def choose_columns(columns: Sequence[Column], asked: Sequence[str]) -> list[Column]:
    """Returns the columns of these values (4096 or 4k), or of these numbers from 1. Raises ConfigError."""
    named = {name: column for column in columns for name in (str(column), name_column(column))}
    kept = []
    for text in asked:
        if text not in named and not (text.isdigit() and 1 <= int(text) <= len(columns)):
            listed = ', '.join(map(name_column, columns)) or 'none'
            raise ConfigError(f'--columns {text}: must be 1 to {len(columns)}, or one of {listed}')
        kept.append(named[text] if text in named else columns[int(text) - 1])
    return [column for column in columns if column in kept or not asked]


def name_axis(tables: Sequence[PaperTable]) -> str:
    """Returns what the columns are, in words; '' where they are figures."""
    return SETTINGS[tables[0].axis] if tables and tables[0].axis else ''


def list_columns(cells: Sequence[Cell]) -> list[Column]:
    """Returns the values of the cells on the axes of their tables; columns that are figures have none."""
    return [cell.column for cell in cells if not isinstance(cell.column, Figure)]


@functools.cache
def _fill_rows(description: Description, scale: str) -> list[tuple[RunGroup, Point, tuple[Cell, ...]]]:
    """Returns the runs at the paper's size, or in the small form of their own, with their cells, in the order of the
    paper. Where the paper has numbers, runs without one are left out."""
    tables = [load_tables()[key] for key in description.published]
    groups = description.list_groups(scale)
    found = [_fill(group, point, tables) for group in groups for point in _make_points(group)]
    if not any(cells for *_, cells in found):
        return found
    return sorted((one for one in found if one[2]), key=lambda one: _rank(one[2][0], tables))


@functools.cache
def _make_points(group: RunGroup) -> list[Point]:
    files = find_paths(group.gin_files), find_paths(group.sweep_files)
    if group.sweep_files:
        return make_points(*files, group.gin_params)
    return [Point(0, group.name, {}, load(files[0], group.gin_params))]


def _find_start(description: Description, group: RunGroup, point: Point) -> tuple[RunGroup, Point]:
    """Returns the run, and its group, whose weights the run of a group starts from."""
    (first,) = (one for one in description.runs if one.name == group.starts_from)
    (start,) = (one for one in _make_points(first) if one.experiment.model == point.experiment.model)
    return first, start


def _fill(group: RunGroup, point: Point, tables: Sequence[PaperTable]) -> tuple[RunGroup, Point, tuple[Cell, ...]]:
    """Returns the run with the cells that it repeats."""
    run = Run(RunDir(point.name), parse_bindings(point.config), {}, [], [], [])
    cells = paper.find_cells(run, tables)
    return group, point, tuple(cell for cell in cells if not paper.list_differences(run, cell))


def _rank(cell: Cell, tables: Sequence[PaperTable]) -> tuple[int, int, int]:
    return tables.index(cell.table), cell.table.rows.index(cell.row), cell.table.columns.index(cell.column)


def _name_row(group: RunGroup, point: Point, cells: Sequence[Cell]) -> TableRow:
    return TableRow(cells[0].row.group, cells[0].row.label) if cells else TableRow(group.name, point.name)


def _identify(group: RunGroup, cells: Sequence[Cell]) -> tuple[str, str, Column | None]:
    """Returns what makes the name of a run, if no other run has the same."""
    label = cells[0].row.label if cells else ''
    return group.name, label, next(iter(list_columns(cells)), None)


def _make_name(group: RunGroup, label: str, column: Column | None, seed: int) -> str:
    words = re.sub('[^A-Za-z0-9]+', '-', label).strip('-').lower()[:80].strip('-')
    return check_name('_'.join([group.name, words, *([] if column is None else [str(column)]), f'seed-{seed}']))


def _find_scale(description: Description, choice: TableChoice) -> Scale | None:
    """Returns how lengths are divided; None: they are not."""
    if choice.scale not in description.scales:
        if choice.text:
            raise ConfigError(f'--text {choice.text}: is of smaller scales; the paper names its corpus')
        return None
    found = load_scales()[choice.scale]
    return Scale(choice.scale, found['divisor'], found['settings'], choice.text)


def _make_run_points(
    name: str, point: Point, scale: Scale | None, seed: int, params: Sequence[str], own: Sequence[str] = ()
) -> tuple[Point, Point]:
    """Returns a run at the chosen scale, with the bindings of the user, and as the paper has it."""
    always = (f'{SEED} = {seed}', *own)
    return _change(name, point, scale, (*always, *params)), _change(name, point, None, always)


def _change(name: str, point: Point, scale: Scale | None, params: Sequence[str]) -> Point:
    experiment = scale.shrink(point.experiment) if scale else point.experiment
    bindings = [f'{key} = {text}' for key, text in parse_bindings(dump(experiment)).items()]
    return Point(0, name, point.settings, load((), [*bindings, *params]))
