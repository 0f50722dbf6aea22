"""Layers of published hybrids with random weights, and what `transformers` computes of them.

tests/data/published_blocks.json has the names and shapes of a layer's tensors, and its outputs at a few tokens. Tensors
are drawn from their names. To record them again, in an environment with PyTorch and transformers from 5.24 on:

    PYTHONPATH=$PWD:tests python tests/interop/published_blocks.py
"""

import json
import pathlib
import sys

import checkpoints
import jax
import jax.numpy as jnp
import numpy as np

from lm.attention.recurrent.delta import Delta
from lm.attention.softmax import Softmax
from lm.interop.names import from_tensors, to_tensors
from lm.model import ModelConfig, Transformer
from lm.model.functions import ModelFunctions

FILE = pathlib.Path(__file__).parent.parent / 'data' / 'published_blocks.json'
LENGTH, WIDTH, HIDDEN = 70, 32, 48
"""The tokens, which fill more than one chunk of the delta rule, and the sizes of the layer."""
TOKENS = (0, 1, 31, 63, 64, 69)
"""The tokens whose outputs are recorded."""
QWEN = dict(
    hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=1, num_experts=0, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
    linear_value_head_dim=12, rope_parameters=dict(rope_type='default', rope_theta=1e4, partial_rotary_factor=0.25),
)  # fmt: skip
KIMI = dict(
    hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=1, mlp_layer_types=['dense'], linear_num_heads=4,
    linear_head_dim=8,
)  # fmt: skip
FORMS = {
    'Gated DeltaNet of Qwen3-Next': ('qwen3_next', QWEN | {'layer_types': ['linear_attention']}),
    'softmax of Qwen3-Next': ('qwen3_next', QWEN | {'layer_types': ['full_attention']}),
    'KDA of Kimi Linear': ('kimi_linear', KIMI | {'layer_types': ['linear_attention']}),
}
"""Form → `model_type`, and its configuration. The feed-forward layers are dense."""
OURS = {
    'Gated DeltaNet of Qwen3-Next': Delta(
        gate=True, n_heads=2, n_kv_heads=2, n_value_heads=4, head_dim=8, value_dim=12, convolution=4, rotary_base=None,
        output_gate=True, output_gate_form='silu', norm_epsilon=1e-6,
    ),
    'softmax of Qwen3-Next': Softmax(
        n_heads=4, n_kv_heads=2, head_dim=16, qk_norm=True, rotary_fraction=0.25, output_gate=True,
        output_gate_form='sigmoid',
    ),
    'KDA of Kimi Linear': Delta(
        gate='channel', n_heads=4, head_dim=8, convolution=4, rotary_base=None, output_gate=True,
        output_gate_form='sigmoid', output_gate_rank=8,
    ),
}  # fmt: skip
Tensors = dict[str, np.ndarray]


def draw_inputs() -> np.ndarray:
    """Returns the inputs of a layer, [1, L, D]."""
    return checkpoints.draw({'embed': [1, LENGTH, WIDTH]})['embed']


def draw_tensors(form: str, shapes: dict[str, list[int]]) -> Tensors:
    """Returns the tensors of a layer. Its heads remember some ten tokens."""
    drawn = checkpoints.draw(shapes)
    centred = FORMS[form][0] == 'qwen3_next'

    def around(name: str) -> float:
        if 'dt_bias' in name:
            return -3.0
        plain = not centred or name == 'linear_attn.norm.weight'
        return float(plain and checkpoints.gains(name))

    return {name: x + np.float32(around(name)) for name, x in drawn.items()}


def make_model(form: str, tensors: Tensors) -> Transformer:
    """Returns our model of one layer, with the weights of theirs."""
    config = ModelConfig(
        vocab_size=2,
        n_layers=1,
        d_model=WIDTH,
        hidden_dim=HIDDEN,
        attention=OURS[form],
        norm='rms',
        norm_epsilon=1e-6 if FORMS[form][0] == 'qwen3_next' else 1e-5,
        activation='silu',
        sinusoids=False,
    )
    functions = ModelFunctions(config, jnp.float32)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), functions.abstract)
    ours = {name: x for name, x in to_tensors(zeros).items() if not name.startswith('layers.')}
    ours |= {f'layers.0.{name}': x for name, x in CONVERSIONS[form](dict(tensors)).items()}
    return functions.merge(from_tensors(ours, functions.abstract, form))


def convert_qwen_delta(theirs: Tensors) -> Tensors:
    """Each key head has its rows of queries, keys, values and gates together."""
    heads, groups, size, value_size = 2, 2, 8, 12
    cuts = np.cumsum([size, size, groups * value_size])
    rows = theirs['linear_attn.in_proj_qkvz.weight'].reshape(heads, -1, WIDTH)
    *qkv, gate = (x.reshape(-1, WIDTH) for x in np.split(rows, cuts, axis=1))
    inputs = theirs['linear_attn.in_proj_ba.weight'].reshape(heads, 2, groups, WIDTH)
    return convert_feed_forward(theirs, 1.0) | {
        'qkv.weight': np.concatenate(qkv),
        'convolution.weight': theirs['linear_attn.conv1d.weight'][:, 0, ::-1],
        'mechanism_in.weight': inputs.swapaxes(0, 1).reshape(-1, WIDTH),
        'attention.gate.bias': theirs['linear_attn.dt_bias'],
        'attention.gate.log_rate': theirs['linear_attn.A_log'],
        'attention.out_norm.weight': theirs['linear_attn.norm.weight'],
        'output_gate.weight': gate,
        'attention_out.weight': theirs['linear_attn.out_proj.weight'],
    }


def convert_qwen_softmax(theirs: Tensors) -> Tensors:
    """Their rotary positions turn the pairs (c, c + 2) of the first four channels, ours (c, c + 8)."""
    heads, size, turned = 4, 16, 4
    first, rest = np.arange(turned), np.arange(turned, size)
    middle = (size - turned) // 2
    order = np.concatenate([first[: turned // 2], rest[:middle], first[turned // 2 :], rest[middle:]])
    joined = theirs['self_attn.q_proj.weight'].reshape(heads, 2, size, WIDTH)
    keys = theirs['self_attn.k_proj.weight'].reshape(-1, size, WIDTH)
    q, k = (x[:, order].reshape(-1, WIDTH) for x in (joined[:, 0], keys))
    return convert_feed_forward(theirs, 1.0) | {
        'qkv.weight': np.concatenate([q, k, theirs['self_attn.v_proj.weight']]),
        'q_norm.weight': 1 + theirs['self_attn.q_norm.weight'][order],
        'k_norm.weight': 1 + theirs['self_attn.k_norm.weight'][order],
        'output_gate.weight': joined[:, 1].reshape(-1, WIDTH),
        'attention_out.weight': theirs['self_attn.o_proj.weight'],
    }


def convert_kimi_delta(theirs: Tensors) -> Tensors:
    """Decay and output gate have matrices of the rank of a head."""
    inputs = theirs['self_attn.b_proj.weight'], theirs['self_attn.forget_gate.f_a_proj.weight']
    return convert_feed_forward(theirs, 0.0) | {
        'qkv.weight': np.concatenate([theirs[f'self_attn.{name}_proj.weight'] for name in 'qkv']),
        'convolution.weight': theirs['self_attn.conv1d.weight'][:, 0, ::-1],
        'mechanism_in.weight': np.concatenate(inputs),
        'attention.gate.logits.weight': theirs['self_attn.forget_gate.f_b_proj.weight'],
        'attention.gate.logits.bias': theirs['self_attn.forget_gate.dt_bias'].reshape(4, 8),
        'attention.gate.log_rate': theirs['self_attn.forget_gate.A_log'].reshape(-1),
        'attention.out_norm.weight': theirs['self_attn.o_norm.weight'],
        'output_gate.down.weight': theirs['self_attn.g_a_proj.weight'],
        'output_gate.up.weight': theirs['self_attn.g_b_proj.weight'],
        'attention_out.weight': theirs['self_attn.o_proj.weight'],
    }


def convert_feed_forward(theirs: Tensors, gain: float) -> Tensors:
    """Returns what is around attention; `gain` is added to the gains of the norms."""
    return {
        'attention_norm.weight': theirs['input_layernorm.weight'] + np.float32(gain),
        'glu_norm.weight': theirs['post_attention_layernorm.weight'] + np.float32(gain),
        'glu_in.weight': np.concatenate([theirs['mlp.up_proj.weight'], theirs['mlp.gate_proj.weight']]),
        'glu_out.weight': theirs['mlp.down_proj.weight'],
    }


CONVERSIONS = dict(zip(FORMS, (convert_qwen_delta, convert_qwen_softmax, convert_kimi_delta), strict=True))
"""Form → the function that gives their tensors our names."""


def compute(form: str) -> tuple[dict[str, list[int]], np.ndarray]:
    """Returns the shapes of a layer's tensors and its outputs [1, L, D], both by `transformers`."""
    import torch
    import transformers

    for package in ('fla', 'causal_conv1d'):  # transformers would take their kernels, which need a GPU
        sys.modules.setdefault(package, None)  # pyright: ignore[reportArgumentType]
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDecoderLayer
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRotaryEmbedding

    kind, changes = FORMS[form]
    config = transformers.AutoConfig.for_model(kind, **changes)
    config._attn_implementation = 'eager'
    layer = {'qwen3_next': Qwen3NextDecoderLayer, 'kimi_linear': KimiLinearDecoderLayer}[kind](config, 0).eval()
    state = layer.state_dict()
    shapes = {name: list(x.shape) for name, x in state.items()}
    with torch.no_grad():
        for name, x in draw_tensors(form, shapes).items():
            state[name].copy_(torch.tensor(x))
        x, options = torch.tensor(draw_inputs()), {}
        if kind == 'qwen3_next':
            options['position_embeddings'] = Qwen3NextRotaryEmbedding(config)(x, torch.arange(LENGTH)[None])
        if config.layer_types == ['full_attention']:
            options['attention_mask'] = torch.full((1, 1, LENGTH, LENGTH), -torch.inf).triu(1)
        return shapes, layer(x, **options).numpy()


def load() -> dict[str, dict]:
    """Returns what is recorded of all forms."""
    return json.loads(FILE.read_text())


if __name__ == '__main__':
    found = load() if FILE.exists() else {}
    for form in sys.argv[1:] or FORMS:
        shapes, outputs = compute(form)
        kept = {str(i): [float(f'{x:.8g}') for x in outputs[0, i]] for i in TOKENS}
        found[form] = {'tensors': shapes, 'outputs': kept}
    FILE.write_text(json.dumps(found) + '\n')
