"""Induction heads (Olsson et al. 2022) as in PolySketchFormer App. F.2.

    a c b * d a … c * → d

The tokens are random. A special token (*) stands at one random position and again at the end. The answer is the token
that followed it the first time.
"""

import jax
import jax.numpy as jnp
import numpy as np

from lm.config.configurable import configurable, field
from lm.tasks.base import Task
from lm.tasks.draws import Draws


@configurable('induction_heads')
class InductionHeads(Task):
    """Recall the token that came after the special one."""

    n_symbols: int = field(default=16, minimum=2, help='ordinary tokens; the special one comes on top')

    @property
    def vocab_size(self) -> int:
        return self.n_symbols + 1

    def shortest_context(self) -> int:
        return 3

    def generate(self, draws: Draws, length: int) -> np.ndarray:
        tokens_NxL = draws.integers(self.n_symbols, length)
        row, special = np.arange(draws.n), self.n_symbols
        place = draws.integers(length - 3, 1)[:, 0]  # anywhere but in the last three
        tokens_NxL[row, place] = special
        tokens_NxL[:, -2] = special
        tokens_NxL[:, -1] = tokens_NxL[row, place + 1]
        return tokens_NxL

    def scored(self, tokens_BxN: jax.Array) -> jax.Array:
        last = tokens_BxN.shape[1] - 2
        return jnp.broadcast_to(jnp.arange(last + 1) == last, (tokens_BxN.shape[0], last + 1))
