"""The model of `lm` in PyTorch, for `transformers`: AutoModelForCausalLM.from_pretrained(…, trust_remote_code=True).

`lm export --format huggingface` writes it beside config.json and model.safetensors; it needs only torch and
transformers. It is for comparing, evaluating and continuing texts. The attention weights of a prompt are all in
memory. Use `lm` itself for training and for long contexts.

B batch, L length, D model width, N heads, C head size.
"""

import dataclasses
import math
import pathlib
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.utils import ModelOutput

from lm.attention.formulas.tokens import LayerTokens
from lm.interop.parts.latent import LmLatentKeys
from lm.interop.parts.mechanism import LmMechanism
from lm.interop.parts.units import ACTIVATIONS, LmExperts, activate
from lm.ops.formulas import EPSILON

NORMS = {'layer': nn.LayerNorm, 'rms': nn.RMSNorm}


class LmConfig(PretrainedConfig):
    """The configuration. `attention` holds a dict per mechanism of the pattern that the layers cycle over: name and
    options. `layers` holds a dict per mechanism too, with what its layers do around it."""

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
        layers=(),
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
        self.rotary_base, self.layers, self.tied, self.logit_cap = rotary_base, list(layers), tied, logit_cap
        super().__init__(**(others | {'tie_word_embeddings': False}))  # `tied` replaces it: there is no second matrix


class LmCache:
    """The arrays that layers keep of the tokens that were read: `layers` has a dict for each."""

    is_compileable = False

    def __init__(self, n_layers):
        self.layers = [{} for _ in range(n_layers)]
        self.is_linear = [True] * n_layers  # transformers cuts no inputs then; `prepare_inputs_for_generation` does
        self.length = 0
        self.counts_Bx1: Any = 0
        """The tokens that were read of a row, and how many of each row are no padding."""

    def get_seq_length(self, *_):
        return self.length

    def reorder_cache(self, rows):
        """Takes other rows of the batch, as beam search asks."""
        self.layers = [{name: x.index_select(0, rows) for name, x in layer.items()} for layer in self.layers]
        self.counts_Bx1 = self.counts_Bx1.index_select(0, rows)


@dataclasses.dataclass
class LmOutput(ModelOutput):
    """The results of the model."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    cache: LmCache | None = None


def angles(positions_BxL, width, base):
    """Returns position times frequency, [B, L, width/2]."""
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float32, device=positions_BxL.device) / width)
    return positions_BxL.float()[..., None] * frequencies


def rotate(x_BxLxNxC, rotary, positions_BxL):
    """Applies rotary positions to the pairs (c, c + C/2); without them it changes nothing."""
    if rotary is None:
        return x_BxLxNxC
    angle, amplitude = angles(positions_BxL, x_BxLxNxC.shape[3], rotary['base']), rotary['amplitude']
    if rotary['frequencies'] is not None:
        frequencies = torch.tensor(rotary['frequencies'], device=x_BxLxNxC.device)
        angle = positions_BxL.float()[..., None] * frequencies
        amplitude = torch.where(frequencies != 0, amplitude, 1.0)  # the others do not turn, and stay as they are
    a, b = x_BxLxNxC.float().chunk(2, dim=-1)
    cos, sin = ((amplitude * x)[:, :, None] for x in (angle.cos(), angle.sin()))
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x_BxLxNxC.dtype)


def offset(k_BxLxKxC, share, tokens):
    """Takes the last channels of each half of a key from the token before."""
    half, length = k_BxLxKxC.shape[-1] // 2, k_BxLxKxC.shape[1]
    chosen = torch.arange(2 * half, device=k_BxLxKxC.device) % half >= half - round(half * share)
    joined = F.pad(tokens.join('key', tokens.clear(k_BxLxKxC), 1), (0, 0, 0, 0, 1, 0))
    return torch.where(chosen, joined[:, -length - 1 : -1], k_BxLxKxC)


class Convolution(nn.Module):
    """y_t = silu(Σ_s w_s x_{t-s}) of each channel; before the first token x is 0."""

    def __init__(self, channels, width):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(channels, width))

    def forward(self, x_BxLxN, tokens):
        length, width = x_BxLxN.shape[1], self.weight.shape[1]
        joined = tokens.join('convolution', tokens.clear(x_BxLxN), width - 1)
        padded = F.pad(joined, (0, 0, width - 1, 0))[:, -length - width + 1 :]
        return F.silu(sum(self.weight[:, s] * padded[:, width - 1 - s :][:, :length] for s in range(width)))


GATES = {'silu': F.silu, 'sigmoid': torch.sigmoid}


class LowRankLinear(nn.Module):
    """A product whose matrix is the product of two."""

    def __init__(self, inputs, rank, width, bias):
        super().__init__()
        self.down, self.up = nn.Linear(inputs, rank, bias=bias), nn.Linear(rank, width, bias=bias)

    def forward(self, x):
        return self.up(self.down(x))


class LmBlock(nn.Module):
    """One layer: x += attention(norm(x)); x += glu(norm(x)). `layer` has the options of its mechanism."""

    def __init__(self, config, mechanism, layer):
        super().__init__()
        options = dict(mechanism)
        heads, kv_heads, size = layer['num_attention_heads'], layer['num_key_value_heads'], layer['head_dim']
        queries, keys, values = layer['projected_heads']
        self.sizes = queries * size, keys * size, values * layer['value_dim']
        self.layer = layer
        self.form = ACTIVATIONS[config.activation], config.gated
        lacking = {
            'attention_norm': 'after',
            'glu_norm': 'after',
            'attention_out_norm': 'before',
            'glu_out_norm': 'before',
        }
        for name, place in lacking.items():
            norm = NORMS[config.norm](config.hidden_size, eps=config.norm_epsilon)
            setattr(self, name, nn.Identity() if config.norm_placement == place else norm)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(n * size if layer['qk_norm'] == 'projection' else size, eps=config.norm_epsilon)
            if layer['qk_norm']
            else nn.Identity()
            for n in (queries, keys)
        )
        channels, biased = sum(self.sizes), config.biases or config.qkv_biases
        latent = layer['latent']
        self.qkv = nn.Linear(config.hidden_size, self.sizes[0] if latent else channels, bias=biased)
        self.latent = None
        if latent:
            self.latent = LmLatentKeys(config.hidden_size, keys, size, layer['value_dim'], **latent)
        width = layer['convolution']
        self.convolution = Convolution(channels, width) if width else None
        self.attention = LmMechanism(options.pop('name'), heads, kv_heads, size, **options)
        widths = [width for _, width in layer['inputs']]
        self.mechanism_in = nn.Linear(config.hidden_size, sum(widths), bias=config.biases) if widths else None
        self.output_norm = nn.Identity()
        if layer['output_norm']:
            self.output_norm = nn.RMSNorm(layer['value_dim'], eps=config.norm_epsilon)
        gate = layer['output_gate']
        self.output_gate = None
        if gate:
            inputs, rank, width = gate['inputs'], gate['rank'], heads * layer['value_dim']
            whole = nn.Linear(inputs, width, bias=config.biases) if rank is None else None
            self.output_gate = whole or LowRankLinear(inputs, rank, width, config.biases)
        self.attention_out = nn.Linear(heads * layer['value_dim'], config.hidden_size, bias=config.biases)
        units = layer['units']
        hidden = units['dense_dim']
        self.glu_in = self.glu_out = None
        if hidden:
            self.glu_in = nn.Linear(config.hidden_size, (1 + config.gated) * hidden, bias=config.biases)
            self.glu_out = nn.Linear(hidden, config.hidden_size, bias=config.biases)
        self.experts = LmExperts(config, units) if 'n_experts' in units else None

    def forward(self, x_BxLxD, tokens):
        normed_BxLxD = self.attention_norm(x_BxLxD)
        x_BxLxD = x_BxLxD + self.attention_out_norm(self.attention_out(self.attend(normed_BxLxD, tokens)))
        normed_BxLxD = self.glu_norm(x_BxLxD)
        dense_BxLxD = None
        if self.glu_in is not None and self.glu_out is not None:
            dense_BxLxD = self.glu_out(activate(self.glu_in(normed_BxLxD), *self.form))
        y_BxLxD = dense_BxLxD if self.experts is None else self.experts(normed_BxLxD, dense_BxLxD)
        return x_BxLxD + self.glu_out_norm(y_BxLxD)

    def attend(self, normed_BxLxD, tokens):
        """Returns what the mechanism gives, times the output gate, [B, L, H·V]."""
        layer = self.layer
        size = layer['head_dim']
        qkv = self.qkv(normed_BxLxD)
        if self.latent is not None:
            qkv = torch.cat([qkv, *self.latent(normed_BxLxD)], dim=-1)
        qkv = (qkv if self.convolution is None else self.convolution(qkv, tokens)).split(self.sizes, dim=-1)
        q, k, v = (x.unflatten(-1, (-1, n)) for x, n in zip(qkv, (size, size, layer['value_dim']), strict=True))
        if self.layer['key_offset']:
            k = offset(k, self.layer['key_offset'], tokens)
        q, k = (
            rotate(self.normalize(norm, x), self.layer['rotary'], tokens.positions_BxL)
            for norm, x in ((self.q_norm, q), (self.k_norm, k))
        )
        q = q.repeat_interleave(layer['num_attention_heads'] // q.shape[2], dim=2)
        k = k.repeat_interleave(layer['num_key_value_heads'] // k.shape[2], dim=2)
        inputs = {}
        if self.mechanism_in is not None:
            names, widths = zip(*self.layer['inputs'], strict=True)
            inputs = dict(zip(names, self.mechanism_in(normed_BxLxD).split(widths, dim=-1), strict=True))
        y_BxLxN = self.output_norm(self.attention(q, k, v, tokens, **inputs)).flatten(-2)
        if self.output_gate is None:
            return y_BxLxN
        gate = self.layer['output_gate']
        return y_BxLxN * GATES[gate['form']](self.output_gate(normed_BxLxD[..., : gate['inputs']]))

    def normalize(self, norm, x_BxLxNxC):
        """Normalizes each head, or all heads of a token together."""
        whole = self.layer['qk_norm'] == 'projection'
        return norm(x_BxLxNxC.flatten(-2)).view_as(x_BxLxNxC) if whole else norm(x_BxLxNxC)


class LmForCausalLM(PreTrainedModel, GenerationMixin):
    """Computes logits [B, L, V] of tokens [B, L].

    Rows may be padded on the left, where `attention_mask` is 0. With `use_cache` the output has a cache, and the next
    call takes only the tokens after it. The cache of linear mechanisms has a constant size.
    """

    config_class = LmConfig
    base_model_prefix = ''

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        rows = config.learned_positions
        self.positions = nn.Embedding(rows, config.hidden_size) if rows else None
        pattern = list(zip(config.attention, config.layers, strict=True))
        blocks = (LmBlock(config, *pattern[i % len(pattern)]) for i in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(blocks)
        self.final_norm = NORMS[config.norm](config.hidden_size, eps=config.norm_epsilon)
        self.head = None if config.tied else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def save_pretrained(self, save_directory, **options):
        """Writes the model as `transformers` does, and config.gin, which `lm import` reads."""
        super().save_pretrained(save_directory, **options)
        if settings := getattr(self.config, 'settings', None):
            (pathlib.Path(save_directory) / 'config.gin').write_text(settings)

    def get_input_embeddings(self):
        return self.embedding

    def set_input_embeddings(self, value):
        self.embedding = value

    def _prepare_cache_for_generation(self, *_, **__):
        """Prepares nothing: the first call makes the cache."""

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *arguments, **options):
        updated = super()._update_model_kwargs_for_generation(outputs, model_kwargs, *arguments, **options)
        return updated | ({} if outputs.cache is None else {'cache': outputs.cache})

    def prepare_inputs_for_generation(self, input_ids, cache=None, attention_mask=None, use_cache=None, **_):
        start = 0 if cache is None else cache.length
        return {
            'input_ids': input_ids[:, start:], 'cache': cache, 'attention_mask': attention_mask, 'use_cache': use_cache
        }  # fmt: skip

    def forward(self, input_ids, attention_mask=None, labels=None, use_cache=False, cache=None, return_dict=True, **_):
        causal = all(layer.attention.formula.causal for layer in self.layers)
        if cache is None and use_cache and causal:
            cache = LmCache(len(self.layers))
        mask_BxL, positions_BxL = self.read(input_ids, attention_mask, cache)
        width = self.config.hidden_size
        x_BxLxD = self.embedding(input_ids)
        if self.positions is not None:
            x_BxLxD = x_BxLxD + self.positions(positions_BxL)
        scale = self.config.embedding_scale
        x_BxLxD = x_BxLxD * (math.sqrt(width) if scale is None else scale)
        if self.config.sinusoids:
            angle = angles(positions_BxL, width, 10_000.0)
            x_BxLxD = x_BxLxD + torch.cat([angle.sin(), angle.cos()], dim=-1).to(x_BxLxD.dtype)
        for i, layer in enumerate(self.layers):
            memory = None if cache is None else cache.layers[i]
            x_BxLxD = layer(x_BxLxD, LayerTokens(torch, mask_BxL, positions_BxL, memory))
        x_BxLxD = self.final_norm(x_BxLxD)
        logits = F.linear(x_BxLxD, self.embedding.weight) if self.head is None else self.head(x_BxLxD)
        if (cap := self.config.logit_cap) is not None:
            logits = cap * torch.tanh(logits / cap)
        loss = None
        if labels is not None:  # shifted here, as in transformers' models
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), ignore_index=-100)
        return LmOutput(loss=loss, logits=logits, cache=cache) if return_dict else (logits,)

    def read(self, input_ids, attention_mask, cache):
        """Returns mask and positions of tokens, and counts them in the cache."""
        mask_BxL = torch.ones_like(input_ids, dtype=torch.bool)
        if attention_mask is not None:
            if bool((attention_mask[:, :-1] > attention_mask[:, 1:]).any()):
                raise ValueError('attention_mask: a row has padding behind its text; pad on the left')
            mask_BxL = attention_mask[:, -input_ids.shape[1] :].bool()
        counts_BxL = mask_BxL.cumsum(1) + (0 if cache is None else cache.counts_Bx1)
        rows, most = self.config.learned_positions, input_ids.shape[1] + (0 if cache is None else cache.length)
        if rows and most > rows:
            raise ValueError(
                f'input_ids: {most} tokens per row, and the model has learned_positions = {rows}; give shorter rows'
            )
        if cache is not None:
            cache.length, cache.counts_Bx1 = most, counts_BxL[:, -1:]
        return mask_BxL, (counts_BxL - 1).clamp(min=0)
