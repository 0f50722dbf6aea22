"""Accuracy and perplexity of hidden tokens, as Performer (App. C.3) reports them of models that see both sides.

The windows of a split follow one another, each token in one of them; the last one ends with the split and asks for what
no other has. What is hidden in them is always the same (`lm.training.objectives.masked`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lm.data.store import TokenStore
from lm.errors import ConfigError
from lm.evaluation.baseline import EmpiricalBaseline
from lm.evaluation.config import EvaluateConfig
from lm.evaluation.perplexity import EvaluationWindows, Evaluator, ScoredSums
from lm.model.functions import ModelFunctions, Scored, Weights
from lm.training.mesh import replicated
from lm.training.objectives import Hiding


def check_masked(config: EvaluateConfig) -> None:
    """Raises ConfigError for what only tokens that see earlier ones alone allow."""
    if config.window != 'disjoint':
        raise ConfigError(f"evaluate.window = '{config.window}': windows with hidden tokens are whole; set 'disjoint'")
    if config.chunk:
        raise ConfigError(
            f'evaluate.chunk = {config.chunk}: where tokens see later ones a window is computed whole; delete this'
        )
    if config.mask_documents:
        raise ConfigError('evaluate.mask_documents = True: is for tokens that see earlier ones alone; delete this')


def make_hidden_scoring_program(
    functions: ModelFunctions, mesh: Mesh, hiding: Hiding
) -> Callable[[Weights, jax.Array, np.ndarray], Scored]:
    """Makes the program (weights, tokens [B, L], numbers of the windows [B]) → scores on all devices. Places that are
    not hidden do not count. The program is compiled once per shape."""

    def score(weights: Weights, tokens_BxL: jax.Array, numbers_B: jax.Array) -> Scored:
        inputs_BxL, chosen_BxL = hiding.hide(tokens_BxL, numbers_B)
        return functions.score_targets(weights, inputs_BxL, tokens_BxL)._replace(counted=chosen_BxL)

    return jax.jit(score, out_shardings=replicated(mesh))


class WholeWindows(EvaluationWindows):
    """Windows of L tokens, not L + 1: nothing stands before them."""

    def batch(self, store: TokenStore, split: str, eod: int, first: int, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Windows first, …, first+size-1: (token ids [size, L], bool [size, L] of those that no other window has)."""
        L, n = self.context_length, self.n_tokens
        index = np.arange(first, first + size)
        starts = np.minimum(np.where(index < len(self), index, 0) * L, n - L)
        tokens = store.read_many(split, starts, L).astype(np.int32)
        own = starts[:, None] + np.arange(L) >= index[:, None] * L
        return tokens, own & (index < len(self))[:, None]


class MaskedEvaluator(Evaluator):
    """Scores what is hidden in a split, and says what the frequencies of the tokens alone would give."""

    def __init__(
        self,
        program: Callable[..., Scored],
        mesh: Mesh,
        store: TokenStore,
        config: EvaluateConfig,
        split: str,
        context_length: int,
        baseline: EmpiricalBaseline,
        first_tokens: int | None = None,
    ):
        """`program` is made by `make_hidden_scoring_program`."""
        super().__init__(program, mesh, store, config, split, context_length, baseline, first_tokens)
        self.windows = WholeWindows(**dataclasses.asdict(self.windows))

    def dispatch(self, weights: Weights, tokens: jax.Array, first: int) -> Scored:
        return self.program(weights, tokens, np.arange(first, first + len(tokens), dtype=np.uint32))

    def targets(self, tokens: np.ndarray) -> np.ndarray:
        return tokens

    def figures(self, sums: ScoredSums, store: Any) -> dict:
        if not sums.tokens_L.sum():
            raise ConfigError(
                f'split {self.split!r} of {store.path}: none of the {self.windows.n_tokens} tokens is hidden; score a '
                'longer split (evaluate.split), or more of it (train.eval_tokens)'
            )
        return super().figures(sums, store)
