"""A run whose process dies goes on from the memory of its host, and ends like an undisturbed run."""

import json
import pathlib
import re
import signal
import time

import pytest
import tiny
from planted_memory import plant
from workshop import BRAKE, Shape, Workshop, logged, saved

from lm import cli
from lm.checkpoint.shared_memory import SharedMemory
from lm.runs.run_dir import RunDir
from lm.session.train import find_fault_of_kept

KEPT = {'checkpoint__memory_every': 2, 'checkpoint__save_every_steps': 1000}


def list_files(run: pathlib.Path) -> list[pathlib.Path]:
    folder = SharedMemory(run, '').folder
    return sorted(folder.iterdir()) if folder.exists() else []


@pytest.mark.timeout(1200)
@pytest.mark.parametrize('processes', [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_from_memory(processes, tmp_path):
    shop, shape = Workshop(tmp_path), Shape(processes=processes, devices=2, steps=30)
    shop.nursery = tiny.nursery()
    run = shop.place('memory')
    for step, last in ((7, 0), (15, 6)):
        session = shop.start(shape, run, launcher=BRAKE, **KEPT)
        assert session.wait_for(f'step {step}/'), session.output()
        assert (session.resumed_from() or 0) >= last, session.output()
        session.send(signal.SIGKILL, processes - 1)
        assert session.end() in (42, -signal.SIGKILL), session.output()
        assert not saved(run)
        assert len(list_files(run)) == 2 * processes
    newest = logged(run)
    session = shop.finish(shape, run, **KEPT)
    assert newest - 3 <= session.resumed_from() <= newest
    assert 'of the memory of the hosts' in session.output()
    shop.same_end(shape, run)
    assert not list_files(run)


@pytest.mark.timeout(600)
def test_a_damaged_state_in_memory_is_one_line_and_the_directory_counts(tmp_path):
    shop, shape = Workshop(tmp_path), Shape(steps=30)
    shop.nursery = tiny.nursery()
    run = shop.place('memory')
    kept = KEPT | {'checkpoint__save_every_steps': 5}
    session = shop.start(shape, run, launcher=BRAKE, **kept)
    assert session.wait_for('step 9/'), session.output()
    while not saved(run):  # the first save ends in the background
        assert session.processes[0].poll() is None, session.output()
        time.sleep(0.01)
    session.send(signal.SIGKILL)
    session.end()
    newest = max(saved(run))
    for path in list_files(run):
        data = bytearray(path.read_bytes())
        data[1000] ^= 1
        path.write_bytes(data)
    session = shop.finish(shape, run, **kept)
    lines = [line for line in session.output().splitlines() if 'in memory is not used' in line]
    assert 1 <= len(lines) <= 2
    assert session.resumed_from() == newest
    assert not list_files(run)
    shop.same_end(shape, run)


def test_a_session_without_memory_forgets_older_states(tiny_flags, tmp_path):
    """The next session with memory would go on from a state that the run has left, after a rewind for example."""
    run = tmp_path / 'run'
    folder = SharedMemory(run, '').folder
    folder.mkdir(mode=0o700)
    (folder / '0.0').write_bytes(b'an older state')
    assert cli.main(['train', '--run_dir', str(run), *tiny_flags, *tiny.params({'train.steps': 6})]) == 0
    assert not list_files(run)


def test_a_planted_state_of_a_step_that_the_run_does_not_have_is_one_line(tiny_flags, tmp_path, monkeypatch, caplog):
    run, settings = tmp_path / 'run', {'checkpoint.memory_every': 1, 'train.steps': 6}
    train = ['train', '--run_dir', str(run), *tiny_flags, *tiny.params(settings)]
    with monkeypatch.context() as patch:
        patch.setattr(SharedMemory, 'delete', lambda self: None)  # as after a kill
        assert cli.main(train) == 0
    assert len(list_files(run)) == 2
    plant(SharedMemory(run, '').folder, step=10**9)
    assert cli.main(train) == 0
    (line,) = (record.getMessage() for record in caplog.records if 'in memory' in record.getMessage())
    assert re.fullmatch('the state of step 1000000000 in memory is not used: /dev/shm/.*: the run has 6 steps', line)
    assert logged(run) == 6
    assert not list_files(run)


def test_a_kept_state_seals_the_lines_that_are_there(tmp_path):
    run = RunDir(tmp_path)
    with run.metrics() as metrics:
        metrics.write({'kind': 'train', 'step': 1, 'loss': 2.0})
        seal = metrics.seal()
    assert find_fault_of_kept(run, 5, 1, seal) is None
    assert find_fault_of_kept(run, 5, 6, seal) == 'the run has 5 steps'
    assert find_fault_of_kept(run, 5, 1, {}) == 'it does not seal the lines of metrics.jsonl'
    assert 'are gone' in find_fault_of_kept(run, 5, 1, seal | {'metrics_lines': 2})
    run.metrics_file.write_text(run.metrics_file.read_text().replace('2.0', '1.0'))
    assert 'another history, for in metrics.jsonl its line 1 has changed' in find_fault_of_kept(run, 5, 1, seal)


def test_states_from_before_a_rewind_are_states_of_another_run(tmp_path):
    run = RunDir(tmp_path)
    known = set()
    for rewinds in ([], [{'to': 3}], [{'to': 3}, {'to': 3}]):
        run.info.write_text(json.dumps({'started': 'today', 'rewinds': rewinds}))
        known.add(run.read_id())
    assert len(known) == 3
    assert 'today' in known, 'states of runs that were never rewound are found after an update'
