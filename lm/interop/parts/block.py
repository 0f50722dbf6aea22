"""One layer of the model. B batch, L length, D model width, N heads, C head size."""

import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer

from lm.interop.parts.latent import LmLatentKeys
from lm.interop.parts.mechanism import LmMechanism
from lm.interop.parts.positions import offset, rotate
from lm.interop.parts.units import ACTIVATIONS, LmExperts, activate

NORMS = {'layer': nn.LayerNorm, 'rms': nn.RMSNorm}


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


class LmBlock(GradientCheckpointingLayer):
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
