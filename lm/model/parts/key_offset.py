"""Keys of which some channels come from the token before: one layer can then find what followed an equal token.

    k_t[c] ← k_{t-1}[c] for the chosen channels c, 0 at the first token of a document

(modded-nanogpt's "partial key offset", measured by marin #4802; Olsson et al. 2022 have the two layers it saves.)

B batch, L length, K key heads, C head size.
"""

import jax
import jax.numpy as jnp
import numpy as np

from lm.ops import sequence


def select_channels(head_dim: int, fraction: float) -> np.ndarray:
    """Returns which channels are offset, [C] of bools: the last ones of each half of a head.

    Rotary positions turn the pairs (c, c + C/2) and begin with the first (`model.rotary_fraction`). So the channels
    that have no position are offset first.
    """
    half = head_dim // 2
    return np.arange(head_dim) % half >= half - round(half * fraction)


def offset_keys(
    k_BxLxKxC: jax.Array,
    fraction: float,
    before_Bx1xKxC: jax.Array | None = None,
    starts_BxL: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """Returns the keys with channels of the tokens before, and the last key as it came, which later tokens need.

    Args:
        k_BxLxKxC: keys of a window, or of one part of it (`lm.ops.sequence`).
        fraction: the share of the channels that are offset (`select_channels`); 0: keys stay, and none is needed.
        before_Bx1xKxC: the key before them; None: the window begins, or its earlier parts have the key.
        starts_BxL: the first token of each token's document.
    """
    if not fraction:
        return k_BxLxKxC, None
    length = k_BxLxKxC.shape[1]
    if before_Bx1xKxC is None:
        before_Bx1xKxC = sequence.tokens_before(k_BxLxKxC, 1)
    earlier_BxLxKxC = jnp.concatenate([before_Bx1xKxC.astype(k_BxLxKxC.dtype), k_BxLxKxC[:, :-1]], axis=1)
    if starts_BxL is not None:
        is_first_BxL = starts_BxL == sequence.index() * length + jnp.arange(length)
        earlier_BxLxKxC = jnp.where(is_first_BxL[..., None, None], 0, earlier_BxLxKxC)
    chosen_C = select_channels(k_BxLxKxC.shape[-1], fraction)
    return jnp.where(chosen_C, earlier_BxLxKxC, k_BxLxKxC), k_BxLxKxC[:, -1:]
