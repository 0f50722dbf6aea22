"""The parts of a residual branch around attention or the feed-forward layer: norms (`model.norm_placement`), and what
`model.branch` adds."""

from typing import Any

import jax
from flax import nnx

from lm.model.parts.maker import Maker
from lm.ops.norms import Norm


def make_norm_before(maker: Maker) -> nnx.Module | None:
    return maker.norm() if maker.config.norm_placement != 'after' else None


def make_norm_after(maker: Maker) -> nnx.Module | None:
    return maker.norm() if maker.config.norm_placement != 'before' else None


def make_branch_part(maker: Maker) -> nnx.Module | None:
    branch = maker.options.branch
    return None if branch is None else branch.build(maker.config.d_model, maker.rngs)


def apply_part(part: Any, x_TxD: jax.Array) -> jax.Array:
    """Applies a norm or another part, if there is one."""
    return x_TxD if part is None else part(x_TxD)


def read_norm(part: nnx.Module | None) -> Norm | None:
    """Returns a norm as operations take it; None: there is no norm."""
    if part is None:
        return None
    assert isinstance(part, nnx.LayerNorm | nnx.RMSNorm), part
    assert part.scale is not None, 'norms of the residual stream have gains'
    centred = isinstance(part, nnx.LayerNorm)
    bias_D = part.bias[...] if isinstance(part, nnx.LayerNorm) and part.bias is not None else None
    return Norm(part.scale[...], bias_D, centred, part.epsilon)
