"""Gated linear attention with one factor a token and head, which the token decides.

    S_i = a_i S_{i-1} + φ(k_i) u_iᵀ     o_i = RMSNorm(S_iᵀ φ(q_i) / √d)

    gate = 'sigmoid'    a = σ(x W + b), u = v                                        (gated power attention)
    gate = 'ssd'        a = exp(-A Δ), u = Δ v, Δ = softplus(x W + b); D v is added to o, before the norm
                                                                                     (Dao and Gu 2024, Mamba-2)

with ⟨φ(q), φ(k)⟩ = ⟨q, k⟩^degree: 1, or 2 (power attention). Mamba-2's blocks have `model.convolution` and
`model.output_gate` too (the latter after the norm, not before), and neither GLU nor rotary positions.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from lm.attention.base import HeadDims
from lm.attention.linear import LinearAttention, LinearModule, linear_flops_per_token
from lm.attention.recurrent.gate import ForgetGate, StepGate
from lm.config.configurable import configurable, field
from lm.ops.linear_attention import PLAIN, SQUARE, LinearCall, Options
from lm.parameters import declare, rms_norm

POWERS = {1: PLAIN, 2: SQUARE}


class SigmoidGate(ForgetGate):
    """gate = 'sigmoid'."""

    def __init__(self, dims: HeadDims, rngs: nnx.Rngs):
        super().__init__(dims.n_kv_heads)

    def gated(self, v_BxLxKxD: jax.Array, gate_BxLxK: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Returns (u, log a)."""
        return v_BxLxKxD, self.log_decay(v_BxLxKxD, gate_BxLxK)

    def skipped(self, o_BxLxHxD: jax.Array, v_BxLxKxD: jax.Array) -> jax.Array:
        """Returns the output, with the part that bypasses the state."""
        return o_BxLxHxD


class SkippedStepGate(StepGate):
    """gate = 'ssd'. D = 1 at first."""

    def __init__(self, dims: HeadDims, rngs: nnx.Rngs):
        super().__init__(dims.n_kv_heads, rngs)
        self.skip = nnx.Param(jnp.ones(dims.n_heads), **declare('gain', 'heads'))

    def gated(self, v_BxLxKxD: jax.Array, gate_BxLxK: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Returns (u, log a)."""
        step_BxLxKx1 = self.steps(v_BxLxKxD, gate_BxLxK)[..., None]
        return (v_BxLxKxD * step_BxLxKx1).astype(v_BxLxKxD.dtype), self.log_decay(v_BxLxKxD, gate_BxLxK)

    def skipped(self, o_BxLxHxD: jax.Array, v_BxLxKxD: jax.Array) -> jax.Array:
        """Returns the output, with the part that bypasses the state."""
        v_BxLxHxD = jnp.repeat(v_BxLxKxD, o_BxLxHxD.shape[2] // v_BxLxKxD.shape[2], axis=2)
        return o_BxLxHxD + self.skip[...][:, None] * v_BxLxHxD


GATES = {'sigmoid': SigmoidGate, 'ssd': SkippedStepGate}


@configurable('gated_linear')
class GatedLinear(LinearAttention):
    """Weights Π_{j < m ≤ i} a_m ⟨q_i, k_j⟩^degree without a denominator; each head's output is normalized instead."""

    gate: str = field(default='sigmoid', choices=tuple(GATES), help='how a token decides what it leaves of the state')
    degree: int = field(default=1, choices=tuple(POWERS), help='power of the scores; 2 is power attention')

    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'GatedLinearAttention':
        return GatedLinearAttention(self, dims, rngs)

    def projections(self, dims: HeadDims) -> dict[str, int]:
        return {'gate_BxLxK': dims.n_kv_heads}

    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        size = dims.head_dim
        features = size if self.degree == 1 else size * (size + 1) // 2
        return linear_flops_per_token(dims, length, features, size)


class GatedLinearAttention(LinearModule):
    """The gate, and the gain of the normalization, which the heads share."""

    def __init__(self, config: GatedLinear, dims: HeadDims, rngs: nnx.Rngs):
        self.config = config
        self.dims = dims
        self.gate = GATES[config.gate](dims, rngs)
        self.out_norm = rms_norm(dims.head_dim, 'head', rngs, dtype=jnp.float32)

    def make_call(
        self,
        q_BxLxHxD: jax.Array,
        k_BxLxKxD: jax.Array,
        v_BxLxKxD: jax.Array,
        gate_BxLxK: jax.Array | None = None,
    ) -> LinearCall:
        u_BxLxKxD, log_decay_BxLxK = self.gate.gated(v_BxLxKxD, gate_BxLxK)
        return LinearCall(
            q_BxLxHxD * self.dims.head_dim**-0.5,
            k_BxLxKxD,
            u_BxLxKxD,
            log_decay_BxLxK=log_decay_BxLxK,
            options=Options(powers=POWERS[self.config.degree], normalize=False),
        )

    def outputs(self, o_BxLxHxD: jax.Array, v_BxLxKxD: jax.Array) -> jax.Array:
        return self.out_norm(self.gate.skipped(o_BxLxHxD, v_BxLxKxD)).astype(o_BxLxHxD.dtype)
