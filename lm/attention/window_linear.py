"""A window of softmax attention and linear attention over all older keys, in one layer (LoLCATs, Zhang et al. 2024).

Both share queries, keys and values (eq. 7). With s_ij = scale ⟨q_i, k_j⟩ and c_i the largest s_ij in the window of N,

    o_i = (Σ_{i-N < j ≤ i} γ exp(s_ij - c_i) v_j + Σ_{j ≤ i-N} ⟨φ(q_i), φ(k_j)⟩ v_j) / (the same sums without v_j)

with a learned γ per query head, a sigmoid that starts at 0.1 as in the code of the authors. The linear part sees only
keys that have left the window. Like theirs, the weights of the window are relative to c_i, the linear ones are not.
Lizard (Nguyen et al. 2025) adds a gate to the linear part. Converted models begin as windows of softmax, whose older
keys a feature map learns to weigh: φ is Hedgehog's, or `map` has another one.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lm.attention.base import MODEL, Attention, HeadDims, exact_flops_per_token
from lm.attention.linear import LinearAttention, LinearModule, linear_flops_per_token
from lm.attention.maps.two_sided import TwoSidedSoftmax, make_weights, weight_flops
from lm.attention.windowed import WindowedAttention
from lm.config.configurable import configurable, field
from lm.errors import ConfigError
from lm.ops.linear_attention import ExpKernel, FeatureMap, LinearCall, Options
from lm.parameters import declare


@configurable('window_linear')
class WindowLinear(WindowedAttention):
    """Softmax over the newest keys and linear attention over older ones, with a learned mix."""

    map: LinearAttention | None = field(
        default=None, help="the mechanism whose features weigh older keys, such as @performer(); None: Hedgehog's φ"
    )
    window: int = field(default=64, minimum=1, help='most recent keys, the own included, that softmax weighs (N)')
    mix: float = field(default=0.1, above=0, below=1, help='γ at first: the factor of the weights in the window')
    scale: float | None = field(default=None, above=0, help='factor of the scores; None is 1 / sqrt(head size)')

    @property
    def redraw_every(self) -> int | None:
        return self.map and self.map.redraw_every

    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'WindowLinearAttention':
        return WindowLinearAttention(self, dims, rngs)

    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        exact = exact_flops_per_token(dims, length, self.window)
        if (older := length - self.window) <= 0:
            return exact
        if self.map is not None:
            return exact + self.map.flops_per_token(dims, older) * older / length
        sums = linear_flops_per_token(dims, older, 2 * dims.head_dim, 2 * dims.head_dim)
        return exact + weight_flops(dims) + sums * older / length

    def portable(self, dims: HeadDims) -> dict[str, Any]:
        if self.map is not None:
            raise ConfigError(
                f"window_linear.map = @{self.map.gin_name}(): models for transformers have Hedgehog's features only; "
                'export with --format safetensors'
            )
        return super().portable(dims)


@dataclasses.dataclass(frozen=True)
class ScaledQueries:
    """A `FeatureMap` whose features of queries are multiplied by a number per head.

    Its parameters are the parameters of the other map for keys, and for queries a pair: these and the numbers, [H].
    """

    features: FeatureMap

    def __call__(self, parameters: Any, x: jax.Array, queries: bool) -> jax.Array:
        if not queries:
            return self.features(parameters, x, False)
        inner, factor_H = parameters
        return _multiplied(self.features(inner, x, True), factor_H)


class WindowLinearAttention(LinearModule):
    """The logits of γ, and the parameters of φ."""

    def __init__(self, config: WindowLinear, dims: HeadDims, rngs: nnx.Rngs):
        self.config = config
        self.dims = dims
        self.scale = config.scale or dims.head_dim**-0.5
        first = math.log(config.mix / (1 - config.mix))
        self.mix_logit = nnx.Param(jnp.full(dims.n_heads, first), **declare('bias', 'heads'))
        if config.map is None:
            self.q_weight, self.k_weight = make_weights(dims, per_head=True)
        else:
            self.map = config.map.build(dims, rngs)
            self._check(config.map, self.map)

    def make_call(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, v_BxLxKxD: jax.Array) -> LinearCall:
        call = self._call_of_map(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD)
        # γ divides the weights of older keys, where it is a factor of queries: numerator and denominator are ÷ γ.
        degree = len(call.options.powers) - 1
        factor_H = (1.0 + jnp.exp(-self.mix_logit[...])) ** (1 / degree)
        options = dataclasses.replace(
            call.options,
            local=ExpKernel(self.scale, relative=True),
            window=self.config.window,
            denominator_bias=0.0,
        )
        local = {'q_local_BxLxHxC': q_BxLxHxD, 'k_local_BxLxKxC': k_BxLxKxD}
        if options.feature_map is None:
            return dataclasses.replace(call, q_BxLxHxE=_multiplied(call.q_BxLxHxE, factor_H), options=options, **local)
        options = dataclasses.replace(options, feature_map=ScaledQueries(options.feature_map))
        return dataclasses.replace(call, q_parameters=(call.q_parameters, factor_H), options=options, **local)

    def redraw(self, key: jax.Array) -> None:
        if self.config.map is not None:
            self.map.redraw(key)

    def _call_of_map(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, v_BxLxKxD: jax.Array) -> LinearCall:
        if self.config.map is None:
            weights = (self.q_weight[...], self.k_weight[...])
            options = Options(feature_map=TwoSidedSoftmax())
            return LinearCall(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, *weights, options=options)
        return self.map.make_call(*self.map.normalize(q_BxLxHxD, k_BxLxKxD), v_BxLxKxD)

    def _check(self, config: LinearAttention, module: LinearModule) -> None:
        """Raises ConfigError for mechanisms whose weights are no features that a factor can be joined to."""
        dims, name = self.dims, f'window_linear.map = @{config.gin_name}()'
        names = [option.name for option in dataclasses.fields(Attention)]
        if own := next((one for one in names if getattr(config, one) != MODEL), None):
            raise ConfigError(f'{name}: sets {own}, an option of layers; set window_linear.{own}')
        if config.projections(dims):
            raise ConfigError(f'{name}: has a gate, which the window would not have; set gate = False there')
        heads = (dims.n_heads, dims.n_kv_heads, dims.n_kv_heads)
        options = self._call_of_map(*(jnp.zeros((1, 1, n, dims.head_dim)) for n in heads)).options
        if module.signed or not options.normalize:
            raise ConfigError(f'{name}: has weights that can be negative; take one without, such as @hedgehog()')
        if options.local is not None:
            raise ConfigError(f'{name}: weighs near keys exactly by itself; set local = False there')
        if not options.causal:
            raise ConfigError(f'{name}: sees later tokens; set causal = True there')
        if any(options.powers[:-1]):
            raise ConfigError(f'{name}: adds several powers of features; take one with one power, such as @hedgehog()')


def _multiplied(x_BxLxHxF: jax.Array, factor_H: jax.Array) -> jax.Array:
    return (x_BxLxHxF * factor_H[:, None]).astype(x_BxLxHxF.dtype)
