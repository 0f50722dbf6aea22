"""Small checkpoints of every family that `lm import` reads, and what `transformers` computes from them.

For each form, tests/data/checkpoints has config.json, and the names and shapes of the tensors. It also has the logits,
the loss and the greedy text that `transformers` computes. Tensors are drawn from their names. To record them again,
in an environment with PyTorch:

    PYTHONPATH=$PWD:tests python tests/interop/checkpoints.py

Forms of flash-linear-attention need this package too (`recurrent_classes`).
"""

import json
import pathlib
import re
import sys
import tempfile
import zlib

import numpy as np
import recurrent_classes
from safetensors.numpy import load_file, save_file

FOLDER = pathlib.Path(__file__).parent.parent / 'data' / 'checkpoints'
SIZES = dict(
    vocab_size=41, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=64, pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
GPT2_SIZES = dict(
    vocab_size=41, n_embd=32, n_layer=2, n_head=4, n_positions=32, n_inner=56, bos_token_id=0, eos_token_id=0
)
LLAMA3 = dict(
    rope_type='llama3', rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=32,
)  # fmt: skip
FORMS = {
    'llama': ('llama', dict(rms_norm_eps=1e-4)),
    'llama_tied': ('llama', dict(tie_word_embeddings=True, head_dim=12)),
    'llama_3.1': ('llama', dict(rope_parameters=LLAMA3)),
    'llama_linear': ('llama', dict(rope_parameters=dict(rope_type='linear', rope_theta=1e4, factor=4.0))),
    'mistral': ('mistral', dict(sliding_window=5)),
    'ministral': ('ministral', dict(
        sliding_window=5, layer_types=['sliding_attention', 'full_attention'], head_dim=12,
    )),
    'qwen2': ('qwen2', dict(tie_word_embeddings=True)),
    'qwen2_window': ('qwen2', dict(use_sliding_window=True, sliding_window=5, max_window_layers=1)),
    'qwen3': ('qwen3', dict(head_dim=12)),
    'qwen3_yarn': ('qwen3', dict(rope_parameters=dict(
        rope_type='yarn', rope_theta=1e4, factor=4.0, original_max_position_embeddings=16,
    ), head_dim=16)),
    'qwen3_next': ('qwen3_next', dict(
        num_hidden_layers=4, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=12, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=24, mlp_only_layers=[1],
    )),
    'qwen3_next_dense': ('qwen3_next', dict(
        num_hidden_layers=4, head_dim=8, linear_num_key_heads=4, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=0, tie_word_embeddings=True,
        rope_parameters=dict(rope_type='default', rope_theta=1e3, partial_rotary_factor=0.5),
    )),
    'kimi_linear': ('kimi_linear', dict(
        num_hidden_layers=5, linear_num_heads=4, linear_head_dim=8, kv_lora_rank=12, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=6, num_key_value_heads=4, num_local_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=16, n_group=4, topk_group=2,
    )),
    'gla': ('gla', dict(num_heads=4, num_kv_heads=2, use_short_conv=True, norm_eps=1e-5)),
    'gla_plain': ('gla', dict(
        num_heads=2, expand_k=1.0, expand_v=1.5, use_output_gate=False, tie_word_embeddings=True,
    )),
    'retnet': ('retnet', dict(num_heads=4)),
    'delta_net': ('delta_net', dict(num_heads=4, expand_v=1.5, allow_neg_eigval=True)),
    'gated_deltanet': ('gated_deltanet', dict(
        num_heads=2, num_v_heads=4, head_dim=8, expand_v=1.5, output_gate_activation='sigmoid',
    )),
    'kda': ('kda', dict(num_heads=4, head_dim=8)),
    'olmo2': ('olmo2', {}),
    'gemma': ('gemma', dict(head_dim=12)),
    'gemma2': ('gemma2', dict(
        head_dim=12, sliding_window=5, query_pre_attn_scalar=9, attn_logit_softcapping=2.0, final_logit_softcapping=3.0,
    )),
    'gemma3': ('gemma3_text', dict(
        num_hidden_layers=4, head_dim=12, sliding_window=5, query_pre_attn_scalar=9,
        layer_types=['sliding_attention', 'full_attention'] * 2,
    )),
    'gemma3_linear': ('gemma3_text', dict(num_hidden_layers=3, head_dim=12, sliding_window=5, rope_parameters=dict(
        full_attention=dict(rope_type='linear', factor=8.0, rope_theta=1e5),
        sliding_attention=dict(rope_type='default', rope_theta=1e3),
    ), layer_types=['sliding_attention', 'sliding_attention', 'full_attention'])),
    'gemma3_vision': ('gemma3', dict(
        text_config=SIZES | dict(
            head_dim=12, sliding_window=5, query_pre_attn_scalar=12,
            layer_types=['sliding_attention', 'full_attention'],
        ),
        vision_config=dict(
            hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
            image_size=28, patch_size=14,
        ),
        mm_tokens_per_image=1, bos_token_id=None, eos_token_id=None,
    )),
    'olmo3': ('olmo3', dict(num_hidden_layers=4, sliding_window=5, rope_parameters=dict(
        full_attention=dict(rope_type='yarn', factor=4.0, rope_theta=1e4, original_max_position_embeddings=16),
        sliding_attention=dict(rope_type='default', rope_theta=1e4),
    ))),
    'llama_biases': ('llama', dict(attention_bias=True, mlp_bias=True)),
    'llama_attention_biases': ('llama', dict(attention_bias=True)),
    'mixtral': ('mixtral', dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=5)),
    'qwen2_moe': ('qwen2_moe', dict(
        num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=24,
    )),
    'qwen3_moe': ('qwen3_moe', dict(
        num_hidden_layers=3, head_dim=12, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=16,
        norm_topk_prob=True, mlp_only_layers=[1],
    )),
    'olmoe': ('olmoe', dict(num_experts=6, num_experts_per_tok=3, intermediate_size=16)),
    'phi3': ('phi3', dict(sliding_window=7)),
    'granite': ('granite', dict(
        embedding_multiplier=3.0, attention_multiplier=0.5, residual_multiplier=0.7, logits_scaling=2.0,
    )),
    'starcoder2': ('starcoder2', dict(sliding_window=6)),
    'smollm3': ('smollm3', dict(num_hidden_layers=4)),
    'gpt2': ('gpt2', GPT2_SIZES | dict(layer_norm_epsilon=1e-3)),
}  # fmt: skip
"""Form → `model_type`, and what differs from `SIZES`."""
CENTRED = ('gemma', 'qwen3_next')
"""Beginnings of the `model_type` of families with gains of 1 + w."""
IN_OTHER_FORM = ('qwen3_next', 'kimi_linear', 'mixtral', 'qwen2_moe', 'qwen3_moe', 'olmoe')
"""Families whose tensors in files have other names and shapes than in the model."""
RECURRENT = ('gla', 'gla_plain', 'retnet', 'delta_net', 'gated_deltanet', 'kda')
"""Forms whose classes are of flash-linear-attention."""
WITHOUT_BIAS = 'g_proj.1.bias'
"""The end of the names of biases that are zero, because models here have none."""
PROMPT, WRITTEN = 16, 8
"""The tokens of the prompt, and how many are written after it."""


def draw(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Returns a random float32 array for each name."""
    tensors = {}
    for name, shape in shapes.items():
        random = np.random.RandomState(zlib.crc32(name.encode()))  # its numbers never change
        spread = 0.3 if len(shape) == 1 else 1.0 if 'embed' in name or '.wte' in name else shape[-1] ** -0.5
        tensors[name] = (spread * random.uniform(-1.7, 1.7, shape)).astype(np.float32)
    return tensors


def gains(name: str) -> bool:
    """Tells whether a tensor of this name is a gain that is 1 at first."""
    return name.endswith('weight') and ('norm' in name or '.ln_' in name)


def make_tensors(recorded: dict) -> dict[str, np.ndarray]:
    """Returns the tensors of a recorded checkpoint."""
    kind, drawn = recorded['config']['model_type'], draw(recorded['tensors'])

    def around(name: str) -> float:
        plain = not kind.startswith(CENTRED) or name.endswith('linear_attn.norm.weight')
        return float(plain and gains(name))

    tensors = {name: (x + np.float32(around(name)) if gains(name) else x) for name, x in drawn.items()}
    return {name: (np.zeros_like(x) if name.endswith(WITHOUT_BIAS) else x) for name, x in tensors.items()}


def load(form: str) -> dict:
    """Returns what is recorded of a form."""
    return json.loads((FOLDER / f'{form}.json').read_text())


def write(recorded: dict, folder: pathlib.Path, parts: int = 1) -> dict[str, np.ndarray]:
    """Writes the checkpoint of a recorded form to `folder`, in several files if `parts` > 1; returns its tensors."""
    folder.mkdir(exist_ok=True)
    tensors = make_tensors(recorded)
    (folder / 'config.json').write_text(json.dumps(recorded['config']))
    if parts == 1:
        save_file(tensors, folder / 'model.safetensors')
        return tensors
    index = {}
    for part in range(parts):
        names, file = sorted(tensors)[part::parts], f'model-{part + 1:05}-of-{parts:05}.safetensors'
        save_file({name: tensors[name] for name in names}, folder / file)
        index |= dict.fromkeys(names, file)
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'weight_map': index}))
    return tensors


def compute(form: str) -> dict:
    """Returns the record of a form, computed by `transformers` or flash-linear-attention."""
    return recurrent_classes.record(form) if form in RECURRENT else compute_here(form)


def compute_here(form: str) -> dict:
    """Does the work of `compute` in this process."""
    import torch
    import transformers

    for package in ('fla', 'causal_conv1d'):  # transformers would take their kernels, which need a GPU
        sys.modules.setdefault(package, None)  # pyright: ignore[reportArgumentType]
    kind, changes = FORMS[form]
    sizes = {} if kind in ('gpt2', 'gemma3') else SIZES
    if form in RECURRENT:
        sizes = {
            name: size for name, size in SIZES.items() if name not in ('num_attention_heads', 'num_key_value_heads')
        }
    config = transformers.AutoConfig.for_model(kind, **(sizes | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation='eager').eval()
    model.config.architectures = [type(model).__name__]
    tied = set(model._tied_weights_keys or ()) if config.tie_word_embeddings else set()
    state = {name: x for name, x in model.state_dict().items() if name not in tied}
    recorded = {
        'config': json.loads(config.to_json_string(use_diff=True)),
        'tensors': {name: list(x.shape) for name, x in state.items()},
    }
    if form in RECURRENT:
        model.config.fuse_cross_entropy = False  # this kernel needs a GPU
    if kind in IN_OTHER_FORM:
        model = rewrite(model, recorded)
        state = {}
    with torch.no_grad():
        for name, x in make_tensors(recorded).items() if state else ():
            state[name].copy_(torch.tensor(x))
        tokens = np.random.RandomState(1).randint(0, SIZES['vocab_size'], (1, PROMPT))
        # `generate` of transformers 5.24 gives the cache another name, and flash-linear-attention 0.6.0 loses it.
        cached = form not in RECURRENT
        written = model.generate(torch.tensor(tokens), max_new_tokens=WRITTEN, do_sample=False, use_cache=cached)
        found = model(written, labels=written)
    return recorded | {
        'transformers': transformers.__version__,
        'tokens': written[0].tolist(),
        'loss': found.loss.item(),
        'logits': [[float(f'{x:.8g}') for x in row] for row in found.logits[0].tolist()],
    }


def rewrite(model, recorded: dict):
    """Returns the model that `transformers` reads from files; records the names and shapes in them."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        path = pathlib.Path(folder) / 'model.safetensors'
        # transformers writes dense layers as parts of a mixture too; the published files do not.
        names = {name: re.sub(r'block_sparse_moe\.(\w+_proj)', r'mlp.\1', name) for name in load_file(path)}
        recorded['tensors'] = {names[name]: list(x.shape) for name, x in load_file(path).items()}
        save_file(make_tensors(recorded), path, {'format': 'pt'})
        options = {'attn_implementation': 'eager', 'experts_implementation': 'eager'}
        return type(model).from_pretrained(folder, **options).eval()


def dump(recorded: dict) -> str:
    """Returns a record as JSON, with a line for each entry and each row of logits."""
    lines = [f' {json.dumps(name)}: {json.dumps(value)}' for name, value in recorded.items() if name != 'logits']
    rows = ',\n'.join(f'  {json.dumps(row)}' for row in recorded['logits'])
    return '{\n' + ',\n'.join(lines) + f',\n "logits": [\n{rows}\n ]\n}}\n'


if __name__ == '__main__':
    FOLDER.mkdir(exist_ok=True)
    for form in sys.argv[1:] or FORMS:
        (FOLDER / f'{form}.json').write_text(dump(compute(form)))
        print(form)
