"""scripts/local_pod.sh runs one command in several processes; here the command is a small program called `lm`."""

import os
import pathlib
import signal
import socket
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / 'scripts' / 'local_pod.sh')
SHOW = 'echo "$* | $JAX_PLATFORMS $XLA_FLAGS"'


@pytest.fixture
def pod(tmp_path):
    """Starts local_pod.sh; `lm` is a bash script with the given text, in which $id is the number of the process."""

    def start(text: str, *arguments: str, **environment: str) -> subprocess.Popen:
        program = tmp_path / 'bin' / 'lm'
        program.parent.mkdir(exist_ok=True)
        program.write_text(f'#!/usr/bin/env bash\nid=${{@: -1}}\n{text}\n')
        program.chmod(0o755)
        return subprocess.Popen(
            [SCRIPT, *arguments],
            env=os.environ | {'PATH': f'{program.parent}:{os.environ["PATH"]}', 'TMPDIR': str(tmp_path)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    yield start
    assert not list(tmp_path.glob('local_pod.*')), 'temporary files stayed behind'


def finish(process: subprocess.Popen, timeout: float = 30) -> tuple[int, list[str], str]:
    """Returns (exit code, lines of stdout, stderr)."""
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out.splitlines(), err


def test_every_process_gets_the_arguments_and_its_number(pod):
    flags = '--xla_force_host_platform_device_count=8 --xla_dump_to=x'
    process = pod(SHOW, '--devices', '4', '3', '--', 'lm', 'train', '--gin_param', "a.b = 'c d'", XLA_FLAGS=flags)
    code, lines, _ = finish(process)
    assert code == 0
    assert len(lines) == 3
    ports = set()
    for i, line in enumerate(sorted(lines)):
        start, _, end = line.partition(' --coordinator_address localhost:')
        assert start == f"[{i}] train --gin_param a.b = 'c d'"
        port, _, end = end.partition(' ')
        ports.add(port)
        assert end == (
            f'--process_count 3 --process_id {i} | cpu --xla_force_host_platform_device_count=4 --xla_dump_to=x'
        )
    (port,) = ports
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', int(port)))


def test_a_word_with_spaces_stays_one_word(pod):
    _, lines, _ = finish(pod('printf "<%s>" "${@:1:3}"; echo', '1', '--', 'lm', "x = 'a  b'", '"', '$HOME *'))
    assert lines == ["[0] <x = 'a  b'><\"><$HOME *>"]


def test_only_the_chosen_process_is_shown(pod):
    code, lines, err = finish(pod('echo "I am $id"', '--only', '0', '3', '--', 'lm'))
    assert (code, lines, err) == (0, ['[0] I am 0'], '')


def test_a_failing_process_ends_the_others_and_its_code_counts(pod):
    text = 'if [ $id = 1 ]; then echo "the reason"; exit 44; fi; trap "exit 1" TERM; while :; do sleep 0.05; done'
    began = time.monotonic()
    code, lines, err = finish(pod(text, '--only', '0', '3', '--', 'lm'))
    assert code == 44
    assert time.monotonic() - began < 15
    assert '[1] the reason' in lines, 'the output of a hidden process appears when it fails'
    assert 'process 1 ended with exit code 44' in err


def test_a_process_that_ignores_sigterm_is_killed(pod):
    text = 'if [ $id = 0 ]; then exit 3; fi; trap "" TERM; for i in {1..600}; do sleep 0.05; done; exit 0'
    began = time.monotonic()
    code, _, err = finish(pod(text, '2', '--', 'lm', LOCAL_POD_GRACE='1'))
    assert code == 3
    assert time.monotonic() - began < 15
    assert 'killing 1 process(es)' in err
    assert 'process 1 ended with exit code 137' in err


@pytest.mark.parametrize('sent', [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_every_process_once(pod, sent):
    text = (
        'signals=0; trap "signals=\\$((signals + 1))" TERM; echo ready\n'
        'while [ $signals = 0 ]; do sleep 0.05; done\n'
        'sleep 0.$((id * 4)); echo "saved after $signals"; exit 42'
    )
    process = pod(text, '3', '--', 'lm', 'train')
    for _ in range(3):
        assert process.stdout.readline().endswith('] ready\n')
    process.send_signal(sent)
    code, lines, _ = finish(process)
    assert code == 42
    assert sorted(lines) == [f'[{i}] saved after 1' for i in range(3)]


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['two', '--', 'lm'], "'two': give the number of processes"),
        (['0', '--', 'lm'], "'0': give the number of processes"),
        (['2', '--'], 'no command'),
        (['2', '--', 'no-such-program'], 'no-such-program: no such command'),
        (['--devices', 'x', '2', '--', 'lm'], "--devices 'x': give a number"),
    ],
)
def test_wrong_usage_is_one_error_line(pod, arguments, message):
    code, lines, err = finish(pod(SHOW, *arguments))
    assert (code, lines) == (2, [])
    assert message in err
    assert len(err.splitlines()) == 1


def test_help_shows_an_example(pod):
    code, lines, _ = finish(pod(SHOW, '-h'))
    assert code == 0
    assert any('scripts/local_pod.sh 2 -- lm train' in line for line in lines)


def test_a_killed_process_is_reported_by_its_exit_code_alone(pod):
    code, _, err = finish(pod('if [ $id = 1 ]; then kill -KILL $$; fi', '2', '--', 'lm'))
    assert (code, err) == (137, 'local_pod.sh: process 1 ended with exit code 137\n')
