"""Tasks whose answers are not part of the input: the model answers at a position and reads on."""

import jax
import numpy as np

from lm.tasks.base import Task


class AnswersApart(Task):
    """A task that packs answers beside the inputs: each token holds an input and the answer to the input before it.

    Subclasses make examples with `pack`; `vocab_size` is at most `LARGEST`.
    """

    LARGEST = 46_338
    """The largest vocabulary whose packed tokens fit into int32."""
    vocab_size: int

    def pack(self, inputs_NxL: np.ndarray, answers_NxL: np.ndarray, context_length: int) -> np.ndarray:
        """Returns examples [N, context_length + 1] int32; an answer of -1 means none, and there are no questions after
        L."""
        length = inputs_NxL.shape[1]
        packed = np.zeros((len(inputs_NxL), context_length + 1), np.int32)
        packed[:, :length] = inputs_NxL
        packed[:, 1 : length + 1] += (self.vocab_size * (answers_NxL + 1)).astype(np.int32)
        return packed

    def scored(self, tokens_BxN: jax.Array) -> jax.Array:
        return tokens_BxN[:, 1:] >= self.vocab_size

    def unpack(self, tokens_BxN: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        asked_BxL = self.scored(tokens_BxN)
        return tokens_BxN[:, :-1] % self.vocab_size, tokens_BxN[:, 1:] // self.vocab_size - asked_BxL, asked_BxL

    def unpack_hidden(self, tokens_BxN: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.unpack(tokens_BxN)
