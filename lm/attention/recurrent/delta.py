"""The delta rule: a token takes out of the state what stood at its key before it adds the new value there.

    S_i = a_i S_{i-1} + β_i k_i (v_i - a_i S_{i-1}ᵀ k_i)ᵀ     o_i = RMSNorm(S_iᵀ q_i / √d)     β = σ(x W)

with q and k of length 1: DeltaNet (Yang et al. 2024); with `gate` and its a = exp(-A softplus(x W' + b)) Gated DeltaNet
(Yang et al. 2025, §3), else a = 1. Their blocks have `model.convolution` and `model.output_gate` too (the latter after
the norm), and no rotary positions. With `gate = 'channel'` a_i is a diagonal matrix, one factor per channel of the key:

    a = exp(-A softplus(W y + b)), y = x W'         Kimi delta attention (KDA; Kimi Team 2025, Kimi Linear, §3, eq. 1)

A is one number per head and b one per channel. W' has as many columns as a head has channels. The authors' output gate
has a sigmoid. Qwen3-Next has twice as many values as keys (`n_value_heads`), and a smaller `norm_epsilon`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lm.attention.base import Attention, AttentionModule, HeadDims
from lm.attention.recurrent.channel_gate import ChannelStepGate
from lm.attention.recurrent.gate import StepGate
from lm.config.configurable import configurable, field
from lm.ops.delta_rule import delta_rule
from lm.ops.documents import forgetting
from lm.parameters import EPSILON, rms_norm

COUNTED_CHUNK = 64
"""Tokens a chunk in `flops_per_token`, wherever it runs: what the authors' kernels take."""


@configurable('delta')
class Delta(Attention):
    """Each key unlearns what it held before it learns anew; each head's output is normalized."""

    layer_type = 'linear_attention'

    gate: bool | str = field(
        default=False,
        choices=(False, True, 'channel'),
        help="tokens decide how much of the state they leave: True for each head (Gated DeltaNet), 'channel' for each "
        'channel of the key (Kimi delta attention)',
    )
    negative: bool = field(
        default=False, help='a token may turn around what its key held: beta up to 2 (Grazzi et al. 2025)'
    )
    norm_epsilon: float = field(
        default=EPSILON, above=0, maximum=0.1, help='added to the variance of what each head gives (Qwen3-Next: 1e-6)'
    )

    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'DeltaAttention':
        return DeltaAttention(self, dims, rngs)

    def projections(self, dims: HeadDims) -> dict[str, int]:
        widths = {'beta_BxLxK': dims.n_kv_heads}
        if self.gate:
            widths['gate_BxLxN'] = dims.head_dim if self.gate == 'channel' else dims.n_kv_heads
        return widths

    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        """Counts the products of key heads and of queries.

        A key head has products of keys, the triangular system for values and keys, and a read and an update of the
        state per token. A query has products with the keys and values of half a chunk, and a read. A gate per channel
        has one more matrix.
        """
        size, value_size, chunk = dims.head_dim, dims.value_size, min(COUNTED_CHUNK, length)
        gate = 2 * size**2 if self.gate == 'channel' else 0
        keys = dims.n_kv_heads * (chunk * (2 * size + value_size) + 4 * size * value_size + gate)
        return keys + dims.n_heads * (chunk * (size + value_size) + 2 * size * value_size)

    def portable(self, dims: HeadDims) -> dict[str, object]:
        return super().portable(dims) | {'value_size': dims.value_size}


class DeltaAttention(AttentionModule):
    """The gate, and the gain of the normalization, which the heads share. A state is [B, K, E, D], float32."""

    def __init__(self, config: Delta, dims: HeadDims, rngs: nnx.Rngs):
        self.config = config
        self.dims = dims
        self.query_length = dims.head_dim**-0.5
        if config.gate == 'channel':
            self.gate = ChannelStepGate(dims, rngs)
        else:
            self.gate = StepGate(dims.n_kv_heads, rngs) if config.gate else None
        self.out_norm = rms_norm(dims.value_size, 'head', rngs, dtype=jnp.float32, epsilon=config.norm_epsilon)

    def mix(
        self,
        q_BxLxHxD: jax.Array,
        k_BxLxKxD: jax.Array,
        v_BxLxKxD: jax.Array,
        beta_BxLxK: jax.Array | None = None,
        gate_BxLxN: jax.Array | None = None,
        *,
        starts_BxL: jax.Array | None = None,
    ) -> jax.Array:
        arguments = self._arguments(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, beta_BxLxK, gate_BxLxN, starts_BxL)
        o_BxLxHxD = delta_rule(**arguments, query_length=self.query_length)
        assert isinstance(o_BxLxHxD, jax.Array)  # only a returned state makes it a pair
        return o_BxLxHxD

    def init_state(self, batch: int, max_length: int, dtype: DTypeLike, documents: bool = False) -> jax.Array:
        return jnp.zeros((batch, self.dims.n_kv_heads, self.dims.head_dim, self.dims.value_size), jnp.float32)

    def decode_step(
        self,
        state: jax.Array,
        q_BxTxHxD: jax.Array,
        k_BxTxKxD: jax.Array,
        v_BxTxKxD: jax.Array,
        beta_BxLxK: jax.Array | None = None,
        gate_BxLxN: jax.Array | None = None,
        *,
        starts_BxT: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        arguments = self._arguments(q_BxTxHxD, k_BxTxKxD, v_BxTxKxD, beta_BxLxK, gate_BxLxN, starts_BxT)
        o_BxTxHxD, state = delta_rule(
            **arguments, query_length=self.query_length, initial_state=state, return_state=True
        )
        return state, self.outputs(o_BxTxHxD, v_BxTxKxD)

    def _arguments(self, q, k, v, beta_BxLxK, gate_BxLxN, starts_BxL) -> dict[str, Any]:
        """Returns the arguments of the operation for queries and keys from `normalize`."""
        logits_BxLxK = jnp.zeros(k.shape[:3]) if beta_BxLxK is None else beta_BxLxK.astype(jnp.float32)
        beta_BxLxK = jax.nn.sigmoid(logits_BxLxK) * (2.0 if self.config.negative else 1.0)
        decay_BxLxK = channel_decay_BxLxKxE = None
        if isinstance(self.gate, ChannelStepGate):
            channel_decay_BxLxKxE = self.gate.log_decay(k, gate_BxLxN)
        elif self.gate is not None:
            decay_BxLxK = self.gate.log_decay(k, gate_BxLxN)
        if starts_BxL is not None:
            decay_BxLxK = forgetting(starts_BxL, decay_BxLxK, self.dims.n_kv_heads)
        return dict(
            q_BxLxHxE=q,
            k_BxLxKxE=k,
            v_BxLxKxD=v,
            beta_BxLxK=beta_BxLxK,
            log_decay_BxLxK=decay_BxLxK,
            channel_log_decay_BxLxKxE=channel_decay_BxLxKxE,
        )

    def outputs(self, o_BxLxHxD: jax.Array, v_BxLxKxD: jax.Array) -> jax.Array:
        return self.out_norm(o_BxLxHxD).astype(o_BxLxHxD.dtype)
