"""Two trainings get the same run directory."""

import json
import signal

import pytest
import tiny


@pytest.mark.smoke
def test_the_second_training_is_refused_and_the_first_is_not_disturbed(tiny_flags, reference_run, tmp_path):
    run = tmp_path / 'run'
    first = tiny.start('train', '--run_dir', str(run), *tiny_flags)
    tiny.wait_for_step(run, 1, first)
    first.send_signal(signal.SIGSTOP)
    before = {path: path.read_bytes() for path in run.rglob('*') if path.is_file() and path.name != 'lock.json'}
    second = tiny.lm('train', '--run_dir', str(run), *tiny_flags)
    assert before == {p: p.read_bytes() for p in run.rglob('*') if p.is_file() and p.name != 'lock.json'}
    first.send_signal(signal.SIGCONT)
    assert second.returncode == 2, second.stderr
    assert len(second.stderr.splitlines()) == 1
    assert f'process {first.pid} on' in second.stderr
    output, _ = first.communicate(timeout=300)
    assert first.returncode == 0, output
    assert tiny.losses(run) == tiny.losses(reference_run[0])
    assert tiny.checksums(run, 40) == tiny.checksums(reference_run[0], 40)
    assert not (run / 'lock.json').exists()


def test_a_killed_training_leaves_a_lock_that_stops_nobody(tiny_flags, tmp_path):
    run = tmp_path / 'run'
    first = tiny.start('train', '--run_dir', str(run), *tiny_flags)
    tiny.wait_for_step(run, 21, first)  # the save of step 10 is complete
    tiny.stop(first, signal.SIGKILL)
    assert json.loads((run / 'lock.json').read_text())['pid'] == first.pid
    second = tiny.lm('train', '--run_dir', str(run), *tiny_flags)
    assert second.returncode == 0, second.stderr
    assert 'resumed from step' in second.stdout
    assert f'process {first.pid} on' in second.stderr
