"""Keys and values from a few numbers per token. B batch, L length, D model width."""

import torch
from torch import nn

LATENT_EPSILON = 1e-6
"""Added to the variance of these numbers."""


class LmLatentKeys(nn.Module):
    """Multi-head latent attention: the last channels of the keys are the same for all heads."""

    def __init__(self, width, heads, key_size, value_size, rank, shared):
        super().__init__()
        self.heads, self.rank, self.shared = heads, rank, shared
        self.sizes = heads * (key_size - shared), heads * value_size
        self.down = nn.Linear(width, rank + shared, bias=False)
        self.norm = nn.RMSNorm(rank, eps=LATENT_EPSILON)
        self.up = nn.Linear(rank, sum(self.sizes), bias=False)

    def forward(self, x_BxLxD):
        """Returns keys and values, one head after another."""
        latent, shared = self.down(x_BxLxD).split([self.rank, self.shared], dim=-1)
        keys, values = self.up(self.norm(latent)).split(self.sizes, dim=-1)
        shared = shared[..., None, :].expand(-1, -1, self.heads, -1)
        return torch.cat([keys.unflatten(-1, (self.heads, -1)), shared], dim=-1).flatten(-2), values
