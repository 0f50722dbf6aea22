"""Selective copying (Gu & Dao 2023, §3.1 and App. E.1) as in PolySketchFormer App. F.1.

    . . a . . . b . a . c . | → a b a c

Coloured tokens stand at random positions among noise (.). After a marker (|) the model writes them down in the same
order. An example counts if all of them are right. The model predicts each token with the right ones before it in sight.
This equals free generation: the first mistake spoils the example either way.
"""

import jax
import jax.numpy as jnp
import numpy as np

from lm.config.configurable import configurable, field
from lm.tasks.base import Task
from lm.tasks.draws import Draws

NOISE = 0


@configurable('selective_copying')
class SelectiveCopying(Task):
    """Write down the coloured tokens in the order in which they came."""

    vocab_size: int = field(default=16, minimum=4, help='noise, colours and the marker')
    n_copied: int = field(default=16, minimum=1, help='coloured tokens in an example')

    def shortest_context(self) -> int:
        return 2 * self.n_copied

    def generate(self, draws: Draws, length: int) -> np.ndarray:
        tokens_NxL = np.full((draws.n, length), NOISE)
        marker = length - self.n_copied - 1
        places_NxK = np.sort(draws.distinct(marker, self.n_copied), axis=1)
        colours_NxK = 1 + draws.integers(self.vocab_size - 2, self.n_copied)
        np.put_along_axis(tokens_NxL, places_NxK, colours_NxK, axis=1)
        tokens_NxL[:, marker] = self.vocab_size - 1
        tokens_NxL[:, marker + 1 :] = colours_NxK
        return tokens_NxL

    def scored(self, tokens_BxN: jax.Array) -> jax.Array:
        L = tokens_BxN.shape[1] - 1
        return jnp.broadcast_to(jnp.arange(L) >= L - self.n_copied, (tokens_BxN.shape[0], L))
