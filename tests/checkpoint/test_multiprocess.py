"""The barrier of a save. Threads stand for processes, a dictionary for the store of jax.distributed."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from lm.checkpoint import multiprocess as together
from lm.checkpoint.multiprocess import ALWAYS, ElsewhereError, SaveBarrier


class Store:
    """A store with the methods that `SaveBarrier` calls on jax.distributed's client."""

    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            assert allow_overwrite or key not in self.values, f'{key} is there already'
            self.values[key] = value
            self.changed.notify_all()

    def key_value_dir_get(self, folder):
        with self.changed:
            return [(key, value) for key, value in self.values.items() if key.startswith(folder)]

    def key_value_delete(self, folder):
        with self.changed:
            self.values = {key: value for key, value in self.values.items() if not key.startswith(folder)}

    def blocking_key_value_get(self, key, milliseconds):
        with self.changed:
            if not self.changed.wait_for(lambda: key in self.values, milliseconds / 1000):
                raise jax.errors.JaxRuntimeError('DEADLINE_EXCEEDED: it is not there')
            return self.values[key]


@pytest.fixture
def processes(monkeypatch):
    """Returns the barriers of three processes in the same save."""
    monkeypatch.setattr(together, 'LOOK_SECONDS', 0.02)
    monkeypatch.setattr(together, 'POLL_SECONDS', 0.005)
    store = Store()
    found = [SaveBarrier(store, index, 3) for index in range(3)]
    for one in found:  # each process counts for itself; here they share a class
        one._numbers = itertools.count(1)
        one.begin()
    return found


def outcomes(processes, save, timeout_ms=20_000):
    """Runs `save(process, wait)` in all processes at once; returns what each returns or raises."""

    def run(one):
        def wait(key):
            one(key=key, timeout_ms=timeout_ms)

        try:
            return save(one, wait)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(processes)) as pool:
        return list(pool.map(run, processes))


def begin_or_end(wait):
    wait(f'{ALWAYS}:set_value_start')
    wait(f'{ALWAYS}:set_value_end')


def like_orbax(fails=(), at='write'):
    """Acts like Orbax in one save: its first and last barriers always run, whatever happens between them."""

    def save(one, wait):
        begin_or_end(wait)
        try:
            if one.index in fails and at == 'write':
                raise OSError(f'disk of {one.index} is full')
            wait('written')
            if one.index in fails and at == 'commit':
                raise OSError(f'rename by {one.index}')
            wait('committed')
            if one.index in fails and at == 'end':
                raise OSError(f'{one.index} at the end')
        finally:
            begin_or_end(wait)
        return 'saved'

    return save


def test_all_processes_continue_together_and_old_keys_are_deleted(processes):
    store = processes[0].client
    for number in range(1, 5):
        assert outcomes(processes, like_orbax()) == ['saved'] * 3
        assert {key.split('/')[2] for key in store.values} == {str(n) for n in (number - 1, number) if n}
        for one in processes:
            one.begin()


@pytest.mark.parametrize('at', ['write', 'commit', 'end'])
@pytest.mark.parametrize('fails', [(0,), (2,), (0, 1)])
def test_a_failure_of_one_process_fails_all(processes, fails, at):
    found = outcomes(processes, like_orbax(fails, at))
    for index, error in enumerate(found):
        assert isinstance(error, OSError if index in fails else ElsewhereError), found
        assert index in fails or str(error).startswith(tuple(f'process {n}: OSError: ' for n in fails))
    for one in processes:
        one.begin()
    assert outcomes(processes, like_orbax()) == ['saved'] * 3


def test_waiting_for_an_absent_process_has_a_limit(processes):
    found = outcomes(processes[:2], lambda one, wait: wait('written'), timeout_ms=60)
    assert [type(error) for error in found] == [TimeoutError] * 2
    assert 'has not come to written for 0 s' in str(found[0])


def test_other_errors_of_the_store_are_not_swallowed(processes):
    def lost(*_):
        raise jax.errors.JaxRuntimeError('UNAVAILABLE: the coordinator is gone')

    processes[1].client.blocking_key_value_get = lost
    with pytest.raises(jax.errors.JaxRuntimeError, match='UNAVAILABLE'):
        processes[1](key='written', timeout_ms=1000)
