"""The empirical baseline (Performer, App. C.2): a model that only knows the frequency of each token."""

import functools

import numpy as np

from lm.data.mixture import Mixture
from lm.data.store import TokenStore
from lm.text import perplexity

MOST_TOKENS = 2**28
"""The most tokens of a split that are counted, in evenly spaced pieces of PIECE."""
PIECE = 2**22


class EmpiricalBaseline:
    """Predicts every token by its frequency in the training split: the distribution is always the same."""

    def __init__(self, store: TokenStore | Mixture, split: str, excluded: tuple[int, ...] = ()):
        """
        Args:
            store: of the training.
            split: of the training.
            excluded: tokens that are never asked for.
        """
        self.store, self.split, self.excluded = store, split, list(excluded)

    @functools.cached_property
    def frequencies_V(self) -> np.ndarray:
        """Returns the frequency of each token, float64, weighted by the shares of a mixture. The sum need not be 1."""
        if not isinstance(self.store, Mixture):
            return count_tokens(self.store, self.split)
        found = np.zeros(self.store.vocab_size)
        weights = dict(zip(self.store.stores, self.store.weights, strict=True))
        for name, store in self.store.parts(self.split).items():
            counts_V = count_tokens(store, self.split)
            found += weights[name] * counts_V / counts_V.sum()
        return found

    def compute_figures(self, asked_V: np.ndarray) -> dict[str, float]:
        """Returns the baseline's accuracy and perplexity, if each token is a target `asked_V` times.

        A token that the training split lacks counts as if it occurred once.
        """
        size = max(len(asked_V), len(self.frequencies_V))
        asked, frequencies = np.zeros(size), np.zeros(size)
        asked[: len(asked_V)], frequencies[: len(self.frequencies_V)] = asked_V, self.frequencies_V
        frequencies[self.excluded] = 0
        positive = frequencies[frequencies > 0]
        frequencies[(asked > 0) & (frequencies == 0)] = positive.min(initial=1.0)
        known = asked > 0
        nats = -(asked[known] * np.log(frequencies[known] / frequencies.sum())).sum() / asked.sum()
        return {
            'baseline_accuracy': float(asked[frequencies.argmax()] / asked.sum()),
            'baseline_perplexity': perplexity(float(nats)),
        }


def count_tokens(store: TokenStore, split: str) -> np.ndarray:
    """Counts each token in a split, or in MOST_TOKENS of it, [vocabulary] float64."""
    total, vocabulary = store.tokens(split), store.vocab_size
    pieces = -(-total // PIECE)
    chosen = range(pieces)
    if total > MOST_TOKENS:
        chosen = np.linspace(0, pieces - 2, MOST_TOKENS // PIECE).round().astype(int).tolist()
    found = np.zeros(vocabulary)
    for piece in chosen:
        tokens = store.read(split, piece * PIECE, min((piece + 1) * PIECE, total))
        found += np.bincount(tokens, minlength=vocabulary)
    return found
