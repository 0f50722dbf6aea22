"""Checkpoints that `lm export` has written."""

from lm.experiment import load
from lm.files import AnyPath
from lm.interop.families.base import Family, Tensors
from lm.interop.formats import MODEL_TYPE
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig


class Ours(Family):
    """Either format of `lm export`. The file config.gin describes the model."""

    model_types = (MODEL_TYPE,)

    def settings(self, folder: AnyPath) -> str:
        return str(folder / 'config.gin')

    def model(self, folder: AnyPath, config: Hyperparameters, allow_imports: bool = False) -> ModelConfig:
        return load([self.settings(folder)], allow_imports=allow_imports).model

    def tensors(self, theirs: Tensors, config: Hyperparameters, model: ModelConfig) -> Tensors:
        ours = dict(theirs)
        theirs.clear()
        return ours
