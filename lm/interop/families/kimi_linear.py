"""Kimi Linear."""

import dataclasses

import numpy as np

from lm.attention import Attention, find_layer_type
from lm.interop.families.base import Tensors
from lm.interop.families.decoder import FULL, Decoder, LayerTensors, count_layers, cut, cut_units, join_units
from lm.interop.families.expert_tensors import (
    describe_balance,
    find_mixture,
    read_balance,
    stack_experts,
    unstack_experts,
)
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig
from lm.model.feed_forward import DenseLayer, FeedForward
from lm.model.feed_forward.experts import Experts

LINEAR, DENSE, SPARSE = 'linear_attention', 'dense', 'sparse'
"""The type of layers of Kimi delta attention, and the types of feed-forward layers."""
DEFAULTS = {
    'num_key_value_heads': None,
    'kv_lora_rank': 512,
    'qk_nope_head_dim': 128,
    'qk_rope_head_dim': 64,
    'v_head_dim': 128,
    'linear_num_heads': 32,
    'linear_head_dim': 128,
    'linear_conv_kernel_dim': 4,
    'num_experts': 256,
    'num_experts_per_token': 8,
    'moe_intermediate_size': 1024,
    'num_shared_experts': 1,
    'moe_renormalize': True,
    'num_expert_group': 1,
    'topk_group': 1,
    'routed_scaling_factor': 2.446,
}
"""The numbers that files leave out, as `transformers` has them."""
OTHER_NAMES = {
    'num_local_experts': 'num_experts',
    'num_experts_per_tok': 'num_experts_per_token',
    'n_shared_experts': 'num_shared_experts',
    'norm_topk_prob': 'moe_renormalize',
    'n_group': 'num_expert_group',
}
"""Other names of entries → the names in published files."""
OF_DELTA = {
    'num_heads': 'linear_num_heads',
    'head_dim': 'linear_head_dim',
    'short_conv_kernel_size': 'linear_conv_kernel_dim',
}
"""Entries of `linear_attn_config` → their names in `transformers`."""
EXPERT = ('w3', 'w1', 'w2')
"""Their maps of an expert: values, gates, output."""
MIXTURE = 'block_sparse_moe.'
LATENT = {'down.weight': 'kv_a_proj_with_mqa.weight', 'norm.weight': 'kv_a_layernorm.weight'}
"""Our tensors of latent keys → theirs; the third one is cut by head."""


class KimiLinear(Decoder):
    """Three layers of Kimi delta attention per layer of softmax over latent keys, without positions; experts that are
    chosen by corrected sigmoids, with a shared one; the first layers are dense."""

    model_types = ('kimi_linear',)
    architecture = 'KimiLinearForCausalLM'
    epsilon = 1e-5
    kinds = (FULL, LINEAR)

    def differences(self, config: Hyperparameters) -> list[str]:
        heads = config.integer('num_attention_heads')
        found = {
            'queries of low rank': config.get('q_lora_rank') is not None,
            'rotary positions': config.get('mla_use_nope') is False,
            'softmax in the router': config.get('moe_router_activation_func', 'sigmoid') != 'sigmoid',
            'layers without experts in between': config.get('moe_layer_freq', 1) != 1,
            'fewer keys than queries': (config.find_integer('num_key_value_heads') or heads) != heads,
        }
        return super().differences(config) + [what for what, differs in found.items() if differs]

    def context_length(self, config: Hyperparameters) -> int | None:
        return config.find_integer('model_max_length') or config.find_integer('max_position_embeddings')

    def options(self, config: Hyperparameters) -> dict[str, object]:
        return {
            'rotary_base': None,
            'feed_forward': find_mixture(self.feed_forward(config, i) for i in count_layers(config)),
        }

    def head_dim(self, config: Hyperparameters) -> int:
        sizes = read_sizes(config)
        return sizes.integer('qk_nope_head_dim') + sizes.integer('qk_rope_head_dim')

    def layer_types(self, config: Hyperparameters) -> list[str]:
        layers, delta = count_layers(config), config.section('linear_attn_config')
        if delta.get('full_attn_layers') is not None:  # it counts layers from 1
            full = delta.integers('full_attn_layers')
            return [FULL if i + 1 in full else LINEAR for i in layers]
        return config.texts('layer_types') or [FULL if i and i % 4 == 0 else LINEAR for i in layers]

    def attention(self, config: Hyperparameters, layer: int) -> Attention:
        kind, sizes = self.layer_types(config)[layer], read_sizes(config)
        options: dict[str, object] = {
            'value_dim': sizes.integer('v_head_dim'),
            'latent_rank': sizes.integer('kv_lora_rank'),
            'shared_key_dim': sizes.integer('qk_rope_head_dim'),
        }
        if kind == LINEAR:
            options = {
                'gate': 'channel',
                'n_heads': sizes.integer('linear_num_heads'),
                'n_kv_heads': None,
                'head_dim': sizes.integer('linear_head_dim'),
                'convolution': sizes.integer('linear_conv_kernel_dim'),
                'output_gate': True,
                'output_gate_form': 'sigmoid',
                'output_gate_rank': sizes.integer('linear_head_dim'),
                'norm_epsilon': config.number('rms_norm_eps', self.epsilon),
            }
        return dataclasses.replace(find_layer_type(kind)(), **options)

    def feed_forward(self, config: Hyperparameters, layer: int) -> FeedForward:
        """Returns the configuration of the feed-forward part of layer number `layer`: dense, or with experts."""
        first = config.integer('first_k_dense_replace', 1)
        types = config.texts('mlp_layer_types') or [DENSE] * first + [SPARSE] * config.integer('num_hidden_layers')
        if types[layer] == DENSE:
            return DenseLayer()
        found = read_sizes(config)
        width = found.integer('moe_intermediate_size')
        return Experts(
            n_experts=found.integer('num_experts'),
            top_k=found.integer('num_experts_per_token'),
            hidden_dim=width,
            shared_dim=width * found.integer('num_shared_experts') or None,
            sigmoid=True,
            normalize=found.flag('moe_renormalize'),
            scale=found.number('routed_scaling_factor'),
            groups=found.integer('num_expert_group'),
            top_groups=found.integer('topk_group'),
            correction=True,
            balance=read_balance(config),
        )

    def attention_tensors(self, theirs: LayerTensors, config: Hyperparameters, layer: int) -> Tensors:
        take = lambda name: theirs.take(f'self_attn.{name}')  # noqa: E731
        sizes = read_sizes(config)
        if self.layer_types(config)[layer] == FULL:
            rows = [sizes.integer('qk_nope_head_dim'), sizes.integer('v_head_dim')]
            keys, values = _split_heads(take('kv_b_proj.weight'), rows)
            return {
                'qkv.weight': take('q_proj.weight'),
                'latent.up.weight': np.concatenate([keys, values]),
                **{f'latent.{our}': take(their) for our, their in LATENT.items()},
                'attention_out.weight': take('o_proj.weight'),
            }
        heads, size = sizes.integer('linear_num_heads'), sizes.integer('linear_head_dim')
        return {
            'qkv.weight': theirs.join([f'self_attn.{name}_proj' for name in 'qkv']),
            'convolution.weight': theirs.join([f'self_attn.{name}_conv1d' for name in 'qkv'])[:, 0, ::-1],
            'mechanism_in.weight': theirs.join(['self_attn.b_proj', 'self_attn.f_a_proj']),
            'attention.gate.logits.weight': take('f_b_proj.weight'),
            'attention.gate.logits.bias': take('dt_bias').reshape(heads, size),
            'attention.gate.log_rate': take('A_log').reshape(-1),
            'attention.out_norm.weight': take('o_norm.weight'),
            'output_gate.down.weight': take('g_a_proj.weight'),
            'output_gate.up.weight': take('g_b_proj.weight'),
            'attention_out.weight': take('o_proj.weight'),
        }

    def unit_tensors(self, theirs: LayerTensors, config: Hyperparameters, layer: int) -> Tensors:
        kind = self.feed_forward(config, layer)
        if not isinstance(kind, Experts):
            begin = 'mlp.' if theirs.has('mlp.up_proj.weight') else MIXTURE  # as transformers writes it
            return join_units(theirs, begin)
        return {
            'experts.router.weight': theirs.take(f'{MIXTURE}gate.weight'),
            'experts.correction': theirs.take(f'{MIXTURE}gate.e_score_correction_bias'),
            **join_units(theirs, f'{MIXTURE}shared_experts.'),
            **stack_experts(theirs, f'{MIXTURE}experts.', EXPERT, kind.n_experts),
        }

    def describe(self, model: ModelConfig) -> dict[str, object]:
        kinds = [model.find_feed_forward(i).settle(model.feed_forward_shape) for i in range(model.n_layers)]
        types = [LINEAR if one.layer_type == LINEAR else FULL for one in model.layers]
        found = super().describe(model)
        for name in ('rope_parameters', 'head_dim', 'sliding_window', 'use_sliding_window'):
            del found[name]
        found |= {
            'layer_types': types,
            'mlp_layer_types': [SPARSE if isinstance(one, Experts) else DENSE for one in kinds],
        }
        for kind, one in zip(types, model.layers, strict=True):
            options = model.resolve(one)
            heads, size = options.heads.queries, options.dims.head_dim
            if kind == LINEAR:
                found |= {'linear_num_heads': heads, 'linear_head_dim': size}
                found['linear_conv_kernel_dim'] = options.convolution or 4
            else:
                shared = options.shared_key_dim
                found |= {'num_attention_heads': heads, 'num_key_value_heads': heads, 'qk_rope_head_dim': shared}
                found |= {'qk_nope_head_dim': size - shared, 'v_head_dim': options.dims.value_size}
                found['kv_lora_rank'] = options.latent_rank or 1
        found |= _describe_experts(next((one for one in kinds if isinstance(one, Experts)), None))
        return found | describe_balance(model)

    def attention_back(self, ours: Tensors, model: ModelConfig, layer: int) -> Tensors:
        one = model.layers[layer]
        options = model.resolve(one)
        found: Tensors = {'o_proj.weight': ours['attention_out.weight']}
        if one.layer_type != LINEAR:
            heads, (keys, values) = options.heads.keys, options.latent_sizes
            rank = ours['latent.up.weight'].shape[1]
            pieces = np.split(ours['latent.up.weight'], [keys])
            joined = np.concatenate([piece.reshape(heads, -1, rank) for piece in pieces], axis=1)
            found |= {'q_proj.weight': ours['qkv.weight'], 'kv_b_proj.weight': joined.reshape(keys + values, rank)}
            found |= {their: ours[f'latent.{our}'] for our, their in LATENT.items()}
        else:
            heads, size = options.heads.queries, options.dims.head_dim
            cuts = [heads * size] * 2
            found |= cut(ours['qkv.weight'], [f'{name}_proj' for name in 'qkv'], cuts)
            found |= cut(ours['convolution.weight'][:, None, ::-1], [f'{name}_conv1d' for name in 'qkv'], cuts)
            found |= cut(ours['mechanism_in.weight'], ['b_proj', 'f_a_proj'], [heads])
            found |= {
                'f_b_proj.weight': ours['attention.gate.logits.weight'],
                'dt_bias': ours['attention.gate.logits.bias'].reshape(-1),
                'A_log': ours['attention.gate.log_rate'].reshape(1, 1, -1, 1),
                'o_norm.weight': ours['attention.out_norm.weight'],
                'g_a_proj.weight': ours['output_gate.down.weight'],
                'g_b_proj.weight': ours['output_gate.up.weight'],
            }
        return {f'self_attn.{name}': tensor for name, tensor in found.items()}

    def unit_back(self, ours: Tensors, model: ModelConfig, layer: int) -> Tensors:
        kind = model.find_feed_forward(layer)
        if not isinstance(kind, Experts):
            return cut_units(ours, 'mlp.')
        return {
            f'{MIXTURE}gate.weight': ours['experts.router.weight'],
            f'{MIXTURE}gate.e_score_correction_bias': ours['experts.correction'],
            **cut_units(ours, f'{MIXTURE}shared_experts.'),
            **unstack_experts(ours, f'{MIXTURE}experts.', EXPERT),
        }


def read_sizes(config: Hyperparameters) -> Hyperparameters:
    """Returns the entries of `DEFAULTS` in a config.json, whichever of their names it uses."""
    delta = config.section('linear_attn_config')
    return Hyperparameters(
        {
            **DEFAULTS,
            **{ours: config[name] for name, ours in OTHER_NAMES.items() if name in config},
            **{name: config[name] for name in DEFAULTS if config.get(name) is not None},
            **{ours: delta[name] for name, ours in OF_DELTA.items() if name in delta},
        }
    )


def _split_heads(matrix: np.ndarray, sizes: list[int]) -> list[np.ndarray]:
    """Returns the rows of keys and of values from a matrix that has both for each head."""
    rows = matrix.reshape(-1, sum(sizes), matrix.shape[1])
    return [piece.reshape(-1, matrix.shape[1]) for piece in np.split(rows, sizes[:1], axis=1)]


def _describe_experts(kind: Experts | None) -> dict[str, object]:
    """Returns the entries of experts."""
    if kind is None:
        return {}
    return {
        'num_experts': kind.n_experts,
        'num_experts_per_token': kind.top_k,
        'moe_intermediate_size': kind.hidden_dim,
        'num_shared_experts': (kind.shared_dim or 0) // (kind.hidden_dim or 1),
        'moe_renormalize': kind.normalize,
        'routed_scaling_factor': kind.scale,
        'num_expert_group': kind.groups,
        'topk_group': kind.top_groups,
    }
