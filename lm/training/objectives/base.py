"""The base of objectives: configurations that a gin file names. They split a window into inputs and targets.

    train.objective = @masked()

Adding an objective means adding one file. The examples of a task (`data.task`) have another objective.
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
"""Windows of tokens [B, L + 1] → what is read, what is asked for there, and which of that counts (None: all), each
[B, L]."""


class Hiding(abc.ABC):
    """An `Unpack` that draws which tokens are hidden, and asks for them.

    Attributes:
        special: tokens that are never hidden.
    """

    special: tuple[int, ...]

    @abc.abstractmethod
    def hide(self, tokens_BxL: jax.Array, numbers_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(the inputs of the model, the places that are asked for (bool)), each [B, L].

        Args:
            tokens_BxL: int32.
            numbers_B: of the windows, uint32; for the same numbers the same is drawn, in whatever batch they come.
        """

    def __call__(self, tokens_BxN: jax.Array, numbers_B: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The `Unpack`, of windows whose last token is the first of the next one."""
        targets_BxL = tokens_BxN[:, :-1]
        hidden_BxL, chosen_BxL = self.hide(targets_BxL, numbers_B)
        return hidden_BxL, targets_BxL, chosen_BxL


class Objective(Configurable, abc.ABC):
    """Base of the objectives (frozen dataclasses made by `@configurable`)."""

    looks_ahead: ClassVar[bool]
    """True if tokens of the model must see later ones; False if they must not."""
    remedy: ClassVar[str]
    """The remedy for a model of the other kind."""

    @abc.abstractmethod
    def unpack(self, store: Store | None, vocab_size: int) -> Unpack | None:
        """The function that unpacks the windows of a step; None: the next token is asked for everywhere.

        Args:
            store: of the tokens; None where only the program matters.
            vocab_size: tokens that the model knows.

        Raises ConfigError where the vocabulary lacks something.
        """

    def make_hiding(self, store: Store | None, vocab_size: int, split: str) -> Hiding | None:
        """The function that hides tokens of a split in its evaluation, with arguments and errors as in `unpack`. None:
        all are read from left to right, and each is asked for."""
        return None


def check_objective(objective: Objective, data: DataConfig, model: ModelConfig) -> None:
    """Raises ConfigError where objective, data and model do not go together."""
    name, setting = f'@{objective.gin_name}()', model.looks_ahead
    if data.task and objective.looks_ahead:
        raise ConfigError(
            f'train.objective = {name}: data.task = @{data.task.gin_name}() says itself what is asked for; delete one'
        )
    if data.task and setting:
        raise ConfigError(
            f'{setting}: the examples of data.task = @{data.task.gin_name}() are read from left to right, and later '
            'tokens hold the answers; set it to True'
        )
    if bool(setting) != objective.looks_ahead:
        raise ConfigError(f'train.objective = {name}: {objective.remedy.format(setting)}')
    if setting and data.mask_documents:
        raise ConfigError(
            f'data.mask_documents = True: {setting}, and documents are told apart only where tokens see earlier ones '
            'alone; set it to False'
        )
