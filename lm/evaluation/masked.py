"""Accuracy and perplexity of hidden tokens, as Performer (App. C.3) reports them for models that see both sides.

The windows of a split follow one another. Each token belongs to one window; the last window ends with the split, and
only scores tokens that no other window has. The hidden tokens are always the same (`lm.training.objectives.masked`).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from lm.data.mixture import Mixture
from lm.data.store import TokenStore
from lm.errors import ConfigError
from lm.evaluation.conditioning import UNCONDITIONED, Conditioning
from lm.evaluation.perplexity import Evaluator, ScoredSums
from lm.model.functions import ModelFunctions, Scored, Weights
from lm.pod.mesh import replicated
from lm.training.objectives import Hiding


def make_hidden_scoring_program(
    functions: ModelFunctions, mesh: Mesh, hiding: Hiding
) -> Callable[[Weights, jax.Array, np.ndarray], Scored]:
    """Makes the program (weights, tokens [B, L], numbers of the windows [B]) → scores on all devices.

    Positions that are not hidden do not count. The program is compiled once per shape.
    """

    def score(weights: Weights, tokens_BxL: jax.Array, numbers_B: jax.Array) -> Scored:
        inputs_BxL, chosen_BxL = hiding.hide(tokens_BxL, numbers_B)
        return functions.score_targets(weights, inputs_BxL, tokens_BxL, accuracy=True)._replace(counted=chosen_BxL)

    return jax.jit(score, out_shardings=replicated(mesh))


class MaskedEvaluator(Evaluator):
    """Scores the hidden tokens of a split, and reports the figures of the frequency baseline."""

    @property
    def conditioning(self) -> Conditioning:
        return UNCONDITIONED

    def dispatch(self, weights: Weights, tokens: jax.Array, first: int) -> Scored:
        return self.program(weights, tokens, _number(tokens, first))

    def inputs(self, tokens: np.ndarray, first: int) -> np.ndarray:
        assert self.text.hiding is not None
        return np.asarray(self.text.hiding.hide(jnp.asarray(tokens), jnp.asarray(_number(tokens, first)))[0])

    def targets(self, tokens: np.ndarray) -> np.ndarray:
        return tokens

    def compute_figures(self, sums: ScoredSums, store: TokenStore | Mixture) -> dict:
        if not sums.tokens_L.sum():
            raise ConfigError(
                f'split {self.split!r} of {store.path}: none of the {self.windows.n_tokens} tokens is hidden; score a '
                'longer split (evaluate.split), or more of it (train.eval_tokens)'
            )
        return super().compute_figures(sums, store)


def _number(tokens: np.ndarray | jax.Array, first: int) -> np.ndarray:
    """Returns the numbers of the windows of a batch, [B]."""
    return np.arange(first, first + len(tokens), dtype=np.uint32)
