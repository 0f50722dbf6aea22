"""A window of softmax attention and linear attention over all older keys, in one layer (LoLCATs, Zhang et al. 2024).

Both share queries, keys and values (eq. 7). With s_ij = scale ⟨q_i, k_j⟩ and c_i the largest s_ij in the window of N,

    o_i = (Σ_{i-N < j ≤ i} γ exp(s_ij - c_i) v_j + Σ_{j ≤ i-N} f ⟨φ(q_i), φ(k_j)⟩ v_j) / (the same sums without v_j)

with a learned γ per query head, a sigmoid that starts at 0.1 as in the code of the authors. The linear part sees only
keys that have left the window. Like theirs, the weights of the window are relative to c_i, the linear ones are not.
Lizard (Nguyen et al. 2025) adds a gate to the linear part. Converted models begin as windows of softmax, whose older
keys a feature map learns to weigh: φ is Hedgehog's, or `map` has another one. f is 1 for Hedgehog's φ, as theirs is.

Other maps have weights of other sizes, in which the window would vanish. Their f is a buffer of one number per head
(`far_factor`). With it, unrelated older keys weigh on average as much as unrelated keys of the window. Weights that
estimate exp(s) (`@performer()` with softmax features) have the unit of the window, and both are relative to c_i:
γ exp(s_ij - c_i) and f ⟨φ(q_i), φ(k_j)⟩ exp(-c_i).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from lm.attention.base import HeadDims, exact_flops_per_token
from lm.attention.linear import LinearAttention, LinearModule, linear_flops_per_token
from lm.attention.maps.two_sided import TWO_SIDED, make_weights, weight_flops
from lm.attention.options import MODEL, LayerOptions
from lm.attention.windowed import WindowedAttention
from lm.config.configurable import configurable, field
from lm.errors import ConfigError
from lm.ops.linear_attention import ExpKernel, LinearCall, Options, RescaledMap
from lm.parameters import Buffer, declare

BALANCE_TOKENS = 64
"""Random queries, and random keys, over which the factor of older keys is matched."""


def number_or_mean(value: float | str | None) -> str | None:
    """Checks `far_factor`."""
    if isinstance(value, str):
        return None if value == 'mean' else "must be a number above 0, 'mean' or None"
    return None if value is None or value > 0 else 'must be above 0'


@configurable('window_linear')
class WindowLinear(WindowedAttention):
    """Softmax over the newest keys and linear attention over older ones, with a learned mix."""

    map: LinearAttention | None = field(
        default=None, help="the mechanism whose features weigh older keys, such as @performer(); None: Hedgehog's φ"
    )
    window: int = field(default=64, minimum=1, help='most recent keys, the own included, that softmax weighs (N)')
    mix: float = field(default=0.1, above=0, below=1, help='γ at first: the factor of the weights in the window')
    far_factor: float | str | None = field(
        default=None,
        check=number_or_mean,
        help="f, the factor of older keys' weights: a number; 'mean': at first unrelated older keys weigh what "
        "unrelated keys of the window do; None: 1 for Hedgehog's φ, 'mean' for others",
    )
    scale: float | None = field(default=None, above=0, help='factor of the scores; None is 1 / sqrt(head size)')

    @property
    def resolved_far_factor(self) -> float | str:
        """The factor of older keys' weights: a number or 'mean'."""
        if self.far_factor is not None:
            return self.far_factor
        return 1.0 if self.map is None or self.map.published_beside_window else 'mean'

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

    def portable(self, dims: HeadDims) -> dict[str, object]:
        if self.map is not None:
            raise ConfigError(
                f"window_linear.map = @{self.map.gin_name}(): models for transformers have Hedgehog's features only; "
                'export with --format safetensors'
            )
        return super().portable(dims) | {'far_factor': self.resolved_far_factor}


@dataclasses.dataclass(frozen=True)
class FarFeatures:
    """The `RescaledMap` of a call whose weights have a further factor per query head.

    Its parameters are the parameters of the call for keys, and for queries a pair: these and logs of factors, [H].
    """

    options: Options

    rescale = True

    def __call__(self, parameters: Any, x: jax.Array, queries: bool) -> jax.Array:
        return self.options.compute_features(parameters[0] if queries else parameters, x, queries)

    def log_factor(self, parameters: tuple[object, jax.Array], x: jax.Array) -> jax.Array:
        """Returns the logs of the factors of a query, [B, T, H, E] → [B, T, H]: the map's own and the further one."""
        inner, log_H = parameters
        feature_map = self.options.feature_map
        own = feature_map.log_factor(inner, x) if isinstance(feature_map, RescaledMap) and feature_map.rescale else 0.0
        return jnp.broadcast_to(log_H + own, x.shape[:-1])


class WindowLinearAttention(LinearModule):
    """The logits of γ, the parameters of φ, and the logs of f where `far_factor` is 'mean'."""

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
        # The unit of both parts is exp(s), or else exp(s - c) for the window alone.
        self.relative = config.map is None or not self.map.estimates_softmax
        factor = config.resolved_far_factor
        self.log_far_factor = Buffer(self._balance()) if isinstance(factor, str) else math.log(factor)

    def make_call(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, v_BxLxKxD: jax.Array) -> LinearCall:
        call = self._call_of_map(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD)
        log_far_factor = self.log_far_factor
        if isinstance(log_far_factor, Buffer):
            log_far_factor = log_far_factor[...]
        # γ divides the weights of older keys: numerator and denominator are ÷ γ.
        log_H = jax.nn.softplus(-self.mix_logit[...]) + (log_far_factor + self._log_factor)
        options = dataclasses.replace(
            call.options,
            feature_map=FarFeatures(call.options),
            local=ExpKernel(self.scale, relative=self.relative),
            window=self.config.window,
            denominator_bias=0.0,
        )
        return dataclasses.replace(
            call,
            q_parameters=(call.q_parameters, log_H),
            q_local_BxLxHxC=q_BxLxHxD,
            k_local_BxLxKxC=k_BxLxKxD,
            options=options,
        )

    def redraw(self, key: jax.Array) -> None:
        if self.config.map is not None:
            self.map.redraw(key)

    def _call_of_map(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, v_BxLxKxD: jax.Array) -> LinearCall:
        if self.config.map is None:
            weights = (self.q_weight[...], self.k_weight[...])
            options = Options(feature_map=TWO_SIDED)
            return LinearCall(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, *weights, options=options)
        return self.map.make_call(*self.map.normalize(q_BxLxHxD, k_BxLxKxD), v_BxLxKxD)

    @property
    def _log_factor(self) -> float:
        """The log of the factor that the calls of the map leave out of their weights."""
        return 0.0 if self.config.map is None else self.map.log_factor

    def _balance(self) -> jax.Array:
        """Returns logs of f, [H], with which older keys weigh on average what keys of the window do.

        The means are over random vectors, whose numbers have mean 0 and variance 1. They are the same for all layers.
        """
        dims, count = self.dims, BALANCE_TOKENS
        q, k = (
            jax.random.normal(jax.random.key(number), (1, count, heads, dims.head_dim))
            for number, heads in enumerate((dims.n_heads, dims.n_kv_heads))
        )

        def multiply(x_1xLxHxE: jax.Array, y_1xMxKxE: jax.Array) -> jax.Array:
            y_1xMxHxE = jnp.repeat(y_1xMxKxE, dims.n_heads // dims.n_kv_heads, axis=2)
            return jnp.einsum('blhe,bmhe->hlm', x_1xLxHxE.astype(jnp.float32), y_1xMxHxE.astype(jnp.float32))

        call = self._call_of_map(q, k, jnp.zeros_like(k))
        far = FarFeatures(call.options)
        parameters = (call.q_parameters, jnp.zeros(dims.n_heads))
        s_HxLxM = multiply(far(parameters, call.q_BxLxHxE, True), far(call.k_parameters, call.k_BxLxKxE, False))
        log_HxL = far.log_factor(parameters, call.q_BxLxHxE)[0].T
        far_H = (call.options.weigh(s_HxLxM) * jnp.exp(log_HxL)[..., None]).mean((1, 2))
        near_HxLxN = self.scale * multiply(q, k)[..., : self.config.window]
        if self.relative:
            near_HxLxN -= near_HxLxN.max(-1, keepdims=True)
        log_near_H = math.log(self.config.mix) + jnp.log(jnp.exp(near_HxLxN).mean((1, 2)))
        # Weights of high powers may underflow; the smallest number leaves such a factor finite.
        return log_near_H - jnp.log(jnp.maximum(far_H, jnp.finfo(jnp.float32).tiny)) - self._log_factor

    def _check(self, config: LinearAttention, module: LinearModule) -> None:
        """Raises ConfigError for mechanisms whose weights cannot stand beside a window."""
        dims, name = self.dims, f'window_linear.map = @{config.gin_name}()'
        names = [option.name for option in dataclasses.fields(LayerOptions)]
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
