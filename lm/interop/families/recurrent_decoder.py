"""The decoder of flash-linear-attention, with what its classes change."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from lm.attention import Attention, find_layer_type
from lm.attention.options import LayerOptions
from lm.files import AnyPath
from lm.interop.families.decoder import Decoder
from lm.interop.families.exchange import Exchange, turn_back, turn_convolution
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig
from lm.model.options import ResolvedLayer

PROJECTIONS, CONVOLUTIONS = [f'attn.{x}_proj' for x in 'qkv'], [f'attn.{x}_conv1d' for x in 'qkv']
"""Their maps of queries, keys and values, and the convolutions of these."""
FACTOR = 256
"""The width of the linear units is a multiple of it, where config.json does not state the width."""


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

    def sizes(self, config: Hyperparameters) -> LayerOptions:
        """Returns the heads, from all entries of a config.json."""
        heads, width = config.integer('num_heads'), config.integer('hidden_size')
        size, value = (round(width * config.number(name)) // heads for name in ('expand_k', 'expand_v'))
        keys = config.find_integer('num_kv_heads') or heads
        return LayerOptions(n_heads=heads, n_kv_heads=keys, head_dim=size, value_dim=None if value == size else value)

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

    def model(self, folder: AnyPath, config: Hyperparameters, allow_imports: bool = False) -> ModelConfig:
        found = self.read(config)
        sizes = self.sizes(found)
        width = int(found.integer('hidden_size') * (found.find_number('hidden_ratio') or 4) * 2 / 3)
        shared = {
            'num_attention_heads': sizes.n_heads,
            'num_key_value_heads': sizes.n_kv_heads,
            'head_dim': sizes.head_dim,
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
            'n_value_heads': sizes.n_value_heads,
            'value_dim': sizes.value_dim,
            **self.gate_options(found),
        }

    def attention(self, config: Hyperparameters, layer: int) -> Attention:
        found = self.read(config)
        settings = {'norm_epsilon': found.number('norm_eps'), **self.settings_of(found)}
        return dataclasses.replace(find_layer_type(self.layer_type)(), **settings)

    def exchange_attention(self, tensors: Exchange, model: ModelConfig, layer: int) -> None:
        options = model.resolve(model.layers[layer])
        rows = options.qkv_sizes[:2]
        tensors.join('qkv', PROJECTIONS, rows)
        tensors.move('attention_out.weight', 'attn.o_proj.weight')
        if options.convolution is not None:
            tensors.join('convolution', CONVOLUTIONS, rows, to_ours=turn_convolution, to_theirs=turn_back)
        our, names = 'attention.out_norm.weight', self.gain_names if options.output_gate else self.gain_names[::-1]
        theirs = [f'attn.{name}.weight' for name in names]
        tensors.move(our, next((their for their in theirs if tensors.has(our, their)), theirs[0]))
        if options.output_gate:
            self.exchange_gate(tensors)
        self.exchange_factors(tensors, options)

    def exchange_gate(self, tensors: Exchange) -> None:
        """Moves the tensors of the output gate."""
        tensors.move('output_gate.weight', 'attn.g_proj.weight')

    def exchange_factors(self, tensors: Exchange, options: ResolvedLayer) -> None:
        """Moves the tensors that the recurrence has beside queries, keys and values."""

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


def move_bias(tensors: Exchange, their: str, options: ResolvedLayer) -> None:
    """Moves the biases of the gate of each key channel, which their files have in one row."""
    shape = options.dims.n_kv_heads, options.dims.head_dim
    tensors.move('attention.gate.logits.bias', their, lambda x: x.reshape(shape), lambda x: x.reshape(-1))
