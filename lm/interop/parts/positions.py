"""Positions in queries and keys. B batch, L length, N heads, C head size."""

import torch
from torch.nn import functional as F


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
