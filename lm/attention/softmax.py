"""Softmax attention, over all earlier tokens or a sliding window of them.

Options of full layers in hybrid models:

- `sinks`: o_i = Σ_j exp(s_ij) v_j / (exp(b_h) + Σ_j exp(s_ij)), b_h learned per query head (OpenAI 2025, gpt-oss)
- `score_cap`: s_ij = c tanh(s'_ij / c) (Gemma Team 2024, Gemma 2, §2)
- `log_base`: s_ij = log_a(t_i + a) s'_ij, for t_i tokens of the document before token i

With `log_base` layers without positions attend as sharply in longer contexts (Chen et al. 2026, HypeNet; Puvvada et al.
2025, SWAN-GPT). Models train without it; a is chosen on training text for the evaluation.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lm.attention.base import HeadDims, exact_flops_per_token
from lm.attention.exact import ExactModule
from lm.attention.recurrent.gate import Gated
from lm.config.configurable import configurable, field
from lm.ops import sequence
from lm.ops.exact_attention import SOFTMAX, cache, softmax_attention
from lm.parameters import declare


@configurable('softmax')
class Softmax(Gated):
    """Weights exp(scale ⟨q_i, k_j⟩) / Σ_j' exp(scale ⟨q_i, k_j'⟩) (PolySketchFormer §2.1); `gate` adds
    Σ_{j < m ≤ i} log a_m to the scores, as in the forgetting transformer (Lin et al. 2025)."""

    is_default = True
    layer_type = 'full_attention'

    scale: float | None = field(default=None, above=0, help='factor of the scores; None is 1 / sqrt(head size)')
    window: int | None = field(default=None, minimum=1, help='tokens that a query sees, itself included; None sees all')
    sinks: bool = field(default=False, help='a learned logit per query head in the denominator')
    score_cap: float | None = field(
        default=None, above=0, help='c: scores are capped smoothly, c·tanh(score / c); None leaves them as they are'
    )
    log_base: float | None = field(
        default=None,
        above=1,
        help='a: scores of a token with t tokens before it grow by log_a(t + a); for evaluation; None: they do not',
    )
    implementation: str | None = field(
        default=None,
        choices=tuple(SOFTMAX),
        resume=True,
        help="how it is computed; None: the platform's best; results agree",
    )
    block: int | None = field(
        default=None, minimum=1, resume=True, help='tokens per block (changes speed, not results); None: the fastest'
    )

    def portable(self, dims: HeadDims) -> dict[str, object]:
        return {name: value for name, value in super().portable(dims).items() if name != 'block'}

    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'SoftmaxAttention':
        return SoftmaxAttention(self, dims)

    def kernels_declare_cost(self, dims: HeadDims) -> bool:
        """Returns False where JAX's kernels compute it: for heads too wide for our kernels."""
        from lm.ops.tpu import LANES

        return self.implementation != 'splash' and dims.head_dim <= LANES

    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        return exact_flops_per_token(dims, length, self.window)

    def why_causal(self) -> str | None:
        if self.window is not None:
            return f'softmax.window = {self.window}: is one of earlier tokens; set it to None'
        if self.log_base is not None:
            return f'softmax.log_base = {self.log_base}: counts earlier tokens; set it to None'
        return super().why_causal()


class SoftmaxAttention(ExactModule):
    """Softmax over the scores. The sinks are its only parameters besides the gate."""

    config: Softmax

    def __init__(self, config: Softmax, dims: HeadDims):
        super().__init__(config, dims)
        self.window = config.window
        # Zero counts as one more key whose score and value are zero.
        sinks = nnx.Param(jnp.zeros(dims.n_heads), **declare('bias', 'heads')) if config.sinks else None
        self.sinks = sinks

    def compute(self, q_BxLxHxD: jax.Array, k_BxMxKxD: jax.Array, v_BxMxKxD: jax.Array, **options: Any) -> jax.Array:
        config = self.config
        computed = {'implementation': config.implementation, 'block': config.block}
        options = {'scale': config.scale, 'window': config.window} | computed | options
        sinks_H = None if self.sinks is None else self.sinks[...]
        weights = {'score_cap': config.score_cap, 'sinks_H': sinks_H}
        return softmax_attention(q_BxLxHxD, k_BxMxKxD, v_BxMxKxD, **weights, **options)

    def mix(
        self,
        q_BxLxHxD: jax.Array,
        k_BxLxKxD: jax.Array,
        v_BxLxKxD: jax.Array,
        gate_BxLxK: jax.Array | None = None,
        *,
        starts_BxL: jax.Array | None = None,
    ) -> jax.Array:
        q_BxLxHxD = self._sharpen(q_BxLxHxD, sequence.index() * q_BxLxHxD.shape[1], starts_BxL)
        return super().mix(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, gate_BxLxK, starts_BxL=starts_BxL)

    def decode_step(
        self,
        state: cache.Cache,
        q_BxTxHxD: jax.Array,
        k_BxTxKxD: jax.Array,
        v_BxTxKxD: jax.Array,
        gate_BxLxK: jax.Array | None = None,
        *,
        starts_BxT: jax.Array | None = None,
    ) -> tuple[cache.Cache, jax.Array]:
        q_BxTxHxD = self._sharpen(q_BxTxHxD, state.position if starts_BxT is None else 0, starts_BxT)
        return super().decode_step(state, q_BxTxHxD, k_BxTxKxD, v_BxTxKxD, gate_BxLxK, starts_BxT=starts_BxT)

    def over_latent(self, rank: int, shared: int) -> 'LatentSoftmax | None':
        return None if self.gate is not None else LatentSoftmax(self, rank, shared)

    def _sharpen(self, q_BxLxHxD: jax.Array, position: jax.Array | int, starts_BxL: jax.Array | None) -> jax.Array:
        """Multiplies queries, from this position on, by log_a(t + a) for t tokens before them in their documents."""
        base = self.config.log_base
        if base is None:
            return q_BxLxHxD
        before = (position + jnp.arange(q_BxLxHxD.shape[1]))[None] - (0 if starts_BxL is None else starts_BxL)
        factor = jnp.log(before.astype(jnp.float32) + base) / math.log(base)
        return (q_BxLxHxD.astype(jnp.float32) * factor[..., None, None]).astype(q_BxLxHxD.dtype)


class LatentSoftmax(SoftmaxAttention):
    """Softmax over keys that all heads share, and whose first channels are the values: its cache holds nothing else
    (DeepSeek-AI 2024, DeepSeek-V2, §2.1.2 and §2.1.4)."""

    def __init__(self, whole: SoftmaxAttention, rank: int, shared: int):
        scale = whole.config.scale or whole.dims.head_dim**-0.5
        dims = HeadDims(whole.dims.n_heads, 1, rank + shared, whole.dims.causal, value_dim=0)
        super().__init__(dataclasses.replace(whole.config, scale=scale), dims)
        self.sinks, self.rank = whole.sinks, rank

    def compute(self, q_BxLxHxD: jax.Array, k_BxMxKxD: jax.Array, v_BxMxKxD: jax.Array, **options: Any) -> jax.Array:
        return super().compute(q_BxLxHxD, k_BxMxKxD, k_BxMxKxD[..., : self.rank], **options)
