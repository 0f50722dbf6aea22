"""The battery itself: a few draws in the default suite; all twenty tests are slow."""

import subprocess
import sys

import pytest
import tiny
from attacks import ATTACKS
from battery import BATTERY
from draws import FAULTS, Draw, Results, draw_shape, random_battery
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
def test_all_twenty_faults_lose_nothing():
    lines = battery(timeout=7200).splitlines()
    assert [line.split()[0] for line in lines[2:22]] == list(BATTERY)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_thirty_random_draws_lose_nothing():
    battery('--random', '30', timeout=7200)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_six_random_draws_lose_nothing():
    """The draws share a shape: SIGKILL, SIGTERM, a second process, damaged metrics, a damaged shard, a changed
    configuration."""
    battery('--random', '6', '--seed', '398', timeout=900)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_restarts_lose_nothing():
    battery('--restarts', '40', timeout=1800)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_each_attack_loses_nothing():
    battery('--random', str(len(FAULTS | ATTACKS)), '--attacks', timeout=7200)


@pytest.mark.timeout(900)
def test_three_random_draws_lose_nothing():
    """The draws share a shape: a damaged shard, a damaged checkpoint, SIGKILL. Each fault has tests of its own, too."""
    battery('--random', '3', '--seed', '2204', timeout=900)


def test_a_battery_goes_on_where_it_was_stopped(tmp_path):
    path = tmp_path / 'draws.jsonl'
    results = Results(3, path)
    draw = Draw(None, 3, 0)
    draw.recoveries = [(draw.faults[0], 2, 1.5), (draw.faults[0], 0, None)]
    results.add(draw, [], 20.0)
    results.add(Draw(None, 3, 1), ['lost'], 30.0)
    Results(4, path).add(Draw(None, 4, 2), [], 1.0)  # another seed
    with path.open('a') as file:
        file.write('{"seed": 3, "draw": 2, ')  # it was killed while writing
    again = Results(3, path)
    assert again.of.keys() == {0, 1}
    again.add(Draw(None, 3, 5), [], 1.0)
    assert Results(3, path).of.keys() == {0, 1, 5}
    del again.of[5]
    rows = {row.fault: row for row in random_battery(None, again, [0, 1], None)}  # this battery has nothing left to do
    assert rows.keys() == {*Draw(None, 3, 0).faults, *Draw(None, 3, 1).faults}
    row = rows[draw.faults[0]]
    assert (row.survived, row.lost, row.seconds) == (row.tries, [2, 0], [1.5])
    assert rows[Draw(None, 3, 1).faults[0]].failures == ['lost']


def test_help_names_every_test():
    text = battery('--help', timeout=60)
    assert all(f' {name} ' in f' {" ".join(text.split()).replace(".", " ")} ' for name in BATTERY)


def test_a_draw_does_not_depend_on_earlier_draws():
    def draws():
        return [str(Draw(None, 3, number)) for number in range(200)]

    assert draws() == draws()
    assert len({draw_shape(3, number) for number in range(200)}) >= 15
    for first in range(0, 192, len(FAULTS)):
        alike = [Draw(None, 3, number) for number in range(first, first + len(FAULTS))]
        assert {draw.faults[0] for draw in alike} == set(FAULTS)
        assert len({draw.shape for draw in alike}) == 1


def test_attacks_are_drawn_beside_the_other_faults_and_change_no_other_draw(tmp_path):
    kinds, path = FAULTS | ATTACKS, tmp_path / 'draws.jsonl'
    for first in range(0, 5 * len(kinds), len(kinds)):
        alike = [Draw(None, 3, number, kinds) for number in range(first, first + len(kinds))]
        assert {draw.faults[0] for draw in alike} == set(kinds)
        assert len({draw.shape for draw in alike}) == 1
    Results(3, path, kinds).add(Draw(None, 3, 0, kinds), [], 1.0)
    assert Results(3, path, kinds).of.keys() == {0}
    assert not Results(3, path).of


def test_the_battery_finds_losses(reference_run, tmp_path):
    """The battery would be worthless if it found no fault in wrong runs."""
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
