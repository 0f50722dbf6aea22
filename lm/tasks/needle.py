"""A needle in a haystack: a fact stands at some depth of a long text, and its end asks for this fact.

    9 4 7 * 3 8 2 5 6 … 7 1 * 3 → 8

The tokens are random. A mark, a key and its value stand at one position; the mark and the key come again at the end.
Depth 0 is the beginning. Evaluation reports accuracies by depth and by context length.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lm.config.configurable import configurable, field
from lm.tasks.base import Slice, Task
from lm.tasks.draws import Draws

MARK = 0


@configurable('needle')
class Needle(Task):
    """Recall the value that was paired with a key. Examples take the depths in turn."""

    vocab_size: int = field(
        default=128, minimum=4, even=True, help='the mark, keys, and half values; all but the mark are hay'
    )
    depths: int = field(default=5, minimum=1, help='equal parts of the context, in one of which the needle lies')
    eval_lengths: tuple[int, ...] = field(
        default=(),
        check=lambda lengths: None if all(n >= 4 for n in lengths) else 'must list contexts of at least 4 tokens',
        help='contexts that are evaluated; none: the context of the training',
    )  # fmt: skip

    def shortest_context(self) -> int:
        return 4 + self.depths

    def examples(self, split: str, index_N: Sequence[int] | np.ndarray, context_length: int) -> np.ndarray:
        tokens_NxL, index_N = super().examples(split, index_N, context_length), np.asarray(index_N)
        where = Draws(self.seed, f'{split} depth', index_N).uniform(1)[:, 0]
        place = ((index_N % self.depths + where) / self.depths * (context_length - 4)).astype(int)
        row = np.arange(len(index_N))
        tokens_NxL[row, place] = MARK
        tokens_NxL[row, place + 1] = tokens_NxL[:, -2]
        tokens_NxL[row, place + 2] = tokens_NxL[:, -1]
        return tokens_NxL

    def generate(self, draws: Draws, length: int) -> np.ndarray:
        """Generates the text without the needle."""
        half = self.vocab_size // 2
        tokens_NxL = 1 + draws.integers(self.vocab_size - 1, length)
        tokens_NxL[:, -3] = MARK
        tokens_NxL[:, -2:-1] = 1 + draws.integers(half - 1, 1)
        tokens_NxL[:, -1:] = half + draws.integers(half, 1)
        return tokens_NxL

    def slices(self, split: str, context_length: int) -> dict[str, Slice]:
        index_N = np.arange(self.count(split))
        return {
            f'{length} tokens, depth {depth / self.depths:.2f}': Slice(index_N[depth :: self.depths], length)
            for length in self.eval_lengths or (context_length,)
            for depth in range(min(self.depths, len(index_N)))
        }

    def scored(self, tokens_BxN: jax.Array) -> jax.Array:
        last = tokens_BxN.shape[1] - 2
        return jnp.broadcast_to(jnp.arange(last + 1) == last, (tokens_BxN.shape[0], last + 1))
