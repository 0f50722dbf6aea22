"""The base of objectives: configurations that a gin file names. They split a window into inputs and targets.

    train.objective = @masked()

Adding an objective means adding one file. The examples of a task (`data.task`) say themselves what is asked for.
`@masked()` leaves their answers out and asks for hidden tokens of the rest, as pre-training does.
"""

import abc
from collections.abc import Callable
from typing import ClassVar

import jax

from lm.config.configurable import Configurable
from lm.data.dataset import DataConfig, Store
from lm.errors import ConfigError
from lm.model import ModelConfig

Unpack = Callable[..., tuple[jax.Array, jax.Array, jax.Array | None]]
"""A function of windows of tokens [B, L + 1] → the inputs, the targets, and which targets count (None: all), each [B,
L]."""


class Hiding(abc.ABC):
    """An `Unpack` that hides random tokens, and makes them the targets.

    Attributes:
        special: tokens that are never hidden.
    """

    special: tuple[int, ...]

    @abc.abstractmethod
    def hide(self, tokens_BxL: jax.Array, numbers_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (the inputs of the model, True at the positions to predict), each [B, L].

        Args:
            tokens_BxL: int32.
            numbers_B: the numbers of the windows, uint32; a number gives the same draw in any batch.
        """

    @abc.abstractmethod
    def __call__(self, tokens_BxN: jax.Array, numbers_B: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Unpacks windows [B, L + 1], or examples, of the numbers `numbers_B`."""


class Objective(Configurable, abc.ABC):
    """Base of the objectives (frozen dataclasses made by `@configurable`)."""

    looks_ahead: ClassVar[bool]
    """True if tokens of the model must see later ones; False if they must not."""
    remedy: ClassVar[str]
    """The remedy for a model of the other kind."""
    trains_feed_forward: ClassVar[bool] = True
    """False if feed-forward layers stay as they are, whatever is minimized."""

    @abc.abstractmethod
    def unpack(self, store: Store | None, vocab_size: int) -> Unpack | None:
        """Returns the function that unpacks the windows of a step; None: each token predicts the next one.

        Args:
            store: the store of the tokens; None if only the program matters.
            vocab_size: the number of tokens that the model knows.

        Raises ConfigError if the vocabulary lacks a token that the objective needs.
        """

    def make_hiding(self, store: Store | None, vocab_size: int, split: str) -> Hiding | None:
        """Returns the function that hides tokens of a split in its evaluation, with arguments and errors as in
        `unpack`.

        None: the model reads from left to right and predicts each token.
        """
        return None


def check_objective(objective: Objective, data: DataConfig, model: ModelConfig) -> None:
    """Raises ConfigError if objective, data and model contradict each other."""
    name, setting = f'@{objective.gin_name}()', model.looks_ahead
    if bool(setting) != objective.looks_ahead and not (data.task and setting):
        raise ConfigError(f'train.objective = {name}: {objective.remedy.format(setting)}')
    for field, given in (('begin_id', data.begin_id), ('begin_windows', data.begin_windows)):
        if setting and given not in (None, False):
            raise ConfigError(
                f'data.{field} = {given}: {setting}, and the token before a text is of models that see earlier tokens '
                'alone; delete this'
            )
    if data.begin_id is not None and data.begin_id >= model.vocab_size:
        raise ConfigError(
            f'data.begin_id = {data.begin_id}: must be a token of the model, which has {model.vocab_size}'
        )
    if setting and data.mask_documents:
        raise ConfigError(
            f'data.mask_documents = True: {setting}, and documents are told apart only where tokens see earlier ones '
            'alone; set it to False'
        )
