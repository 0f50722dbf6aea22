"""Progress of a long job: a bar with rate and time left on a terminal, a plain line every ten seconds elsewhere."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from lm.text import format_duration

PLAIN_SECONDS = 10.0


class Meter:
    """Bytes and tokens done of a known number of bytes; `with Meter(…) as meter: meter.update(bytes, tokens)`."""

    def __init__(self, console: Console, title: str, total_bytes: int, done_bytes: int = 0):
        """`done_bytes` were done by an earlier run: they count for the share, not for the rate."""
        self.console, self.title, self.total, self.before = console, title, max(1, total_bytes), done_bytes
        self.start = self.printed = time.monotonic()
        self._progress: Progress | None = None

    def __enter__(self) -> 'Meter':
        if self.console.is_terminal:
            columns = (
                TextColumn('{task.description}'),
                BarColumn(),
                TextColumn('{task.percentage:3.0f} %  {task.fields[rate]}'),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=self.console, transient=True)
            self._task = self._progress.add_task(self.title, total=self.total, completed=self.before, rate='')
            self._progress.start()
        return self

    def __exit__(self, *_) -> None:
        if self._progress:
            self._progress.stop()

    def update(self, done: int, tokens: int) -> None:
        """`done` bytes and `tokens` tokens since the beginning of this run."""
        seconds = max(1e-9, time.monotonic() - self.start)
        rate = f'{done / seconds / 1e6:.1f} MB/s  {tokens / seconds / 1e6:.2f} M tokens/s'
        if self._progress:
            self._progress.update(self._task, completed=min(self.total, self.before + done), rate=rate)
        elif time.monotonic() - self.printed >= PLAIN_SECONDS:
            self.printed = time.monotonic()
            left = max(0, self.total - self.before - done) * seconds / done if done else 0
            share = min(1.0, (self.before + done) / self.total)
            self.console.print(f'{self.title}: {share:.0%}  {rate}  {format_duration(left)} left')
