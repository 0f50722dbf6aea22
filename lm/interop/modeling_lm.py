"""The model of `lm` in PyTorch, for `transformers`: AutoModelForCausalLM.from_pretrained(…, trust_remote_code=True).

`lm export --format huggingface` writes it beside config.json and model.safetensors; it needs only torch and
transformers. It is for comparing, evaluating and continuing texts of moderate length, whose attention weights fit into
memory. Use `lm` itself for training and for long contexts.

B batch, L length, D model width, N heads, C head size.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from lm.interop.formulas.base import MECHANISMS, NORMS, gelu


class LmConfig(PretrainedConfig):
    """The configuration; `attention` holds a dict per mechanism of the pattern that the layers cycle over: name and
    options."""

    model_type = 'lm_tpu'

    def __init__(
        self,
        vocab_size=32_000,
        num_hidden_layers=12,
        hidden_size=768,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        intermediate_size=2048,
        attention=(),
        norm='layer',
        activation='gelu',
        gated=True,
        biases=False,
        sinusoids=True,
        learned_positions=None,
        rotary_base=10_000.0,
        tied=True,
        logit_cap=None,
        **others,
    ):
        self.vocab_size, self.num_hidden_layers, self.hidden_size = vocab_size, num_hidden_layers, hidden_size
        self.num_attention_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads
        self.head_dim, self.intermediate_size, self.attention = head_dim, intermediate_size, list(attention)
        self.norm, self.activation, self.gated, self.biases = norm, activation, gated, biases
        self.sinusoids, self.learned_positions = sinusoids, learned_positions
        self.rotary_base, self.tied, self.logit_cap = rotary_base, tied, logit_cap
        super().__init__(**(others | {'tie_word_embeddings': False}))  # `tied` replaces it: there is no second matrix


def angles(length, width, base, device):
    """Returns position times frequency, [L, width/2]."""
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    return torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequencies


def rotate(x_BxLxNxC, base):
    """Applies rotary positions to the pairs (c, c + C/2); without a base it changes nothing."""
    if base is None:
        return x_BxLxNxC
    angle = angles(x_BxLxNxC.shape[1], x_BxLxNxC.shape[3], base, x_BxLxNxC.device)[:, None]
    a, b = x_BxLxNxC.float().chunk(2, dim=-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_BxLxNxC.dtype)


ACTIVATIONS = {'gelu': gelu, 'silu': F.silu}


class LmBlock(nn.Module):
    """One layer: x += attention(norm(x)); x += glu(norm(x))."""

    def __init__(self, config, mechanism):
        super().__init__()
        options = dict(mechanism)
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.heads, self.kv_heads, self.size, self.base = heads, kv_heads, size, config.rotary_base
        self.activation, self.gated = ACTIVATIONS[config.activation], config.gated
        self.attention_norm, self.glu_norm = (NORMS[config.norm](config.hidden_size) for _ in range(2))
        self.qkv = nn.Linear(config.hidden_size, (heads + 2 * kv_heads) * size, bias=config.biases)
        self.attention = MECHANISMS[options.pop('name')](heads, kv_heads, size, **options)
        self.attention_out = nn.Linear(heads * size, config.hidden_size, bias=config.biases)
        n_hidden = (1 + config.gated) * config.intermediate_size
        self.glu_in = nn.Linear(config.hidden_size, n_hidden, bias=config.biases)
        self.glu_out = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.biases)

    def forward(self, x_BxLxD):
        qkv = self.qkv(self.attention_norm(x_BxLxD)).unflatten(-1, (-1, self.size))
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        y_BxLxHxC = self.attention(rotate(q, self.base), rotate(k, self.base), v)
        x_BxLxD = x_BxLxD + self.attention_out(y_BxLxHxC.flatten(-2))
        hidden = self.glu_in(self.glu_norm(x_BxLxD))
        if not self.gated:
            return x_BxLxD + self.glu_out(self.activation(hidden))
        value, gate = hidden.chunk(2, dim=-1)
        return x_BxLxD + self.glu_out(value * self.activation(gate))


class LmForCausalLM(PreTrainedModel, GenerationMixin):
    """Computes logits [B, L, V] of tokens [B, L].

    Batches are not padded: there is no attention mask. Generation computes the whole sequence again per token.
    """

    config_class = LmConfig
    base_model_prefix = ''
    _supports_cache_class = False

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        rows = config.learned_positions
        self.positions = nn.Embedding(rows, config.hidden_size) if rows else None
        pattern = config.attention
        self.layers = nn.ModuleList(LmBlock(config, pattern[i % len(pattern)]) for i in range(config.num_hidden_layers))
        self.final_norm = NORMS[config.norm](config.hidden_size)
        self.head = None if config.tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def set_input_embeddings(self, value):
        self.embedding = value

    def prepare_inputs_for_generation(self, input_ids, **_):
        return {'input_ids': input_ids}

    def forward(self, input_ids, attention_mask=None, labels=None, use_cache=None, return_dict=True, **_):
        if attention_mask is not None and not bool(attention_mask.all()):
            raise ValueError('attention_mask: this model has none; give rows of one length, without padding')
        width = self.config.hidden_size
        x_BxLxD = self.embedding(input_ids)
        if self.positions is not None:
            if input_ids.shape[1] > self.config.learned_positions:
                raise ValueError(
                    f'input_ids: {input_ids.shape[1]} tokens per row, and the model has learned_positions = '
                    f'{self.config.learned_positions}; give shorter rows'
                )
            x_BxLxD = x_BxLxD + self.positions.weight[: input_ids.shape[1]]
        x_BxLxD = x_BxLxD * math.sqrt(width)
        if self.config.sinusoids:
            angle = angles(input_ids.shape[1], width, 10_000.0, x_BxLxD.device)
            x_BxLxD = x_BxLxD + torch.cat([angle.sin(), angle.cos()], dim=-1).to(x_BxLxD.dtype)
        for layer in self.layers:
            x_BxLxD = layer(x_BxLxD)
        x_BxLxD = self.final_norm(x_BxLxD)
        logits = F.linear(x_BxLxD, self.embedding.weight) if self.head is None else self.head(x_BxLxD)
        if (cap := self.config.logit_cap) is not None:
            logits = cap * torch.tanh(logits / cap)
        loss = None
        if labels is not None:  # shifted here, as in transformers' models
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
        return CausalLMOutput(loss=loss, logits=logits) if return_dict else (logits,)
