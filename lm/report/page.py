"""The page of a report: one HTML file with sortable tables, and curves whose values the pointer shows.

The page holds all that it needs, so it works from a disk and without a network. Its parts are the files in `assets`.
uPlot (https://github.com/leeoniya/uPlot, MIT licence) draws the curves.
"""

import collections
import json
import math
import os
import string
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from lm.files import is_remote
from lm.report.pictures import Picture
from lm.runs.metrics_file import to_plain
from lm.runs.records import Run
from lm.text import escape_markdown, make_markdown_table

ASSETS = Path(__file__).parent / 'assets'


class TableCell(NamedTuple):
    """A cell of a table.

    Attributes:
        value: what the table is sorted by; None: it stays at the end.
        marked: it stands out.
    """

    text: str
    value: float | str | None = None
    link: str | None = None
    marked: bool = False


def make_cell(value: Any, form: Callable[[Any], str] = str) -> TableCell:
    """Returns the cell of a figure; a dash where it is None."""
    return TableCell('–' if value is None else form(value), value)


@dataclass(frozen=True)
class SortableTable:
    """A table that the reader can sort.

    Attributes:
        rows: cells, one per column.
        left: columns of words, which come first.
        notes: sentences below it.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[TableCell]]
    left: int = 1
    notes: Sequence[str] = ()

    def to_markdown(self) -> str:
        """Returns rows and notes in Markdown."""
        cells = [[escape_markdown(cell.text) for cell in row] for row in self.rows]
        table = make_markdown_table(cells, list(self.columns), self.left)
        return '\n\n'.join([table, *map(escape_markdown, self.notes)])


def format_page(
    tables: Sequence[SortableTable],
    pictures: Sequence[Picture],
    notes: Sequence[str],
    files: Sequence[str],
    refresh: int | None,
) -> str:
    """Returns the HTML text.

    Args:
        tables: the first one stands before the curves.
        pictures: pictures of curves are drawn; a row of dots says what the table says.
        notes: sentences below the curves.
        files: names of the other files of the report.
        refresh: seconds after which the page reads itself again; None: never.
    """
    data = {
        'written': time.strftime('%Y-%m-%d %H:%M:%S'),
        'refresh': refresh,
        'files': list(files),
        'tables': [
            vars(table) | {'rows': [[cell._asdict() for cell in row] for row in table.rows]} for table in tables
        ],
        'charts': [_describe_chart(picture) for picture in pictures if picture.y_label is not None],
        'notes': list(notes),
    }
    # A browser ends a script at `</script>`, even inside a string.
    text = json.dumps(to_plain(data), allow_nan=False).replace('<', '\\u003c')
    licence = f'/*\n{_read("uPlot.LICENSE")}*/\n'
    return string.Template(_read('page.html')).substitute(
        title='Report',
        style=_read('uPlot.min.css') + _read('page.css'),
        script=licence + _read('uPlot.iife.min.js') + _read('page.js'),
        data=text,
    )


def link_run(run: Run, out: Path) -> str | None:
    """Returns the address of a run directory, as a page in the folder `out` refers to it; None: browsers have none."""
    path = run.directory.path
    if not is_remote(path):
        return (
            quote(Path(os.path.relpath(Path(path).absolute(), out.absolute())).as_posix(), errors='surrogateescape')
            + '/'
        )
    scheme, _, place = str(path).partition('://')
    return f'https://console.cloud.google.com/storage/browser/{quote(place)}' if scheme == 'gs' else None


def compare_configurations(runs: Sequence[Run]) -> SortableTable | None:
    """Returns the bindings that differ between runs; values that most runs lack stand out. None: there are none."""
    names = list(dict.fromkeys(name for run in runs for name in run.config))
    rows = []
    for name in names:
        values = [run.config.get(name) for run in runs]
        counts = collections.Counter(values)
        if len(counts) > 1:
            (most, often), *_ = counts.most_common()
            marked = [value != most and often > len(runs) / 2 for value in values]
            cells = [
                TableCell(value or '–', _to_number(value), marked=mark)
                for value, mark in zip(values, marked, strict=True)
            ]
            rows.append([TableCell(name, name), *cells])
    columns = ['binding', *(run.name for run in runs)]
    note = 'A dash: the run does not set it, or has another mechanism or source.'
    return SortableTable('Configuration differences', columns, rows, len(columns), [note]) if rows else None


def _to_number(text: str | None) -> float | str | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return text


def _describe_chart(picture: Picture) -> dict[str, Any]:
    return {name: getattr(picture, name) for name in ('name', 'caption', 'x_label', 'y_label')} | {
        # Contexts and positions are powers of two.
        'x_log': (2 if picture.options.get('ticks') else 10) if picture.options.get('x_scale') == 'log' else None,
        'ticks': picture.options.get('ticks'),
        'y_log': picture.options.get('y_scale') == 'log',
        'curves': [
            {'label': curve.label, 'colour': curve.colour, 'joined': curve.joined, 'marked': curve.marked}
            | {
                name: None if values is None else [float(v) if math.isfinite(v) else None for v in values]
                for name, values in (('x', curve.x), ('y', curve.y), ('low', curve.low), ('high', curve.high))
            }
            for curve in picture.curves
        ],
    }


def _read(name: str) -> str:
    return (ASSETS / name).read_text(encoding='utf-8')
