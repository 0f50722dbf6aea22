"""The rotation as the paper writes it, and normalizations around it: readable, in the precision of the inputs."""

import jax
import jax.numpy as jnp

from lm.ops.formulas import standardize
from lm.ops.rotary.types import RotaryCall, Rotation


def rotate(call: RotaryCall) -> tuple[jax.Array, jax.Array]:
    """Divides by the root mean square, rotates, then normalizes."""
    x_BxLxNxC = call.qk_BxLxNxC
    if (roots := call.roots) is not None:
        mean_BxLxNx1 = jnp.mean(x_BxLxNxC**2, axis=-1, keepdims=True)
        gains_NxC = roots.spread(x_BxLxNxC.shape[2], call.n_heads)
        x_BxLxNxC = x_BxLxNxC / jnp.sqrt(mean_BxLxNx1 + roots.epsilon) * gains_NxC
    if call.rotation is not None:
        x_BxLxNxC = turn(x_BxLxNxC, call.rotation)
    q_BxLxHxC, k_BxLxKxC = x_BxLxNxC[:, :, : call.n_heads], x_BxLxNxC[:, :, call.n_heads :]
    if (norms := call.norms) is None:
        return q_BxLxHxC, k_BxLxKxC
    q_BxLxHxC = standardize(jnp, q_BxLxHxC) * norms.q_scale_C + norms.q_bias_C
    k_BxLxKxC = standardize(jnp, k_BxLxKxC) * norms.k_scale_C + norms.k_bias_C
    return q_BxLxHxC.astype(call.dtype), k_BxLxKxC.astype(call.dtype)


def turn(x_BxLxNxC: jax.Array, rotation: Rotation) -> jax.Array:
    """Multiplies (x_c + i x_{c + C/2}) by (cos + i sin)."""
    cos, sin = rotation
    a, b = jnp.split(x_BxLxNxC, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
