"""The places where the documents of a window begin: what stands there, and that no document sees another.

Token stores hold documents one after another, each ended by the end-of-document token. As an input that token opens
the document that follows: a model predicts a first token from it alone, whether the document stands by itself or in
the middle of a window. Some models have a token of their own there (`TextBegin`).
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops import sequence


@dataclasses.dataclass(frozen=True)
class TextBegin:
    """The token that a model has before each text, in place of the end-of-document token before it.

    Only inputs change. The targets, their number and the places of windows are the ones of other models.

    Attributes:
        begin_id: the token before a text.
        eod_id: the end-of-document token.
        windows: the first input of each window is `begin_id` too, whether or not a text begins there.
    """

    begin_id: int
    eod_id: int
    windows: bool

    def make_inputs(self, tokens_BxN: jax.Array) -> jax.Array:
        """Returns the inputs of the model, [B, L], for windows [B, L + 1] of a split.

        An input whose target is `begin_id` stays: there the data have this token themselves.
        """
        inputs_BxL, targets_BxL = tokens_BxN[:, :-1], tokens_BxN[:, 1:]
        opens_BxL = inputs_BxL == self.eod_id
        if self.windows:
            opens_BxL |= jnp.arange(inputs_BxL.shape[1], dtype=jnp.int32) == 0
        if self.begin_id != self.eod_id:
            opens_BxL &= targets_BxL != self.begin_id
        return jnp.where(opens_BxL, jnp.asarray(self.begin_id, inputs_BxL.dtype), inputs_BxL)


@dataclasses.dataclass(frozen=True)
class Documents:
    """A window of several documents, none of which sees another.

    Attributes:
        eod_id: the input that opens a document: the end-of-document token, or the one in its place (`TextBegin`).
        restart: whether the positions of each document begin at 0, or go on through the window.
    """

    eod_id: int
    restart: bool = False

    def of(self, tokens_BxL: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns `positions` and `starts` of the tokens of whole windows."""
        starts_BxL = self.starts(tokens_BxL)
        return self.positions(starts_BxL), starts_BxL

    def starts(self, tokens_BxL: jax.Array) -> jax.Array:
        """Returns the index of the first token of each token's document, [B, L] int32, ascending along L.

        A document that began before the window begins with it.
        """
        index_L = jnp.arange(tokens_BxL.shape[1], dtype=jnp.int32)
        return lax.cummax(jnp.where(tokens_BxL == self.eod_id, index_L, 0), axis=1)

    def positions(self, starts_BxL: jax.Array) -> jax.Array:
        """Returns the positions of the tokens: [B, L] int32 where each document restarts them, else [L]."""
        index_L = jnp.arange(starts_BxL.shape[1], dtype=jnp.int32)
        return index_L - starts_BxL if self.restart else index_L


def forgetting(starts_BxL: jax.Array, log_decay_BxLxK: jax.Array | None, heads: int) -> jax.Array:
    """Returns the log-decay of a linear mechanism, [B, L, K] float32, that forgets everything where a document begins.

    Without a `log_decay_BxLxK` it decays nowhere else.
    """
    length = starts_BxL.shape[1]
    index_L = sequence.index() * length + jnp.arange(length, dtype=jnp.int32)
    first_BxLx1 = (starts_BxL == index_L)[..., None]
    if log_decay_BxLxK is None:
        log_decay_BxLxK = jnp.zeros((*starts_BxL.shape, heads), jnp.float32)
    return jnp.where(first_BxLx1, -jnp.inf, log_decay_BxLxK)
