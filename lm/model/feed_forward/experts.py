"""A mixture of experts: a router chooses a few of many small feed-forward layers for each token.

    s = softmax(x W), or σ(x W)         in float32
    y = c Σ_{e chosen} s_e E_e(x)  [+ E_shared(x), or σ(x w) E_shared(x)]

The `top_k` experts with the largest s_e are chosen (Shazeer et al. 2017, §2.1); with `normalize` their weights are
divided by their sum. The weight of one expert alone is then 1, and its router has no gradient: training refuses it.
Published models with one expert weigh it with s_e (Fedus et al. 2021, Switch Transformer, §2.1).

No expert has a limit of tokens, so none are dropped, and a token's output depends on no other token. Experts are small
and shared experts see all tokens (Dai et al. 2024, DeepSeekMoE, §3.1 and §3.2).

With `groups` the experts stand in groups, and only experts in the best `top_groups` can be chosen. With `correction` a
fixed number per expert is added for the choice alone (DeepSeek-AI 2024, DeepSeek-V3, §2.1.2, eq. 16): training keeps
the numbers of an import.

`balance` = α adds α Σ_e f_e P_e to the loss of each layer (Dai et al. 2024, §3.3, eq. 12 to 14): f_e is the share of
choices that e gets times the number of experts, and P_e the mean of s_e, divided by its sum. It is 1 where all experts
get equally much. Losses that are reported leave it out.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike

from lm.config.configurable import configurable, field
from lm.errors import ConfigError
from lm.model.dense import run_on_gathered
from lm.model.feed_forward.base import FeedForward, FeedForwardShape, RoutedPart, Routing
from lm.ops.custom_vjp import custom_vjp
from lm.ops.experts import apply_experts
from lm.ops.platform import DATA_AXES, SEQUENCE_AXIS
from lm.parameters import Buffer, declare

GROUP_BEST = 2
"""The scores of a group of experts that are added to choose groups, as in DeepSeek-V3."""


@configurable('experts')
class Experts(FeedForward):
    """Each token passes a few of many experts, and a shared one if there is one."""

    n_experts: int = field(default=8, minimum=2, help='experts of a layer, without the shared one')
    top_k: int = field(default=2, minimum=1, help='experts that a token passes')
    hidden_dim: int | None = field(
        default=None, minimum=1, help="width of an expert; None: a dense layer's width over top_k, a multiple of 8"
    )
    shared_dim: int | None = field(default=None, minimum=1, help='width of an expert that all tokens pass; None: none')
    shared_gate: bool = field(default=False, help='the output of the shared expert is multiplied by sigmoid(x w)')
    sigmoid: bool = field(
        default=False, help='the scores are sigmoids of the products of the router, each for itself, and no softmax'
    )
    normalize: bool = field(default=True, help='the weights of the chosen experts have the sum 1')
    scale: float = field(default=1.0, above=0, help='factor of the weights of the chosen experts')
    groups: int = field(default=1, minimum=1, help='groups in which the experts stand')
    top_groups: int = field(default=1, minimum=1, help='groups that a token chooses its experts from')
    correction: bool = field(
        default=False, help='a fixed number per expert is added to its score for the choice (DeepSeek-V3), 0 at first'
    )
    balance: float = field(
        default=0.0,
        minimum=0,
        maximum=1,
        help='coefficient of the balance loss of each layer (usual is 0.001 to 0.01); 0: none',
    )

    def __post_init__(self) -> None:
        def refuse(name: str, remedy: str) -> None:
            raise ConfigError(f'{self.gin_name}.{name} = {getattr(self, name)}: {remedy}')

        if self.shared_gate and self.shared_dim is None:
            refuse('shared_gate', f'there is no shared expert; set {self.gin_name}.shared_dim')
        if self.n_experts % self.groups:
            refuse('groups', f'must divide {self.gin_name}.n_experts = {self.n_experts}')
        if self.top_groups > self.groups:
            refuse('top_groups', f'there are {self.groups} groups; take fewer, or more {self.gin_name}.groups')
        if self.top_k > (most := self.n_experts // self.groups * self.top_groups):
            refuse('top_k', f'a token can choose from {most} experts; take fewer')

    def expert_dim(self, shape: FeedForwardShape) -> int:
        """Returns the width of an expert."""
        return self.hidden_dim or max(8, shape.hidden_dim // self.top_k // 8 * 8)

    def dense_dim(self, shape: FeedForwardShape) -> int:
        return self.shared_dim or 0

    def build(self, shape: FeedForwardShape, rngs: nnx.Rngs, dtype: DTypeLike) -> 'RoutedExperts':
        return RoutedExperts(self, shape, rngs, dtype)

    def count_products(self, shape: FeedForwardShape) -> int:
        routed = self.top_k * shape.count_products(self.expert_dim(shape))
        shared = shape.count_products(self.dense_dim(shape)) + (shape.d_model if self.shared_gate else 0)
        return routed + shared + shape.d_model * self.n_experts

    def settle(self, shape: FeedForwardShape) -> 'Experts':
        return dataclasses.replace(self, hidden_dim=self.expert_dim(shape), balance=0.0)

    def count_experts(self) -> int:
        return self.n_experts

    def why_untrained(self) -> str | None:
        if self.top_k > 1 or not self.normalize:
            return None
        return (
            f'{self.gin_name}.normalize = True: the weight of the one expert of {self.gin_name}.top_k = 1 is always 1, '
            f'and its router never learns; set {self.gin_name}.normalize = False (Switch Transformer), take more '
            "experts, or keep an imported router with optimizer.frozen = ['glu']"
        )

    def count_idle(self, shape: FeedForwardShape) -> int:
        return (self.n_experts - self.top_k) * shape.count_products(self.expert_dim(shape))


class RoutedExperts(RoutedPart):
    """The router and the experts of a layer. `glu_in` has values, then gates, of each expert."""

    def __init__(self, config: Experts, shape: FeedForwardShape, rngs: nnx.Rngs, dtype: DTypeLike):
        self.config, self.shape, self.dtype = config, shape, jnp.dtype(dtype)
        experts, width, hidden = config.n_experts, shape.d_model, config.expert_dim(shape)

        def linear(outputs: int, axis: str) -> nnx.Linear:
            metadata = declare('matrix', 'embed', axis, part='glu')
            options = {'use_bias': False, 'dtype': jnp.float32, 'precision': lax.Precision.HIGHEST}
            return nnx.Linear(width, outputs, rngs=rngs, kernel_metadata=metadata, **options)

        def stacked(scale: float, *sizes: int) -> jax.Array:
            init = nnx.initializers.variance_scaling(scale, 'fan_in', 'truncated_normal', batch_axis=(0,))
            return init(rngs.params(), (experts, *sizes), jnp.float32)

        self.router = linear(experts, 'experts')
        pieces = (hidden, hidden) if shape.gated else (hidden,)
        axes = ('experts', 'embed', 'mlp')
        self.glu_in = nnx.Param(stacked(1.0, width, sum(pieces)), **declare('matrix', *axes, part='glu', pieces=pieces))
        # It starts smaller in deeper models, as the output of a dense layer does (`Block`).
        out = stacked(1 / (2 * shape.n_layers), hidden, width)
        self.glu_out = nnx.Param(out, **declare('matrix', axes[0], *axes[:0:-1], part='glu'))
        self.shared_gate = linear(1, 'gate') if config.shared_gate else None
        self.correction = Buffer(jnp.zeros(experts)) if config.correction else None

    def compute(self, x_BxLxD: jax.Array, dense_BxLxD: jax.Array | None) -> tuple[jax.Array, Routing]:
        chosen_BxLxN, weights_BxLxN, routing = self._route(x_BxLxD)
        arrays, matrices = (x_BxLxD.astype(self.dtype), chosen_BxLxN, weights_BxLxN), (self.glu_in, self.glu_out)
        y_BxLxD = run_on_gathered(self._apply, arrays, [each[...].astype(self.dtype) for each in matrices])
        if dense_BxLxD is None:
            return y_BxLxD, routing
        if self.shared_gate is not None:
            dense_BxLxD *= jax.nn.sigmoid(self.shared_gate(x_BxLxD)).astype(dense_BxLxD.dtype)
        return y_BxLxD + dense_BxLxD, routing

    def route(self, x_BxLxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the experts of each token, [B, L, N] int32, and their weights, float32."""
        return self._route(x_BxLxD)[:2]

    def _route(self, x_BxLxD: jax.Array) -> tuple[jax.Array, jax.Array, Routing]:
        """Routes like `route`, and counts the choices."""
        config = self.config
        form = jax.nn.sigmoid if config.sigmoid else jax.nn.softmax
        scores_BxLxE = form(self.router(x_BxLxD.astype(jnp.float32)))
        chosen_BxLxN = lax.top_k(self._compare(lax.stop_gradient(scores_BxLxE)), config.top_k)[1]
        counts_E = jnp.bincount(chosen_BxLxN.reshape(-1), length=config.n_experts)
        mean_E = _average_scores(scores_BxLxE)
        axes, parts = _find_parts()
        load_E = counts_E * (config.top_k / (chosen_BxLxN.size * parts))
        routing = Routing(load_E, lax.stop_gradient(mean_E) / parts)
        if config.balance:
            share_E = counts_E * (config.n_experts / chosen_BxLxN.size)
            if axes:
                share_E = lax.pmean(share_E, axes)
            # The share that these tokens have in Σ_e f_e P_e over all devices.
            loss = config.balance * ((share_E * mean_E).sum() / parts)
            scores_BxLxE = attach_loss(scores_BxLxE, loss)
        weights_BxLxN = jnp.take_along_axis(scores_BxLxE, chosen_BxLxN, axis=-1)
        if config.normalize:
            weights_BxLxN /= weights_BxLxN.sum(axis=-1, keepdims=True) + 1e-20
        return chosen_BxLxN, weights_BxLxN * config.scale, routing

    def _compare(self, scores_BxLxE: jax.Array) -> jax.Array:
        """Returns the numbers whose largest ones are chosen."""
        config = self.config
        if self.correction is not None:
            scores_BxLxE += self.correction[...]
        if config.top_groups == config.groups:
            return scores_BxLxE
        grouped_BxLxGxM = scores_BxLxE.reshape(*scores_BxLxE.shape[:-1], config.groups, -1)
        best = min(GROUP_BEST, grouped_BxLxGxM.shape[-1])
        found_BxLxG = lax.top_k(grouped_BxLxGxM, best)[0].sum(axis=-1)
        chosen = lax.top_k(found_BxLxG, config.top_groups)[1]
        is_open_BxLxG = jax.nn.one_hot(chosen, config.groups).sum(axis=-2) > 0
        return jnp.where(is_open_BxLxG[..., None], grouped_BxLxGxM, -jnp.inf).reshape(scores_BxLxE.shape)

    def _apply(self, x_BxLxD, chosen, weights, into_ExDxG, out_ExFxD):
        """Applies the experts to the tokens of a device."""
        x_TxD, chosen_TxN, weights_TxN = (each.reshape(-1, each.shape[-1]) for each in (x_BxLxD, chosen, weights))
        y_TxD = apply_experts(x_TxD, chosen_TxN, weights_TxN, into_ExDxG, out_ExFxD, self.shape.activate)
        return y_TxD.reshape(x_BxLxD.shape)


def _average_scores(scores_BxLxE: jax.Array) -> jax.Array:
    """Returns the mean over the tokens of the scores of each expert, which are divided by their sum, [E] float32."""
    shares_BxLxE = scores_BxLxE / scores_BxLxE.sum(axis=-1, keepdims=True)
    return shares_BxLxE.reshape(-1, shares_BxLxE.shape[-1]).mean(axis=0)


def _find_parts() -> tuple[tuple[str, ...], int]:
    """Returns the axes of the mesh whose devices are told apart, and how many parts of the tokens they hold."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(name for name in (*DATA_AXES, SEQUENCE_AXIS) if name in mesh.manual_axes)
    return axes, math.prod(mesh.shape[name] for name in axes)


@custom_vjp()
def attach_loss(x: jax.Array, loss: jax.Array) -> jax.Array:
    """Returns x. Gradients are as if `loss` were added to the loss that is minimized."""
    return x


attach_loss.defvjp(lambda x, loss: (x, None), lambda _, d: (d, jnp.ones(())))
