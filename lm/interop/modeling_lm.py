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

from lm.interop.formulas.base import EPSILON, MECHANISMS, NORMS, gelu, rms_norm


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
        norm_epsilon=EPSILON,
        norm_placement='before',
        activation='gelu',
        gated=True,
        biases=False,
        qkv_biases=False,
        embedding_scale=None,
        sinusoids=True,
        learned_positions=None,
        rotary_base=10_000.0,
        rotary_frequencies=None,
        rotary_amplitude=1.0,
        qk_norm=False,
        qk_norm_span='head',
        tied=True,
        logit_cap=None,
        **others,
    ):
        self.vocab_size, self.num_hidden_layers, self.hidden_size = vocab_size, num_hidden_layers, hidden_size
        self.num_attention_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads
        self.head_dim, self.intermediate_size, self.attention = head_dim, intermediate_size, list(attention)
        self.norm, self.norm_epsilon, self.norm_placement = norm, norm_epsilon, norm_placement
        self.activation, self.gated, self.biases, self.qkv_biases = activation, gated, biases, qkv_biases
        self.embedding_scale, self.sinusoids, self.learned_positions = embedding_scale, sinusoids, learned_positions
        self.rotary_base, self.rotary_frequencies = rotary_base, rotary_frequencies
        self.rotary_amplitude, self.qk_norm, self.qk_norm_span = rotary_amplitude, qk_norm, qk_norm_span
        self.tied, self.logit_cap = tied, logit_cap
        super().__init__(**(others | {'tie_word_embeddings': False}))  # `tied` replaces it: there is no second matrix


def angles(length, width, base, device):
    """Returns position times frequency, [L, width/2]."""
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float32, device=device) / width)
    return torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequencies


def rotate(x_BxLxNxC, config):
    """Applies rotary positions to the pairs (c, c + C/2); without a base it changes nothing."""
    length, width, device = x_BxLxNxC.shape[1], x_BxLxNxC.shape[3], x_BxLxNxC.device
    if config.rotary_base is None:
        return x_BxLxNxC
    if config.rotary_frequencies is None:
        angle = angles(length, width, config.rotary_base, device)[:, None]
    else:
        frequencies = torch.tensor(config.rotary_frequencies, device=device)
        angle = torch.arange(length, dtype=torch.float32, device=device)[:, None, None] * frequencies
    a, b = x_BxLxNxC.float().chunk(2, dim=-1)
    cos, sin = config.rotary_amplitude * angle.cos(), config.rotary_amplitude * angle.sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_BxLxNxC.dtype)


ACTIVATIONS = {'gelu': gelu, 'silu': F.silu}


class LmBlock(nn.Module):
    """One layer: x += attention(norm(x)); x += glu(norm(x))."""

    def __init__(self, config, mechanism):
        super().__init__()
        options = dict(mechanism)
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.config, self.heads, self.kv_heads, self.size = config, heads, kv_heads, size
        self.activation, self.gated = ACTIVATIONS[config.activation], config.gated
        norms = {
            'attention_norm': 'after',
            'glu_norm': 'after',
            'attention_out_norm': 'before',
            'glu_out_norm': 'before',
        }
        for name, lacking in norms.items():
            norm = NORMS[config.norm](config.hidden_size, config.norm_epsilon)
            setattr(self, name, nn.Identity() if config.norm_placement == lacking else norm)
        whole = config.qk_norm_span == 'projection'
        self.q_norm, self.k_norm = (
            rms_norm(n * size if whole else size, config.norm_epsilon) if config.qk_norm else nn.Identity()
            for n in (heads, kv_heads)
        )
        biased = config.biases or config.qkv_biases
        self.qkv = nn.Linear(config.hidden_size, (heads + 2 * kv_heads) * size, bias=biased)
        self.attention = MECHANISMS[options.pop('name')](heads, kv_heads, size, **options)
        self.attention_out = nn.Linear(heads * size, config.hidden_size, bias=config.biases)
        n_hidden = (1 + config.gated) * config.intermediate_size
        self.glu_in = nn.Linear(config.hidden_size, n_hidden, bias=config.biases)
        self.glu_out = nn.Linear(config.intermediate_size, config.hidden_size, bias=config.biases)

    def forward(self, x_BxLxD):
        qkv = self.qkv(self.attention_norm(x_BxLxD)).unflatten(-1, (-1, self.size))
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        q, k = self.normalize(self.q_norm, q), self.normalize(self.k_norm, k)
        y_BxLxHxC = self.attention(rotate(q, self.config), rotate(k, self.config), v)
        x_BxLxD = x_BxLxD + self.attention_out_norm(self.attention_out(y_BxLxHxC.flatten(-2)))
        hidden = self.glu_in(self.glu_norm(x_BxLxD))
        if self.gated:
            value, gate = hidden.chunk(2, dim=-1)
            hidden = value * self.activation(gate)
        else:
            hidden = self.activation(hidden)
        return x_BxLxD + self.glu_out_norm(self.glu_out(hidden))

    def normalize(self, norm, x_BxLxNxC):
        """Normalizes each head, or all heads of a token together."""
        if self.config.qk_norm_span == 'head':
            return norm(x_BxLxNxC)
        return norm(x_BxLxNxC.flatten(-2)).view_as(x_BxLxNxC)


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
        self.final_norm = NORMS[config.norm](config.hidden_size, config.norm_epsilon)
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
        scale = self.config.embedding_scale
        x_BxLxD = x_BxLxD * (math.sqrt(width) if scale is None else scale)
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
