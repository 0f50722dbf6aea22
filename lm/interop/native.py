"""The format of `lm export` for models that a class of `transformers` or flash-linear-attention computes."""

import dataclasses
import json
import pathlib
from typing import ClassVar

from lm.errors import ConfigError
from lm.inference.loaded_run import LoadedRun
from lm.interop.families import FAMILIES
from lm.interop.families.base import Tensors
from lm.interop.families.decoder import Decoder
from lm.interop.formats import TRANSFORMERS_CONFIG, Safetensors, describe_generation, name_marks
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig


class NativeFormat(Safetensors):
    """Writes config.json and the tensors of a class that `transformers` or another package has; loading needs no
    trust_remote_code."""

    name: ClassVar[str] = 'native'

    def check(self, model: ModelConfig) -> None:
        find_family(model)

    def find_imports(self, model: ModelConfig) -> str:
        return find_family(model).imports

    def tensors(self, run: LoadedRun) -> Tensors:
        model = run.experiment.model
        return find_family(model).back(super().tensors(run), model)

    def others(self, run: LoadedRun, dtype: str) -> dict[str, bytes]:
        model = run.experiment.model
        described = find_family(model).describe(model) | {
            'max_position_embeddings': run.experiment.train.context_length,
            **name_marks(run),
            'pad_token_id': None,  # the default of a class may lie outside of the vocabulary
            'torch_dtype': dtype,
        }
        return {TRANSFORMERS_CONFIG: (json.dumps(described, indent=2) + '\n').encode()} | describe_generation(run)


def find_family(model: ModelConfig) -> Decoder:
    """Returns the first family that computes the model.

    Raises ConfigError if none does; the message names what the nearest family does not have.
    """
    differences: dict[str, list[str]] = {}
    families = [family for family in dict.fromkeys(FAMILIES.values()) if isinstance(family, Decoder)]
    for family in sorted(families, key=lambda family: family.scale_of(model) != 1):  # others change the tensors' bits
        if family.architecture:
            differences[family.architecture] = compare(model, family)
            if not differences[family.architecture]:
                return family
    nearest = min(differences, key=lambda name: (count_mechanisms(differences[name]), len(differences[name])))
    raise ConfigError(
        f'{differences[nearest][0]}: no class of transformers or flash-linear-attention that is written computes this, '
        f'{nearest} is the nearest; export with --format huggingface'
    )


def count_mechanisms(differences: list[str]) -> int:
    """Returns how many of the differences are mechanisms."""
    return sum(': attention = ' in one for one in differences)


def compare(model: ModelConfig, family: Decoder) -> list[str]:
    """Returns the settings of a model that are lost on the way to the config.json of a family and back."""
    again = family.model(pathlib.Path(), Hyperparameters(family.describe(model)))
    ours, theirs = _facts(model), _facts(again)
    return [f'{name} = {value}' for name, value in ours.items() if theirs.get(name) != value]


def _facts(model: ModelConfig) -> dict[str, str]:
    """Returns the fields that change what a model computes, apart from factors that its tensors can hold."""
    names = (
        *('norm', 'norm_epsilon', 'norm_placement', 'activation', 'gated', 'biases', 'qkv_biases', 'sinusoids'),
        *('learned_positions', 'tied', 'logit_cap'),
    )
    facts = {f'model.{name}': repr(getattr(model, name)) for name in names}
    for i, one in enumerate(model.layers):
        options = model.resolve(one)
        facts[f'layer {i}: attention'] = f'@{one.gin_name}() with {one.portable(options.dims)}'
        facts[f'layer {i}: feed_forward'] = repr(model.find_feed_forward(i).settle(model.feed_forward_shape))
        facts |= {
            f'layer {i}: {field.name}': repr(getattr(options, field.name)) for field in dataclasses.fields(options)
        }
    return facts
