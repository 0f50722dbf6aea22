"""The short run: the list of long tests, and the budget that keeps it true."""

import os
import subprocess
import sys

import pytest
import short_run
import tiny
from short_run import LongTests


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(short_run, 'PATH', tmp_path / 'long_tests.txt')
    return short_run.PATH


SECONDS = {'a.py::quick': 0.1, 'a.py::mixed[one]': 0.1, 'a.py::mixed[two words]': 0.9, 'b.py::long': 2.0}


def test_the_list_names_functions_and_the_parameters_that_stay(path):
    LongTests.choose(SECONDS).write()
    assert path.read_text() == f'{short_run.HEADER}a.py::mixed\n  [one]\nb.py::long\n'


def test_what_is_left_out(path):
    LongTests.choose(SECONDS).write()
    long = LongTests.read()
    assert {test for test in SECONDS if test in long} == {'a.py::mixed[two words]', 'b.py::long'}
    assert 'a.py::mixed[a later parameter]' in long
    assert 'b.py::long[a later parameter]' in long
    assert 'b.py::longer' not in long


def test_a_short_run_adds_to_the_list(path):
    long = LongTests.choose(SECONDS)
    long.add({'a.py::quick': 0.9, 'a.py::mixed[one]': 0.1})
    assert 'a.py::quick' in long
    assert 'a.py::mixed[one]' not in long
    assert 'b.py::long' in long


def test_a_function_with_a_test_that_became_long_leaves_the_short_run(path):
    """The next parameter would compile in its place."""
    long = LongTests.choose(SECONDS | {'a.py::mixed[three]': 0.1})
    long.add({'a.py::mixed[one]': 0.9, 'a.py::mixed[three]': 0.1})
    assert all(f'a.py::mixed[{name}]' in long for name in ('one', 'two words', 'three'))


def test_a_test_over_the_budget_fails_a_short_run_and_is_named(tmp_path):
    """A test that is long only the first time, as one that imports something, does not."""
    tmp_path.joinpath('conftest.py').write_text(
        f'import sys\nsys.path.insert(0, {str(tiny.ROOT / "tests")!r})\nimport short_run\n'
        'pytest_addoption, pytest_configure = short_run.add_options, short_run.configure\n'
    )
    tmp_path.joinpath('test_times.py').write_text(
        'import time\n\n'
        'def compute(seconds):\n'
        '    begun = time.process_time()\n'
        '    while time.process_time() - begun < seconds: pass\n\n'
        'def test_quick(): pass\n'
        'def test_first(seen=[]): compute(0 if seen else 2); seen.append(1)\n'
        'def test_long(): compute(2)\n'
    )
    run = [sys.executable, '-m', 'pytest', '-q', '-p', 'no:cacheprovider', '--short', str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith('PYTEST_')}
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines() if 'the short run allows' in line] == [
        'test_times.py::test_long'
    ]
    assert '3 passed' in done.stdout
