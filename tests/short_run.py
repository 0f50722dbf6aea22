"""The short run of the tests: `pytest --short` leaves out the tests that `tests/data/long_tests.txt` lists.

A test has a budget of processor time. The short run measures it, and fails with the names of tests over the budget, so
that the list cannot rot. A listed function is left out with all its parameters, also with later ones, but for those
that are listed below it. `--record_long` writes the list: after all tests anew; in a short run it adds functions.

The time of a test includes the processes that it starts, and leaves out the fixtures that it shares with others. It is
divided by the pace of the machine, so that a slow machine fails nothing.

Tests with the marks `compiles` and `journey` are never in the short run.
"""

import functools
import math
import os
import pathlib
import resource
import statistics
import time

import jax
import jax.numpy as jnp
import pytest
import tiny
from _pytest.runner import runtestprotocol

PATH = pathlib.Path(__file__).parent / 'data' / 'long_tests.txt'
BUDGET = 0.5
"""The processor seconds that a test of the short run may take."""
LONG = 0.25
"""The processor seconds beyond which a test is listed: no test stands so near to the budget that noise decides."""
PACE_SECONDS = 0.1
"""The processor seconds of `_work` on two cores of an AMD EPYC (2026)."""
NEVER = ('compiles', 'journey')
"""Marks of tests that are never in the short run."""
HEADER = """\
# Functions whose tests scripts/test.sh leaves out, and below them the parameters that stay: tests/short_run.py.
# `scripts/test.sh --all --record_long` writes this file; `scripts/test.sh --short --record_long` adds to it.
"""


class LongTests:
    """The list of functions that are long, each with the node ids of its tests that stay in the short run."""

    def __init__(self, stays: dict[str, set[str]]):
        self.stays = stays

    @classmethod
    def read(cls) -> 'LongTests':
        stays: dict[str, set[str]] = {}
        function = ''
        for line in PATH.read_text().splitlines() if PATH.exists() else ():
            if line.startswith('  '):
                stays[function].add(function + line.strip())
            elif line and not line.startswith('#'):
                stays[function := line] = set()
        return cls(stays)

    @classmethod
    def choose(cls, seconds: dict[str, float]) -> 'LongTests':
        """Returns the list for node id → processor seconds of all tests."""
        long = {find_function(test) for test, taken in seconds.items() if taken > LONG}
        return cls({name: {t for t, s in seconds.items() if find_function(t) == name and s <= LONG} for name in long})

    def add(self, seconds: dict[str, float]) -> None:
        """Adds the functions that took too long in a short run, given as node id → processor seconds.

        No parameter of them stays: the first one often compiles for all, and the next would be too long in its place.
        """
        self.stays.update({function: set() for function in LongTests.choose(seconds).stays})

    def __contains__(self, test: str) -> bool:
        stays = self.stays.get(find_function(test))
        return stays is not None and test not in stays

    def write(self) -> None:
        lines = []
        for function in sorted(self.stays):
            lines += [function, *('  ' + test.removeprefix(function) for test in sorted(self.stays[function]))]
        PATH.write_text(HEADER + '\n'.join(lines) + '\n')


def find_function(test: str) -> str:
    """Returns the function of a node id."""
    return test.partition('[')[0]


def _processor_seconds() -> float:
    """Returns the processor time of this process, of its processes that ended, and of its warm commands."""
    return _sum_used() + (tiny.nursery().processor_seconds() if tiny.nursery.cache_info().currsize else 0.0)


def _sum_used() -> float:
    """Returns the processor seconds of this process and of its processes that ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _work() -> None:
    """Does a piece of what most tests do: it traces and compiles a function."""

    def function(x_NxN):
        for _ in range(8):
            x_NxN = jnp.tanh(x_NxN @ x_NxN) + x_NxN.sum(0)
        return x_NxN

    jax.jit(jax.grad(lambda x_NxN: function(x_NxN).sum())).lower(jnp.ones((8, 8))).compile()


@functools.cache
def measure_pace() -> float:
    """Returns how many times slower this machine is than the one of `PACE_SECONDS`; at least 1."""
    _work()  # the first compilation of a process also loads the compiler
    taken = []
    for _ in range(3):
        begun = time.process_time()
        _work()
        taken.append(time.process_time() - begun)
    return max(1.0, statistics.median(taken) / PACE_SECONDS)


class Meter:
    """The plugin of each process that runs tests: it notes the processor seconds of each test in its last report.

    A test that takes more than `again` runs a second time, and the smaller time counts: the first time it may have
    imported what others use, too.
    """

    def __init__(self, again: float = math.inf):
        self.again = again
        self.taken = self.shared = 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        measure_pace()
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        reports = self._run(item, nextitem)
        if self.taken > self.again and all(report.passed for report in reports):
            first = self.taken
            jax.clear_caches()
            repeated = all(report.passed for report in self._run(item, nextitem))
            # A test fails at its second run if it changes a fixture that it shares.
            self.taken = min(self.taken, first) if repeated else first
        for report in reports:
            if report.when == 'teardown':
                report.user_properties.append(('processor_seconds', self.taken))
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run(self, item: pytest.Item, nextitem: pytest.Item | None) -> list[pytest.TestReport]:
        begun, self.shared = _processor_seconds(), 0.0
        reports = runtestprotocol(item, log=False, nextitem=nextitem)
        self.taken = (_processor_seconds() - begun - self.shared) / measure_pace()
        return reports

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        if fixturedef.scope == 'function':
            return (yield)
        begun, inner = _processor_seconds(), self.shared
        try:
            return (yield)
        finally:
            self.shared = inner + _processor_seconds() - begun


class ShortRun:
    """The plugin of the process that controls the workers, or of the only process."""

    def __init__(self, config: pytest.Config):
        self.config = config
        self.begun, self.used = time.monotonic(), _sum_used()  # this process may have been the shell that installed
        self.seconds: dict[str, float] = {}

    @property
    def over(self) -> dict[str, float]:
        return {test: taken for test, taken in self.seconds.items() if taken > BUDGET}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == 'teardown':
            self.seconds[report.nodeid] = dict(report.user_properties)['processor_seconds']

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session, exitstatus: int):
        yield
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        short = self.config.getoption('short')
        if self.config.getoption('record_long'):
            long = LongTests.read() if short else LongTests.choose(self.seconds)
            if short:
                long.add(self.seconds)
            long.write()
        elif short and self.over:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.config.getoption('short'):
            return
        for test, taken in sorted(self.over.items(), key=lambda item: -item[1]):
            terminalreporter.write_line(
                f'{test} takes {taken:.1f} s of processor time, and the short run allows {BUDGET} s: make it smaller, '
                'or run scripts/test.sh --short --record_long',
                red=True,
            )
        minutes = (_sum_used() - self.used) / 60
        passed = (time.monotonic() - self.begun) / 60
        terminalreporter.write_line(
            f'The short run took {passed:.1f} minutes, and {minutes:.1f} of processor time. '
            'scripts/test.sh --all runs everything.'
        )


def add_options(parser: pytest.Parser) -> None:
    parser.addoption('--short', action='store_true', help='leave out the tests that tests/data/long_tests.txt lists')
    parser.addoption(
        '--record_long', action='store_true', help='write tests/data/long_tests.txt, or add to it in a short run'
    )


def configure(config: pytest.Config) -> None:
    short, record = config.getoption('short'), config.getoption('record_long')
    if not (short or record):
        return
    config.pluginmanager.register(Meter((LONG if record else BUDGET) if short else math.inf), 'meter')
    if 'PYTEST_XDIST_WORKER' not in os.environ:
        config.pluginmanager.register(ShortRun(config), 'short_run')


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Removes the long tests from `items` in a short run."""
    if not config.getoption('short'):
        return
    long = LongTests.read()
    left_out = {item for item in items if item.nodeid in long or any(map(item.get_closest_marker, NEVER))}
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = [item for item in items if item not in left_out]
