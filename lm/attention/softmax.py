"""Softmax attention, over all earlier tokens or a sliding window of them."""

from typing import Any

import jax
from flax import nnx

from lm.attention.base import HeadDims, exact_flops_per_token
from lm.attention.exact import ExactModule
from lm.attention.recurrent.gate import Gated
from lm.config.configurable import configurable, field
from lm.ops.exact_attention import SOFTMAX, softmax_attention


@configurable('softmax')
class Softmax(Gated):
    """Weights exp(scale ⟨q_i, k_j⟩) / Σ_j' exp(scale ⟨q_i, k_j'⟩) (PolySketchFormer §2.1); `gate` adds
    Σ_{j < m ≤ i} log a_m to the scores, as in the forgetting transformer (Lin et al. 2025)."""

    is_default = True

    scale: float | None = field(default=None, above=0, help='factor of the scores; None is 1 / sqrt(head size)')
    window: int | None = field(default=None, minimum=1, help='tokens that a query sees, itself included; None sees all')
    implementation: str | None = field(
        default=None,
        choices=tuple(SOFTMAX),
        resume=True,
        help="how it is computed; None: the platform's best; results agree",
    )

    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'SoftmaxAttention':
        return SoftmaxAttention(self, dims)

    def kernels_declare_cost(self, dims: HeadDims) -> bool:
        """Returns False where JAX's kernels compute it: for windows and for heads too wide for our kernels."""
        from lm.ops.tpu import LANES

        return self.window is None and self.implementation != 'splash' and dims.head_dim <= LANES

    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        return exact_flops_per_token(dims, length, self.window)

    def why_causal(self) -> str | None:
        if self.window is not None:
            return f'softmax.window = {self.window}: is one of earlier tokens; set it to None'
        return super().why_causal()


class SoftmaxAttention(ExactModule):
    """Softmax over the scores."""

    config: Softmax

    def __init__(self, config: Softmax, dims: HeadDims):
        super().__init__(config, dims)
        self.window = config.window

    def compute(self, q_BxLxHxD: jax.Array, k_BxMxKxD: jax.Array, v_BxMxKxD: jax.Array, **options: Any) -> jax.Array:
        config = self.config
        options = {'scale': config.scale, 'window': config.window, 'implementation': config.implementation} | options
        return softmax_attention(q_BxLxHxD, k_BxMxKxD, v_BxMxKxD, **options)
