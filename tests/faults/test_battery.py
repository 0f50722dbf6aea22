"""The battery itself: a few draws in the default suite, all twenty tests among the slow ones."""

import subprocess
import sys

import pytest
import tiny
from battery import BATTERY
from draws import FAULTS, Draw, draw_shape
from tally import Tally, table
from workshop import Failed, compare, need


def battery(*arguments: str, timeout: float) -> str:
    command = [str(tiny.ROOT / 'scripts' / 'test_faults.sh'), *arguments]
    done = subprocess.run(
        command, env=tiny.environment(PYTHON=sys.executable), capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_all_twenty():
    lines = battery(timeout=7200).splitlines()
    assert [line.split()[0] for line in lines[2:22]] == list(BATTERY)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_thirty_draws():
    battery('--random', '30', timeout=7200)


def test_two_draws():
    """A SIGTERM, and checkpoints that are gone."""
    battery('--random', '2', '--seed', '32', timeout=600)


def test_help_names_every_test():
    text = battery('--help', timeout=60)
    assert all(f' {name} ' in f' {" ".join(text.split()).replace(".", " ")} ' for name in BATTERY)


def test_a_draw_is_the_same_whatever_was_drawn_before():
    def draws():
        return [str(Draw(None, 3, number, {})) for number in range(200)]

    assert draws() == draws()
    assert len({draw_shape(3, number) for number in range(200)}) > 20
    assert all(any(name in text for text in draws()) for name in FAULTS)


def test_what_is_lost_is_found(reference_run, tmp_path):
    """A battery that finds nothing wrong in wrong runs would be worth nothing."""
    run, _ = reference_run
    compare(run, run, 40)
    with pytest.raises(Failed, match='do not end with 39'):
        compare(run, run, 39)
    for old, new in (('"step": 7,', '"step": 8,'), ('"loss": 4', '"loss": 5')):
        other = tmp_path / str(len(new)) / 'run'
        other.mkdir(parents=True)
        (other / 'checkpoints').symlink_to(run / 'checkpoints')
        text = (run / 'metrics.jsonl').read_text()
        (other / 'metrics.jsonl').write_text(text.replace(old, new, 1))
        with pytest.raises(Failed, match='metrics'):
            compare(other, run, 40)


def test_a_row_counts_what_failed():
    row = Tally('fault')
    with row.attempt('one'):
        need(True, 'nothing')
    with row.attempt('two'):
        need(False, 'lost')
    with row.attempt('three'):
        raise ValueError
    assert (row.tries, row.survived) == (3, 1)
    assert row.failures[0] == 'two: lost'
    assert 'ValueError' in row.failures[1]
    row.lost, row.seconds = [0, 3], [1.0, 2.0]
    assert table([row]).splitlines()[2].split() == ['fault', '3', '1', '1.5', '/', '3', '1.5', '/', '2.0']
