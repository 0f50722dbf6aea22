"""What the benchmarks print and write: where they ran, a table, a JSON file, pictures."""

import dataclasses
import datetime
import json
import os
import pathlib
import platform
import sys
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import jax
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from lm import __version__
from lm.errors import ConfigError

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


class Printer:
    """Prints tables, on the first process alone."""

    def __init__(self) -> None:
        self.console = Console(width=WIDTH, quiet=jax.process_index() > 0)
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

    def table(self, rows: Sequence[dict[str, Any]], columns: dict[str, tuple[str, Callable[[Any], str]]]) -> None:
        """Columns: key of a row → title and form. Those that no row has are left out."""
        shown = {k: v for k, v in columns.items() if any(row.get(k) is not None for row in rows)}
        table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
        for key, (title, _) in shown.items():
            words = any(isinstance(row.get(key), str) and row[key][:1].isalpha() and row[key] != 'OOM' for row in rows)
            table.add_column(title, justify='left' if words else 'right', no_wrap=True)
        for row in rows:
            table.add_row(*('–' if row.get(k) is None else form(row[k]) for k, (_, form) in shown.items()))
        self.console.print(table)


def write_json(path: str | None, part: str, found: dict[str, Any], settings: dict[str, Any], rows: list) -> None:
    """{benchmark, machine, settings, rows}; nothing without a path."""
    if path is None or jax.process_index():
        return
    rows = [dataclasses.asdict(row) if dataclasses.is_dataclass(row) else row for row in rows]
    content = {'benchmark': part, 'machine': found, 'settings': settings, 'rows': rows}
    try:
        pathlib.Path(path).write_text(json.dumps(content, indent=1) + '\n')
    except OSError as error:
        raise ConfigError(f'--json {path}: {error.strerror}') from None


def check_writable(json_path: str | None, out: str | None) -> None:
    """Raises ConfigError before anything is measured if the results could not be kept."""
    if json_path is not None:
        file = pathlib.Path(json_path).absolute()
        if not file.parent.is_dir():
            raise ConfigError(f'--json {json_path}: the folder does not exist; make it')
        if file.is_dir():
            raise ConfigError(f'--json {json_path}: is a folder; name a file in it')
        if not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ConfigError(f'--json {json_path}: cannot be written; name another file')
    if out is None:
        return
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigError(f"--out {out}: pictures need matplotlib: pip install 'lm-tpu[report]'") from None
    try:
        pathlib.Path(out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f'--out {out}: {error.strerror}') from None


def draw_contexts(
    path: pathlib.Path,
    points: dict[str, list[tuple[int, float, float, float]]],
    label: str,
    dtype: str = '',
    **options: Any,
) -> list[str]:
    """A curve a mechanism against the context length, both axes logarithmic; the names of the files.

    Args:
        path: of the picture without suffix.
        points: mechanism → (context length, value, least and greatest of its repeats, which are the band around it);
            what ran out of memory has no point.
        label: of the values, with their unit.
        dtype: in which they were computed; it stands above the axes, behind the devices.
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
    ticks = sorted({n for found in points.values() for n, *_ in found})
    scales = dict(x_scale='log', y_scale='log', markers=True, ticks=ticks)
    title = ', '.join(filter(None, (f'{jax.device_count()} × {jax.devices()[0].device_kind}', dtype)))
    plots.draw_lines(path, curves, 'context length (tokens)', label, title=title, **scales, **options)
    return [f'{path}.png', f'{path}.pdf']
