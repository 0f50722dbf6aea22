"""The normalizations before and after attention and the feed-forward layer (`model.norm_placement`)."""

from typing import Any

import jax
from flax import nnx

from lm.model.parts.maker import Maker


def make_norm_before(maker: Maker) -> nnx.Module | None:
    return maker.norm() if maker.config.norm_placement != 'after' else None


def make_norm_after(maker: Maker) -> nnx.Module | None:
    return maker.norm() if maker.config.norm_placement != 'before' else None


def apply_norm(norm: Any, x_TxD: jax.Array) -> jax.Array:
    """Applies a normalization, if there is one."""
    return x_TxD if norm is None else norm(x_TxD)
