"""A shape of checkpoints that `lm import` reads. Adding one means adding one file with a class."""

import abc
from typing import ClassVar

import numpy as np

from lm.errors import MismatchError
from lm.files import AnyPath
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig

Tensors = dict[str, np.ndarray]

FAMILIES: dict[str, 'Family'] = {}
"""`model_type` → family. Each subclass of `Family` that names types adds itself."""


def drop_tied_head(theirs: Tensors, embedding: str) -> None:
    """Removes the output matrix of a checkpoint with tied embeddings. Where it stands alone, it is the embeddings.

    Raises MismatchError if both are there and differ.
    """
    head = theirs.pop('lm_head.weight', None)
    if head is not None and not np.array_equal(theirs.setdefault(embedding, head), head):
        raise MismatchError(
            f"tensor 'lm_head.weight': differs from '{embedding}', but config.json says tie_word_embeddings; "
            'set it to false there'
        )


class Family(abc.ABC):
    """Checkpoints of one shape; `config` is the contents of their config.json.

    Attributes:
        model_types: the values of `model_type` in config.json.
    """

    model_types: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls) -> None:
        FAMILIES.update(dict.fromkeys(cls.__dict__.get('model_types', ()), cls()))

    def differences(self, config: Hyperparameters) -> list[str]:
        """Returns in words what no model here can compute; empty if a model here computes the same."""
        return []

    def settings(self, folder: AnyPath) -> str | None:
        """Returns the config.gin with all settings of the training, or None: such checkpoints have none."""
        return None

    def context_length(self, config: Hyperparameters) -> int | None:
        """Returns the longest context of the training, or None where the checkpoint does not say it."""
        return config.find_integer('max_position_embeddings')

    @abc.abstractmethod
    def model(self, folder: AnyPath, config: Hyperparameters, allow_imports: bool = False) -> ModelConfig:
        """Returns the model that computes the same. `allow_imports`: a config.gin in `folder` may import modules."""

    @abc.abstractmethod
    def tensors(self, theirs: Tensors, config: Hyperparameters, model: ModelConfig) -> Tensors:
        """Returns the tensors of `model` under the names of `lm.interop.names`. Removes those that it uses."""
