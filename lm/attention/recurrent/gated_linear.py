"""Gated linear attention: each token decides by which factors the state fades, one per head or one per key channel.

    S_i = a_i S_{i-1} + φ(k_i) u_iᵀ     o_i = RMSNorm(S_iᵀ φ(q_i) / √d)

    gate = 'sigmoid'    a = σ(x W + b), u = v                                        (gated power attention)
    gate = 'ssd'        a = exp(-A Δ), u = Δ v, Δ = softplus(x W + b); D v is added to o, before the norm
                                                                                     (Dao and Gu 2024, Mamba-2)
    gate = 'channel'    a = σ(W y + b)^(1/16), y = x W' [16]: diagonal, one factor per channel of the key; u = v
                                                                                     (Yang et al. 2024, GLA)

with ⟨φ(q), φ(k)⟩ = ⟨q, k⟩^degree: 1, or 2 (power attention). Mamba-2's blocks have `model.convolution` and
`model.output_gate` too (the latter after the norm, not before), and neither GLU nor rotary positions.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from lm.attention.base import HeadDims
from lm.attention.linear import LinearAttention, LinearModule, linear_flops_per_token
from lm.attention.recurrent.channel_gate import RANK, ChannelForgetGate
from lm.attention.recurrent.gate import ForgetGate, StepGate
from lm.config.configurable import configurable, field
from lm.errors import ConfigError
from lm.ops.linear_attention import PLAIN, SQUARE, LinearCall, Options
from lm.parameters import EPSILON, declare, rms_norm

POWERS = {1: PLAIN, 2: SQUARE}


class SkippedStepGate(StepGate):
    """gate = 'ssd'. D = 1 at first."""

    def __init__(self, dims: HeadDims, rngs: nnx.Rngs):
        super().__init__(dims.n_kv_heads, rngs)
        self.skip = nnx.Param(jnp.ones(dims.n_heads), **declare('gain', 'heads'))

    def scale(self, v_BxLxKxD: jax.Array, steps_BxLxK: jax.Array) -> jax.Array:
        """Returns u."""
        return (v_BxLxKxD * steps_BxLxK[..., None]).astype(v_BxLxKxD.dtype)

    def add_skipped(self, o_BxLxHxD: jax.Array, v_BxLxKxD: jax.Array) -> jax.Array:
        """Returns the output, with the part that bypasses the state."""
        v_BxLxHxD = jnp.repeat(v_BxLxKxD, o_BxLxHxD.shape[2] // v_BxLxKxD.shape[2], axis=2)
        return o_BxLxHxD + self.skip[...][:, None] * v_BxLxHxD


GATES = {
    'sigmoid': lambda dims, rngs: ForgetGate(dims.n_kv_heads),
    'ssd': SkippedStepGate,
    'channel': ChannelForgetGate,
}


@configurable('gated_linear')
class GatedLinear(LinearAttention):
    """Weights Π_{j < m ≤ i} a_m ⟨q_i, k_j⟩^degree without a denominator; each head's output is normalized instead."""

    layer_type = 'gated_linear_attention'

    gate: str = field(default='sigmoid', choices=tuple(GATES), help='how a token decides what it leaves of the state')
    degree: int = field(default=1, choices=tuple(POWERS), help='power of the scores; 2 is power attention')
    norm_epsilon: float = field(
        default=EPSILON,
        above=0,
        maximum=0.1,
        omit_default=True,
        help='added to the variance of what each head gives',
    )

    def __post_init__(self) -> None:
        if self.gate == 'channel' and self.degree != 1:
            raise ConfigError(
                f'{self.gin_name}.degree = {self.degree}: needs one factor per head; '
                f"set {self.gin_name}.gate = 'sigmoid', or degree = 1"
            )

    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'GatedLinearAttention':
        return GatedLinearAttention(self, dims, rngs)

    def projections(self, dims: HeadDims) -> dict[str, int]:
        return {'gate_BxLxN': RANK if self.gate == 'channel' else dims.n_kv_heads}

    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        size = dims.head_dim
        features = size if self.degree == 1 else size * (size + 1) // 2
        gate = 2 * RANK * dims.n_kv_heads * size if self.gate == 'channel' else 0
        return linear_flops_per_token(dims, length, features, size) + gate

    def portable(self, dims: HeadDims) -> dict[str, object]:
        return super().portable(dims) | {'value_size': dims.value_size}


class GatedLinearAttention(LinearModule):
    """The gate, and the gain of the normalization, which the heads share."""

    def __init__(self, config: GatedLinear, dims: HeadDims, rngs: nnx.Rngs):
        self.config = config
        self.dims = dims
        self.gate = GATES[config.gate](dims, rngs)
        self.log_factor = -config.degree / 2 * math.log(dims.head_dim)
        self.out_norm = rms_norm(dims.value_size, 'head', rngs, dtype=jnp.float32, epsilon=config.norm_epsilon)

    def make_call(
        self,
        q_BxLxHxD: jax.Array,
        k_BxLxKxD: jax.Array,
        v_BxLxKxD: jax.Array,
        gate_BxLxN: jax.Array | None = None,
    ) -> LinearCall:
        log_decay, u_BxLxKxD = self.gate.log_decay(k_BxLxKxD, gate_BxLxN), v_BxLxKxD
        if isinstance(self.gate, SkippedStepGate):
            u_BxLxKxD = self.gate.scale(v_BxLxKxD, self.gate.steps(k_BxLxKxD, gate_BxLxN))
        by_channel = isinstance(self.gate, ChannelForgetGate)
        return LinearCall(
            q_BxLxHxD,
            k_BxLxKxD,
            u_BxLxKxD,
            log_decay_BxLxK=None if by_channel else log_decay,
            channel_log_decay_BxLxKxE=log_decay if by_channel else None,
            options=Options(powers=POWERS[self.config.degree], normalize=False),
        )

    def outputs(self, o_BxLxHxD: jax.Array, v_BxLxKxD: jax.Array) -> jax.Array:
        skips = isinstance(self.gate, SkippedStepGate)
        whole_BxLxHxD = self.gate.add_skipped(o_BxLxHxD, v_BxLxKxD) if skips else o_BxLxHxD
        return self.out_norm(whole_BxLxHxD).astype(o_BxLxHxD.dtype)
