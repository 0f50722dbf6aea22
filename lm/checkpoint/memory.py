"""The host memory of a restore: how much is under way at a time, and that it goes back to the system."""

import contextlib
import ctypes
import threading
from collections.abc import Iterator


class ReadBudget:
    """Lets blocks run side by side as long as what they take together is at most `limit`; one alone may take more."""

    def __init__(self, limit: int):
        self.limit = limit
        self._taken = 0
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def spent(self, amount: int) -> Iterator[None]:
        """A block that takes `amount`; waits until there is room for it."""
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
