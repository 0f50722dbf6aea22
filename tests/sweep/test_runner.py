"""The runner of a sweep between stand-ins: the start of each point, its end, and a stop of all points.

The tests start no process: a point ends when the test says so.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
import types

import pytest

from lm.errors import ConfigError, LmError, Preempted
from lm.lease import Lease
from lm.signals import ENDING
from lm.sweep import runner as runner_module
from lm.sweep.options import SweepOptions
from lm.sweep.runner import Runner
from lm.sweep.sweep import Sweep


class Process:
    """Behaves like Popen's result: it ends with the next of `codes` after some polls."""

    def __init__(self, command, looks, code, log, options):
        self.command, self.looks, self.code, self.options = command, looks, code, options
        self.returncode, self.signals = None, []
        log.write(f'up\nlm train: error: it ended with {code}\nlast words\n'.encode() if code else b'fine\n')
        log.flush()

    def poll(self):
        self.looks -= 1
        if self.looks < 0:
            self.returncode = self.code
        return self.returncode

    def send_signal(self, number):
        self.signals.append(number)
        self.code, self.looks = 42, 1


class World:
    """A sweep of points named a, b, c, … in a folder, with the started processes and the printed lines."""

    def __init__(self, root, monkeypatch):
        self.root, self.notes, self.is_local = root, root / 'points', True
        self.points, self.status, self.exit_codes, self.ends = [], {}, {}, {}
        self.started, self.failures, self.prepared, self.tables = [], {}, [], 0
        self.occupied = {}
        self.notes.mkdir(parents=True)
        self.now, self.step = 0.0, 3000
        monkeypatch.setattr(subprocess, 'Popen', self.popen)
        clock = types.SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep, strftime=time.strftime)
        monkeypatch.setattr(runner_module, 'time', clock)
        self.on_sleep = lambda: None

    def sleep(self, seconds):
        self.now += seconds
        assert self.now < 500, 'the runner does not end'
        self.on_sleep()

    def add(self, name, status='waiting', exit_code=None, looks=0, ends=0):
        self.points.append(types.SimpleNamespace(name=name, fault=None))
        self.status[name], self.exit_codes[name], self.ends[name] = status, exit_code, (looks, ends)

    def popen(self, command, stdin, stdout, stderr, env, start_new_session):
        assert (stdin, stderr, start_new_session) == (subprocess.DEVNULL, subprocess.STDOUT, True)
        name = os.path.basename(command[command.index('--run_dir') + 1])
        looks, code = self.ends[name]
        if code == 0:
            self.status[name] = 'done'
        process = Process(command, looks, code, stdout, types.SimpleNamespace(env=env))
        process.others = sum(p.returncode is None for p in self.processes())
        self.started.append((name, process))
        return process

    def processes(self):
        return [process for _, process in self.started]

    def names(self):
        return [name for name, _ in self.started]

    # The methods of a Sweep.

    def result(self, point):
        return {
            'point': point.name,
            'status': self.status[point.name],
            'exit_code': self.exit_codes[point.name],
            'split': 'test',
            'perplexity': 7.25,
            'accuracy': None,
            'tokens_per_second': 5.0,
            'step': self.step,
            'steps': 9000,
            'error': None,
        }

    is_due = Sweep.is_due

    def is_running(self, point):
        return self.occupied.get(point.name, False)

    def prepare(self, point):
        self.prepared.append(point.name)
        return f'{point.name}.gin'

    def record_failure(self, point, code, error):
        self.failures[point.name] = code, error
        self.status[point.name] = 'failed'

    def write_results(self):
        self.tables += 1
        return [self.result(point) for point in self.points]

    def runner(self, jobs=1, gpus=None, retry=False, imports=False):
        return Runner(self, SweepOptions(jobs, gpus, retry, imports))


@pytest.fixture
def world(tmp_path, monkeypatch):
    return World(tmp_path, monkeypatch)


@pytest.mark.parametrize('jobs', [1, 2, 9])
def test_the_number_of_points_at_a_time_has_a_limit(world, jobs, capsys):
    for name in 'abcd':
        world.add(name, looks=3)
    runner = world.runner(jobs)
    runner.run()
    assert world.names() == world.prepared == list('abcd')
    assert max(process.others for process in world.processes()) == min(jobs, 4) - 1
    assert (runner.running, runner.waiting, runner.slots) == ([], [], list(range(jobs)))
    assert world.failures == {}
    out = capsys.readouterr().out
    assert f'a: started, see {world.notes / "a.log"}  (3 waiting)' in out
    assert 'd: done, perplexity 7.250  (0 waiting)' in out
    assert world.tables == 6  # before, after each point, at the end


def test_the_command_of_a_point(world, monkeypatch):
    monkeypatch.setenv('SOME_VARIABLE', 'kept')
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    world.add('a')
    world.runner().run()
    [process] = world.processes()
    assert process.command == [
        *(sys.executable, '-m', 'lm.sweep.child', str(os.getpid())),
        *('train', '--run_dir', str(world.root / 'a'), '--gin_file', 'a.gin'),
    ]
    assert process.options.env['SOME_VARIABLE'] == 'kept'
    assert 'CUDA_VISIBLE_DEVICES' not in process.options.env
    assert (world.notes / 'a.log').read_text() == 'fine\n'
    assert not (world.notes / '.a.lock').exists()


def test_points_may_import_what_the_sweep_may_import(world):
    world.add('a')
    world.runner(imports=True).run()
    [process] = world.processes()
    assert process.command[-3:] == ['--gin_file', 'a.gin', '--allow_gin_imports']


def test_points_that_are_done_or_failed_for_good_are_left_out(world, capsys):
    world.add('a', 'done')
    world.add('b', 'failed', 43)
    world.add('c', 'failed', 1)
    world.add('d', 'interrupted')
    with pytest.raises(LmError, match='1 of 4 points did not succeed: b; see'):
        world.runner().run()
    assert world.names() == ['c', 'd']
    assert capsys.readouterr().out.count('b failed with 43 before and is left out (see --retry_failed)') == 1
    world.runner(retry=True).run()
    assert world.names() == ['c', 'd', 'b']


def test_a_failing_point_is_recorded_and_the_rest_go_on(world, capsys):
    for name, code in zip('abcdefg', (43, 0, -9, 1, 1, 1, 0), strict=True):
        world.add(name, ends=code)
    with pytest.raises(LmError, match='5 of 7 points did not succeed: a, c, d, e …; see') as error:
        world.runner(2).run()
    assert str(world.notes) in str(error.value)
    assert world.failures['a'] == (43, 'it ended with 43')
    assert world.failures['c'] == (-9, 'killed by SIGKILL; it ended with -9')
    assert world.names() == list('abcdefg')
    out = capsys.readouterr().out
    assert 'a: failed (43): it ended with 43' in out
    assert 'b: done' in out


@pytest.mark.parametrize('failed', [1, 4])
def test_up_to_four_failures_are_named(world, failed):
    for name in 'abcd'[:failed]:
        world.add(name, ends=1)
    with pytest.raises(LmError, match=rf'did not succeed: {", ".join("abcd"[:failed])}; see'):
        world.runner().run()


def test_a_point_that_is_interrupted_stops_the_sweep(world, capsys):
    """The machine is being taken away: the other points save, and no new point starts."""
    world.add('a', ends=42, looks=2)
    world.add('b', looks=50)
    world.add('c')
    previous = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted, match=r'stopped with 2 of 3 points unfinished, .* run the same command again'):
        world.runner(2).run()
    a, b = world.processes()
    assert (a.signals, b.signals) == ([], [signal.SIGTERM])
    assert world.failures == {}
    out = capsys.readouterr().out
    assert 'a: interrupted (42)' in out
    assert 'b: interrupted (42)' in out
    assert signal.getsignal(signal.SIGTERM) is previous


@pytest.mark.parametrize('number', ENDING)
def test_a_signal_is_passed_on_and_a_second_one_kills(world, number):
    world.add('a', looks=400)
    world.add('b', looks=400)
    world.add('c')
    sent = []

    def send():
        if len(sent) < 2 and world.now > 0.5 * (1 + len(sent)):
            sent.append(number)
            os.kill(os.getpid(), number)
            if len(sent) == 1:
                for process in world.processes():
                    process.looks = 400  # it takes its time

    world.on_sleep = send
    before = [signal.getsignal(n) for n in ENDING]
    with pytest.raises(Preempted):
        world.runner(2).run()
    # The system and a shell may both report a closed terminal.
    expected = [signal.SIGTERM] if number == signal.SIGHUP else [signal.SIGTERM, signal.SIGKILL]
    assert [process.signals for process in world.processes()] == [expected] * 2
    assert [signal.getsignal(n) for n in ENDING] == before


def test_a_closed_terminal_does_not_stop_a_sweep_under_nohup(world):
    world.add('a', looks=4)
    world.on_sleep = lambda: os.kill(os.getpid(), signal.SIGHUP)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        world.runner().run()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_point_that_another_process_runs_is_tried_later(world, capsys):
    world.add('a')
    world.add('b')
    held = contextlib.ExitStack()
    held.enter_context(Lease(world.notes, '.a.lock'))

    def leave():
        if world.now > 5:
            world.status['a'] = 'done'  # the other process has finished it
            held.close()

    world.on_sleep = leave
    world.runner(2).run()
    assert world.names() == ['b']
    assert capsys.readouterr().out.count('a: another process runs it; waiting for that') == 1


def test_a_point_that_another_command_trains_is_tried_later_or_left_to_it(world, capsys):
    """`lm train` and `lm sweep --index` hold only the lock of the run, and no lock of the sweep. The run's lock refuses
    the point."""
    world.add('a')
    world.add('b', ends=2, looks=3)
    world.add('c', ends=2)
    world.occupied = {'a': True}

    def leave():
        if world.names()[-1:] == ['b'] and world.now < 5:
            world.occupied['b'] = True  # another host was faster, and trains it
        if world.now > 5:
            world.occupied = {}
            world.status['b'] = 'done'

    world.on_sleep = leave
    with pytest.raises(LmError, match='1 of 3 points did not succeed: c'):
        world.runner().run()
    assert world.names() == ['b', 'c', 'a']
    assert world.failures == {'c': (2, 'it ended with 2')}
    assert 'b: another process runs it; left to that' in capsys.readouterr().out


def test_a_remote_sweep_keeps_no_logs_and_no_locks(world):
    world.is_local = False
    world.add('a', ends=1)
    with pytest.raises(LmError):
        world.runner().run()
    assert world.failures == {'a': (1, 'it ended with 1')}
    assert list(world.notes.iterdir()) == []


def test_a_signal_during_a_start_reaches_the_new_process_and_no_other_starts(world, monkeypatch):
    for name in 'abc':
        world.add(name, looks=400, ends=1)

    def popen(*arguments, **options):
        process = world.popen(*arguments, **options)
        os.kill(os.getpid(), signal.SIGTERM)  # before the runner knows of the process
        return process

    monkeypatch.setattr(subprocess, 'Popen', popen)
    with pytest.raises(Preempted, match='3 of 3 points unfinished'):
        world.runner(3).run()
    assert world.names() == ['a']
    assert world.processes()[0].signals == [signal.SIGTERM]


@pytest.mark.parametrize(('seconds', 'reports'), [(59.5, 0), (60.5, 1), (140, 2)])
def test_running_points_are_reported_once_a_minute(world, capsys, seconds, reports):
    world.add('a', looks=seconds / 0.2)
    world.runner().run()
    assert capsys.readouterr().out.count('a: step 3,000 of 9,000') == reports


@pytest.mark.parametrize(
    ('logged', 'said'),
    [
        (b'tokens in total 5\n', 'starting or compiling, no step yet'),
        (b'first step after 9s\n', 'training, no step is'),
    ],
)
def test_a_point_that_compiles_is_not_at_step_0(logged, said, world, capsys):
    world.add('a', looks=500)
    world.step = 0
    world.on_sleep = lambda: (world.notes / 'a.log').write_bytes(logged)
    world.runner().run()
    printed = capsys.readouterr().out
    assert f'a: {said}' in printed
    assert 'step 0' not in printed


def test_each_point_gets_its_own_gpus(world, monkeypatch):
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)
    for name in 'abc':
        world.add(name, looks=2)
    world.runner(2, gpus=2).run()
    assert [p.options.env['CUDA_VISIBLE_DEVICES'] for p in world.processes()] == ['0,1', '2,3', '0,1']
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '4,5,6,7')
    world.started.clear()
    world.status = dict.fromkeys('abc', 'waiting')
    world.runner(2, gpus=2).run()
    assert [p.options.env['CUDA_VISIBLE_DEVICES'] for p in world.processes()] == ['4,5', '6,7', '4,5']
    with pytest.raises(ConfigError, match='--gpus_per_job 3: CUDA_VISIBLE_DEVICES has only 4 GPUs'):
        world.runner(2, gpus=3)


@pytest.mark.parametrize(
    ('text', 'expected'),
    [
        (b'', 'it printed nothing'),
        (b'  \r\n', 'it printed nothing'),
        (b'one\rtwo\r\n\n', 'two'),
        (b'lm train: error: first\nthen\nlm train: error: second\nmore\n', 'second'),
        (b'\xff' + b'w' * 600 + b'\n', '\ufffd' + 'w' * 499),
        (b'lm train: error: long ago\n' + b'x\n' * 20_000, 'x'),
    ],
)
def test_the_last_line_of_a_log_is_found(text, expected, tmp_path):
    (tmp_path / 'log').write_bytes(text)
    with open(tmp_path / 'log', 'ab') as log:
        job = runner_module.RunningPoint(None, None, log, 0, begin=0)
        assert runner_module._find_last_line(job.read_log()) == expected


def test_the_reason_of_a_failure_is_of_the_last_attempt(tmp_path):
    (tmp_path / 'log').write_bytes(b'lm train: error: no space\n')
    with open(tmp_path / 'log', 'ab') as log:
        job = runner_module.RunningPoint(None, None, log, 0, begin=os.fstat(log.fileno()).st_size)
        assert runner_module._find_last_line(job.read_log()) == 'it printed nothing'
        log.write(b'compiling\n')
        assert runner_module._find_last_line(job.read_log()) == 'compiling'
