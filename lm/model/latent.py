"""Keys and values from a few numbers per token: multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, §2.1.2).

    c = RMSNorm(x W)        [R]
    k_h = [c W_h, x W']     the last channels are the same for all heads
    v_h = c W'_h

B batch, L length, D model width, H heads, R rank. A key has C channels and a value V.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from lm.model.dense import Dense
from lm.model.options import LayerOptions
from lm.parameters import rms_norm

LATENT_EPSILON = 1e-6
"""Added to the variance of c, as in the authors' code, whatever `norm_epsilon` is."""


class LatentKeys(nnx.Module):
    """Computes keys and values. Decoding keeps them whole, not c: the cache is as large as other caches."""

    def __init__(self, options: LayerOptions, down: Dense, up: Dense, rngs: nnx.Rngs):
        assert options.latent is not None
        self.options, self.down, self.up = options, down, up
        self.norm = rms_norm(
            options.latent.rank, 'logits', rngs, part='attention', dtype=down.dtype, epsilon=LATENT_EPSILON
        )

    def __call__(self, x_BxLxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns keys [B, L, H C] and values [B, L, H V]."""
        own = self.options
        assert own.latent is not None
        latent_BxLxR, *shared = self.down.pieces(x_BxLxD, own.latent.down_sizes)
        keys, v_BxLxN = self.up.pieces(self.norm(latent_BxLxR), own.latent_sizes)
        if not shared:
            return keys, v_BxLxN
        keys_BxLxHxP = keys.reshape(*keys.shape[:2], own.heads.keys, -1)
        shared_BxLxHxS = jnp.broadcast_to(shared[0][:, :, None], (*keys_BxLxHxP.shape[:3], own.latent.shared))
        k_BxLxHxC = jnp.concatenate([keys_BxLxHxP, shared_BxLxHxS], axis=-1)
        return k_BxLxHxC.reshape(*keys.shape[:2], -1), v_BxLxN
