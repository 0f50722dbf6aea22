"""Rotary positions, normalizations, and whole models in Llama's shape; `lm import` converts the weights.

transformers computes angles, RMSNorm and attention weights in float32. So models are compared in single precision only.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from flax import nnx
from ledger import compares, draw, values_and_gradients
from torch.nn import functional as F
from transformers.models.llama import modeling_llama

from lm.interop.families.llama import Llama
from lm.interop.hyperparameters import Hyperparameters
from lm.interop.names import from_tensors
from lm.model import build
from lm.model.functions import split
from lm.model.positions import rotary
from lm.ops.rotary import rotate
from lm.parameters import NORMS

SIZES = dict(
    vocab_size=97, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=56, rms_norm_eps=1e-5, initializer_range=0.2, attn_implementation='eager',
)  # fmt: skip
BASES = {'Llama 2': 10_000.0, 'Llama 3': 500_000.0}


@compares('rotary positions of given angles', 'transformers apply_rotary_pos_emb')
def _(dtype):
    (angle,) = draw(0, (48, 8))
    angle *= 10

    def theirs(q):
        cos, sin = (torch.tensor(np.concatenate([x, x], axis=-1))[None] for x in (np.cos(angle), np.sin(angle)))
        return modeling_llama.apply_rotary_pos_emb(q, q, cos, sin, unsqueeze_dim=2)[0]

    rotation = tuple(jnp.asarray(f(angle)[:, None], dtype) for f in (np.cos, np.sin))
    return values_and_gradients(lambda q: rotate(q, rotation, 4)[0], theirs, draw(1, (2, 48, 4, 16)), dtype)


def angles_row(name, base):
    @compares(f'rotary angles, base {base:,.0f}', 'transformers LlamaRotaryEmbedding', bits=(32,))
    def row(dtype):
        rope = {'rope_type': 'default', 'rope_theta': base}
        theirs = modeling_llama.LlamaRotaryEmbedding(transformers.LlamaConfig(**SIZES, rope_parameters=rope))
        cos, sin = theirs(torch.zeros(1), torch.arange(64)[None])
        ours = rotary(jnp.arange(64), 8, base)
        yield 'cosines', ours[0][:, 0], cos[0, :, :4]
        yield 'sines', ours[1][:, 0], sin[0, :, :4]


for name, base in BASES.items():
    angles_row(name, base)


def norm_row(name, theirs, against):
    @compares(f'normalization, {name}', against)
    def row(dtype):
        scale, bias = draw(2, (24,), (24,))

        def ours(x, scale, bias):
            made = NORMS[name](24, 'embed', nnx.Rngs(0), dtype=dtype)
            made.scale.set_value(scale)
            if name == 'layer':
                made.bias.set_value(bias)
            return made(x) + 0 * bias.sum()

        return values_and_gradients(ours, theirs, [*draw(3, (4, 9, 24)), scale, bias], dtype)


norm_row('layer', lambda x, scale, bias: F.layer_norm(x, (24,), scale, bias, 1e-5), 'torch layer_norm')
norm_row('rms', lambda x, scale, bias: F.rms_norm(x, (24,), scale, 1e-5) + 0 * bias.sum(), 'torch rms_norm')


def ours_of(theirs, config, gradients=False):
    """Returns (model, its weights) of a Llama by the code of `lm import`; with gradients, it converts these instead of
    weights."""
    family, described = Llama(), Hyperparameters(config.to_dict())
    model = family.model(None, described)
    state = {name: (p.grad if gradients else p).detach().numpy().copy() for name, p in theirs.named_parameters()}
    norms = {n: state.pop(n) for n in list(state) if n.endswith(('q_norm.weight', 'k_norm.weight'))}
    tensors = family.tensors(state, described, model)
    assert not state, f'left over: {list(state)}'
    model = dataclasses.replace(model, qk_norm=bool(norms))
    for name, array in norms.items():
        _, _, layer, _, which, _ = name.split('.')
        tensors[f'layers.{layer}.{which}.weight'] = array
    _, params, buffers = split(nnx.eval_shape(lambda: build(model, 0)))
    return model, from_tensors(tensors, {'params': params, 'buffers': buffers}, 'theirs')['params']


def model_row(what, against, made):
    @compares(what, against, bits=(32,))
    def row(dtype):
        torch.manual_seed(1)
        theirs = made().double().eval()
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                if 'norm' in name:
                    parameter.uniform_(0.5, 1.5)
        tokens = np.random.default_rng(4).integers(0, 97, (2, 33))
        result = theirs(torch.tensor(tokens), labels=torch.tensor(tokens))
        result.loss.backward()
        model, params = ours_of(theirs, theirs.config)
        graph, _, buffers = split(nnx.eval_shape(lambda: build(model, 0)))

        @jax.jit
        def loss(params):
            made = nnx.merge(graph, params, buffers)
            return made.token_losses(tokens[:, :-1], tokens[:, 1:]).mean(), made(jnp.asarray(tokens))

        (nats, logits), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        yield 'logits', logits, result.logits.detach().numpy()
        yield 'loss', nats, result.loss.item()
        if theirs.config.tie_word_embeddings:
            return
        _, expected = ours_of(theirs, theirs.config, gradients=True)
        found = jax.tree_util.tree_leaves_with_path(gradients)
        for (path, got), want in zip(found, jax.tree.leaves(expected), strict=True):
            yield f'gradient of {jax.tree_util.keystr(path)}', got, want


def llama(**changes):
    return lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**(SIZES | changes)))


model_row('a model: logits, loss, all gradients', 'transformers LlamaForCausalLM', llama(tie_word_embeddings=False))
model_row('a model with tied embeddings: logits, loss', 'transformers LlamaForCausalLM',
          llama(tie_word_embeddings=True))  # fmt: skip
model_row('a model with a GELU gate', 'transformers LlamaForCausalLM',
          llama(hidden_act='gelu_pytorch_tanh', num_key_value_heads=4))  # fmt: skip
QWEN = SIZES | {'rms_norm_eps': 1e-5}
model_row('a model with RMSNorm of queries and keys', 'transformers Qwen3ForCausalLM',
          lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**QWEN)))  # fmt: skip
