"""The decoder that most families share: layers with Llama's names, with what a family changes."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import ClassVar, TypeVar

import numpy as np

from lm.attention import DEFAULT, Attention
from lm.attention.options import LayerOptions
from lm.files import AnyPath
from lm.interop.families.base import Family, Tensors, drop_tied_head
from lm.interop.families.exchange import Exchange, Incoming, Outgoing
from lm.interop.families.rotary_entry import RotaryEntry, describe_rotary, describe_types
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig

T = TypeVar('T')
FULL, SLIDING, LINEAR = 'full_attention', 'sliding_attention', 'linear_attention'
KINDS = {FULL, SLIDING}
"""Types of layers."""
QKV = [f'self_attn.{x}_proj' for x in 'qkv']
"""Their maps of queries, keys and values, whose outputs stand side by side in ours."""
UNITS = ('up_proj', 'gate_proj', 'down_proj')
"""Their maps of linear units and of experts: values, gates, output."""


class Decoder(Family):
    """RMSNorm, gated linear units, rotary positions, grouped queries. Embeddings are tied or not.

    Attributes:
        architecture: the class of `transformers` that computes it; '': nothing is exported to it.
        imports: the line of Python that gives the class to `transformers`, where it has not.
        embedding: the name of the embeddings.
        rotary_base: the base where config.json states none, and so are `epsilon`, `tied` and `activation`.
        norms: our name of each normalization → their name.
        gain: added to their gains.
        fields: further fields of the model.
        head_size: the size of a head where config.json states none; None: the width over the heads.
        default_window: the window where config.json states none.
        turns_by_type: each type of layers has rotary positions of its own.
        kinds: the types of layers.
        turns_parts: rotary positions may turn a part of the channels of a head.
        without: beginnings of the names of tensors that `transformers` does not read either.
        takes_biases: attention and linear units may have biases.
        slides: all layers have the window, if config.json states one.
        names_types: config.json lists the types of layers.
    """

    ACTIVATIONS: ClassVar = {'silu': 'silu', 'swish': 'silu', 'gelu_new': 'gelu', 'gelu_pytorch_tanh': 'gelu'}
    architecture: ClassVar[str] = ''
    imports: ClassVar[str] = ''
    embedding: ClassVar[str] = 'model.embed_tokens.weight'
    rotary_base: ClassVar[float] = 10_000.0
    epsilon: ClassVar[float] = 1e-6
    tied: ClassVar[bool] = False
    activation: ClassVar[str] = 'silu'
    norms: ClassVar[Mapping[str, str]] = {
        'attention_norm': 'input_layernorm',
        'glu_norm': 'post_attention_layernorm',
    }
    gain: ClassVar[float] = 0.0
    fields: ClassVar[Mapping[str, object]] = {}
    head_size: ClassVar[int | None] = None
    default_window: ClassVar[int | None] = None
    turns_by_type: ClassVar[bool] = False
    kinds: ClassVar[Collection[str]] = KINDS
    turns_parts: ClassVar[bool] = False
    without: ClassVar[tuple[str, ...]] = ()
    takes_biases: ClassVar[bool] = False
    slides: ClassVar[bool] = False
    names_types: ClassVar[bool] = True

    def options(self, config: Hyperparameters) -> dict[str, object]:
        """Returns further fields of the model."""
        return dict(self.fields)

    def layer_types(self, config: Hyperparameters) -> list[str]:
        """Returns the type of each layer."""
        kind = SLIDING if self.slides and self.window(config) is not None else FULL
        return [kind for _ in count_layers(config)]

    def window(self, config: Hyperparameters) -> int | None:
        """Returns the window of the layers of type `SLIDING`."""
        return config.find_integer('sliding_window', self.default_window)

    def attention(self, config: Hyperparameters, layer: int) -> Attention:
        """Returns the mechanism of a layer."""
        kind = self.layer_types(config)[layer]
        own, full = self.rotary(config, kind), self.rotary(config)
        options: dict[str, object] = {'window': self.window(config) if kind == SLIDING else None}
        if (own.base, own.scaling) != (full.base, full.scaling):
            options |= {'rotary_base': own.base, 'rotary_scaling': own.scaling}
        return dataclasses.replace(DEFAULT(), **options)

    def head_dim(self, config: Hyperparameters) -> int:
        """Returns the size of a head."""
        if self.head_size is not None:
            return config.integer('head_dim', self.head_size)
        return config.find_integer('head_dim') or config.integer('hidden_size') // config.integer('num_attention_heads')

    def find_activation(self, config: Hyperparameters) -> str:
        """Returns their name of the activation."""
        return config.find_text('hidden_act') or self.activation

    def rotary(self, config: Hyperparameters, layer_type: str = FULL) -> RotaryEntry:
        """Returns the rotary positions of the layers of one type."""
        return RotaryEntry(config, self.rotary_base)

    def differences(self, config: Hyperparameters) -> list[str]:
        activation = self.find_activation(config)
        types = {FULL, *self.layer_types(config)}
        rotary = dict.fromkeys(
            what for kind in sorted(types) for what in self.rotary(config, kind).differences(self.turns_parts)
        )
        found = {
            f'hidden_act = {activation!r}': activation not in self.ACTIVATIONS,
            'biases in attention': config.flag('attention_bias') and not self.takes_biases,
            'biases in the linear units': config.flag('mlp_bias') and not self.takes_biases,
            f'layers of type {", ".join(sorted(types - {*self.kinds}))}': bool(types - {*self.kinds}),
            'tokens that see later ones': config.flag('use_bidirectional_attention'),
            'quantized weights': config.get('quantization_config') is not None,
        }
        return [*rotary] + [what for what, differs in found.items() if differs]

    def model(self, folder: AnyPath, config: Hyperparameters, allow_imports: bool = False) -> ModelConfig:
        rotary, heads = self.rotary(config), config.integer('num_attention_heads')
        further: dict[str, object] = {'embedding_scale': 1.0, 'rotary_base': rotary.base, **self.options(config)}
        model = ModelConfig(
            vocab_size=config.integer('vocab_size'),
            n_layers=config.integer('num_hidden_layers'),
            d_model=config.integer('hidden_size'),
            layer=LayerOptions(
                n_heads=heads,
                n_kv_heads=config.find_integer('num_key_value_heads') or heads,
                head_dim=self.head_dim(config),
                rotary_scaling=rotary.scaling,
            ),
            hidden_dim=config.integer('intermediate_size'),
            attention=find_pattern([self.attention(config, layer) for layer in count_layers(config)]),
            norm='rms',
            norm_epsilon=config.number('rms_norm_eps', self.epsilon),
            activation=self.ACTIVATIONS[self.find_activation(config)],
            sinusoids=False,
            tied=config.flag('tie_word_embeddings', self.tied),
        )
        return dataclasses.replace(model, **further)

    def tensors(self, theirs: Tensors, config: Hyperparameters, model: ModelConfig) -> Tensors:
        # Old files keep the frequencies, but the configuration determines them.
        for name in [name for name in theirs if name.endswith('rotary_emb.inv_freq') or name.startswith(self.without)]:
            del theirs[name]
        if model.tied:
            drop_tied_head(theirs, self.embedding)
        ours = {
            'embedding.weight': theirs.pop(self.embedding),
            'final_norm.weight': theirs.pop('model.norm.weight') + np.float32(self.gain),
        }
        if not model.tied:
            ours['head.weight'] = theirs.pop('lm_head.weight')
        for i in range(model.n_layers):
            layer = Incoming(theirs, f'model.layers.{i}.')
            self.exchange(layer, model, i)
            ours |= {f'layers.{i}.{name}': tensor for name, tensor in layer.made.items()}
        return ours

    def exchange(self, tensors: Exchange, model: ModelConfig, layer: int) -> None:
        """Moves the tensors of one layer of a model."""
        self.exchange_attention(tensors, model, layer)
        self.exchange_units(tensors, model, layer)
        gain = np.float32(self.gain)
        for our, their in self.norms.items():
            tensors.move(f'{our}.weight', f'{their}.weight', lambda x: x + gain, lambda x: x - gain)

    def exchange_attention(self, tensors: Exchange, model: ModelConfig, layer: int) -> None:
        """Moves the tensors of attention."""
        rows = model.resolve(model.layers[layer]).qkv_sizes[:2]
        tensors.join('qkv', QKV, rows)
        tensors.move('attention_out.weight', 'self_attn.o_proj.weight')
        if tensors.has('qkv.bias', f'{QKV[0]}.bias'):
            tensors.join('qkv', QKV, rows, 'bias')

    def exchange_units(self, tensors: Exchange, model: ModelConfig, layer: int) -> None:
        """Moves the tensors of the feed-forward layer."""
        join_units(tensors, 'mlp.')

    def describe(self, model: ModelConfig) -> dict[str, object]:
        """Returns a config.json of this family. Where `model` gives another model, this family does not compute it."""
        windows = [getattr(one, 'window', None) for one in model.layers]
        options = [model.resolve(one) for one in model.layers]
        dims, rotary = options[0].dims, next((one.rotary for one in options if one.rotary), None)
        window = next(filter(None, windows), None)
        return {
            'model_type': self.model_types[0],
            'architectures': [self.architecture],
            'vocab_size': model.vocab_size,
            'num_hidden_layers': model.n_layers,
            'hidden_size': model.d_model,
            'num_attention_heads': dims.n_heads,
            'num_key_value_heads': dims.n_kv_heads,
            'head_dim': dims.head_dim,
            'intermediate_size': model.glu_dim,
            'hidden_act': {'silu': 'silu', 'gelu': 'gelu_pytorch_tanh'}[model.activation],
            'rms_norm_eps': model.norm_epsilon,
            'rope_parameters': describe_types(model) if self.turns_by_type else describe_rotary(rotary),
            'tie_word_embeddings': model.tied,
            'sliding_window': window,
            'use_sliding_window': window is not None,
            **({'layer_types': [FULL if one is None else SLIDING for one in windows]} if self.names_types else {}),
        }

    def back(self, ours: Tensors, model: ModelConfig) -> Tensors:
        """Returns the tensors under the names of this family, from tensors under ours."""
        scale = np.float32(self.scale_of(model))
        theirs: Tensors = {self.embedding: ours['embedding.weight'] * scale}
        gains = ours['final_norm.weight']
        theirs['model.norm.weight'] = (gains / scale if model.tied else gains) - np.float32(self.gain)
        if not model.tied:
            theirs['lm_head.weight'] = ours['head.weight']
        for i in range(model.n_layers):
            begin = f'layers.{i}.'
            layer = Outgoing({name.removeprefix(begin): ours[name] for name in ours if name.startswith(begin)})
            self.exchange(layer, model, i)
            theirs |= {f'model.layers.{i}.{name}': x for name, x in layer.made.items()}
        return theirs

    def scale_of(self, model: ModelConfig) -> float:
        """Returns the factor of the embeddings of this family: the model's over its own."""
        root = math.sqrt(model.d_model)
        own = Hyperparameters({'embedding_scale': 1.0, **self.options(Hyperparameters(self.describe(model)))})
        factor = own.find_number('embedding_scale')
        return (root if model.embedding_scale is None else model.embedding_scale) / (root if factor is None else factor)


def count_layers(config: Hyperparameters) -> range:
    """Returns the numbers of the layers."""
    return range(config.integer('num_hidden_layers'))


def join_units(tensors: Exchange, begin: str) -> None:
    """Moves linear units whose maps have names that begin so."""
    values, gates, out = (f'{begin}{name}' for name in UNITS)
    tensors.join('glu_in', [values, gates])
    tensors.move('glu_out.weight', f'{out}.weight')


def find_pattern(layers: Sequence[T]) -> T | tuple[T, ...]:
    """Returns the shortest list that gives all layers if it is repeated, the last time in part."""
    for size in range(1, len(layers) + 1):
        if all(one == layers[i % size] for i, one in enumerate(layers)):
            return layers[0] if size == 1 else tuple(layers[:size])
    raise ValueError('there are no layers')
