"""The short run of the tests: `pytest --short` leaves out the tests that `tests/data/long_tests.txt` lists.

A full run with `--record_long` writes that list. A test is long if it takes more than `LONG` seconds of wall time with
the fixtures that it makes. The quickest test of each file stays in the short run. New tests are in it until somebody
records again. Tests with the mark `compiles` are never in it.
"""

import os
import pathlib
import resource
import time

import pytest

PATH = pathlib.Path(__file__).parent / 'data' / 'long_tests.txt'
LONG = 0.5
HEADER = """\
# Tests that scripts/test.sh leaves out, because they are long: tests/short_run.py.
# `scripts/test.sh --all --record_long` writes this file.
"""


def read_long_tests() -> set[str]:
    """Returns the node ids of the long tests."""
    lines = PATH.read_text().splitlines() if PATH.exists() else []
    return {line for line in lines if line and not line.startswith('#')}


def choose_long_tests(seconds: dict[str, float]) -> list[str]:
    """Returns the node ids of the long tests.

    Args:
        seconds: node id → time, of all tests.
    """
    quickest: dict[str, str] = {}
    for test in sorted(seconds, key=lambda test: (seconds[test], test)):
        quickest.setdefault(test.partition('::')[0], test)
    return sorted(test for test, time in seconds.items() if time > LONG and test not in quickest.values())


class ShortRun:
    """The plugin of the process that controls the workers, or of the only process."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.begun = time.monotonic()
        self.seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != 'teardown':
            self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if self.config.getoption('record_long') and exitstatus == pytest.ExitCode.OK:
            PATH.write_text(HEADER + '\n'.join(choose_long_tests(self.seconds)) + '\n')

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.config.getoption('short'):
            return
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        minutes = sum(one.ru_utime + one.ru_stime for one in used) / 60
        passed = (time.monotonic() - self.begun) / 60
        terminalreporter.write_line(
            f'The short run took {passed:.1f} minutes, and {minutes:.1f} of processor time. '
            'scripts/test.sh --all runs everything.'
        )


def add_options(parser: pytest.Parser) -> None:
    parser.addoption('--short', action='store_true', help='leave out the tests that tests/data/long_tests.txt lists')
    parser.addoption(
        '--record_long', action='store_true', help='write tests/data/long_tests.txt after a run of all tests'
    )


def configure(config: pytest.Config) -> None:
    if 'PYTEST_XDIST_WORKER' not in os.environ:
        config.pluginmanager.register(ShortRun(config), 'short_run')


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Removes the long tests from `items` in a short run."""
    if not config.getoption('short'):
        return
    long = read_long_tests()
    left_out = {item for item in items if item.nodeid in long or item.get_closest_marker('compiles')}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
