"""The host memory of a restore: a limit for reads in progress, and its return to the system."""

import contextlib
import ctypes
import threading
from collections.abc import Iterator


class ReadBudget:
    """A limit for blocks that run side by side: their amounts add up to at most `limit`; a lone block may take more."""

    def __init__(self, limit: int):
        self.limit = limit
        self._taken = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def spend(self, amount: int) -> Iterator[None]:
        """Reserves `amount` for the block; waits until there is room for it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._taken or self._taken + amount <= self.limit)
            self._taken += amount
        try:
            yield
        finally:
            with self._changed:
                self._taken -= amount
                self._changed.notify_all()


def give_back_memory() -> None:
    """Gives freed memory back to the system. The allocator of the GNU C library keeps blocks of up to 32 MiB, in each
    thread's arena: after a restore as much as the whole state. Other libraries do this by themselves."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
