"""Qwen3-Next."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from lm.attention import Attention, find_layer_type
from lm.interop.families.decoder import FULL, LINEAR, QKV, count_layers
from lm.interop.families.exchange import Exchange, turn_back, turn_convolution
from lm.interop.families.mixture import ExpertDecoder
from lm.interop.families.rotary_entry import RotaryEntry
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig
from lm.model.options import ResolvedLayer


class Qwen3Next(ExpertDecoder):
    """Three layers of Gated DeltaNet per layer of softmax, whose positions turn a quarter of each head; experts with a
    shared one; gates of the outputs; gains of 1 + w."""

    model_types = ('qwen3_next',)
    architecture = 'Qwen3NextForCausalLM'
    gain = 1.0
    head_size = 256
    kinds = (FULL, LINEAR)
    turns_parts = True
    without = ('mtp.',)
    has_dense = True
    shared = True
    entries: ClassVar = {**ExpertDecoder.entries, 'shared_dim': 'shared_expert_intermediate_size'}
    delta: ClassVar[Mapping[str, int]] = {
        'linear_num_key_heads': 16,
        'linear_num_value_heads': 32,
        'linear_key_head_dim': 128,
        'linear_value_head_dim': 128,
        'linear_conv_kernel_dim': 4,
    }
    """The sizes of Gated DeltaNet where config.json states none, and so are `expert`."""
    expert: ClassVar[Mapping[str, object]] = {
        'num_experts': 512,
        'num_experts_per_tok': 10,
        'moe_intermediate_size': 512,
        'shared_expert_intermediate_size': 512,
        'norm_topk_prob': True,
    }

    def options(self, config: Hyperparameters) -> dict[str, object]:
        return {**super().options(config), 'rotary_fraction': self.rotary(config).fraction}

    def rotary(self, config: Hyperparameters, layer_type: str = FULL) -> RotaryEntry:
        return RotaryEntry({'partial_rotary_factor': 0.25} | config, self.rotary_base)

    def layer_types(self, config: Hyperparameters) -> list[str]:
        every = config.integer('full_attention_interval', 4)
        types = [FULL if (i + 1) % every == 0 else LINEAR for i in count_layers(config)]
        return config.texts('layer_types') or types

    def attention(self, config: Hyperparameters, layer: int) -> Attention:
        kind = self.layer_types(config)[layer]
        options: dict[str, object] = {'qk_norm': True, 'output_gate': True, 'output_gate_form': 'sigmoid'}
        if kind == LINEAR:
            sizes = self.delta | config
            options = {
                'gate': True,
                'n_heads': sizes.integer('linear_num_key_heads'),
                'n_kv_heads': sizes.integer('linear_num_key_heads'),
                'n_value_heads': sizes.integer('linear_num_value_heads'),
                'head_dim': sizes.integer('linear_key_head_dim'),
                'value_dim': sizes.integer('linear_value_head_dim'),
                'convolution': sizes.integer('linear_conv_kernel_dim'),
                'rotary_base': None,
                'output_gate': True,
                'output_gate_form': 'silu',
                'norm_epsilon': config.number('rms_norm_eps', self.epsilon),
            }
        return dataclasses.replace(find_layer_type(kind)(), **options)

    def exchange_attention(self, tensors: Exchange, model: ModelConfig, layer: int) -> None:
        one = model.layers[layer]
        options = model.resolve(one)
        if one.layer_type == LINEAR:
            _exchange_delta(tensors, options)
        else:
            _exchange_heads(tensors, options, np.float32(self.gain))

    def describe(self, model: ModelConfig) -> dict[str, object]:
        types = [LINEAR if one.layer_type == LINEAR else FULL for one in model.layers]
        found = super().describe(model) | {'layer_types': types}
        resolved = dict(zip(reversed(types), map(model.resolve, reversed(model.layers)), strict=True))
        if (full := resolved.get(FULL)) is not None:
            found |= {'num_attention_heads': full.heads.queries, 'num_key_value_heads': full.heads.keys}
            found['head_dim'] = full.dims.head_dim
        if (linear := resolved.get(LINEAR)) is not None:
            found |= _describe_delta(linear)
        return found


def order_turned(size: int, fraction: float) -> np.ndarray:
    """Returns their channels of a head in our order.

    Their positions turn the pairs (c, c + T/2) of the first T channels, ours the pairs (c, c + size/2), c < T/2.
    """
    turned = 2 * max(1, round(fraction * (size // 2)))
    first, rest, middle = np.arange(turned), np.arange(turned, size), (size - turned) // 2
    return np.concatenate([first[: turned // 2], rest[:middle], first[turned // 2 :], rest[middle:]])


def _exchange_heads(tensors: Exchange, options: ResolvedLayer, gain: np.float32) -> None:
    """Moves the tensors of softmax. Each of their heads has its rows of queries and of the gate together."""
    size, rows = options.dims.head_dim, options.qkv_sizes
    order = order_turned(size, options.rotary.fraction if options.rotary else 1.0)
    back = np.argsort(order)

    def to_ours(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> list[np.ndarray]:
        width = values.shape[1]
        joined, keys = queries.reshape(-1, 2, size, width), keys.reshape(-1, size, width)
        q, k = (x[:, order].reshape(-1, width) for x in (joined[:, 0], keys))
        return [np.concatenate([q, k, values]), joined[:, 1].reshape(-1, width)]

    def to_theirs(qkv: np.ndarray, gate: np.ndarray) -> list[np.ndarray]:
        width = qkv.shape[1]
        q, k, v = np.split(qkv, [rows[0], rows[0] + rows[1]])
        q, k = (x.reshape(-1, size, width)[:, back] for x in (q, k))
        return [np.stack([q, gate.reshape(-1, size, width)], axis=1).reshape(-1, width), k.reshape(-1, width), v]

    tensors.change(['qkv.weight', 'output_gate.weight'], [f'{name}.weight' for name in QKV], to_ours, to_theirs)
    for name in ('q_norm.weight', 'k_norm.weight'):
        tensors.move(name, f'self_attn.{name}', lambda x: gain + x[order], lambda x: x[back] - gain)
    tensors.move('attention_out.weight', 'self_attn.o_proj.weight')


def _exchange_delta(tensors: Exchange, options: ResolvedLayer) -> None:
    """Moves the tensors of Gated DeltaNet. Each of their key heads has its rows of queries, keys, values and gates
    together, and of the two inputs of the mechanism."""
    heads, sizes = options.heads.keys, options.qkv_sizes

    def to_ours(joined: np.ndarray) -> list[np.ndarray]:
        width = joined.shape[1]
        rows = np.split(joined.reshape(heads, -1, width), np.cumsum(sizes) // heads, axis=1)
        *qkv, gate = (x.reshape(-1, width) for x in rows)
        return [np.concatenate(qkv), gate]

    def to_theirs(qkv: np.ndarray, gate: np.ndarray) -> list[np.ndarray]:
        pieces, width = [*np.split(qkv, np.cumsum(sizes)[:2]), gate], qkv.shape[1]
        return [np.concatenate([x.reshape(heads, -1, width) for x in pieces], axis=1).reshape(-1, width)]

    def swap(inputs: np.ndarray, first: int, second: int) -> np.ndarray:
        width = inputs.shape[1]
        return inputs.reshape(first, second, -1, width).swapaxes(0, 1).reshape(-1, width)

    tensors.change(['qkv.weight', 'output_gate.weight'], ['linear_attn.in_proj_qkvz.weight'], to_ours, to_theirs)
    inputs = 'mechanism_in.weight', 'linear_attn.in_proj_ba.weight'
    tensors.move(*inputs, lambda x: swap(x, heads, 2), lambda x: swap(x, 2, heads))
    tensors.move('convolution.weight', 'linear_attn.conv1d.weight', turn_convolution, turn_back)
    tensors.move('attention.gate.bias', 'linear_attn.dt_bias')
    tensors.move('attention.gate.log_rate', 'linear_attn.A_log')
    tensors.move('attention.out_norm.weight', 'linear_attn.norm.weight')
    tensors.move('attention_out.weight', 'linear_attn.out_proj.weight')


def _describe_delta(options: ResolvedLayer) -> dict[str, object]:
    """Returns the entries of layers of Gated DeltaNet."""
    return {
        'linear_num_key_heads': options.heads.keys,
        'linear_num_value_heads': options.heads.values,
        'linear_key_head_dim': options.dims.head_dim,
        'linear_value_head_dim': options.dims.value_size,
        'linear_conv_kernel_dim': options.convolution or 4,
    }
