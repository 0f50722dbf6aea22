"""SIGTERM at any moment sets a flag; several processes stop at the same poll."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny

from lm.pod.preemption import Preemption

ROOT = Path(__file__).parents[2]


def start(code: str, *arguments) -> subprocess.Popen:
    environment = os.environ | {
        'PYTHONPATH': str(ROOT),
        'JAX_PLATFORMS': 'cpu',
        'XLA_FLAGS': f'--xla_force_host_platform_device_count=1 {tiny.COMPILE_QUICKLY}',
    }
    command = [sys.executable, '-u', '-c', code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for(process: subprocess.Popen, word: str) -> None:
    for line in process.stdout:
        if word in line:
            return
    pytest.fail(process.stderr.read()[-3000:])


def finish(process: subprocess.Popen) -> str:
    try:
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-3000:]
    return out


@pytest.mark.smoke
@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_sets_the_flag_and_a_second_one_is_harmless(number, caplog):
    before = signal.signal(number, signal.SIG_DFL)
    with Preemption() as preemption:
        assert not preemption.is_requested(1)
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert preemption.is_requested(2)
        assert preemption.is_requested(3)
    assert signal.signal(number, before) == signal.SIG_DFL
    assert [r.getMessage() for r in caplog.records] == [f'told to stop ({number.name}) at step 2: saving']
    with Preemption() as fresh:
        assert not fresh.is_requested()


def test_a_command_under_nohup_ignores_a_closed_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Preemption() as preemption:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not preemption.is_requested(1)
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.smoke
def test_the_first_interrupt_sets_the_flag_and_the_second_raises(caplog, capfd):
    before = signal.getsignal(signal.SIGINT)
    with Preemption() as preemption:
        os.kill(os.getpid(), signal.SIGINT)
        assert preemption.is_requested(3)
        assert 'again stops at once' in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == before
    assert [r.getMessage() for r in caplog.records] == ['told to stop (SIGINT) at step 3: saving']


COMPILING = """
import jax, jax.numpy as jnp, time
from lm.pod.preemption import Preemption

jax.config.update('jax_enable_compilation_cache', False)  # each run of this test compiles

def slow(x):
    for i in range(1000):
        x = jnp.sin(x @ x) + i
    return x

with Preemption() as preemption:
    lowered = jax.jit(slow).lower(jnp.ones((8, 8)))
    print('compiling')
    start = time.time()
    compiled = lowered.compile()
    print(time.time() - start, preemption.is_requested(), compiled(jnp.ones((8, 8))).shape)
"""


STARTING = """
import time
from jax._src import xla_bridge
from lm.pod.preemption import Preemption

plain = xla_bridge.discover_pjrt_plugins

def discover():
    print('starting')
    time.sleep(5)
    plain()

xla_bridge.discover_pjrt_plugins = discover
try:
    with Preemption() as preemption:
        print(preemption.is_requested())
except KeyboardInterrupt:
    print('interrupted')
"""


def test_an_interrupt_while_jax_starts_stops_the_process():
    process = start(STARTING)
    wait_for(process, 'starting')
    process.send_signal(signal.SIGINT)
    assert finish(process).split() == ['interrupted']


def test_a_signal_during_compilation_sets_the_flag():
    process = start(COMPILING)
    wait_for(process, 'compiling')
    time.sleep(0.1)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    seconds, answer = finish(process).split()[:2]
    assert float(seconds) > 0.12, 'the signal came too late to test anything'
    assert answer == 'True'


def test_after_the_block_a_signal_kills_again():
    process = start(
        "from lm.pod.preemption import Preemption\nwith Preemption(): pass\nprint('out')\nimport time; time.sleep(60)"
    )
    wait_for(process, 'out')
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGTERM


TWO_PROCESSES = """
import sys, time, jax
jax.config.update('jax_cpu_collectives_implementation', 'gloo')
me = int(sys.argv[2])
jax.distributed.initialize(f'localhost:{sys.argv[1]}', 2, me)
import jax.numpy as jnp
from lm.checkpoint.checkpointer import CheckpointConfig, Checkpointer
from lm.pod.preemption import Preemption

def run():
    config = CheckpointConfig(save_every_steps=2)
    with Preemption() as preemption, Checkpointer(sys.argv[3], config) as checkpointer:
        for step in range(10_000):
            if preemption.is_requested(step):
                return 'training', step
            if checkpointer.should_save(step):
                checkpointer.save(step, state)  # must not disturb the agreement
            if step == 5:
                print('evaluating' if me == 0 else 'ready')
                for batch in range(10_000):
                    time.sleep(0.01 + 0.01 * me)
                    if preemption.is_requested(step):
                        checkpointer.save(step, state)
                        return 'evaluating', step, batch

mesh = jax.make_mesh((2,), ('data',))
state = {'x': jax.jit(lambda: jnp.zeros(4), out_shardings=jax.NamedSharding(mesh, jax.P('data')))()}
print('stopped', run())
"""


@pytest.mark.parametrize('how', [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_two_processes_stop_at_the_same_poll(tmp_path, how):
    port = tiny.free_port()
    processes = [start(TWO_PROCESSES, port, i, tmp_path) for i in range(2)]
    wait_for(processes[0], 'evaluating')
    wait_for(processes[1], 'ready')
    for number in (how, signal.SIGTERM):
        processes[1].send_signal(number)  # to only one of them, twice
        time.sleep(0.05)
    outs = [finish(process) for process in processes]
    stopped = [next(line for line in out.splitlines() if line.startswith('stopped')) for out in outs]
    assert stopped[0] == stopped[1]
    assert stopped[0].startswith("stopped ('evaluating', 5, ")
    assert int(stopped[0].rstrip(')').split()[-1]) < 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == ['4', '5']
