"""The accounts of the goodput add up to the wall-clock time, restarts included."""

import json
import re
import signal
import time

import pytest
import tiny

from lm import cli
from lm.runs.goodput import Goodput, describe, parse_ledger, read_process_start
from lm.runs.run_dir import RunDir


def goodput(run) -> dict:
    return json.loads((run / 'run.json').read_text())['goodput']


class Clock:
    """A clock that only tests move, in seconds."""

    def __init__(self):
        self.now = 10_000.0

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now - 7

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr('lm.runs.goodput.time', clock)
    return clock


def test_every_moment_is_charged_to_one_account(clock):
    ledger = Goodput(begun=clock.now - 5)
    with ledger.charge('step'):
        clock.sleep(0.5)
        with ledger.charge('evaluation'):
            clock.sleep(1)
        assert list(ledger.charge_items('data', (clock.sleep(0.25) for _ in range(3)))) == [None] * 3
    record = ledger.record()
    assert {name: seconds for name, seconds in record['seconds'].items() if seconds} == {
        'imports': 5,
        'step': 0.5,
        'evaluation': 1,
        'data': 0.75,
    }
    assert record['updated'] - record['started'] == 7.25


def test_lost_steps_and_the_time_between_are_charged(clock):
    before = {'seconds': {'step': 100.0, 'compile': 10.0}, 'starts': 1, 'started': clock.now - 200}
    before['updated'] = before['started'] + 110
    ledger = Goodput(before, begun=clock.now - 10)
    ledger.count_lost(step_seconds=70.0)
    record = ledger.record()
    seconds = record['seconds']
    assert (seconds['step'], seconds['lost'], seconds['compile'], seconds['restart']) == (70, 30, 10, 80)
    assert (record['starts'], record['share']) == (2, 0.35)
    assert sum(seconds.values()) == record['updated'] - record['started']
    assert describe(record).startswith('35.0% of 3m20s')
    assert '(2 starts); restart 40.0%, lost 15.0%, ' in describe(record)


def test_the_time_after_a_finished_run_is_not_charged(clock):
    before = {'seconds': {'step': 90.0}, 'share': 0.9, 'starts': 1, 'started': clock.now - 8000, 'updated': 0.0}
    before['updated'] = before['started'] + 100
    assert Goodput(parse_ledger(before | {'finished': True}), clock.now).seconds['restart'] == 0
    assert Goodput(parse_ledger(before), clock.now).seconds['restart'] == 7900
    again = Goodput(before | {'finished': True}, clock.now)
    assert not again.record()['finished'], 'what is killed while the run grows has time between again'
    assert again.record(finished=True)['finished']


def test_the_times_of_a_start_exclude_earlier_starts(clock):
    before = Goodput(begun=clock.now - 100).record()
    ledger = Goodput(before | {'seconds': before['seconds'] | {'compile': 7.0}}, begun=clock.now - 3)
    with ledger.charge('compile'):
        clock.sleep(0.2)
    assert ledger.describe_start() == '3.2s: imports 3.0s, compile 0.2s'
    ledger.seconds['step'] += 50.0
    ledger._before['step'] += 50.0
    ledger.count_lost(20.0)
    assert ledger.describe_start() == '3.2s: imports 3.0s, compile 0.2s', 'lost steps are of earlier starts'


def test_the_start_of_a_process_is_read():
    assert 0 <= time.time() - read_process_start() < 24 * 3600


def test_a_run_that_is_killed_and_stopped_accounts_for_its_wall_clock(tiny_flags, tmp_path):
    run = tmp_path / 'run'
    begun = time.time()
    process = tiny.start('train', '--run_dir', str(run), *tiny_flags, cold=True)
    tiny.wait_for_step(run, 27, process)
    tiny.stop(process, signal.SIGKILL)
    time.sleep(1)
    process = tiny.start('train', '--run_dir', str(run), *tiny_flags, *tiny.params({'train.log_every': 1}), cold=True)
    time.sleep(0.5)
    output, _ = process.communicate(timeout=300)
    ended = time.time()
    assert process.returncode == 0, output
    record = goodput(run)
    seconds = record['seconds']
    assert record['starts'] == 2
    assert abs(record['started'] - begun) < 1
    assert sum(seconds.values()) == pytest.approx(record['updated'] - record['started'], abs=0.1)
    assert ended - begun - 2 < sum(seconds.values()) < ended - begun + 0.1
    assert seconds['restart'] >= 1
    accounts = ('step', 'imports', 'start', 'initialize', 'restore', 'trace', 'compile', 'data', 'checkpoint')
    for account in (*accounts, 'evaluation'):
        assert seconds[account] > 0, account
    assert re.search(r'\nfirst step after \d+\.\ds: (\w+ \d+\.\ds, )*(imports|start) \d', output)
    assert output.splitlines()[-1] == f'goodput {describe(record)}'
    lines = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
    waits = [line['data_wait_seconds'] for line in lines if line['kind'] == 'train']
    assert all(wait >= 0 for wait in waits)
    assert sum(waits) <= seconds['data'] + 1


def test_a_start_keeps_the_ledger_until_it_writes_its_own(tmp_path):
    run = RunDir(tmp_path)
    run.create_or_resume('', {})
    run.write_goodput(ledger := Goodput().record())
    run.create_or_resume('', {})
    assert run.read_goodput() == parse_ledger(ledger)


def test_inspect_and_report_show_it(reference_run, tmp_path, capsys):
    run, output = reference_run
    assert 'goodput ' in output.splitlines()[-1]
    assert cli.main(['inspect', str(run)]) == 0
    shown = capsys.readouterr().out
    assert f'goodput          {describe(goodput(run))}' in shown
    assert cli.main(['report', str(run), '--out', str(tmp_path), '--no_pictures']) == 0
    assert f'{goodput(run)["share"]:.1%}' in capsys.readouterr().out
    assert describe(goodput(run)) in (tmp_path / 'report.md').read_text()


def test_a_new_run_restores_nothing(reference_run):
    run, output = reference_run
    assert goodput(run)['seconds']['restore'] == 0
    assert goodput(run)['seconds']['initialize'] > 0
    assert 'restore' not in output


@pytest.mark.parametrize('record', [None, {}, 'nothing', {'seconds': 3}, {'seconds': {'step': 'x'}}, [1]])
def test_an_invalid_ledger_counts_as_none(record):
    assert parse_ledger(record) is None
