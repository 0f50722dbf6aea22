"""A save by several processes: they wait for each other, and the save fails in all of them or in none.

Orbax's own barrier waits twenty minutes for a process whose write has failed and that never comes. This barrier is a
few keys in the store of jax.distributed, where the waiting processes see a failure:

    lm/saves/<n>/failed/<process>       what went wrong there
    lm/saves/<n>/<barrier>/at/<process> it has come
    lm/saves/<n>/<barrier>/done         process 0: all have come
"""

import collections
import itertools
import sys
import time
from typing import Any

import jax

from lm.checkpoint.snapshot import describe_error

POLL_SECONDS = 0.02
"""How often process 0 counts who has come; it asks itself."""
LOOK_SECONDS = 1.0
"""How often the others look whether somebody has failed."""
ALWAYS = 'ThreadSaveMultiHostValueHolder'
"""How the names begin of the barriers to which Orbax comes in every process, whatever has happened: two of them when a
save begins, and once more when it has ended."""
LAST = f'{ALWAYS}:set_value_end', 2
"""The last barrier of a save: its name, and how often a save has come to it by then."""


class ElsewhereError(Exception):
    """The save has failed in another process, whose message explains it."""


class SaveBarrier:
    """A barrier for `orbax.checkpoint.AsyncOptions`. Call `begin` before each save, in all processes.

    Orbax comes to the last barrier of a save while an exception is on its way where there was one: this is how a
    failure is noticed.

    Args:
        client: of jax.distributed, or what has its key-value methods.
        index, count: this process, of how many.
    """

    _numbers = itertools.count(1)
    """The number of the next save of this process, across all objects: the keys stay for as long as the job."""

    def __init__(self, client: Any, index: int, count: int):
        self.client, self.index, self.count = client, index, count
        self._save = 0
        self._visits: collections.Counter = collections.Counter()

    def begin(self) -> None:
        """Begins the next save. Nobody reads the keys of the save before the last any more, so they are deleted."""
        self._save = next(self._numbers)
        self._visits.clear()
        if self.index == 0 and self._save > 2:
            self.client.key_value_delete(f'lm/saves/{self._save - 2}/')

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits until all processes have called this with `key`.

        Raises:
            ElsewhereError: another process has failed, so that it may never come.
            TimeoutError: somebody has not come in time, and nobody has failed.
        """
        error = sys.exc_info()[1]
        if error is not None:
            self.client.key_value_set(f'{self._root}/failed/{self.index}', describe_error(error), allow_overwrite=True)
        self._visits[key] += 1
        place = f'{self._root}/{key}.{self._visits[key]}'
        self.client.key_value_set(f'{place}/at/{self.index}', '')
        end = time.monotonic() + timeout_ms / 1000
        while not (self._count(place) if self.index == 0 else self._is_complete(place)):
            if not key.startswith(ALWAYS):
                self._check()
            if time.monotonic() > end:
                raise TimeoutError(f'another process has not come to {key} for {timeout_ms / 1000:.0f} s')
        if error is None and (key, self._visits[key]) == LAST:
            self._check()

    @property
    def _root(self) -> str:
        return f'lm/saves/{self._save}'

    def _count(self, place: str) -> bool:
        if len(self.client.key_value_dir_get(f'{place}/at/')) < self.count:
            time.sleep(POLL_SECONDS)
            return False
        self.client.key_value_set(f'{place}/done', '')
        return True

    def _is_complete(self, place: str) -> bool:
        try:
            self.client.blocking_key_value_get(f'{place}/done', int(LOOK_SECONDS * 1000))
        except jax.errors.JaxRuntimeError as error:
            if 'DEADLINE_EXCEEDED' not in str(error):
                raise
            return False
        return True

    def _check(self) -> None:
        for key, reason in self.client.key_value_dir_get(f'{self._root}/failed/'):
            raise ElsewhereError(f'process {key.rpartition("/")[2]}: {reason}')
