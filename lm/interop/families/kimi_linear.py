"""Kimi Linear."""

import dataclasses

import numpy as np

from lm.attention import Attention, find_layer_type
from lm.interop.families.decoder import FULL, LINEAR, QKV, Decoder, count_layers, join_units
from lm.interop.families.exchange import Exchange, turn_back, turn_convolution
from lm.interop.families.mixture import describe_balance, exchange_experts, find_mixture, read_balance
from lm.interop.families.recurrent_decoder import move_bias
from lm.interop.hyperparameters import Hyperparameters
from lm.model import ModelConfig
from lm.model.feed_forward import DenseLayer, FeedForward
from lm.model.feed_forward.experts import Experts
from lm.model.options import ResolvedLayer

DENSE, SPARSE = 'dense', 'sparse'
"""The types of feed-forward layers."""
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
ATTENTION, MIXTURE = 'self_attn.', 'block_sparse_moe.'
LATENT = {'down.weight': 'kv_a_proj_with_mqa.weight', 'norm.weight': 'kv_a_layernorm.weight'}
"""Our tensors of latent keys → theirs; the third one is cut by head."""
DELTA = {
    'attention.gate.logits.weight': 'f_b_proj.weight',
    'attention.out_norm.weight': 'o_norm.weight',
    'output_gate.down.weight': 'g_a_proj.weight',
    'output_gate.up.weight': 'g_b_proj.weight',
}
"""Our tensors of Kimi delta attention → theirs, which are the same."""


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

    def exchange_attention(self, tensors: Exchange, model: ModelConfig, layer: int) -> None:
        one = model.layers[layer]
        exchange = _exchange_delta if one.layer_type == LINEAR else _exchange_latent
        exchange(tensors, model.resolve(one))
        tensors.move('attention_out.weight', f'{ATTENTION}o_proj.weight')

    def exchange_units(self, tensors: Exchange, model: ModelConfig, layer: int) -> None:
        kind = model.find_feed_forward(layer)
        if not isinstance(kind, Experts):
            # Files of transformers and published files differ.
            join_units(tensors, 'mlp.' if tensors.has('glu_in.weight', 'mlp.up_proj.weight') else MIXTURE)
            return
        tensors.move('experts.router.weight', f'{MIXTURE}gate.weight')
        tensors.move('experts.correction', f'{MIXTURE}gate.e_score_correction_bias')
        join_units(tensors, f'{MIXTURE}shared_experts.')
        exchange_experts(tensors, f'{MIXTURE}experts.', EXPERT, kind.n_experts)

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


def _exchange_latent(tensors: Exchange, options: ResolvedLayer) -> None:
    """Moves the tensors of softmax over latent keys. Their matrix has the keys and the values of each head together."""
    heads, sizes = options.heads.keys, options.latent_sizes

    def split_heads(matrix: np.ndarray) -> np.ndarray:
        width = matrix.shape[1]
        pieces = np.split(matrix.reshape(heads, -1, width), [sizes[0] // heads], axis=1)
        return np.concatenate([piece.reshape(-1, width) for piece in pieces])

    def join_heads(matrix: np.ndarray) -> np.ndarray:
        width = matrix.shape[1]
        pieces = [piece.reshape(heads, -1, width) for piece in np.split(matrix, sizes[:1])]
        return np.concatenate(pieces, axis=1).reshape(-1, width)

    tensors.move('qkv.weight', f'{ATTENTION}q_proj.weight')
    tensors.move('latent.up.weight', f'{ATTENTION}kv_b_proj.weight', split_heads, join_heads)
    for our, their in LATENT.items():
        tensors.move(f'latent.{our}', f'{ATTENTION}{their}')


def _exchange_delta(tensors: Exchange, options: ResolvedLayer) -> None:
    """Moves the tensors of Kimi delta attention."""
    rows, heads = options.qkv_sizes[:2], options.heads.queries
    convolutions = [f'{ATTENTION}{name}_conv1d' for name in 'qkv']
    tensors.join('qkv', QKV, rows)
    tensors.join('convolution', convolutions, rows, to_ours=turn_convolution, to_theirs=turn_back)
    tensors.join('mechanism_in', [f'{ATTENTION}b_proj', f'{ATTENTION}f_a_proj'], [heads])
    move_bias(tensors, f'{ATTENTION}dt_bias', options)
    rate = 'attention.gate.log_rate', f'{ATTENTION}A_log'
    tensors.move(*rate, lambda x: x.reshape(-1), lambda x: x.reshape(1, 1, -1, 1))
    for our, their in DELTA.items():
        tensors.move(our, f'{ATTENTION}{their}')


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
