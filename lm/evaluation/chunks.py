"""The losses of windows that are too long for memory: chunk by chunk, through the states of decoding.

A chunk passes a state to the next one: of constant size for linear mechanisms, keys and values for exact ones. Only one
chunk's activations are in memory.
"""

import jax
import jax.numpy as jnp
from jax import lax

from lm.model import Transformer
from lm.ops.documents import Documents


def compute_losses_in_chunks(
    model: Transformer, inputs_BxL: jax.Array, targets_BxL: jax.Array, chunk: int, documents: Documents | None = None
) -> jax.Array:
    """Computes the negative log-likelihoods [B, L] float32 of the targets, in nats, like `Transformer.token_losses`.

    The remainder of the length comes first. With `documents` the tokens of a window do not see other documents.
    """
    batch, length = inputs_BxL.shape
    model.config.check_length(length)
    positions, starts_BxL = jnp.arange(length, dtype=jnp.int32), None
    if documents is not None:
        positions, starts_BxL = documents.of(inputs_BxL)

    def walk(state, first, size):
        def part(x):
            return lax.dynamic_slice_in_dim(x, first, size, axis=-1)

        starts_BxT = None if starts_BxL is None else part(starts_BxL) - first
        state, x_BxTxD = model.extend(state, part(inputs_BxL), part(positions), starts_BxT)
        return state, model.losses(x_BxTxD, part(targets_BxL))

    state, parts, left = model.init_state(batch, length, documents is not None), [], length % chunk
    if left:
        state, nats_BxT = walk(state, jnp.int32(0), left)
        parts.append(nats_BxT)
    firsts_N = jnp.arange(left, length, chunk, dtype=jnp.int32)
    _, nats_NxBxT = lax.scan(lambda state, first: walk(state, first, chunk), state, firsts_N)
    parts.append(nats_NxBxT.swapaxes(0, 1).reshape(batch, -1))
    return jnp.concatenate(parts, axis=1)
