"""Output that nobody reads, or that finds no disk space: training goes on, and a command that only prints ends."""

import importlib.util
import os
import pty
import shutil
import subprocess
import sys
from typing import Any

import pytest
import tiny

from lm.output import WITHOUT_TPU, lasting, quiet_libtpu


def command(*arguments: str) -> list[str]:
    return [sys.executable, '-m', 'lm.cli', *arguments]


def run_into(stdout: Any, *arguments: str, stderr: Any = subprocess.PIPE) -> subprocess.CompletedProcess:
    settings = {'env': tiny.environment(), 'cwd': tiny.ROOT, 'text': True}
    return subprocess.run(command(*arguments), stdout=stdout, stderr=stderr, **settings)


@pytest.fixture
def unread():
    """Returns the writing end of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


def test_training_goes_on_after_the_reader_of_its_output_has_ended(tiny_flags, reference_run, tmp_path):
    """The reader of stderr may end too: `2>&1 | tee` that has ended."""
    run = tmp_path / 'run'
    process = tiny.start('train', '--run_dir', str(run), *tiny_flags, cold=True)
    while not process.stdout.readline().startswith('step'):
        pass
    process.stdout.close()
    assert process.wait() == 0
    assert tiny.losses(run) == tiny.losses(reference_run[0])


def test_a_command_runs_without_streams_and_in_an_ascii_terminal(reference_run, tmp_path):
    """`>&-` closes a stream. Both cases must write the same files."""
    run = shutil.copytree(reference_run[0], tmp_path / 'run')
    (written,) = [tmp_path / 'run' / 'evaluations' / 'step-40_validation_32_disjoint.json']
    for close in ('>&-', '<&- >&- 2>&-'):
        written.unlink(missing_ok=True)
        lines = ['sh', '-c', f'exec "$@" {close}', 'sh', *command('evaluate', '--run_dir', str(run))]
        assert subprocess.run(lines, env=tiny.environment(), cwd=tiny.ROOT).returncode == 0
        assert written.exists()
    plain = tiny.environment(PYTHONIOENCODING='ascii')
    done = subprocess.run(command('inspect', str(run)), env=plain, cwd=tiny.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()


def test_the_first_lost_output_is_reported(monkeypatch, capfd):
    reading, writing = os.pipe()
    monkeypatch.setattr(sys, 'stdout', os.fdopen(writing, 'w'))
    with lasting('lm train'):
        os.close(reading)
        for _ in range(3):
            print('a line', flush=True)
    sys.stdout.close()
    assert capfd.readouterr().err == 'lm train: output is lost (Broken pipe); the work goes on\n'


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='no /dev/full here')
def test_training_goes_on_when_its_output_finds_no_disk_space(tiny_flags, tmp_path):
    settings = [*tiny_flags, *tiny.params({'train.steps': 12, 'train.eval_every': None})]
    with open('/dev/full', 'w') as full:
        done = run_into(full, 'train', '--run_dir', str(tmp_path / 'run'), *settings)
    assert done.returncode == 0, done.stderr
    assert len(tiny.losses(tmp_path / 'run')) == 12
    assert done.stderr.count('output is lost (No space left on device)') == 1


@pytest.mark.skipif(not shutil.which('setsid'), reason='needs setsid')
def test_a_closed_terminal_saves_the_run(tiny_flags, reference_run, tmp_path):
    run = tmp_path / 'run'
    terminal, its_end = pty.openpty()
    process = subprocess.Popen(
        ['setsid', '--ctty', '--wait', *command('train', '--run_dir', str(run), *tiny_flags)],
        env=tiny.environment(),
        cwd=tiny.ROOT,
        stdin=its_end,
        stdout=its_end,
        stderr=its_end,
    )
    os.close(its_end)
    said = b''
    while b'step  1/40' not in said:  # all steps together take half a second
        said += os.read(terminal, 1000)
    os.close(terminal)
    assert process.wait(timeout=120) == 42
    saved = max(int(path.name) for path in (run / 'checkpoints').iterdir() if path.name.isdigit())
    assert 1 <= saved < 40
    assert tiny.lm('train', '--run_dir', str(run), *tiny_flags).returncode == 0
    assert tiny.losses(run) == tiny.losses(reference_run[0])


def test_a_command_that_only_prints_ends_without_a_reader(reference_run, unread):
    done = run_into(unread, 'inspect', str(reference_run[0]))
    assert (done.returncode, done.stderr) == (141, '')


@pytest.mark.skipif(not os.path.exists('/dev/full'), reason='no /dev/full here')
@pytest.mark.parametrize('unbuffered', ['', '1'])
@pytest.mark.parametrize(
    ('words', 'said', 'code'),
    [
        ('--version', 'lm: error: the output cannot be written (No space left on device); make room', 1),
        ('help', 'lm help: error: the output cannot be written (No space left on device); make room', 1),
        ('train --help', 'lm: error: the output cannot be written (No space left on device); make room', 1),
        ('reproduce --list', 'lm reproduce: output is lost (No space left on device); the work goes on', 0),
    ],
)
def test_a_full_disk_is_reported_however_late_python_writes(words, said, code, unbuffered):
    """Python keeps the output back until the end of a command, without PYTHONUNBUFFERED."""
    settings = {'env': tiny.environment(PYTHONUNBUFFERED=unbuffered), 'cwd': tiny.ROOT, 'text': True}
    with open('/dev/full', 'w') as full:
        done = subprocess.run(command(*words.split()), stdout=full, stderr=subprocess.PIPE, **settings)
    assert (done.returncode, done.stderr.count('\n')) == (code, 1)
    assert said in done.stderr


def test_the_exit_code_of_an_error_needs_no_reader(tmp_path, unread):
    refused = 'train', '--run_dir', str(tmp_path / 'run'), '--gin_param', 'train.steps = -1'
    for words in (refused, ('trian',)):
        assert run_into(unread, *words, stderr=unread).returncode == 2


def test_warnings_look_alike_before_and_after_a_library_has_logged():
    code = """
import logging, sys
sys.orig_argv = ['lm']  # it is the program
import lm.cli
import absl.logging
for _ in range(2):
    logging.getLogger('lm.pod.preemption').warning('told to stop')
    absl.logging.vlog(1, 'which sets a form of its own where there is none')
"""
    done = subprocess.run([sys.executable, '-c', code], env=tiny.environment(), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, 'told to stop\n' * 2)


def test_lines_of_native_code_are_left_out():
    """Python's own lines stay, in the order of their prints, and so does what else native code prints."""
    code = """
import os, sys, time
from lm.output import lasting, leave_out_lines
with lasting('lm'):
    print('before [Gloo]')
    leave_out_lines(b'[Gloo] ')
    print('[Gloo] of Python')
    os.write(1, b'[Gloo] Rank 0 is connected to 1 peer ranks\\n')
    os.write(1, b'native\\n')
    sys.stdout.flush()
    time.sleep(0.3)
"""
    done = subprocess.run([sys.executable, '-c', code], cwd=tiny.ROOT, env=tiny.environment(), capture_output=True)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.decode().splitlines()) == ['[Gloo] of Python', 'before [Gloo]', 'native']


@pytest.mark.parametrize(
    ('devices', 'variables', 'is_quiet'),
    [
        ([], {}, True),
        (['/dev/accel0'], {}, False),
        ([], {'TPU_WORKER_ID': '0'}, False),
        ([], {'JAX_PLATFORMS': 'tpu'}, False),
        ([], {'JAX_PLATFORMS': 'cpu'}, True),
    ],
)
def test_libtpu_is_quiet_where_there_is_no_tpu(devices, variables, is_quiet, monkeypatch):
    for name in [name for name in os.environ if name.startswith(('TPU_', 'CLOUD_TPU_', 'JAX_PLATFORMS'))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr('glob.glob', lambda pattern: [d for d in devices if d.startswith(pattern[:8])])
    kept = dict(os.environ)
    quiet_libtpu()
    added = {name: os.environ[name] for name in os.environ.keys() - kept.keys()}
    for name in added:
        monkeypatch.delenv(name)
    assert added == (WITHOUT_TPU if is_quiet else {})


@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is not installed')
def test_a_command_with_libtpu_prints_none_of_its_lines(reference_run):
    """This machine has no TPU."""
    environment = {name: value for name, value in tiny.environment().items() if not name.startswith('TPU_')}
    words = command('generate', '--run_dir', str(reference_run[0]), '--prompt', 'a', '--max_tokens', '1')
    done = subprocess.run(words, env=environment, cwd=tiny.ROOT, capture_output=True, text=True)
    assert done.returncode == 0
    assert len(done.stderr.splitlines()) == 1, done.stderr  # its own, with the count of tokens
    assert 'TPU' not in done.stderr
