"""The next token: the objective of causal models of text."""

import jax
import jax.numpy as jnp

from lm.config.configurable import configurable
from lm.data.dataset import Store
from lm.ops.documents import TextBegin
from lm.training.objectives.base import Objective


@configurable('next_token')
class NextToken(Objective):
    """Every token predicts the next one, and all of them count."""

    looks_ahead = False
    remedy = '{}, so every token sees the one that it shall predict; set train.objective = @masked(), or that to True'

    def unpack(self, store: Store | None, vocab_size: int) -> None:
        return None


def next_answer(tokens_BxL: jax.Array, begin: TextBegin | None = None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Unpacks text like `next_token`; ~token is a token that is read and not predicted."""
    counted_BxL = tokens_BxL[:, 1:] >= 0
    inputs_BxL, targets_BxL, _ = next_token(jnp.where(tokens_BxL < 0, ~tokens_BxL, tokens_BxL), begin)
    return inputs_BxL, targets_BxL, counted_BxL


def next_token(tokens_BxL: jax.Array, begin: TextBegin | None = None) -> tuple[jax.Array, jax.Array, None]:
    """Unpacks text: every token predicts the next one, and all of them count.

    `begin` is the token before a text; None: the tokens are the inputs as they are.
    """
    inputs_BxL = tokens_BxL[:, :-1] if begin is None else begin.make_inputs(tokens_BxL)
    return inputs_BxL, tokens_BxL[:, 1:], None
