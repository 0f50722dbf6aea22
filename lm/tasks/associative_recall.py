"""Multi-query associative recall, MQAR (Arora et al., "Zoology", 2023; LLoPS App. B.1 after Arora et al. 2024).

    A 4 B 3 C 6 | B → 3 . . C → 6 A → 4 . .

Key-value pairs come first; then each key is asked once, more often soon than late: the slot i = 1, 2, … of two tokens
is chosen with a probability ∝ i^(power - 1). Between the questions stands filler (.). The answer follows its question
as text would continue. Accuracy is the share of questions answered.
"""

import jax
import jax.numpy as jnp
import numpy as np

from lm.config.configurable import configurable, field
from lm.errors import ConfigError
from lm.tasks.base import Task
from lm.tasks.draws import Draws

FILLER = 0


@configurable('associative_recall')
class AssociativeRecall(Task):
    """Recall the value that was paired with a key."""

    vocab_size: int = field(default=8192, minimum=4, even=True, help='half keys (without 0, the filler), half values')
    n_pairs: int = field(default=64, minimum=1, help='key-value pairs, each asked once')
    power: float = field(
        default=0.01, above=0, maximum=1, help='1: all slots are alike; smaller: questions come sooner'
    )

    whole_answers = False

    def __post_init__(self):
        if self.n_pairs >= self.vocab_size // 2:
            raise ConfigError(
                f'associative_recall.n_pairs = {self.n_pairs}: must be below half of '
                f'associative_recall.vocab_size = {self.vocab_size}'
            )

    def shortest_context(self) -> int:
        return 4 * self.n_pairs - 1

    def generate(self, draws: Draws, length: int) -> np.ndarray:
        P, half = self.n_pairs, self.vocab_size // 2
        tokens_NxL = np.full((draws.n, length), FILLER)
        keys_NxP = 1 + draws.distinct(half - 1, P)
        values_NxP = half + draws.distinct(half, P)
        tokens_NxL[:, 0 : 2 * P : 2] = keys_NxP
        tokens_NxL[:, 1 : 2 * P : 2] = values_NxP
        slots = (length - 2 * P) // 2
        question_NxP = 2 * P + 2 * draws.distinct(slots, P, np.arange(1, slots + 1) ** (self.power - 1))
        np.put_along_axis(tokens_NxL, question_NxP, keys_NxP, axis=1)
        np.put_along_axis(tokens_NxL, question_NxP + 1, values_NxP, axis=1)
        return tokens_NxL

    def scored(self, tokens_BxN: jax.Array) -> jax.Array:
        inputs_BxL = tokens_BxN[:, :-1]
        is_key = (inputs_BxL != FILLER) & (inputs_BxL < self.vocab_size // 2)
        return is_key & (jnp.arange(inputs_BxL.shape[1]) >= 2 * self.n_pairs)
