"""What `lm import` reads: one class for each shape of checkpoint, found by the `model_type` of its config.json."""

import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from lm.errors import ConfigError, MismatchError
from lm.experiment import load
from lm.interop.formats import MODEL_TYPE
from lm.model import ModelConfig

Tensors = dict[str, np.ndarray]


class Family:
    """Checkpoints of one shape.

    Attributes:
        model_types: of config.json.
    """

    model_types: ClassVar[tuple[str, ...]] = ()

    def differences(self, config: Mapping[str, Any]) -> list[str]:
        """What a model of ours cannot be told, in words; empty if it can be the same."""
        return []

    def model(self, folder: pathlib.Path, config: Mapping[str, Any], allow_imports: bool = False) -> ModelConfig:
        """The model that computes the same; `allow_imports`: of its config.gin, where it has one of ours."""
        raise TypeError(f'{type(self).__name__} makes no model')

    def tensors(self, theirs: Tensors, config: Mapping[str, Any]) -> Tensors:
        """By the names of `lm.interop.names`. Those that it does not take stay in `theirs`."""
        raise TypeError(f'{type(self).__name__} has no tensors')


class Ours(Family):
    """What `lm export` has written, in either format: config.gin says all."""

    model_types = (MODEL_TYPE,)

    def model(self, folder: pathlib.Path, config: Mapping[str, Any], allow_imports: bool = False) -> ModelConfig:
        return load([str(folder / 'config.gin')], allow_imports=allow_imports).model

    def tensors(self, theirs: Tensors, config: Mapping[str, Any]) -> Tensors:
        ours = dict(theirs)
        theirs.clear()
        return ours


class Llama(Family):
    """RMSNorm, gated linear units, rotary positions, grouped queries, tied embeddings or not: Llama 1 to 3, Mistral."""

    model_types = ('llama', 'mistral')
    ACTIVATIONS: ClassVar = {'silu': 'silu', 'gelu_new': 'gelu', 'gelu_pytorch_tanh': 'gelu'}

    def differences(self, config: Mapping[str, Any]) -> list[str]:
        rope = _rope(config)
        epsilon = config.get('rms_norm_eps', 1e-6)
        found = {
            f'rms_norm_eps = {epsilon} (here 1e-05)': not math.isclose(epsilon, 1e-5, rel_tol=1e-3),
            f'hidden_act = {config.get("hidden_act")!r}': config.get('hidden_act', 'silu') not in self.ACTIVATIONS,
            f'rotary positions scaled by {rope.get("type")!r}': rope.get('type') not in (None, 'default'),
            'rotary positions on a part of a head': config.get('partial_rotary_factor', 1.0) != 1.0,
            'biases in attention': bool(config.get('attention_bias')),
            'biases in the linear units': bool(config.get('mlp_bias')),
            'attention in a sliding window': config.get('sliding_window') is not None,
            'quantized weights': config.get('quantization_config') is not None,
        }
        return [what for what, differs in found.items() if differs]

    def model(self, folder: pathlib.Path, config: Mapping[str, Any], allow_imports: bool = False) -> ModelConfig:
        heads = config['num_attention_heads']
        return ModelConfig(
            vocab_size=config['vocab_size'],
            n_layers=config['num_hidden_layers'],
            d_model=config['hidden_size'],
            n_heads=heads,
            n_kv_heads=config.get('num_key_value_heads') or heads,
            head_dim=config.get('head_dim') or config['hidden_size'] // heads,
            hidden_dim=config['intermediate_size'],
            norm='rms',
            activation=self.ACTIVATIONS[config.get('hidden_act', 'silu')],
            sinusoids=False,
            rotary_base=float(_rope(config)['base']),
            tied=bool(config.get('tie_word_embeddings', False)),
        )

    def tensors(self, theirs: Tensors, config: Mapping[str, Any]) -> Tensors:
        for name in [name for name in theirs if name.endswith('rotary_emb.inv_freq')]:
            del theirs[name]  # a function of the configuration, which old files keep
        root = math.sqrt(config['hidden_size'])
        # Ours multiplies embeddings by √D where they enter. Where they are also the output matrix, the gain before it
        # makes up for the division.
        tied = bool(config.get('tie_word_embeddings', False))
        ours = {
            'embedding.weight': theirs.pop('model.embed_tokens.weight') / root,
            'final_norm.weight': theirs.pop('model.norm.weight') * (root if tied else 1.0),
        }
        if tied:
            theirs.pop('lm_head.weight', None)
        else:
            ours['head.weight'] = theirs.pop('lm_head.weight')
        for i in range(config['num_hidden_layers']):
            take = lambda name, i=i: theirs.pop(f'model.layers.{i}.{name}.weight')  # noqa: E731
            ours |= {
                f'layers.{i}.attention_norm.weight': take('input_layernorm'),
                f'layers.{i}.qkv.weight': np.concatenate([take(f'self_attn.{x}_proj') for x in 'qkv']),
                f'layers.{i}.attention_out.weight': take('self_attn.o_proj'),
                f'layers.{i}.glu_norm.weight': take('post_attention_layernorm'),
                f'layers.{i}.glu_in.weight': np.concatenate([take('mlp.up_proj'), take('mlp.gate_proj')]),
                f'layers.{i}.glu_out.weight': take('mlp.down_proj'),
            }
        return ours


class Gpt2(Family):
    """Layer normalization, learned positions, biases, feed-forward layers without gates: GPT-2 and what followed it."""

    model_types = ('gpt2',)
    ACTIVATIONS: ClassVar = {'gelu_new': 'gelu', 'gelu_pytorch_tanh': 'gelu', 'silu': 'silu', 'swish': 'silu'}
    MASKS = ('.attn.bias', '.attn.masked_bias')
    """What old files keep of every layer beside its weights."""

    def differences(self, config: Mapping[str, Any]) -> list[str]:
        epsilon = config.get('layer_norm_epsilon', 1e-5)
        activation = config.get('activation_function', 'gelu_new')
        found = {
            f'layer_norm_epsilon = {epsilon} (here 1e-05)': not math.isclose(epsilon, 1e-5, rel_tol=1e-3),
            f'activation_function = {activation!r}': activation not in self.ACTIVATIONS,
            'attention that is not scaled': not config.get('scale_attn_weights', True),
            'attention that is scaled by the layer': bool(config.get('scale_attn_by_inverse_layer_idx')),
            'attention to an encoder': bool(config.get('add_cross_attention')),
            'quantized weights': config.get('quantization_config') is not None,
        }
        return [what for what, differs in found.items() if differs]

    def model(self, folder: pathlib.Path, config: Mapping[str, Any], allow_imports: bool = False) -> ModelConfig:
        width, heads = config['n_embd'], config['n_head']
        return ModelConfig(
            vocab_size=config['vocab_size'],
            n_layers=config['n_layer'],
            d_model=width,
            n_heads=heads,
            head_dim=width // heads,
            hidden_dim=config.get('n_inner') or 4 * width,
            activation=self.ACTIVATIONS[config.get('activation_function', 'gelu_new')],
            gated=False,
            biases=True,
            sinusoids=False,
            rotary_base=None,
            learned_positions=config['n_positions'],
            tied=bool(config.get('tie_word_embeddings', True)),
        )

    def tensors(self, theirs: Tensors, config: Mapping[str, Any]) -> Tensors:
        for name in [name for name in theirs if name.endswith(self.MASKS)]:
            del theirs[name]
        # The files of the first GPT-2 say 'wte.weight', those of newer ones 'transformer.wte.weight'.
        begin = 'transformer.' if 'transformer.wte.weight' in theirs else ''
        take = lambda name: theirs.pop(begin + name)  # noqa: E731
        tied, root = bool(config.get('tie_word_embeddings', True)), math.sqrt(config['n_embd'])
        ours = {
            'embedding.weight': take('wte.weight') / root,  # as in Llama.tensors
            'positions.weight': take('wpe.weight') / root,
            'final_norm.weight': take('ln_f.weight') * (root if tied else 1.0),
            'final_norm.bias': take('ln_f.bias') * (root if tied else 1.0),
        }
        if tied:
            theirs.pop('lm_head.weight', None)
        else:
            ours['head.weight'] = theirs.pop('lm_head.weight')
        maps = {'qkv': 'attn.c_attn', 'attention_out': 'attn.c_proj', 'glu_in': 'mlp.c_fc', 'glu_out': 'mlp.c_proj'}
        for i in range(config['n_layer']):
            for our, their in maps.items():  # whose matrices have inputs first
                ours[f'layers.{i}.{our}.weight'] = take(f'h.{i}.{their}.weight').T
                ours[f'layers.{i}.{our}.bias'] = take(f'h.{i}.{their}.bias')
            for our, their in {'attention_norm': 'ln_1', 'glu_norm': 'ln_2'}.items():
                for part in ('weight', 'bias'):
                    ours[f'layers.{i}.{our}.{part}'] = take(f'h.{i}.{their}.{part}')
        return ours


FAMILIES = {name: family for family in (Ours(), Llama(), Gpt2()) for name in family.model_types}


def find(folder: pathlib.Path) -> tuple[Family, dict[str, Any]]:
    """(family, config.json) of a checkpoint.

    Raises:
        MismatchError: there is none, or it is damaged.
        ConfigError: it is of a kind that cannot be taken over; says what differs.
    """
    path = folder / 'config.json'
    if not path.exists() and (folder / 'config.gin').exists():
        return FAMILIES[MODEL_TYPE], {}
    try:
        config = json.loads(path.read_text())
        kind = config.get('model_type')
    except FileNotFoundError:
        raise MismatchError(f'{path}: there is none; name a folder with config.json and model.safetensors') from None
    except (ValueError, AttributeError, OSError):
        raise MismatchError(f'{path}: cannot be read; fetch it again') from None
    if kind not in FAMILIES:
        raise ConfigError(f'{path}: model_type = {kind!r}: can be imported are {", ".join(FAMILIES)}')
    if differences := FAMILIES[kind].differences(config):
        raise ConfigError(f'{folder}: a {kind} model that no model here equals: it has {"; ".join(differences)}')
    return FAMILIES[kind], config


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """Base and kind of the rotary positions, as transformers 4 and 5 write them."""
    new = config.get('rope_parameters') or {}
    old = config.get('rope_scaling') or {}
    kinds = [entry.get('rope_type', entry.get('type')) for entry in (new, old)]
    base = new.get('rope_theta', config.get('rope_theta', 10_000.0))
    return {'base': base, 'type': next((kind for kind in kinds if kind not in (None, 'default')), None)}
