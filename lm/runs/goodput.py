"""Goodput: the share of the wall clock of a run that went into steps that count, and the accounts of the rest.

The ledger is cumulative over all starts of a run. Each moment is charged to one account. The accounts
(`ACCOUNTS`) therefore add up to the wall clock since the first start, without the time in which the run was finished.
"""

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from lm.files import JsonObject
from lm.text import format_duration

T = TypeVar('T')


ACCOUNTS = (
    *('step', 'imports', 'start', 'initialize', 'restore', 'trace', 'compile', 'data', 'checkpoint', 'evaluation'),
    *('replay', 'lost', 'restart'),
)
"""The accounts, whose meanings the page on files has (`Accounts` in docs/extensions/lm_reference/keys.py)."""


class Goodput:
    """The ledger of one process, on top of what the processes before it left behind.

    Args:
        record: what `record` of the process before returned, from run.json; None for a new run.
        begun: when this process began (seconds since the epoch).
    """

    def __init__(self, record: Mapping[str, Any] | None = None, begun: float | None = None):
        now = time.time()
        begun = read_process_start() if begun is None else begun
        self.seconds = dict.fromkeys(ACCOUNTS, 0.0)
        self.starts = 1
        self.started = begun
        if record:
            self.seconds |= record['seconds']
            self.starts = record['starts'] + 1
            self.started = record['started']
            # A clock that was set back must not make time negative; nobody waits for a run that has ended.
            self.seconds['restart'] += 0.0 if record.get('finished') else max(0.0, begun - record['updated'])
        self._before = dict(self.seconds)
        self.seconds['imports'] += max(0.0, now - begun)
        self._laps = dict(self.seconds)
        self._accounts = ['start']
        self._last = self._recorded = time.monotonic()

    @property
    def age(self) -> float:
        """Seconds since the last `record`."""
        return time.monotonic() - self._recorded

    @contextlib.contextmanager
    def charge(self, account: str) -> Iterator[None]:
        """Charges the time inside the block to `account`."""
        self._charge()
        self._accounts.append(account)
        try:
            yield
        finally:
            self._charge()
            self._accounts.pop()

    def charge_items(self, account: str, items: Iterable[T]) -> Iterator[T]:
        """Yields `items`, and charges the wait for each of them to `account`."""
        iterator = iter(items)
        while True:
            with self.charge(account):
                item = list(itertools.islice(iterator, 1))
            if not item:
                return
            yield item[0]

    def total(self, account: str) -> float:
        """Returns the seconds on an account up to now."""
        self._charge()
        return self.seconds[account]

    def read_lap(self, account: str) -> float:
        """Returns the seconds on an account since the last call; the first time, since this process began."""
        before, self._laps[account] = self._laps[account], self.total(account)
        return self._laps[account] - before

    def describe_start(self) -> str:
        """Describes the time of this process so far, the largest first: '5.0s: imports 1.9s, compile 1.2s, …'."""
        self._charge()
        spent = {account: self.seconds[account] - before for account, before in self._before.items()}
        spent |= {'lost': 0.0, 'restart': 0.0}
        largest = sorted(spent.items(), key=lambda item: -item[1])
        parts = ', '.join(f'{account} {value:.1f}s' for account, value in largest if value >= 0.05)
        return f'{sum(spent.values()):.1f}s: {parts}'

    def count_lost(self, step_seconds: float | None) -> None:
        """Counts steps as lost that came after the checkpoint, written after `step_seconds` of steps; None: no step."""
        if step_seconds is not None:
            lost = max(0.0, self.seconds['step'] - step_seconds)
            self.seconds['step'] -= lost
            self.seconds['lost'] += lost
            self._before['step'] -= lost  # they are not of this process

    def record(self, finished: bool = False) -> JsonObject:
        """Returns the ledger at this moment as JSON; `finished` is True after the last step."""
        self._charge()
        self._recorded = self._last
        seconds = {account: round(value, 3) for account, value in self.seconds.items()}
        return {
            'share': round(share(seconds), 4),
            'seconds': seconds,
            'starts': self.starts,
            'started': round(self.started, 3),
            'updated': round(time.time(), 3),
            'finished': finished,
        }

    def _charge(self) -> None:
        now = time.monotonic()
        self.seconds[self._accounts[-1]] += now - self._last
        self._last = now


def parse_ledger(record: Any) -> JsonObject | None:
    """Returns a ledger that `Goodput.record` made; None for anything else that run.json may hold."""
    try:
        seconds = {account: float(value) for account, value in record['seconds'].items()}
        numbers = {name: float(record[name]) for name in ('share', 'started', 'updated')}
        numbers |= {'starts': int(record['starts']), 'finished': record.get('finished') is True}
        return numbers | {'seconds': dict.fromkeys(ACCOUNTS, 0.0) | seconds}
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def share(seconds: Mapping[str, float]) -> float:
    """Returns the productive share of the wall clock."""
    total = sum(seconds.values())
    return seconds['step'] / total if total else 0.0


def describe(record: Mapping[str, Any]) -> str:
    """Describes a ledger: '93 % of 2 h 10 min in steps; compile 3 %, evaluation 2 %, …', the largest first."""
    seconds = record['seconds']
    total = sum(seconds.values()) or 1.0
    rest = sorted(((value, account) for account, value in seconds.items() if account != 'step'), reverse=True)
    places = ', '.join(f'{account} {100 * value / total:.1f}%' for value, account in rest if value / total >= 0.0005)
    starts = f' ({record["starts"]} starts)' if record['starts'] > 1 else ''
    return f'{100 * share(seconds):.1f}% of {format_duration(total)} in steps{starts}' + (
        f'; {places}' if places else ''
    )


def read_process_start() -> float:
    """Returns the start of this process in seconds since the epoch; without Linux's /proc, the time now."""
    try:
        # The name of the program, in brackets, may contain anything.
        ticks = int(Path('/proc/self/stat').read_text().rpartition(')')[2].split()[19])
        age = float(Path('/proc/uptime').read_text().split()[0]) - ticks / 100
        return time.time() - max(0.0, age)
    except (OSError, ValueError, IndexError):
        return time.time()
