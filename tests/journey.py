"""Journeys as tests: each script of `tests/journeys` is a test with the mark `journey`.

A new journey is one new file there, which `words.sh` explains. A line `# slow: WHY` in it adds the mark `slow`.
"""

import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile

import pytest
import tiny

FOLDER = tiny.ROOT / 'tests' / 'journeys'
WORDS = FOLDER / 'words.sh'
SLOW = re.compile(r'^# slow: \S', re.MULTILINE)
MOST_SECONDS = 3600


class JourneyFailed(Exception):
    """A journey has failed; the text is its output."""


class Script(pytest.File):
    """The file of a journey."""

    def collect(self):
        journey = Journey.from_parent(self, name=self.path.stem)
        for mark in read_marks(self.path.read_text(encoding='utf-8')):
            journey.add_marker(mark)
        yield journey


class Journey(pytest.Item):
    """The test that runs the script."""

    def runtest(self):
        run(self.path)

    def repr_failure(self, excinfo, style=None):
        return str(excinfo.value) if excinfo.errisinstance(JourneyFailed) else super().repr_failure(excinfo, style)

    def reportinfo(self):
        return self.path, None, f'journey {self.name}'


def read_marks(script: str) -> list[str]:
    """Returns the marks of the journey with this text."""
    return ['journey', 'slow'] if SLOW.search(script) else ['journey']


def collect(file_path: pathlib.Path, parent: pytest.Collector) -> Script | None:
    """Returns the journey of a file; None for other files."""
    is_journey = file_path.suffix == '.sh' and file_path.parent == FOLDER and file_path != WORDS
    return Script.from_parent(parent, path=file_path) if is_journey else None


def run(script: pathlib.Path, seconds: float = MOST_SECONDS) -> str:
    """Runs a journey in a new folder and returns its output. Raises JourneyFailed where it fails."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        variables = tiny.environment() | {'PYTHON': sys.executable, 'JOURNEY': folder}
        process = subprocess.Popen(
            ['bash', str(script)],
            env={
                name: value for name, value in variables.items() if not name.startswith('PYTEST_')
            },  # it may run pytest
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # one signal ends it with all that it has started
        )
        try:
            output, _ = process.communicate(timeout=seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGTERM)  # the script ends what it has in the background
            output, _ = process.communicate()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise JourneyFailed(f'took over {seconds:.0f} seconds:\n{output}') from None
    if process.returncode:
        raise JourneyFailed(f'exit code {process.returncode}:\n{output}')
    return output
