"""A damaged, edited or full run directory is refused in one line or repaired; nothing is lost silently."""

import json
import re
import shutil
import signal
import subprocess
import sys

import pytest
import tiny

import lm.cli

FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
from lm.cli import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.fixture
def run(reference_run, tmp_path):
    """Returns a copy of the finished reference run."""
    return shutil.copytree(reference_run[0], tmp_path / 'run')


def contents(run) -> dict:
    return {path: path.read_bytes() for path in run.rglob('*') if path.is_file()}


def refuse(run, capsys, code: int, *words: str, flags=()) -> None:
    """Checks that `lm train` ends with this code and one line with these words, and changes nothing."""
    before = contents(run)
    capsys.readouterr()
    assert lm.cli.main(['train', '--run_dir', str(run), *flags]) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert all(word in lines[0] for word in words), lines[0]
    assert contents(run) == before


def same_end(run, reference) -> None:
    assert tiny.losses(run) == tiny.losses(reference)
    assert tiny.losses(run, 'eval') == tiny.losses(reference, 'eval')
    assert tiny.checksums(run, 40) == tiny.checksums(reference, 40)


@pytest.mark.smoke
def test_without_its_checkpoints_a_run_is_not_started_again(run, tiny_flags, capsys):
    shutil.rmtree(run / 'checkpoints')
    refuse(run, capsys, 44, 'was saved at step 40', 'holds no checkpoint; mount or restore', flags=tiny_flags)
    (run / 'checkpoints').mkdir()  # an empty mount
    refuse(run, capsys, 44, 'was saved at step 40')


def test_an_edited_config_gin_is_detected(run, tiny_flags, capsys):
    config = run / 'config.gin'
    text = config.read_text()
    config.write_text(text.replace('train.seed = 0', 'train.seed = 3'))
    refuse(run, capsys, 44, 'by the record of 40 in checkpoints', 'train.seed was 0, now 3')
    for change in ('', None):
        config.write_text(change) if change is not None else config.unlink()
        flags = [*tiny_flags, *tiny.params({'train.seed': 3})]
        refuse(run, capsys, 44, 'by the record of 40 in checkpoints', 'train.seed was 0, now 3', flags=flags)


def test_the_same_flags_restore_a_lost_config_gin_and_damaged_files(run, tiny_flags, reference_run):
    shutil.rmtree(run / 'checkpoints' / '40')
    config = (run / 'config.gin').read_text()
    (run / 'config.gin').write_text('')
    (run / 'run.json').write_text('{"started": 3, "starts": "no')
    metrics = (run / 'metrics.jsonl').read_bytes()
    (run / 'metrics.jsonl').write_bytes(b'\xff\xfe\n' + metrics.replace(b'\n', b'\n{"kind": \n', 3))
    (run / 'checkpoints' / '20').mkdir(exist_ok=True)
    done = tiny.lm('train', '--run_dir', str(run), *tiny_flags)
    assert done.returncode == 0, done.stderr
    assert 'Traceback' not in done.stderr
    for words in ('run.json could not be read', 'config.gin could not be read', 'line 1 (and 3 more) is not a record'):
        assert words in done.stderr
    assert 'resumed from step 30' in done.stdout
    same_end(run, reference_run[0])
    assert (run / 'config.gin').read_text() == config
    assert (run / 'metrics.jsonl.damaged').read_bytes().startswith(b'\xff\xfe\n')


def test_a_run_that_was_killed_before_its_first_checkpoint_says_so(tiny_flags, reference_run, tmp_path):
    run = tmp_path / 'run'
    process = tiny.start('train', '--run_dir', str(run), *tiny_flags)
    tiny.wait_for_step(run, 2, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    shutil.rmtree(run / 'checkpoints')  # if it was quicker than the signal
    (run / 'checkpoints').mkdir()
    saved = json.loads((run / 'run.json').read_text())['saved_step']
    done = tiny.lm('train', '--run_dir', str(run), *tiny_flags)
    assert done.returncode == (44 if saved else 0), done.stderr
    if not saved:
        assert 'starts at step 0 again: no checkpoint was written yet' in done.stderr
        same_end(run, reference_run[0])


def test_a_run_that_was_killed_before_its_save_was_noted_and_lost_its_checkpoints_is_refused(run, tiny_flags, capsys):
    info = json.loads((run / 'run.json').read_text())
    (run / 'run.json').write_text(json.dumps(info | {'saved_step': None}))
    shutil.rmtree(run / 'checkpoints')
    refuse(run, capsys, 44, 'had reached step 40', 'mount or restore that folder', flags=tiny_flags)


def test_a_run_is_rewound_and_the_same_command_repeated_goes_on(run, tiny_flags, reference_run):
    """The first command is killed after the rewind, before the next checkpoint. Then come the same command, and the
    command without the flag."""
    flags = [*tiny_flags, *tiny.params({'optimizer.peak_learning_rate': 1e-3, 'train.skip_batches': [[35, 37]]})]
    command = ['train', '--run_dir', str(run), *flags]
    process = tiny.start(*command, '--rewind_to', '30')
    while 'optimizer.peak_learning_rate = 0.001' not in (run / 'config.gin').read_text():  # config.gin is written last
        assert process.poll() is None, process.communicate()[0]
    tiny.stop(process, signal.SIGKILL)
    assert not (run / 'checkpoints' / '40').exists()
    assert (run / 'checkpoints' / '40.abandoned').exists()

    done = tiny.lm(*command, '--rewind_to', '30')
    assert done.returncode == 0, done.stderr
    assert 'resumed from step 30' in done.stdout
    ours, theirs = tiny.losses(run), tiny.losses(reference_run[0])
    assert list(ours) == list(theirs)
    assert all((ours[step] == theirs[step]) == (step <= 31) for step in ours)
    (rewind,) = json.loads((run / 'run.json').read_text())['rewinds']
    assert (rewind['to'], rewind['from']) == (30, 40)
    changed = {name: (old, new) for name, old, new in rewind['changed']}
    assert changed['optimizer.peak_learning_rate'] == ('0.003', '0.001')

    end = tiny.checksums(run, 40)
    for extra in (['--rewind_to', '30'], []):
        done = tiny.lm(*command, *extra)
        assert done.returncode == 0, done.stderr
        assert 'resumed from step 40' in done.stdout
        assert tiny.checksums(run, 40) == end


def test_a_rewind_to_an_absent_step_or_a_step_of_another_model_is_refused(run, tiny_flags, capsys):
    refuse(run, capsys, 2, 'checkpoint step 5: not in', 'which has 30, 40', flags=[*tiny_flags, '--rewind_to', '5'])
    other = [*tiny_flags, *tiny.params({'model.d_model': 64}), '--rewind_to', '30']
    refuse(run, capsys, 44, 'model.d_model was 32, now 64', flags=other)
    rate = [*tiny_flags, *tiny.params({'optimizer.peak_learning_rate': 1e-3})]
    refuse(run, capsys, 44, 'optimizer.peak_learning_rate was 0.003, now 0.001', flags=rate)


def test_batches_that_were_read_cannot_be_left_out(run, tiny_flags, capsys):
    for ranges, words in (([[10, 12]], 'is behind'), ([[5, 3]], 'names no batches'), ([[-1, 3]], 'names no batches')):
        flags = [*tiny_flags, *tiny.params({'train.skip_batches': ranges})]
        refuse(run, capsys, 2, 'train.skip_batches', words, flags=flags)


FULL_AT = {
    4000: 'tokenizer.model cannot be written',
    8000: 'metrics.jsonl cannot be written',
    20_000: 'checkpoint step 10',
}


@pytest.mark.parametrize(('size', 'what'), FULL_AT.items())
def test_a_full_disk_is_one_error_line_and_leaves_no_half_written_file(tiny_flags, reference_run, tmp_path, size, what):
    run = tmp_path / 'run'
    many = tiny.params({'train.eval_every': 1})  # metrics.jsonl is then longer than config.gin
    command = [sys.executable, '-c', FULL, str(size), 'train', '--run_dir', str(run), *tiny_flags, *many]
    full = subprocess.run(command, env=tiny.environment(), capture_output=True, text=True, cwd=tiny.ROOT)
    assert full.returncode == 1, full.stderr
    (line,) = full.stderr.splitlines()
    assert what in line
    assert re.search('File too large.*make room', line)
    metrics = run / 'metrics.jsonl'
    for text in metrics.read_text().splitlines(keepends=True) if metrics.exists() else ():
        assert text.endswith('\n')
        json.loads(text)
    assert not (run / 'lock.json').exists()
    done = tiny.lm('train', '--run_dir', str(run), *tiny_flags)
    assert done.returncode == 0, done.stderr
    same_end(run, reference_run[0])


def test_an_unwritable_folder_is_one_error_line(tiny_flags, capsys):
    assert lm.cli.main(['train', '--run_dir', '/proc/run', *tiny_flags]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert 'lock.json cannot be written' in line


def test_a_directory_of_somebody_else_is_left_alone(tiny_flags, tmp_path, capsys):
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'config.gin').write_text('train.seed = 3\n')
    (tmp_path / 'run' / 'metrics.jsonl').write_text('{"kind": "train", "step": 7, "loss": 1.0}\n')
    refuse(tmp_path / 'run', capsys, 2, 'is not of a run of lm train; name another directory', flags=tiny_flags)
