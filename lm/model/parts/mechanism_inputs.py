"""The matrix of a mechanism's inputs besides queries, keys and values (`Attention.projections`)."""

import jax
import jax.numpy as jnp
import numpy as np

from lm.model.dense import Dense
from lm.model.options import ResolvedLayer
from lm.model.parts.maker import Maker


def make_mechanism_inputs(maker: Maker) -> Dense | None:
    widths = maker.options.widths
    return maker.linear(maker.config.d_model, widths, 'embed', 'all_heads', part='mechanism') if widths else None


@jax.named_scope('qkv')
def compute_mechanism_inputs(matrix: Dense | None, normed_BxLxD: jax.Array, own: ResolvedLayer) -> dict[str, jax.Array]:
    """Returns the inputs by name."""
    if matrix is None:
        return {}
    names, widths = zip(*own.projections, strict=True)
    return dict(zip(names, jnp.split(matrix(normed_BxLxD), np.cumsum(widths)[:-1], axis=-1), strict=True))
