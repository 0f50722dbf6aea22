"""A save and a restore take at most 1.3 times the state in host memory; the bytes read at the same time have
a limit."""

import json
import threading
import time

import jax
import numpy as np
import pytest
import tiny

from lm.checkpoint import checksum, snapshot
from lm.checkpoint.checkpointer import Checkpointer
from lm.checkpoint.memory import ReadBudget, give_back_memory


@pytest.mark.slow
def test_save_and_restore_take_little_more_than_the_state(tmp_path):
    size = {'d_model': 512, 'n_heads': 8, 'n_layers': 8, 'vocab_size': 16_000}  # 381 MiB
    flags = tiny.params({f'model.{name}': value for name, value in size.items()})
    files = ['--gin_file', 'configs/models/tiny.gin', '--json', str(tmp_path / 'c.json')]
    done = tiny.lm('bench', 'checkpoint', *files, *flags)
    assert done.returncode == 0, done.stderr
    rows = {row['name']: row for row in json.loads((tmp_path / 'c.json').read_text())['rows']}
    assert rows.keys() == {'save', 'restore'}
    for row in rows.values():
        assert row['state_mib'] > 350
        assert row['host_over_state'] <= 1.3, row


def test_a_budget_is_kept_and_a_single_large_read_may_exceed_it():
    budget, taken, most = ReadBudget(10), [], []

    def work(amount):
        with budget.spend(amount):
            taken.append(amount)
            most.append(sum(taken))
            time.sleep(0.005)
            taken.remove(amount)

    threads = [threading.Thread(target=work, args=(amount,)) for amount in (3, 4, 25, 5, 2, 9, 1, 3, 12, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(most) == 10
    assert sorted(most)[-2:] == [12, 25]  # these two were read alone, all others within the budget
    assert sorted(most)[-3] <= 10


def test_a_failed_read_returns_its_budget():
    budget = ReadBudget(1)
    for _ in range(2):
        with pytest.raises(ValueError, match='no'), budget.spend(5):
            raise ValueError('no')


def test_a_restore_reads_what_the_budget_allows(tmp_path, monkeypatch):
    state = {str(i): jax.numpy.full((64, 64), i, 'float32') for i in range(6)}
    with Checkpointer(tmp_path / 'c') as checkpoints:
        checkpoints.save(1, state)
    plain, now, most = snapshot.Snapshot._read_array, [], []

    def read(self, name, *rest):
        now.append(name)
        most.append(len(now))
        time.sleep(0.01)
        array = plain(self, name, *rest)
        now.remove(name)
        return array

    monkeypatch.setattr(snapshot.Snapshot, '_read_array', read)
    monkeypatch.setattr(snapshot, 'READ_AT_LEAST', 2 * 64 * 64 * 4)
    with Checkpointer(tmp_path / 'c') as checkpoints:
        restored, _, _ = checkpoints.restore(state)
    assert max(most) == 2
    assert all((np.asarray(restored[name]) == np.asarray(state[name])).all() for name in state)


def test_checksums_in_groups_equal_checksums_of_all_leaves_together(monkeypatch):
    arrays = {str(i): jax.numpy.arange(10 * i + 1, dtype='float32') for i in range(9)}
    together = checksum.checksums(arrays)
    monkeypatch.setattr(checksum, 'TOGETHER_AT_LEAST', 100)
    groups = [[x.size for x in group] for group in checksum.group_arrays(list(arrays.values()))]
    assert groups == [[1, 11, 21], [31], [41], [51], [61], [71], [81]]
    assert checksum.checksums(arrays) == together


def test_memory_can_be_given_back_at_any_time():
    give_back_memory()
