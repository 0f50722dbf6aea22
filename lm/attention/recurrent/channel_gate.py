"""Gates with one factor per channel of the key: a token fades each row of the state by a factor of its own.

    S_i = diag(a_i) S_{i-1} + k_i v_iᵀ          a_i of each key head [E], at most 1

The factors are functions of a few numbers per token: the model projects the layer's input to R numbers (`Attention.
projections`), and the gate's matrix maps them to all channels of all heads. Without them they count as 0.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lm.attention.base import HeadDims
from lm.attention.recurrent.gate import LONGEST, SHORTEST, draw_rates, draw_steps
from lm.ops.dots import dot
from lm.parameters import declare

RANK = 16
"""Numbers per token from which `ChannelForgetGate` makes its factors, as published."""
TEMPERATURE = 16.0
"""τ of `ChannelForgetGate`, as published."""


class ChannelLogits(nnx.Module):
    """W y + b for each channel of each key head, y [B, L, R]; W and y come together as a matrix of rank R."""

    def __init__(self, dims: HeadDims, rank: int, bias_KxE: jax.Array, rngs: nnx.Rngs):
        draw = nnx.initializers.lecun_normal()
        kernel = draw(rngs.params(), (rank, dims.n_kv_heads * dims.head_dim), jnp.float32)
        self.kernel = nnx.Param(kernel, **declare('matrix', 'logits', 'all_heads'))
        self.bias = nnx.Param(bias_KxE, **declare('bias', 'heads', 'head'))

    def __call__(self, k_BxLxKxE: jax.Array, gate_BxLxR: jax.Array | None) -> jax.Array:
        """Returns [B, L, K, E] float32. Only the shape of the keys counts."""
        if gate_BxLxR is None:
            return jnp.broadcast_to(self.bias[...], k_BxLxKxE.shape)
        products = dot('blr,rn->bln', gate_BxLxR, self.kernel[...].astype(gate_BxLxR.dtype))
        return products.reshape(k_BxLxKxE.shape) + self.bias[...]


class ChannelStepGate(nnx.Module):
    """a = exp(-A softplus(W y + b)): the gate of Kimi delta attention (Kimi Team 2025, Kimi Linear, §3 and §4).

    A is one number per head, from 1 to 16 at first, and b one per channel. y has as many numbers as a head has
    channels. The authors' code begins b at 0 (`KimiDeltaAttention` of flash-linear-attention). Here softplus(b) is from
    0.001 to 0.1, as for `StepGate`. So channels forget at first after 1 to 1,000 tokens.
    """

    def __init__(self, dims: HeadDims, rngs: nnx.Rngs):
        steps_KxE = draw_steps((dims.n_kv_heads, dims.head_dim), rngs)
        rate_K = draw_rates((dims.n_kv_heads,), rngs)
        self.logits = ChannelLogits(dims, dims.head_dim, jnp.log(jnp.expm1(steps_KxE)), rngs)
        self.log_rate = nnx.Param(jnp.log(rate_K), **declare('bias', 'heads'))

    def log_decay(self, k_BxLxKxE: jax.Array, gate_BxLxR: jax.Array | None) -> jax.Array:
        """Returns log a, [B, L, K, E] float32."""
        return -jnp.exp(self.log_rate[...])[:, None] * jax.nn.softplus(self.logits(k_BxLxKxE, gate_BxLxR))


class ChannelForgetGate(nnx.Module):
    """a = σ(W y + b)^(1/16): the gate of gated linear attention (Yang et al. 2024, GLA, §4.4, α).

    b is such that the channels of a head forget at first after 10 to 1,000 tokens. They spread evenly on a logarithmic
    scale, as the heads of `ForgetGate` do.
    """

    def __init__(self, dims: HeadDims, rngs: nnx.Rngs):
        tokens_E = np.geomspace(SHORTEST, LONGEST, dims.head_dim)
        # σ(b) = exp(-16 / tokens)
        bias_E = -np.log(np.expm1(TEMPERATURE / tokens_E))
        bias_KxE = jnp.broadcast_to(jnp.asarray(bias_E, jnp.float32), (dims.n_kv_heads, dims.head_dim))
        self.logits = ChannelLogits(dims, RANK, bias_KxE, rngs)

    def log_decay(self, k_BxLxKxE: jax.Array, gate_BxLxR: jax.Array | None) -> jax.Array:
        """Returns log a, [B, L, K, E] float32."""
        return jax.nn.log_sigmoid(self.logits(k_BxLxKxE, gate_BxLxR)) / TEMPERATURE
