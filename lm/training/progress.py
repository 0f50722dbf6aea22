"""Reports of a run for people: the rows of its plan, one line of progress, and the utilisation of the hardware."""

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping

from lm.data.batches import BatchWindows
from lm.text import format_count, format_duration, format_si, perplexity
from lm.training.step import UPDATE


def print_row(name: str, value: str, width: int = 17) -> None:
    """Prints one line of a plan; the value begins in column `width`."""
    print(f'{name:<{width}}{value}', flush=True)


def print_rows(rows: Mapping[str, str]) -> None:
    """Prints the lines of a plan."""
    for name, value in rows.items():
        print_row(name, value)


def describe_divergence(
    step: int,
    bad_steps: int,
    what: str,
    windows: BatchWindows,
    skip_batches: tuple[tuple[int, int], ...],
    saved: int | None,
) -> str:
    """Describes a divergence in `bad_steps` steps up to `step`, with remedies in this directory and in a new one.
    `saved` is the newest checkpoint here."""
    first, last = windows.batch(step - bad_steps), windows.batch(step - 1)
    others = [(a, b) for a, b in skip_batches if a < first or b > last + 1]
    batches = (
        f"with --gin_param 'train.skip_batches = {sorted([*others, (first, last + 1)])}' to leave these batches out"
    )
    # No batch is to blame for a rate that is not finite, or for an update that is not, where its gradient is.
    remedy = '' if what == 'learning rate' or what.startswith(UPDATE) else f'{batches}, or '
    return (
        f'loss, gradient or update was not finite for {format_count(bad_steps, "step")} in a row, up to step {step}, '
        f'there first: {what}; {"no step is saved" if saved is None else f"the newest checkpoint is step {saved}"}: '
        f'run it again {remedy}with a lower optimizer.peak_learning_rate '
        + ('or smaller factors of the update, such as optimizer.weight_decay, ' if what.startswith(UPDATE) else '')
        + ('in a new --run_dir' if saved is None else f'and --rewind_to {saved}')
    )


class Throughput:
    """Training time and speed. A run's checkpoints carry the seconds of its earlier sessions."""

    def __init__(self, step: int, total_steps: int, tokens_per_step: int, seconds: float = 0.0):
        self.total_steps, self.tokens_per_step = total_steps, tokens_per_step
        self._before = seconds
        self._start = self._last_time = time.perf_counter()
        self._last_step = step
        self._paused = 0.0
        self._rate: float | None = None

    @property
    def seconds(self) -> float:
        """Returns the wall time of the run without evaluation, over all its sessions."""
        return self._before + time.perf_counter() - self._start - self._paused

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Keeps the time of its block out of the training time (evaluation)."""
        start = time.perf_counter()
        try:
            yield
        finally:
            lost = time.perf_counter() - start
            self._paused += lost
            self._last_time += lost

    def tick(self, step: int) -> tuple[float, float]:
        """Returns (tokens per second since the last tick, seconds left), at the end of `step`."""
        now = time.perf_counter()
        elapsed, steps = now - self._last_time, step - self._last_step
        self._last_time, self._last_step = now, step
        if steps > 0 and elapsed > 0:
            rate = steps / elapsed
            # A moving average keeps the remaining time steady.
            self._rate = rate if self._rate is None else 0.8 * self._rate + 0.2 * rate
            return rate * self.tokens_per_step, (self.total_steps - step) / self._rate
        return 0.0, 0.0


class Progress:
    """Prints one line per logged step: a terminal rewrites the line, other outputs get a new line."""

    def __init__(self, total_steps: int, enabled: bool = True):
        self.width = len(str(total_steps))
        self.total_steps, self.enabled = total_steps, enabled
        self.terminal = sys.stdout.isatty()

    def step(self, record: dict, seconds_left: float, summary: str | None = None) -> None:
        """Prints the line of a step. `summary` describes its loss; None: the loss is a cross-entropy."""
        summary = f'ppl {perplexity(record["loss"]):.2f}' if summary is None else summary
        mfu = f'  mfu {100 * record["mfu"]:.1f}%' if record['mfu'] is not None else ''
        self._show(
            f'step {record["step"]:>{self.width}}/{self.total_steps}'
            f'  loss {record["loss"]:.4f}  {summary}  lr {record["learning_rate"]:.2e}'
            f'  grad {record["grad_norm"]:.3f}  {format_si(record["tokens_per_second"])} tok/s{mfu}'
            f'  left {format_duration(seconds_left)}'
            + (f'  skipped {record["skipped_steps"]}' if record['skipped_steps'] else '')
            + (f'  kept {format_si(record["kept_numbers"])}' if record.get('kept_numbers') else ''),
            '\r' if self.terminal else '\n',
        )

    def note(self, text: str) -> None:
        """Prints a line that stays."""
        self._show(text, '\n')

    def _show(self, text: str, end: str) -> None:
        if self.enabled:
            # \x1b[K clears the rest of a longer line before.
            print(('\r\x1b[K' if self.terminal else '') + text, end='' if end == '\r' else end, flush=True)
