"""Output of the benchmarks: where they ran, a table, a JSON file, pictures."""

import dataclasses
import datetime
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from lm import __version__
from lm.bench.candidates import BASELINE
from lm.errors import ConfigError, MissingPackageError
from lm.files import local_path

WIDTH = 200
"""Columns that a table may have; a narrower terminal breaks its lines, but nothing is cut off."""

PLAIN_SECONDS = 10.0
"""Between two lines of progress where there is no terminal."""


def machine() -> dict[str, Any]:
    """Where and with what the figures were made."""
    device = jax.devices()[0]
    found = {
        'device_kind': device.device_kind,
        'device_count': jax.device_count(),
        'process_count': jax.process_count(),
        'host_cores': len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count(),
        'lm': __version__,
        'python': platform.python_version(),
        'date': datetime.datetime.now(datetime.UTC).strftime('%Y-%m-%d %H:%M UTC'),
    }
    for package in ('jax', 'jaxlib', 'libtpu', 'sentencepiece', 'tensorstore'):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def heading(part: str, found: dict[str, Any], packages: Sequence[str] = ('jax', 'jaxlib')) -> str:
    """One line: what, on what, with which versions, when."""
    versions = ', '.join(f'{name} {found[name]}' for name in (*packages, 'python') if name in found)
    cores = f', {found["host_cores"]} host cores'
    return f'{part} · {found["device_count"]} × {found["device_kind"]}{cores} · {versions} · {found["date"]}'


Columns = Mapping[str, tuple[str, Callable[[Any], str]]]
"""Name of a figure of a row → the title of its column, and what makes text of it."""


class Printer:
    """Prints tables, on the first process alone."""

    def __init__(self) -> None:
        self.console = Console(width=WIDTH, quiet=jax.process_index() > 0, markup=False, emoji=False)
        self._said = time.monotonic()

    def line(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def progress(self, text: str = '') -> None:
        """How far a measurement is, on stderr: in one place of a terminal ('' clears it), else a line now and then."""
        if self.console.quiet:
            return
        if sys.stderr.isatty():
            print(f'\r\x1b[K{text}', end='', file=sys.stderr, flush=True)
        elif text and time.monotonic() - self._said >= PLAIN_SECONDS:
            self._said = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    def table(self, rows: Sequence[Any], columns: Columns) -> None:
        """Prints rows, which are dicts or have attributes. A column that no row has is left out."""
        rows = [row if isinstance(row, dict) else {k: getattr(row, k) for k in columns} for row in rows]
        shown = {k: v for k, v in columns.items() if any(row.get(k) is not None for row in rows)}
        table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        for key, (title, _) in shown.items():
            words = any(isinstance(row.get(key), str) and row[key][:1].isalpha() and row[key] != 'OOM' for row in rows)
            table.add_column(title, justify='left' if words else 'right', no_wrap=True)
        for row in rows:
            table.add_row(*('–' if row.get(k) is None else form(row[k]) for k, (_, form) in shown.items()))
        self.console.print(table)


class Output:
    """Where results go besides the terminal.

    Args:
        file: a file for everything; None: there is none.
        folder: a folder for pictures; None: nothing is drawn.

    Raises ConfigError, before anything is measured, if the results could not be kept.
    """

    def __init__(self, file: str | None, folder: str | None = None):
        # The file may lie in the folder, which is made first.
        self.pictures = None if folder is None else _check_pictures(local_path(folder, '--out'))
        self.json = None if file is None else _check_file(local_path(file, '--save').absolute())

    def write(self, part: str, found: dict[str, Any], settings: dict[str, Any], rows: Sequence[Any]) -> None:
        """Writes {benchmark, machine, settings, rows} to the file, if there is one. Rows are dataclasses or dicts."""
        if self.json is None or jax.process_index():
            return
        rows = [row if isinstance(row, dict) else dataclasses.asdict(row) for row in rows]
        content = {'benchmark': part, 'machine': found, 'settings': settings, 'rows': rows}
        try:
            self.json.write_text(json.dumps(content, indent=1) + '\n')
        except OSError as error:
            raise ConfigError(f'--save {self.json}: {error.strerror}') from None


def _check_file(path: pathlib.Path) -> pathlib.Path:
    if not path.parent.is_dir():
        raise ConfigError(f'--save {path}: the folder does not exist; make it')
    if path.is_dir():
        raise ConfigError(f'--save {path}: is a folder; name a file in it')
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f'--save {path}: cannot be written; name another file')
    return path


def _check_pictures(path: pathlib.Path) -> pathlib.Path:
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise MissingPackageError(f'--out {path}', 'matplotlib', 'report') from None
    return make_folder(path)


def make_folder(path: pathlib.Path) -> pathlib.Path:
    """Returns the folder of --out, which it makes. Raises ConfigError if it cannot."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f'--out {path}: {error.strerror}') from None
    return path


Row = TypeVar('Row', bound=Any)


def add_speed_ratios(rows: Sequence[Row], speed: Callable[[Any], float | None]) -> list[Row]:
    """Returns rows of mechanisms at contexts with `speed_over_softmax`: the speed over the speed of the baseline at the
    same context. It is None for the baseline itself, and where one of the two ran out of memory."""
    bases = {row.context: speed(row) for row in rows if row.mechanism == BASELINE}

    def ratio(row: Any) -> float | None:
        own, base = speed(row), bases.get(row.context)
        return own / base if own and base and row.mechanism != BASELINE else None

    return [dataclasses.replace(row, speed_over_softmax=ratio(row)) for row in rows]


class ContextFigure(NamedTuple):
    """A figure at a context length, and the least and greatest of its repeats, which are the band around it."""

    context: int
    value: float
    least: float
    greatest: float


def draw_contexts(
    path: pathlib.Path,
    points: Mapping[str, Sequence[ContextFigure]],
    label: str,
    dtype: str = '',
    devices: int | None = None,
    **options: Any,
) -> list[str]:
    """A curve a mechanism against the context length, both axes logarithmic; the names of the files.

    Args:
        path: of the picture without suffix.
        points: by mechanism; what ran out of memory has no point.
        label: of the values, with their unit.
        dtype: in which they were computed; it stands above the axes, behind the devices.
        devices: on how many the values were measured; None: on all.
        options: of `lm.plots.draw_lines`.
    """
    from lm import plots

    curves = []
    for style, (name, found) in enumerate(points.items()):
        if found:
            x, y, low, high = np.array(sorted(found), float).T
            curves.append(plots.Curve(name, style, x, y, low, high))
    if not curves or jax.process_index():
        return []
    ticks = sorted({point.context for found in points.values() for point in found})
    scales = dict(x_scale='log', y_scale='log', markers=True, ticks=ticks)
    title = ', '.join(filter(None, (f'{devices or jax.device_count()} × {jax.devices()[0].device_kind}', dtype)))
    plots.draw_lines(path, curves, 'context length (tokens)', label, title=title, **scales, **options)
    return [f'{path}.png', f'{path}.pdf']
