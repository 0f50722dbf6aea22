"""Keys, values and queries from a few numbers per token: multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2,
§2.1.2 and §2.1.3).

    c = RMSNorm(x W)           [R]
    k_h = [c W_h, x W']        the last channels are the same for all heads
    v_h = c W'_h
    q_h = RMSNorm(x U) U_h     with `latent_query_rank`; else q_h = x U_h

With `rotary_decoupled` positions turn the last channels alone, of keys and queries. Decoding with softmax then keeps c
and the turned channels: a product of a query and a key is one of q_h W_h^T and c, and weights apply to c before W'_h.

B batch, L length, D model width, H heads, R rank, S shared channels. A key has C = P + S channels and a value V.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from lm.model.parts.maker import Maker
from lm.ops.rotary import Rotation
from lm.ops.rotary.xla import turn
from lm.parameters import rms_norm

LATENT_EPSILON = 1e-6
"""Added to the variance of c, as in the authors' code, whatever `norm_epsilon` is."""


class LatentQueries(nnx.Module):
    """Computes the numbers that queries are made of."""

    def __init__(self, maker: Maker, rank: int):
        self.down = maker.linear(maker.config.d_model, (rank,), 'embed', 'logits', part='attention')
        self.norm = _make_norm(maker, rank)

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        """Returns them, [B, L, rank]."""
        return self.norm(self.down(x_BxLxD))


class LatentKeys(nnx.Module):
    """Computes keys and values."""

    def __init__(self, maker: Maker, rank: int):
        self.options = own = maker.options
        self.down = maker.linear(maker.config.d_model, own.down_sizes, 'embed', 'logits', part='attention')
        self.up = maker.linear(rank, own.latent_sizes, 'logits', 'all_heads', part='attention')
        self.norm = _make_norm(maker, rank)

    def __call__(self, x_BxLxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns keys [B, L, H C] and values [B, L, H V]."""
        own = self.options
        latent_BxLxR, *shared = self.down.pieces(x_BxLxD, own.down_sizes)
        keys, v_BxLxN = self.up.pieces(self.norm(latent_BxLxR), own.latent_sizes)
        if not shared:
            return keys, v_BxLxN
        keys_BxLxHxP = keys.reshape(*keys.shape[:2], own.heads.keys, -1)
        shared_BxLxHxS = jnp.broadcast_to(shared[0][:, :, None], (*keys_BxLxHxP.shape[:3], own.shared_key_dim))
        k_BxLxHxC = jnp.concatenate([keys_BxLxHxP, shared_BxLxHxS], axis=-1)
        return k_BxLxHxC.reshape(*keys.shape[:2], -1), v_BxLxN

    def make_shared(self, x_BxLxD: jax.Array, rotation: Rotation | None) -> jax.Array:
        """Returns c and the turned channels that all heads share, [B, L, 1, R + S]: what decoding keeps."""
        own = self.options
        latent_BxLxR, shared_BxLxS = self.down.pieces(x_BxLxD, own.down_sizes)
        shared_BxLx1xS = turn_last(shared_BxLxS[:, :, None], rotation)
        return jnp.concatenate([self.norm(latent_BxLxR)[:, :, None], shared_BxLx1xS], axis=-1)

    def absorb(self, q_BxLxHxC: jax.Array) -> jax.Array:
        """Returns queries [B, L, H, R + S] whose products with `make_shared` equal the products with keys."""
        to_keys_RxHxP, _ = self._split_up()
        own = to_keys_RxHxP.shape[-1]
        q_BxLxHxR = jnp.einsum('blhp,rhp->blhr', q_BxLxHxC[..., :own], to_keys_RxHxP.astype(q_BxLxHxC.dtype))
        return jnp.concatenate([q_BxLxHxR, q_BxLxHxC[..., own:]], axis=-1)

    def read(self, o_BxLxHxR: jax.Array) -> jax.Array:
        """Returns what heads read of values [B, L, H, V], from what they read of c."""
        _, to_values_RxHxV = self._split_up()
        return jnp.einsum('blhr,rhv->blhv', o_BxLxHxR, to_values_RxHxV.astype(o_BxLxHxR.dtype))

    def _split_up(self) -> tuple[jax.Array, jax.Array]:
        """Returns the matrices of the keys' own channels [R, H, P] and of values [R, H, V]."""
        keys, _ = self.options.latent_sizes
        heads, kernel_RxN = self.options.heads.keys, self.up.kernel[...]
        pieces = kernel_RxN[:, :keys], kernel_RxN[:, keys:]
        to_keys_RxHxP, to_values_RxHxV = (piece.reshape(kernel_RxN.shape[0], heads, -1) for piece in pieces)
        return to_keys_RxHxP, to_values_RxHxV


def _make_norm(maker: Maker, rank: int) -> nnx.RMSNorm:
    options = {'dtype': maker.dtype, 'epsilon': LATENT_EPSILON}
    return rms_norm(rank, 'logits', maker.rngs, part='attention', **options)


def make_latent_keys(maker: Maker) -> LatentKeys | None:
    return None if maker.options.latent_rank is None else LatentKeys(maker, maker.options.latent_rank)


def make_latent_queries(maker: Maker) -> LatentQueries | None:
    rank = maker.options.latent_query_rank
    return None if rank is None else LatentQueries(maker, rank)


def turn_last(x_BxLxNxC: jax.Array, rotation: Rotation | None) -> jax.Array:
    """Returns x with its last channels turned, as many as the rotation has; the others stay as they are."""
    if rotation is None:
        return x_BxLxNxC
    still = x_BxLxNxC.shape[-1] - 2 * rotation.cos_AxLx1xP.shape[-1]
    return jnp.concatenate([x_BxLxNxC[..., :still], turn(x_BxLxNxC[..., still:], rotation)], axis=-1)
