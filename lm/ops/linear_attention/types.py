"""The call of linear attention and its parts: local kernels, the state, the options."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops.channel_decay import add_logs
from lm.ops.linear_attention.feature_maps import FeatureMap, RescaledMap

PLAIN = (0.0, 1.0)
"""Powers of plain features."""

SQUARE = (0.0, 0.0, 1.0)
"""Powers of x ⊗ x."""


LOCAL_BLOCK = 1024
"""Tokens per block of exact weights, as in the paper."""

A = TypeVar('A')
Tree = TypeVar('Tree')


@dataclasses.dataclass(frozen=True)
class PolynomialKernel:
    """Exact weights (scale ⟨q, k⟩)^degree (PolySketchFormer §3.2)."""

    degree: int
    scale: float = 1.0

    def weigh(self, s: jax.Array) -> jax.Array:
        """Computes the weights of inner products s."""
        return lax.integer_pow(s * self.scale if self.scale != 1.0 else s, self.degree)


@dataclasses.dataclass(frozen=True)
class ExpKernel:
    """Exact weights exp(scale ⟨q, k⟩).

    A query's numerator and denominator, approximate part included, are scaled by exp(-m). m is the largest exponent of
    the exact part, or 0 where the query has an approximate part (approximate attention, eq. 2.3-2.4); with a
    `RescaledMap` the log of its factor in place of 0.

    relative: the exact weights are exp(scale ⟨q, k⟩ - c) with c the largest exponent of the exact part, through which
    gradients flow; the approximate weights stay as they are (LoLCATs, Zhang et al. 2024, eq. 7).
    """

    scale: float = 1.0
    relative: bool = False


LocalKernel = PolynomialKernel | ExpKernel


class State(NamedTuple):
    """The sums over keys that later queries need, float32. Their size does not depend on the number of keys.

    `kv_BxKxRxD` holds Σ_j φ(k_j) v_jᵀ. ⟨φ(q), φ(k)⟩ is the approximate weight, and φ the implementation's (packed)
    expansion. `totals` holds Σ_j y_j^{⊗n} for each power n with a coefficient other than 0, in order: [B, K] for n = 0,
    [B, K, F] for n = 1, [B, K, F, F] for n = 2.
    """

    kv_BxKxRxD: jax.Array
    totals: tuple[jax.Array, ...]


def decay_state(sums: Tree, log_factor_BxK: jax.Array) -> Tree:
    """Multiplies a `State`, or other sums [B, K, …], by one factor per key head.

    States compose. Let S₀ be the sums over some tokens, and S the sums over the tokens after them. g is the sum of the
    later tokens' log factors. The sums over all tokens are decay_state(S₀, g) + S.
    """

    def multiply(x):
        return x * jnp.exp(log_factor_BxK).reshape(*log_factor_BxK.shape, *[1] * (x.ndim - log_factor_BxK.ndim))

    return jax.tree.map(multiply, sums)


@dataclasses.dataclass(frozen=True)
class Options:
    """The static arguments of a call. `lm.ops.linear_attention.linear_attention` explains them."""

    powers: tuple[float, ...] = PLAIN
    feature_map: FeatureMap | None = None
    local: LocalKernel | None = None
    window: int | None = None
    block: int | None = None
    denominator_bias: float = 1.0
    normalize: bool = True
    causal: bool = True

    @property
    def exact_block(self) -> int | None:
        """Tokens per block of exact weights; None where there are no such blocks."""
        return (self.block or LOCAL_BLOCK) if self.local is not None and self.window is None else None

    def compute_features(self, parameters: object, x: jax.Array, queries: bool) -> jax.Array:
        """Maps [..., T, heads, E] to features [..., T, heads, F]."""
        return x if self.feature_map is None else self.feature_map(parameters, x, queries)

    @property
    def lacks_factors(self) -> bool:
        """True where features of queries lack factors (`RescaledMap`)."""
        return isinstance(self.feature_map, RescaledMap) and self.feature_map.rescale

    def find_log_factor(self, parameters: object, q: jax.Array) -> jax.Array | None:
        """Computes the logs of the factors that weights of queries lack, [B, T, heads]; None where they lack none, or
        where all weights lack them."""
        if not isinstance(self.local, ExpKernel) or not self.lacks_factors:
            return None
        return cast(RescaledMap, self.feature_map).log_factor(parameters, q)

    def weigh(self, s: jax.Array) -> jax.Array:
        """Computes the approximate weights of pairs whose features have inner products s."""
        terms = (c * lax.integer_pow(s, n) if n else c * jnp.ones_like(s) for n, c in enumerate(self.powers) if c)
        return cast(jax.Array, sum(terms))  # some power has a coefficient, so the sum is no plain 0


class Sides(NamedTuple, Generic[A]):
    """One thing for the queries, and the same for the keys: parameters of their feature map, matrices, features."""

    queries: A
    keys: A


class Keys(NamedTuple):
    """The arrays of a call that have one entry per key."""

    k_BxSxKxE: jax.Array
    v_BxSxKxD: jax.Array
    k_local_BxSxKxC: jax.Array | None
    log_decay_BxSxK: jax.Array | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearCall:
    """One call of the operation: the arguments of `linear_attention`, as all implementations take them.

    The arrays are the pytree's leaves; `options` and `with_state` are static. `with_state` also requests the sums
    over all keys.
    """

    q_BxLxHxE: jax.Array
    k_BxLxKxE: jax.Array
    v_BxLxKxD: jax.Array
    q_parameters: Any = None
    k_parameters: Any = None
    q_local_BxLxHxC: jax.Array | None = None
    k_local_BxLxKxC: jax.Array | None = None
    initial_state: State | None = None
    log_decay_BxLxK: jax.Array | None = None
    channel_log_decay_BxLxKxE: jax.Array | None = None
    options: Options = dataclasses.field(default=Options(), metadata={'static': True})
    with_state: bool = dataclasses.field(default=False, metadata={'static': True})

    @classmethod
    def from_arguments(cls, arguments: Mapping[str, Any]) -> 'LinearCall':
        """Makes the call of `linear_attention(**arguments)`; `implementation` does not belong to it."""
        static = {field.name for field in dataclasses.fields(Options)}
        arrays = {name: value for name, value in arguments.items() if name not in static | {'implementation'}}
        with_state = arrays.pop('return_state', False)
        options = Options(**{name: arguments[name] for name in static & arguments.keys()})
        return cls(**arrays, options=options, with_state=with_state)

    @property
    def parameters(self) -> Sides[Any]:
        return Sides(self.q_parameters, self.k_parameters)

    @property
    def local(self) -> Sides[jax.Array] | None:
        """The vectors that the exact kernel compares; None where the call has no exact kernel."""
        if self.options.local is None or self.q_local_BxLxHxC is None or self.k_local_BxLxKxC is None:
            return None
        return Sides(self.q_local_BxLxHxC, self.k_local_BxLxKxC)

    @property
    def all_log_decay_BxLxKxE(self) -> jax.Array:
        """The logs of the factors of all channels, float32, of a call whose channels have factors of their own."""
        return add_logs(cast(jax.Array, self.channel_log_decay_BxLxKxE), self.log_decay_BxLxK)

    @property
    def keys(self) -> Keys:
        k_local = None if self.local is None else self.local.keys
        return Keys(self.k_BxLxKxE, self.v_BxLxKxD, k_local, self.log_decay_BxLxK)

    def replace_keys(self, keys: Keys) -> 'LinearCall':
        """Returns the call with other keys, which may be more or fewer than the queries."""
        k, v, k_local, log_decay = keys
        return dataclasses.replace(self, k_BxLxKxE=k, v_BxLxKxD=v, k_local_BxLxKxC=k_local, log_decay_BxLxK=log_decay)


class LinearResult(NamedTuple):
    """Outputs in the dtype of v, and the sums over all keys so far; None unless the call asks for them."""

    o_BxLxHxD: jax.Array
    state: State | None
