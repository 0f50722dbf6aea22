"""A training that hangs ends with its stacks and 42; a training that is only slow does not."""

import itertools
import signal
import subprocess
import sys
import time
import types

import pytest
import tiny

from lm.pod.watchdog import FACTOR, Watchdog

HANGING = """
import sys, threading, time
from lm import cli
from lm.data.batches import Batches

read = Batches.__call__
def blocked(self, step):
    if step == 30:
        threading.Event().wait()
    return read(self, step)
Batches.__call__ = blocked
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_reader_that_blocks_ends_the_run_with_all_stacks(tiny_flags, tmp_path):
    run = tmp_path / 'run'
    flags = [*tiny_flags, *tiny.params({'train.hang_minutes': 0.05})]
    done = subprocess.run(
        [sys.executable, '-c', HANGING, 'train', '--run_dir', str(run), *flags],
        env=tiny.environment(),
        cwd=tiny.ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 42, done.stderr
    assert 'step 31: it has not gone on for 0.1 minutes' in done.stderr.splitlines()[-1]
    assert 'in blocked' in done.stderr
    assert 'in run_steps' in done.stderr
    assert list(tiny.losses(run))[-1] >= 29
    again = tiny.lm('train', '--run_dir', str(run), *flags)
    assert again.returncode == 0, again.stderr
    assert 'resumed from step' in again.stdout


STUCK = """
import sys, threading
from lm import cli
from {module} import {name}
{name}.{method} = lambda *_, **__: threading.Event().wait()
from lm.pod import watchdog
watchdog.PATIENCE, watchdog.START_MINUTES = 3, {start}
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ('module', 'name', 'method', 'phase', 'settings'),
    [
        ('lm.evaluation.perplexity', 'Evaluator', 'sum_scores', 'evaluation', {'train.eval_every': 10}),
        ('lm.checkpoint.checkpointer', 'Checkpointer', 'save', 'checkpoint', {}),
        ('lm.training.replay', 'Replay', 'check', 'replay', {'train.replay_every': 10}),
        ('lm.session.trainer', 'Trainer', 'record_goodput', 'start', {}),
    ],
)
def test_each_phase_of_a_run_has_a_limit(module, name, method, phase, settings, tiny_flags, tmp_path):
    flags = [*tiny_flags, *tiny.params({'train.hang_minutes': 0.1} | settings)]
    start = 0.5 if phase == 'start' else 10
    program = STUCK.format(module=module, name=name, method=method, start=start)
    done = subprocess.run(
        [sys.executable, '-c', program, 'train', '--run_dir', str(tmp_path / 'run'), *flags],
        env=tiny.environment(),
        cwd=tiny.ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 42, done.stderr
    last = done.stderr.splitlines()[-1]
    assert f'its {phase} has not gone on for' in last
    assert 'train.hang_minutes = 0.1 decides' in last
    assert 'in <lambda>' in done.stderr


QUIET = """
import sys, time
from lm.pod.watchdog import Watchdog
with Watchdog(minutes=0.01) as watchdog:
    {body}
print('survived')
"""


@pytest.mark.parametrize(
    ('body', 'code'),
    [
        ('time.sleep(2)', 0),  # compiling: no step has begun
        ('watchdog.step(1)\n    with watchdog.watch("replay"):\n        time.sleep(2)', 0),
        ('watchdog.step(1)\n    with watchdog.watch("replay"):\n        time.sleep(6)', 42),
        (
            'watchdog.step(1)\n    with watchdog.watch("evaluation"):\n'
            '        for _ in range(6):\n            time.sleep(1)\n            watchdog.beat()',
            0,
        ),
        ('watchdog.step(1)\n    time.sleep(2)', 42),
        ('watchdog.step(1)\n    with watchdog.watch("replay"):\n        time.sleep(0.1)\n    time.sleep(2)', 42),
    ],
)
def test_only_work_that_stands_still_hangs(body, code):
    done = subprocess.run(
        [sys.executable, '-c', QUIET.format(body=body)], env=tiny.environment(), capture_output=True, text=True
    )
    assert done.returncode == code, done.stderr
    assert ('survived' in done.stdout) == (code == 0)


def test_a_signal_prints_all_stacks_and_the_run_goes_on(tiny_flags, tmp_path):
    flags = [*tiny_flags, *tiny.params({'train.steps': 500})]
    process = tiny.start('train', '--run_dir', str(tmp_path / 'run'), *flags, cold=True, errors_apart=True)
    while 'first step' not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGUSR1)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert 'most recent call first' in err


def test_slow_steps_have_more_time_and_a_step_costs_nothing(monkeypatch):
    watchdog = Watchdog(minutes=1 / 6000)
    watchdog.step(0)
    assert watchdog.compute_limit() == pytest.approx(0.01)
    clock = itertools.count(100.0, 0.02)
    with monkeypatch.context() as patched:
        patched.setattr('lm.pod.watchdog.time', types.SimpleNamespace(monotonic=lambda: next(clock)))
        for n in range(5):
            watchdog.step(n)
    assert watchdog.compute_limit() == pytest.approx(FACTOR * 0.02)
    start = time.process_time()
    for n in range(10_000):
        watchdog.step(n)
    assert (time.process_time() - start) / 10_000 < 20e-6
