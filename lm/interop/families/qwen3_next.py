"""Qwen3-Next."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from lm.attention import Attention, find_layer_type
from lm.interop.families.base import Tensors
from lm.interop.families.decoder import FULL, LayerTensors, count_layers
from lm.interop.families.expert_tensors import BALANCE
from lm.interop.families.mixture import ExpertDecoder
from lm.interop.families.rotary_entry import RotaryEntry
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig
from lm.model.options import ResolvedLayer

LINEAR = 'linear_attention'
"""The type of layers of Gated DeltaNet."""


class Qwen3Next(ExpertDecoder):
    """Three layers of Gated DeltaNet per layer of softmax, whose positions turn a quarter of each head; experts with a
    shared one; gates of the outputs; gains of 1 + w."""

    model_types = ('qwen3_next',)
    architecture = 'Qwen3NextForCausalLM'
    gain = 1.0
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
        BALANCE: 0.001,
    }

    def options(self, config: Hyperparameters) -> dict[str, object]:
        return {**super().options(config), 'rotary_fraction': self.rotary(config).fraction}

    def head_dim(self, config: Hyperparameters) -> int:
        return config.integer('head_dim', 256)

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

    def attention_tensors(self, theirs: LayerTensors, config: Hyperparameters, layer: int) -> Tensors:
        if self.layer_types(config)[layer] == LINEAR:
            return self._delta_tensors(theirs, self.delta | config)
        size = self.head_dim(config)
        order = order_turned(size, self.rotary(config).fraction)
        width = config.integer('hidden_size')
        joined = theirs.take('self_attn.q_proj.weight').reshape(-1, 2, size, width)
        keys = theirs.take('self_attn.k_proj.weight').reshape(-1, size, width)
        q, k = (x[:, order].reshape(-1, width) for x in (joined[:, 0], keys))
        one = np.float32(self.gain)
        return {
            'qkv.weight': np.concatenate([q, k, theirs.take('self_attn.v_proj.weight')]),
            'q_norm.weight': one + theirs.take('self_attn.q_norm.weight')[order],
            'k_norm.weight': one + theirs.take('self_attn.k_norm.weight')[order],
            'output_gate.weight': joined[:, 1].reshape(-1, width),
            'attention_out.weight': theirs.take('self_attn.o_proj.weight'),
        }

    def _delta_tensors(self, theirs: LayerTensors, sizes: Hyperparameters) -> Tensors:
        """Each of their key heads has its rows of queries, keys, values and gates together."""
        heads, size = sizes.integer('linear_num_key_heads'), sizes.integer('linear_key_head_dim')
        values = sizes.integer('linear_num_value_heads') // heads * sizes.integer('linear_value_head_dim')
        joined, inputs = (theirs.take(f'linear_attn.in_proj_{name}.weight') for name in ('qkvz', 'ba'))
        width = joined.shape[1]
        rows = np.split(joined.reshape(heads, -1, width), np.cumsum([size, size, values]), axis=1)
        *qkv, gate = (x.reshape(-1, width) for x in rows)
        return {
            'qkv.weight': np.concatenate(qkv),
            'convolution.weight': theirs.take('linear_attn.conv1d.weight')[:, 0, ::-1],
            'mechanism_in.weight': inputs.reshape(heads, 2, -1, width).swapaxes(0, 1).reshape(-1, width),
            'attention.gate.bias': theirs.take('linear_attn.dt_bias'),
            'attention.gate.log_rate': theirs.take('linear_attn.A_log'),
            'attention.out_norm.weight': theirs.take('linear_attn.norm.weight'),
            'output_gate.weight': gate,
            'attention_out.weight': theirs.take('linear_attn.out_proj.weight'),
        }

    def describe(self, model: ModelConfig) -> dict[str, object]:
        types = [LINEAR if one.layer_type == LINEAR else FULL for one in model.layers]
        found = super().describe(model) | {'layer_types': types}
        resolved = dict(zip(reversed(types), map(model.resolve, reversed(model.layers)), strict=True))
        if (full := resolved.get(FULL)) is not None:
            found |= _describe_heads(full)
        if (linear := resolved.get(LINEAR)) is not None:
            found |= _describe_delta(linear)
        return found

    def attention_back(self, ours: Tensors, model: ModelConfig, layer: int) -> Tensors:
        one = model.layers[layer]
        options = model.resolve(one)
        if one.layer_type == LINEAR:
            return self._delta_back(ours, options)
        size, width = options.dims.head_dim, model.d_model
        turned = options.rotary.fraction if options.rotary else 1.0
        back = np.argsort(order_turned(size, turned))
        queries, keys, _ = options.qkv_sizes
        q, k, v = np.split(ours['qkv.weight'], [queries, queries + keys])
        q, k = (x.reshape(-1, size, width)[:, back] for x in (q, k))
        gate, gain = ours['output_gate.weight'].reshape(-1, size, width), np.float32(self.gain)
        return {
            'self_attn.q_proj.weight': np.stack([q, gate], axis=1).reshape(-1, width),
            'self_attn.k_proj.weight': k.reshape(-1, width),
            'self_attn.v_proj.weight': v,
            'self_attn.q_norm.weight': ours['q_norm.weight'][back] - gain,
            'self_attn.k_norm.weight': ours['k_norm.weight'][back] - gain,
            'self_attn.o_proj.weight': ours['attention_out.weight'],
        }

    def _delta_back(self, ours: Tensors, options: ResolvedLayer) -> Tensors:
        heads, width = options.heads.keys, ours['qkv.weight'].shape[1]
        queries, keys, _ = options.qkv_sizes
        pieces = [*np.split(ours['qkv.weight'], [queries, queries + keys]), ours['output_gate.weight']]
        joined = np.concatenate([x.reshape(heads, -1, width) for x in pieces], axis=1)
        inputs = ours['mechanism_in.weight'].reshape(2, heads, -1, width).swapaxes(0, 1)
        return {
            'linear_attn.in_proj_qkvz.weight': joined.reshape(-1, width),
            'linear_attn.in_proj_ba.weight': inputs.reshape(-1, width),
            'linear_attn.conv1d.weight': ours['convolution.weight'][:, None, ::-1],
            'linear_attn.dt_bias': ours['attention.gate.bias'],
            'linear_attn.A_log': ours['attention.gate.log_rate'],
            'linear_attn.norm.weight': ours['attention.out_norm.weight'],
            'linear_attn.out_proj.weight': ours['attention_out.weight'],
        }


def order_turned(size: int, fraction: float) -> np.ndarray:
    """Returns their channels of a head in our order.

    Their positions turn the pairs (c, c + T/2) of the first T channels, ours the pairs (c, c + size/2), c < T/2.
    """
    turned = 2 * max(1, round(fraction * (size // 2)))
    first, rest, middle = np.arange(turned), np.arange(turned, size), (size - turned) // 2
    return np.concatenate([first[: turned // 2], rest[:middle], first[turned // 2 :], rest[middle:]])


def _describe_heads(options: ResolvedLayer) -> dict[str, object]:
    """Returns the entries of layers with softmax."""
    heads = options.heads
    return {
        'num_attention_heads': heads.queries,
        'num_key_value_heads': heads.keys,
        'head_dim': options.dims.head_dim,
    }


def _describe_delta(options: ResolvedLayer) -> dict[str, object]:
    """Returns the entries of layers of Gated DeltaNet."""
    return {
        'linear_num_key_heads': options.heads.keys,
        'linear_num_value_heads': options.heads.values,
        'linear_key_head_dim': options.dims.head_dim,
        'linear_value_head_dim': options.dims.value_size,
        'linear_conv_kernel_dim': options.convolution or 4,
    }
