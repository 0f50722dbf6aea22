"""Gates: factors by which a token multiplies everything before it.

    S_i = a_i S_{i-1} + φ(k_i) v_iᵀ     a_i of each key head, at most 1; exact weights become w_ij Π_{j < m ≤ i} a_m

A mechanism with a gate asks for the logits x_i W (`Attention.projections`); without them it computes as if they were 0.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lm.attention.base import Attention, HeadDims
from lm.config.configurable import configurable_base, field
from lm.parameters import declare

SHORTEST, LONGEST = 10.0, 1000.0
"""Tokens after which 1/e is left, by the first gates of the first head and of the last."""


class ForgetGate(nnx.Module):
    """a = σ(x W + b), as in the forgetting transformer (Lin et al. 2025) and in gated power attention.

    b is such that the heads forget at first after 10 to 1,000 tokens, evenly spread on a logarithmic scale: the range
    from which Mamba draws its steps (Gu and Dao 2023, §3.6: 0.1 to 0.001).
    """

    def __init__(self, heads: int):
        tokens = np.geomspace(SHORTEST, LONGEST, heads)
        # σ(b) = exp(-1 / tokens)
        self.bias = nnx.Param(jnp.asarray(-np.log(np.expm1(1 / tokens)), jnp.float32), **declare('bias', 'heads'))

    def log_decay(self, k_BxLxKxD: jax.Array, gate_BxLxK: jax.Array | None) -> jax.Array:
        """Returns log a, [B, L, K] float32. Only the shape of the keys counts."""
        return jax.nn.log_sigmoid(_logits(k_BxLxKxD, gate_BxLxK) + self.bias[...])


class StepGate(nnx.Module):
    """a = exp(-A Δ), Δ = softplus(x W + b), as in Mamba-2 and Gated DeltaNet.

    A from 1 to 16, Δ at first from 0.001 to 0.1 (as in the code of Mamba-2).
    """

    def __init__(self, heads: int, rngs: nnx.Rngs):
        step, rate = draw_steps((heads,), rngs), draw_rates((heads,), rngs)
        self.bias = nnx.Param(jnp.log(jnp.expm1(step)), **declare('bias', 'heads'))
        self.log_rate = nnx.Param(jnp.log(rate), **declare('bias', 'heads'))

    def steps(self, k_BxLxKxD: jax.Array, gate_BxLxK: jax.Array | None) -> jax.Array:
        """Returns Δ, [B, L, K] float32. Only the shape of the keys counts."""
        return jax.nn.softplus(_logits(k_BxLxKxD, gate_BxLxK) + self.bias[...])

    def log_decay(self, k_BxLxKxD: jax.Array, gate_BxLxK: jax.Array | None) -> jax.Array:
        """Returns log a, [B, L, K] float32."""
        return -jnp.exp(self.log_rate[...]) * self.steps(k_BxLxKxD, gate_BxLxK)


def draw_steps(shape: tuple[int, ...], rngs: nnx.Rngs) -> jax.Array:
    """Draws the first Δ, from 0.001 to 0.1."""
    return jnp.exp(jax.random.uniform(rngs.params(), shape, minval=jnp.log(0.001), maxval=jnp.log(0.1)))


def draw_rates(shape: tuple[int, ...], rngs: nnx.Rngs) -> jax.Array:
    """Draws the first A, from 1 to 16."""
    return jax.random.uniform(rngs.params(), shape, minval=1.0, maxval=16.0)


def _logits(k_BxLxKxD, gate_BxLxK):
    return jnp.zeros(k_BxLxKxD.shape[:3]) if gate_BxLxK is None else gate_BxLxK.astype(jnp.float32)


@configurable_base
class Gated(Attention):
    """Base of the mechanisms that may have a `ForgetGate`."""

    gate: bool = field(
        default=False, help='each token decides, for each key head, how much it leaves of all weights before it'
    )

    def projections(self, dims: HeadDims) -> dict[str, int]:
        return {'gate_BxLxK': dims.n_kv_heads} if self.gate else {}

    def why_causal(self) -> str | None:
        if not self.gate:
            return None
        why = 'forgets what came before, which no token that sees later ones does'
        return f'{self.gin_name}.gate = True: {why}; set it to False'

    def build_gate(self, dims: HeadDims) -> ForgetGate | None:
        """Returns the gate of one layer; None: it has none."""
        return ForgetGate(dims.n_kv_heads) if self.gate else None
