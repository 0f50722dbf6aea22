"""The decoder of flash-linear-attention, with what its classes change."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import numpy as np

from lm.attention import Attention, find_layer_type
from lm.interop.families.base import Tensors
from lm.interop.families.decoder import Decoder, LayerTensors, cut
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig
from lm.model.options import ResolvedLayer

PROJECTIONS, CONVOLUTIONS = [f'attn.{x}_proj' for x in 'qkv'], [f'attn.{x}_conv1d' for x in 'qkv']
"""Their maps of queries, keys and values, and the convolutions of these."""
FACTOR = 256
"""The width of the linear units is a multiple of it, where config.json does not state the width."""


class HeadSizes(NamedTuple):
    """The numbers of heads in a config.json, and the sizes of a key and of a value."""

    queries: int
    keys: int
    values: int
    key_size: int
    value_size: int


class RecurrentDecoder(Decoder):
    """RMSNorm, linear units with SiLU, and one recurrence in all layers, without positions. All normalizations have one
    epsilon. Classes of flash-linear-attention, which `import fla` gives to `transformers`.

    Attributes:
        layer_type: the type of the recurrence (`lm.attention.find_layer_type`).
        defaults: the entries that files leave out, as flash-linear-attention has them.
        fixed: the only values of entries that a model here equals.
        gain_names: the names of the gains of each head's output: with an output gate, and without one.
        gate_entry: the entry that says whether the output has a gate.
    """

    ACTIVATIONS: ClassVar = {'swish': 'silu'}
    activation = 'swish'
    imports = 'import fla  # pip install flash-linear-attention\n'
    embedding = 'model.embeddings.weight'
    norms: ClassVar[Mapping[str, str]] = {'attention_norm': 'attn_norm', 'glu_norm': 'mlp_norm'}
    layer_type: ClassVar[str]
    defaults: ClassVar[Mapping[str, object]]
    fixed: ClassVar[Mapping[str, object]] = {}
    gain_names: ClassVar[tuple[str, str]] = ('o_norm', 'o_norm')
    gate_entry: ClassVar[str] = 'use_output_gate'

    def read(self, config: Hyperparameters) -> Hyperparameters:
        """Returns the entries of a config.json, with the defaults of those that it leaves out."""
        shared = {'attn': None, 'attnres_block_size': None, 'conv_size': 4, 'norm_eps': self.epsilon}
        return {**shared, 'hidden_ratio': 4, 'intermediate_size': None, **self.defaults} | config

    def sizes(self, config: Hyperparameters) -> HeadSizes:
        """Returns the heads, from all entries of a config.json."""
        heads, width = config.integer('num_heads'), config.integer('hidden_size')
        keys = config.find_integer('num_kv_heads') or heads
        key_size, value_size = (round(width * config.number(name)) // heads for name in ('expand_k', 'expand_v'))
        return HeadSizes(heads, keys, keys, key_size, value_size)

    def settings_of(self, config: Hyperparameters) -> dict[str, object]:
        """Returns the fields of the mechanism, apart from its epsilon."""
        return {}

    def gate_options(self, config: Hyperparameters) -> dict[str, object]:
        """Returns the fields of the model on the output gate."""
        return {'output_gate': config.flag(self.gate_entry), 'output_gate_form': 'silu'}

    def differences(self, config: Hyperparameters) -> list[str]:
        found = self.read(config)
        only = {'attn': None, 'attnres_block_size': None, **self.fixed}
        wrong = [f'{name} = {found[name]!r}' for name, value in only.items() if found.get(name, value) != value]
        return super().differences(config) + wrong

    def model(self, folder: pathlib.Path, config: Hyperparameters, allow_imports: bool = False) -> ModelConfig:
        found = self.read(config)
        sizes = self.sizes(found)
        width = int(found.integer('hidden_size') * (found.find_number('hidden_ratio') or 4) * 2 / 3)
        shared = {
            'num_attention_heads': sizes.queries,
            'num_key_value_heads': sizes.keys,
            'head_dim': sizes.key_size,
            'rms_norm_eps': found.number('norm_eps'),
            'intermediate_size': found.find_integer('intermediate_size') or -(-width // FACTOR) * FACTOR,
        }
        return super().model(folder, found | shared, allow_imports)

    def options(self, config: Hyperparameters) -> dict[str, object]:
        found = self.read(config)
        sizes = self.sizes(found)
        return {
            'rotary_base': None,
            'convolution': found.integer('conv_size') if found.flag('use_short_conv') else None,
            'n_value_heads': None if sizes.values == sizes.keys else sizes.values,
            'value_dim': None if sizes.value_size == sizes.key_size else sizes.value_size,
            **self.gate_options(found),
        }

    def attention(self, config: Hyperparameters, layer: int) -> Attention:
        found = self.read(config)
        settings = {'norm_epsilon': found.number('norm_eps'), **self.settings_of(found)}
        return dataclasses.replace(find_layer_type(self.layer_type)(), **settings)

    def attention_tensors(self, theirs: LayerTensors, config: Hyperparameters, layer: int) -> Tensors:
        found = self.read(config)
        (gains,) = {name for name in self.gain_names if theirs.has(f'attn.{name}.weight')} or {self.gain_names[0]}
        tensors = {
            'qkv.weight': theirs.join(PROJECTIONS),
            'attention_out.weight': theirs.take('attn.o_proj.weight'),
            'attention.out_norm.weight': theirs.take(f'attn.{gains}.weight'),
        }
        if found.flag('use_short_conv'):
            tensors['convolution.weight'] = theirs.join(CONVOLUTIONS)[:, 0, ::-1]
        if found.flag(self.gate_entry):
            tensors |= self.gate_tensors(theirs)
        return tensors | self.factor_tensors(theirs, self.sizes(found))

    def gate_tensors(self, theirs: LayerTensors) -> Tensors:
        """Returns the tensors of the output gate under our names."""
        return {'output_gate.weight': theirs.take('attn.g_proj.weight')}

    def factor_tensors(self, theirs: LayerTensors, sizes: HeadSizes) -> Tensors:
        """Returns the tensors that the recurrence has beside queries, keys and values, under our names."""
        return {}

    def describe(self, model: ModelConfig) -> dict[str, object]:
        one = model.resolve(model.layers[0])
        return {
            'model_type': self.model_types[0],
            'architectures': [self.architecture],
            'vocab_size': model.vocab_size,
            'num_hidden_layers': model.n_layers,
            'hidden_size': model.d_model,
            'intermediate_size': model.glu_dim,
            'hidden_act': self.activation,
            'norm_eps': model.norm_epsilon,
            'tie_word_embeddings': model.tied,
            'use_short_conv': one.convolution is not None,
            'conv_size': one.convolution or 4,
            **self.describe_layer(one, model),
            **self.fixed,
        }

    def describe_layer(self, options: ResolvedLayer, model: ModelConfig) -> dict[str, object]:
        """Returns the entries on the heads and on the mechanism."""
        heads, dims = options.heads.queries, options.dims
        return {
            'num_heads': heads,
            'num_kv_heads': options.heads.keys,
            'expand_k': heads * dims.head_dim / model.d_model,
            'expand_v': heads * dims.value_size / model.d_model,
            self.gate_entry: options.output_gate,
        }

    def attention_back(self, ours: Tensors, model: ModelConfig, layer: int) -> Tensors:
        options = model.resolve(model.layers[layer])
        gains = self.gain_names[not options.output_gate]
        rows = options.qkv_sizes[:2]
        found = cut(ours['qkv.weight'], PROJECTIONS, rows) | {
            'attn.o_proj.weight': ours['attention_out.weight'],
            f'attn.{gains}.weight': ours['attention.out_norm.weight'],
        }
        if options.convolution is not None:
            found |= cut(ours['convolution.weight'][:, None, ::-1], CONVOLUTIONS, rows)
        if options.output_gate:
            found |= self.gate_back(ours)
        return found | self.factors_back(ours, options)

    def gate_back(self, ours: Tensors) -> Tensors:
        """Undoes `gate_tensors`."""
        return {'attn.g_proj.weight': ours['output_gate.weight']}

    def factors_back(self, ours: Tensors, options: ResolvedLayer) -> Tensors:
        """Undoes `factor_tensors`."""
        return {}


def cut_rows(whole: np.ndarray, names: list[str], rows: int) -> Tensors:
    """Returns name → matrix of two maps of the layer's input, the first of which has `rows` rows."""
    return cut(whole, [f'attn.{name}' for name in names], [rows])
