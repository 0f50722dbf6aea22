"""Training batches as a pure function of (seed, step): the state of the input pipeline is the step.

The tokens of the split are cut into windows of context_length + 1 (neighbours share one token, so that every token is
predicted once an epoch). Epoch e visits them in the order of a pseudo-random permutation keyed by (seed, e). Any number
of hosts and devices gives the same global batches; each host reads only the rows of its own devices.
"""

import abc
import collections
import concurrent.futures
import copy
from collections.abc import Generator, Iterable
from typing import Any, Protocol, Self

import jax
import numpy as np

from lm.data.permutation import Permutation
from lm.data.teacher_logits import TeacherLogits
from lm.errors import ConfigError


class Order:
    """The order of the windows of a split: example number → start offset, by a permutation of (seed, epoch)."""

    def __init__(self, n_tokens: int, context_length: int, seed: int):
        """Raises ConfigError for a split that is shorter than a window."""
        self.count = (n_tokens - 1) // context_length
        if self.count < 1:
            raise ConfigError(
                f'train.context_length = {context_length}: the split has only {n_tokens} tokens; '
                'shorten the context or prepare more text'
            )
        self.context_length, self.seed = context_length, seed
        self._epoch: tuple[int, Permutation] | None = None

    def __call__(self, example: np.ndarray) -> np.ndarray:
        """Returns start offsets, in the shape of `example`, of the windows with these numbers (from 0)."""
        epochs, index = np.divmod(example, self.count)
        window = np.empty_like(index)
        for epoch in np.unique(epochs):
            rows = epochs == epoch
            window[rows] = self._permutation(int(epoch))(index[rows])
        return window * self.context_length

    def _permutation(self, epoch: int) -> Permutation:
        found = self._epoch  # read once: batches are made by several threads
        if found is None or found[0] != epoch:
            self._epoch = found = (epoch, Permutation(self.count, self.seed, epoch))
        return found[1]


class BatchWindows(abc.ABC):
    """The windows of each step: step → start offsets of the windows of its batch. Subclasses place an example."""

    def __init__(self, context_length: int, batch_size: int, skip: tuple[tuple[int, int], ...] = ()):
        """
        Args:
            context_length: tokens predicted in a window, which is one token longer.
            batch_size: windows in a global batch.
            skip: half-open ranges of batches that no step sees, such as the batches of a loss spike.
        """
        self.context_length, self.batch_size = context_length, batch_size
        self.skip = merge_ranges(skip)

    @abc.abstractmethod
    def place(self, example: np.ndarray) -> np.ndarray:
        """Returns start offsets, in the shape of `example`, of the windows with these numbers (from 0)."""

    def by_source(self, step: int, losses_AxB: np.ndarray, targets_AxB: np.ndarray | None = None) -> dict[str, float]:
        """Returns the figures that are logged for a step besides its loss, from the mean loss of each window and its
        number of targets. None: all windows have equally many targets. A single source has no further figures."""
        return {}

    @abc.abstractmethod
    def describe(self, steps: int, path: str) -> str:
        """Returns how often the data of `path` are seen in so many steps."""

    def batch(self, step: int) -> int:
        """Returns the number of the batch of step `step`, both from 0; skipped batches count, but no step sees them."""
        batch = step
        for first, end in self.skip:
            if batch >= first:
                batch += end - first
        return batch

    def skipped_before(self, step: int) -> list[tuple[int, int]]:
        """Returns the ranges that were left out before step `step`. A checkpoint keeps them for `resume`."""
        following = self.batch(step - 1) + 1 if step else 0
        return [(first, min(end, following)) for first, end in self.skip if first < following]

    def resume(self, step: int, skipped: Iterable[tuple[int, int]] | None) -> Self:
        """Returns the windows of a run that goes on at `step`, and before it has left out the batches `skipped`.

        Those stay left out, the ranges of this object count from there on, and every other batch is seen once. None:
        not known, the ranges have been the same from the beginning.

        Raises:
            ConfigError: a range names a batch that has been seen.
        """
        if skipped is None:
            return self
        skipped = merge_ranges(skipped)
        following = step + sum(end - first for first, end in skipped)
        for first, end in self.skip:
            behind = (first, min(end, following))
            if first < following and not any(a <= behind[0] and behind[1] <= b for a, b in skipped):
                raise ConfigError(
                    f'train.skip_batches: [{first}, {end}] is behind: the run has seen all batches before {following} '
                    f'but those it left out ({[list(r) for r in skipped] or "none"}); leave out later ones, or go back '
                    'with --rewind_to'
                )
        ahead = [(max(first, following), end) for first, end in self.skip if end > following]
        resumed = copy.copy(self)
        resumed.skip = merge_ranges([*skipped, *ahead])
        return resumed

    def examples(self, step: int) -> np.ndarray:
        """Returns example numbers [batch_size] of step `step` (both from 0): the windows of all batches in a row."""
        return self.batch(step) * self.batch_size + np.arange(self.batch_size)

    def starts(self, step: int) -> np.ndarray:
        """Returns start offsets [batch_size] of the windows of step `step` (from 0)."""
        return self.place(self.examples(step))


class Windows(BatchWindows):
    """The windows of one split, in the order of its epochs."""

    def __init__(
        self, n_tokens: int, context_length: int, batch_size: int, seed: int, skip: tuple[tuple[int, int], ...] = ()
    ):
        """Takes the tokens of the split, and the seed that keys the order; for the rest see `BatchWindows`."""
        super().__init__(context_length, batch_size, skip)
        self.order = Order(n_tokens, context_length, seed)
        self.count = self.order.count

    def place(self, example: np.ndarray) -> np.ndarray:
        return self.order(example)

    def describe(self, steps: int, path: str) -> str:
        return f'{steps * self.batch_size / self.count:.3g} epochs of {path}'


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns the same batches as half-open ranges that are in order and neither overlap nor touch.

    Raises ConfigError for a range that is negative or empty, such as (5, 3).
    """
    merged: list[tuple[int, int]] = []
    for first, end in sorted(map(tuple, ranges)):
        if first < 0 or end <= first:
            raise ConfigError(
                f'train.skip_batches: [{first}, {end}] names no batches; give pairs [first, end] with '
                '0 <= first < end, of which end itself is not left out'
            )
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return merged


class WindowReader(Protocol):
    """A source of windows of tokens: a store, a mixture of stores, or the examples of a task."""

    def read_many(self, split: str, starts: Any, length: int) -> np.ndarray:
        """Reads the windows [n, length] that begin at `starts` [n]."""
        ...


class Batches:
    """Global batches on the devices: [microbatches, batch_size / microbatches, context_length + 1] token ids, or these
    among other arrays by name."""

    def __init__(
        self,
        store: WindowReader | TeacherLogits,
        split: str,
        windows: BatchWindows,
        microbatches: int,
        sharding: jax.sharding.Sharding,
    ):
        """`sharding` splits the second axis; the first is the loop of gradient accumulation."""
        self.store, self.split, self.windows, self.sharding = store, split, windows, sharding
        rows = windows.batch_size // microbatches
        self.shape = (microbatches, rows, windows.context_length + 1)

    def __call__(self, step: int) -> Any:
        """Returns the batch of step `step`; each process reads the rows of its own devices."""
        starts = self.windows.starts(step).reshape(self.shape[:2])
        places = self.sharding.addressable_devices_indices_map(self.shape)
        local = [starts[(index or ())[:2]] for index in places.values()]
        flat = np.concatenate([part.ravel() for part in local])

        def place(rows: np.ndarray) -> jax.Array:
            parts = np.split(rows, np.cumsum([part.size for part in local])[:-1])
            shards = [
                jax.device_put(part.reshape(*own.shape, *rows.shape[1:]), device)
                for part, own, device in zip(parts, local, places, strict=True)
            ]
            shape = *self.shape[:2], *rows.shape[1:]
            return jax.make_array_from_single_device_arrays(shape, self.sharding, shards)

        return jax.tree.map(place, self.store.read_many(self.split, flat, self.shape[2]))

    def prefetch(self, start: int, stop: int, depth: int = 3) -> Generator[Any, None, None]:
        """Yields the batches of steps start, …, stop - 1. Threads read and transfer them `depth` steps ahead."""
        with concurrent.futures.ThreadPoolExecutor(max_workers=2, thread_name_prefix='batches') as pool:
            ahead: collections.deque = collections.deque()
            try:
                for step in range(start, stop):
                    while len(ahead) < depth and step + len(ahead) < stop:
                        ahead.append(pool.submit(self, step + len(ahead)))
                    yield ahead.popleft().result()
            finally:
                for future in ahead:
                    future.cancel()
