"""Reversal: write a sequence down backwards.

    . . a b c | → c b a

Symbols, a marker (|), and the symbols in the opposite order; filler (.) in front. An example counts when all symbols
are right.
"""

import jax
import jax.numpy as jnp
import numpy as np

from lm.config.configurable import configurable, field
from lm.tasks.base import Task
from lm.tasks.draws import Draws

FILLER, MARKER, FIRST = 0, 1, 2


@configurable('reversal')
class Reversal(Task):
    """Write the symbols down in the opposite order."""

    n_symbols: int = field(default=16, minimum=2, help='different symbols; filler and marker come on top')
    n_reversed: int = field(default=16, minimum=1, help='symbols per example')

    @property
    def vocab_size(self) -> int:
        return FIRST + self.n_symbols

    def shortest_context(self) -> int:
        return 2 * self.n_reversed

    # An example is a pure function of seed, split and index: all randomness comes from `draws`.
    def generate(self, draws: Draws, length: int) -> np.ndarray:
        symbols_NxK = FIRST + draws.integers(self.n_symbols, self.n_reversed)
        tokens_NxL = np.full((draws.n, length), FILLER)
        tokens_NxL[:, -2 * self.n_reversed - 1 : -self.n_reversed - 1] = symbols_NxK
        tokens_NxL[:, -self.n_reversed - 1] = MARKER
        tokens_NxL[:, -self.n_reversed :] = symbols_NxK[:, ::-1]
        return tokens_NxL

    def scored(self, tokens_BxN: jax.Array) -> jax.Array:
        L = tokens_BxN.shape[1] - 1
        return jnp.broadcast_to(jnp.arange(L) >= L - self.n_reversed, (tokens_BxN.shape[0], L))
