"""Gemma 3 with its tower for pictures: the language model alone."""

from lm.files import AnyPath
from lm.interop.families.base import Tensors
from lm.interop.families.gemma3 import Gemma3
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig

DEFAULTS = {
    'vocab_size': 262_208,
    'hidden_size': 2304,
    'intermediate_size': 9216,
    'num_hidden_layers': 26,
    'num_attention_heads': 8,
    'num_key_value_heads': 4,
}
"""The sizes that files leave out, as transformers has them."""
PICTURES = ('vision_tower.', 'multi_modal_projector.')
"""Beginnings of the tensors for pictures."""


class Gemma3Vision(Gemma3):
    """Gemma 3 whose config.json describes the language model in `text_config`; tensors for pictures are left out."""

    model_types = ('gemma3',)
    architecture = ''

    def differences(self, config: Hyperparameters) -> list[str]:
        return super().differences(_text(config))

    def context_length(self, config: Hyperparameters) -> int | None:
        return super().context_length(_text(config))

    def model(self, folder: AnyPath, config: Hyperparameters, allow_imports: bool = False) -> ModelConfig:
        return super().model(folder, _text(config), allow_imports)

    def tensors(self, theirs: Tensors, config: Hyperparameters, model: ModelConfig) -> Tensors:
        for name in list(theirs):
            tensor, end = theirs.pop(name), name.removeprefix('model.')
            if not end.startswith(PICTURES):
                # transformers 4 writes language_model.model.X, and version 5 writes model.language_model.X
                theirs[f'model.{end.removeprefix("language_model.").removeprefix("model.")}'] = tensor
        for name in ('lm_head.weight', 'model.lm_head.weight'):
            if name in theirs:
                theirs['lm_head.weight'] = theirs.pop(name)
        return super().tensors(theirs, _text(config), model)


def _text(config: Hyperparameters) -> Hyperparameters:
    """Returns the config.json of the language model."""
    tied = {name: config[name] for name in ('tie_word_embeddings', 'quantization_config') if name in config}
    return DEFAULTS | tied | config.section('text_config')
