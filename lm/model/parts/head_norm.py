"""RMSNorm of queries and keys: of each head, or of the whole projection (`qk_norm_span`)."""

import jax
from flax import nnx

from lm.model.options import ResolvedLayer
from lm.model.parts.maker import Maker
from lm.ops.rotary import RootNorms


def make_query_norm(maker: Maker) -> nnx.RMSNorm | None:
    return _make(maker, maker.options.heads.queries)


def make_key_norm(maker: Maker) -> nnx.RMSNorm | None:
    return _make(maker, maker.options.heads.keys)


def _make(maker: Maker, heads: int) -> nnx.RMSNorm | None:
    own = maker.options
    if own.norm_span == 'projection':
        return maker.rms_norm(heads * own.dims.head_dim, 'all_heads')
    return maker.rms_norm(own.dims.head_dim, 'head') if own.qk_norm else None


def find_root_norms(q_norm: nnx.RMSNorm | None, k_norm: nnx.RMSNorm | None, own: ResolvedLayer) -> RootNorms | None:
    """Returns the norms of each head as the rotation takes them; None: it takes none."""
    if q_norm is None or k_norm is None or own.norm_span != 'head' or own.rotary_decoupled:
        return None
    assert q_norm.scale is not None
    assert k_norm.scale is not None
    return RootNorms(q_norm.scale[...], k_norm.scale[...], q_norm.epsilon)


def normalize_heads(norm: nnx.RMSNorm | None, x_BxLxNxC: jax.Array, own: ResolvedLayer) -> jax.Array:
    """Applies such a norm, if there is one."""
    if norm is None:
        return x_BxLxNxC
    if own.norm_span == 'head':
        return norm(x_BxLxNxC)
    return norm(x_BxLxNxC.reshape(*x_BxLxNxC.shape[:2], -1)).reshape(x_BxLxNxC.shape)
