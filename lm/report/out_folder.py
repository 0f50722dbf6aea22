"""The folder of a report: new files replace the files of an earlier report, and no others."""

import pathlib
from collections.abc import Iterable

from lm.errors import ConfigError

TEXT, PAGE = 'report.md', 'report.html'
HEAD = ('# Report', '')
"""The lines with which the text of every report begins."""


def check_folder(folder: pathlib.Path, names: Iterable[str]) -> None:
    """Raises ConfigError if a report would replace a file in a folder that holds no earlier report."""
    there = [name for name in names if (folder / name).exists()]
    if there and not is_report(folder):
        raise ConfigError(
            f'--out {folder}: holds {there[0]}, which no report has written; name another folder, or move it away'
        )


def is_report(folder: pathlib.Path) -> bool:
    """Returns whether the folder holds the text of a report."""
    try:
        return (folder / TEXT).read_text(encoding='utf-8').startswith('\n'.join(HEAD))
    except (OSError, UnicodeDecodeError):
        return False
