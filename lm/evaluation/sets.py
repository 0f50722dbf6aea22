"""Perplexity of several texts at once: the parts of a mixture, and the named sets of `evaluate.sets`."""

import functools
import operator
from collections.abc import Callable

from lm.data.mixture import Mixture
from lm.data.store import TokenStore
from lm.evaluation.perplexity import Evaluator
from lm.model.functions import Weights

FIGURES = ('loss', 'perplexity', 'word_perplexity', 'bits_per_byte')
FIGURES += ('accuracy', 'baseline_accuracy', 'baseline_perplexity')
"""Figures of each set in metrics.jsonl, as FIGURE/NAME, if the set has them."""


class SetsEvaluator:
    """Scores several texts with the weights of a model.

    The figures of the whole belong to the data of the run: they are sums over the parts of a mixture.
    """

    def __init__(self, store: TokenStore | Mixture, parts: dict[str, Evaluator], others: dict[str, Evaluator]):
        """
        Args:
            store: the data of the run.
            parts: name → evaluator of each part of it; a single store is its only part.
            others: name → evaluator of the other texts.
        """
        self.store, self.parts, self.others = store, parts, others
        self._first = next(iter(parts.values()))
        self.split = self._first.split

    @property
    def measure(self) -> str:
        """The name of the loss on the data of the run, as in `Evaluator`."""
        return '; '.join(part.measure for part in self.parts.values())

    def __call__(self, weights: Weights, step: int, should_stop: Callable[[], bool] = lambda: False) -> dict | None:
        """Returns the result as in `Evaluator`, with `sets`: name → the result of each text.

        Returns None when `should_stop` returned True.
        """
        sums, sets = [], {}
        for name, evaluator in (self.parts | self.others).items():
            found = evaluator.sum_scores(weights, should_stop)
            if found is None:
                return None
            sums.append(found)
            sets[name] = evaluator.result(found, step) | {'path': evaluator.store.path}
        if not isinstance(self.store, Mixture):
            sets = {name: sets[name] for name in self.others}
        whole = functools.reduce(operator.add, sums[: len(self.parts)])
        return self._first.result(whole, step, self.store) | {'sets': sets}

    def describe(self, result: dict) -> str:
        """Describes the result in one line."""
        sets = [f'{name} {found["perplexity"]:.3f}' for name, found in result['sets'].items()]
        return f'{self._first.describe(result)}  perplexity of {", ".join(sets)}'


def flatten_result(result: dict) -> dict:
    """Returns a result as a record of metrics.jsonl; `sets` become single figures, such as perplexity/books."""
    sets = result.get('sets', {})
    figures = {f'{f}/{name}': found[f] for name, found in sets.items() for f in FIGURES if f in found}
    return {name: value for name, value in result.items() if name != 'sets'} | figures
