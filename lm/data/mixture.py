"""Several token stores as one, in the shares that the configuration names.

    data.path = 'data'
    data.mixture = {'books': 0.7, 'web': 0.3}

A split of the mixture consists of the same split of each store, one after another. An offset names a token of one
store.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from lm.data.batches import BatchWindows, Order
from lm.data.shares import Shares
from lm.data.store import NamedFile, TokenStore
from lm.data.tokenizers import Tokenizer
from lm.errors import ConfigError, MismatchError
from lm.files import is_remote


class Mixture:
    """Finished token stores of one tokenizer, opened for reading; has what a `TokenStore` has.

    Attributes:
        stores: name → store, in the order of the configuration.
        weights: of each store [stores], positive numbers in any unit.
    """

    def __init__(self, stores: dict[str, TokenStore], weights: Sequence[float]):
        """Raises MismatchError if the stores have been made with different tokenizers."""
        self.stores, self.weights = stores, tuple(weights)
        first = next(iter(stores.values()))
        for store in stores.values():
            check_same_tokenizer(store, first, 'data.mixture')
        self.path = ' + '.join(store.path for store in stores.values())
        self.vocab_size = first.vocab_size
        self._first = first

    @classmethod
    def open(cls, path: str, mixture: Sequence[tuple[str, float]], timeout: float | None = None) -> 'Mixture':
        """Opens the stores that `mixture` names, below `path` where that is not empty.

        Raises what `TokenStore.open` raises, and MismatchError if their tokenizers differ.
        """
        is_whole = [not path or is_remote(place) or place.startswith(('/', '~')) for place, _ in mixture]
        below = f'{path.rstrip("/")}/'
        places = [place if alone else below + place for (place, _), alone in zip(mixture, is_whole, strict=True)]
        stores = {name: TokenStore.open(place, timeout) for name, place in zip(names(mixture), places, strict=True)}
        return cls(stores, [weight for _, weight in mixture])

    @property
    def fingerprints(self) -> dict[str, str]:
        """Name → value that a checkpoint depends on: the tokens of all stores, in order, and their tokenizer."""
        content = json.dumps([store.fingerprint for store in self.stores.values()])
        return self._first.fingerprints | {'data': hashlib.sha256(content.encode()).hexdigest()}

    @property
    def info(self) -> dict[str, Any]:
        """The part of dataset.json that all stores have in common."""
        return {'tokenizer': self._first.info['tokenizer']}

    @property
    def begin_id(self) -> int | None:
        """The token that documents of the stores begin with; None: none."""
        return next((store.begin_id for store in self.stores.values() if store.begin_id is not None), None)

    def parts(self, split: str) -> dict[str, TokenStore]:
        """Returns name → store of the sources that have the split. Raises ConfigError if none has it."""
        found = {name: store for name, store in self.stores.items() if split in store.splits}
        if not found:
            self._first.tokens(split)
        return found

    def tokens(self, split: str) -> int:
        return sum(store.tokens(split) for store in self.parts(split).values())

    def documents(self, split: str) -> int:
        return sum(store.documents(split) for store in self.parts(split).values())

    def bytes(self, split: str) -> int:
        return sum(store.bytes(split) for store in self.parts(split).values())

    def words(self, split: str) -> int:
        return sum(store.words(split) for store in self.parts(split).values())

    def copied_share(self, split: str) -> float | None:
        """Returns the same as `TokenStore.copied_share`; None if it is not known of some store."""
        shares = [(store.copied_share(split), store.tokens(split)) for store in self.parts(split).values()]
        known = [(share * tokens, tokens) for share, tokens in shares if share is not None]
        return sum(own for own, _ in known) / sum(own for _, own in known) if len(known) == len(shares) else None

    def read(self, split: str, start: int, stop: int) -> np.ndarray:
        """Returns token ids [stop - start], uint16 or uint32, of one store."""
        return self.read_many(split, [start], stop - start)[0]

    def read_many(self, split: str, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """Windows [n, length] of token ids, each of one store; see `TokenStore.read_many`."""
        return self._read_many(split, starts, length, 'read_many')

    @property
    def marks_answers(self) -> bool:
        """Only some tokens of some stores are predicted in training."""
        return any(store.marks_answers for store in self.stores.values())

    def read_marked(self, split: str, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """Windows [n, length], each of one store; see `TokenStore.read_marked`."""
        return self._read_many(split, starts, length, 'read_marked')

    def _read_many(self, split: str, starts: Sequence[int] | np.ndarray, length: int, how: str) -> np.ndarray:
        parts = self.parts(split)
        starts, ends = np.asarray(starts, np.int64), np.cumsum([store.tokens(split) for store in parts.values()])
        source = np.searchsorted(ends, starts, side='right')
        dtypes = [np.int32] if how == 'read_marked' else [store.info['dtype'] for store in parts.values()]
        windows = np.empty((len(starts), length), np.result_type(*dtypes))
        for i, store in enumerate(parts.values()):
            own = source == i
            if own.any():
                windows[own] = getattr(store, how)(split, starts[own] - (ends[i - 1] if i else 0), length)
        return windows

    def read_tokenizer_file(self) -> NamedFile:
        return self._first.read_tokenizer_file()

    def tokenizer(self) -> Tokenizer:
        return self._first.tokenizer()


class MixedWindows(BatchWindows):
    """Windows of several stores in exact shares: of any N consecutive windows each store has its share, to less than 2
    windows (`lm.data.shares`). Each store has epochs and an order of its own."""

    def __init__(
        self,
        mixture: Mixture,
        split: str,
        context_length: int,
        batch_size: int,
        seed: int,
        skip: tuple[tuple[int, int], ...] = (),
    ):
        super().__init__(context_length, batch_size, skip)
        self.shares, self.names = Shares(mixture.weights), list(mixture.stores)
        self.orders, self._bases, base = [], [], 0
        for i, (name, store) in enumerate(mixture.stores.items()):
            tokens = store.tokens(split)
            try:
                self.orders.append(Order(tokens, context_length, _seed(seed, i)))
            except ConfigError as error:
                raise ConfigError(f'{error} (source {name!r} of data.mixture)') from None
            self._bases.append(base)
            base += tokens

    def place(self, example: np.ndarray) -> np.ndarray:
        source, number = self.shares(example)
        starts = np.empty_like(number)
        for i, order in enumerate(self.orders):
            own = source == i
            if own.any():
                starts[own] = order(number[own]) + self._bases[i]
        return starts

    def sources(self, step: int) -> np.ndarray:
        """Returns the source of each window of step `step` [batch_size], an index into `names`."""
        return self.shares(self.examples(step))[0]

    def epochs(self, step: int) -> dict[str, float]:
        """Returns how often each source was seen before step `step`, with the batches that were left out."""
        taken = self.shares.taken(self.batch(step) * self.batch_size)
        return {name: int(n) / order.count for name, n, order in zip(self.names, taken, self.orders, strict=True)}

    def by_source(self, step: int, losses_AxB: np.ndarray, targets_AxB: np.ndarray | None = None) -> dict[str, float]:
        """The mean loss over the targets of each source that has some in the step, loss/NAME, and how often each has
        been seen after it, epochs/NAME."""
        sources, losses = self.sources(step), np.asarray(losses_AxB, np.float64).ravel()
        targets = np.ones(len(losses)) if targets_AxB is None else np.asarray(targets_AxB, np.float64).ravel()
        owned = {name: (sources == i) & (targets > 0) for i, name in enumerate(self.names)}
        here = {name: own for name, own in owned.items() if own.any()}
        means = {f'loss/{name}': float(np.average(losses[own], weights=targets[own])) for name, own in here.items()}
        return means | {f'epochs/{name}': seen for name, seen in self.epochs(step + 1).items()}

    def describe(self, steps: int, path: str) -> str:
        shares, epochs = self.shares.counts / self.shares.period, self.epochs(steps)
        parts = [f'{epochs[n]:.3g} epochs of {n} ({100 * s:.4g} %)' for n, s in zip(self.names, shares, strict=True)]
        return ', '.join(parts)


def names(mixture: Sequence[tuple[str, float]]) -> list[str]:
    """Returns the names of the sources: the last parts of their paths."""
    return [place.rstrip('/').rpartition('/')[2] for place, _ in mixture]


def check_mixture(mixture: Sequence[tuple[str, float]]) -> str | None:
    """Returns the fault of a mixture; None for a good one."""
    for place, weight in mixture:
        if not 0 < weight < float('inf'):
            return f'the weight of {place!r} must be a positive number; leave out the others'
    found = names(mixture)
    if twice := [name for i, name in enumerate(found) if name in found[:i] or not name]:
        return f'must name stores by different last parts of their paths, not {twice[0]!r} twice'
    return None


def check_same_tokenizer(store: TokenStore, other: TokenStore | Mixture, setting: str) -> None:
    """Raises MismatchError unless both have been made with one tokenizer."""
    (ours, end), (theirs, other_end) = (
        (s.info['tokenizer']['sha256'], s.info['tokenizer'].get('eod_id')) for s in (store, other)
    )
    if ours == theirs and end != other_end:
        raise MismatchError(
            f'{setting}: documents of {store.path} end by token {end}, documents of {other.path} by {other_end}; '
            'prepare one of them again with the tokenizer.end_of_document of the other'
        )
    if ours != theirs:
        raise MismatchError(
            f'{setting}: the tokenizer of {store.path} is {ours[:12]}…, the one of {other.path} is {theirs[:12]}…, and '
            'the same number means another piece; prepare one of them again with the tokenizer of the other '
            '(tokenizer.model_path)'
        )


def _seed(seed: int, source: int) -> int:
    """Returns the seed of the order of a source: stores of equal length are visited in different orders."""
    return int(np.random.SeedSequence([seed, source]).generate_state(1, np.uint64)[0])
