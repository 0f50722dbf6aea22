"""`lm report --watch`: writes the report again when run directories change."""

import time
from collections.abc import Sequence
from typing import Any

from etils import epath

from lm.errors import LmError
from lm.report.measures import get_status
from lm.report.write import write_files, write_report
from lm.runs.records import find_run_paths
from lm.text import format_count

POLL_SECONDS = 5.0
"""Time between two looks at the run directories."""
REFRESH_SECONDS = 10
"""Time after which the page in the browser reads itself again."""
FILES = ('config.gin', 'run.json', 'metrics.jsonl', 'evaluations/*', 'checkpoints/*')
"""The files of a run directory that a report reads, besides the sweep.json beside it."""


def watch_report(paths: Sequence[str], out: str, **options: Any) -> int:
    """Writes the report, and again after each change of a run directory, until Ctrl-C.

    Each refresh prints one line. A refresh that fails prints its error, and the next change is tried again.

    Args:
        paths, out, options: as in `lm.report.write.write_report`.

    Returns:
        The exit code 0.
    """
    options |= {'refresh': REFRESH_SECONDS}
    watched = [*paths, *([ladder] if (ladder := options.get('ladder')) else [])]
    try:
        state = read_state(watched)
        write_report(paths, out, **options)
        print(f'watching {format_count(len(paths), "path")}; Ctrl-C ends', flush=True)
        while True:
            time.sleep(POLL_SECONDS)
            try:
                if (now := read_state(watched)) == state:
                    continue
                report = write_files(paths, out, **options)
                state = now
                unfinished = sum(get_status(run) == 'not finished' for run in report.runs)
                line = (
                    f'{report.out / "report.html"}: {format_count(len(report.runs), "run")}, {unfinished} not finished'
                )
            except (LmError, OSError) as error:
                line = f'not refreshed: {error}'
            print(f'{time.strftime("%H:%M:%S")}  {line}', flush=True)
    except KeyboardInterrupt:
        return 0


def read_state(paths: Sequence[str]) -> dict[str, tuple[int, float]]:
    """Returns file → (bytes, time of the last change) of all files that a report on `paths` reads."""
    return {
        str(file): (found.length, found.mtime)
        for pattern in paths
        for directory in map(epath.Path, find_run_paths(pattern))
        for file in (directory.parent / 'sweep.json', *(file for name in FILES for file in directory.glob(name)))
        if (found := _stat(file))
    }


def _stat(file: epath.Path) -> Any:
    try:
        return file.stat()
    except OSError:  # it is not there, or not any more
        return None
