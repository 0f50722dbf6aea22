"""LLoPS: learnable low-rank polynomial sketches, products of p learned projections (Definition 3.3, Theorem 3.2).

    φ(x) = Σ_r Π_j x Θ_{j,r}        j = 1…p factors, r = 1…t ranks (t = 1 in the paper), Θ_{j,r} of shape [D, M]

with separate Θ for queries and keys, approximates (q·k)^p. `configs/papers/llops/table_3_sketches` fits Θ to samples
of either.
"""

import dataclasses
import functools
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lm.attention.base import HeadDims, NormedModule, score_start
from lm.attention.linear import LinearAttention, LinearModule, linear_flops_per_token
from lm.attention.maps.products import ProductFeatures
from lm.config.configurable import configurable, field
from lm.errors import ConfigError
from lm.ops.linear_attention import LinearCall, Options
from lm.ops.rotary import HeadNorms
from lm.parameters import declare

MOST_WITHOUT_NORM = 4
"""Degree up to which vectors that training makes a thousand times longer leave all sums finite."""


@configurable('llops')
class Llops(LinearAttention):
    """Weights ⟨φ_Q(q_i), φ_K(k_j)⟩ / (b + Σ_j' ⟨φ_Q(q_i), φ_K(k_j')⟩)."""

    degree: int = field(default=4, minimum=1, maximum=16, help='power p of the kernel that the sketch stands for')
    n_features: int = field(default=256, minimum=1, help='features of each query and key')
    rank: int = field(default=1, minimum=1, help='terms t of the tensor rank decomposition')
    nonnegative: bool = field(
        default=True, help='square products of p/2 projections, so that no weight is negative (§3.2)'
    )
    affine: bool = field(default=False, help='projections of [1, x], which reach the powers below p too')
    init: str = field(
        default='random_sketch',
        choices=('random_sketch', 'flatten', 'based'),
        help='initial projections: random, one projection for all factors, or the map of BASED',
    )
    layer_norm: bool = field(default=True, help='layer normalization of q and k, as in polynomial attention')
    offset: float = field(default=0.0, minimum=0, help='first mean of scores q·k, in their standard deviations')
    renormalize: bool = field(default=True, help='divide by the sum of the weights')
    denominator_bias: float = field(default=1.0, minimum=0, formerly='bias', help='b: added to the sum of the weights')
    stabilizer: float = field(
        default=1e-6, minimum=0, help='where weights can be negative, keeps their sum this far from 0'
    )

    def __post_init__(self):
        if self.nonnegative and self.degree % 2:
            raise ConfigError(f'llops.degree = {self.degree}: must be even, or set llops.nonnegative = False')
        if self.init == 'based' and (self.degree < 2 or self.nonnegative):
            raise ConfigError(
                "llops.init = 'based': BASED's map has llops.degree = 2 and llops.nonnegative = False; set both"
            )
        if self.init == 'based' and self.degree > 2 and not self.affine:
            raise ConfigError(
                f"llops.init = 'based': BASED's map has degree 2, and llops.degree = {self.degree}; further factors "
                'start as the constant 1 of llops.affine = True: set it'
            )
        if self.init == 'based' and not based_size(self.n_features, self.affine):
            raise ConfigError(f"llops.n_features = {self.n_features}: too few for llops.init = 'based'")
        if self.nonnegative and self.renormalize and self.denominator_bias == 0:
            raise ConfigError('llops.denominator_bias = 0.0: must be above 0, for all weights of a query may vanish')

        if self.offset and not self.layer_norm:
            raise ConfigError(f'llops.offset = {self.offset}: is of biases that llops.layer_norm = False does not have')
        if not self.layer_norm and self.degree > MOST_WITHOUT_NORM:
            raise ConfigError(
                f'llops.layer_norm = False: products of llops.degree = {self.degree} unnormalized vectors leave '
                f'float32; set it to True, or the degree to at most {MOST_WITHOUT_NORM}'
            )

    @property
    def n_factors(self) -> int:
        """The number of learned projections: half of p where their product is squared."""
        return self.degree // 2 if self.nonnegative else self.degree

    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'LlopsAttention':
        return LlopsAttention(self, dims, rngs)

    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        products = 2.0 * self.n_factors * self.rank * self.n_features * (dims.head_dim + self.affine)
        products *= dims.n_heads + dims.n_kv_heads
        return products + linear_flops_per_token(dims, length, self.n_features, self.n_features)

    def why_causal(self) -> None:
        return None

    @classmethod
    def kernel_forms(cls) -> dict[str, Self]:
        return {'llops 256, p=4': cls(degree=4, n_features=256)}

    def sketch(self, dtype: DTypeLike | None = None) -> 'LowRankSketch':
        """Returns φ, with features of `dtype` (None: the type of the vectors)."""
        return LowRankSketch(self.nonnegative, self.affine, self.rank, self.n_features, dtype)

    def kernel(self, s: jax.Array) -> jax.Array:
        """Returns the kernel that sketches approximate: a power of the inner product."""
        return jax.lax.integer_pow(s, self.degree)

    def init_factors(self, key: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
        """Returns (Θ^Q, Θ^K), each [factors, rank, size (+ 1), n_features], for vectors of `size`."""
        size += self.affine
        shape = (self.n_factors, self.rank, size, self.n_features)
        if self.init == 'based':
            q_key, k_key, random_key = jax.random.split(key, 3)
            random = jax.random.normal(random_key, shape) * size**-0.5
            n_projected = based_size(self.n_features, self.affine)
            init = nnx.initializers.lecun_normal()
            w_q, w_k = (init(each, (size - self.affine, n_projected)) for each in (q_key, k_key))
            return based_factors(self, w_q, random, queries=True), based_factors(self, w_k, random, queries=False)
        if self.init == 'flatten':
            factors = jnp.broadcast_to(jax.random.normal(key, (1, *shape[1:])), shape)
        else:
            factors = jax.random.normal(key, shape)
        # With this scale ⟨φ(q), φ(k)⟩ = (q·k)^p on average for random sketches without squares.
        factors = factors * (self.n_features * self.rank) ** (-0.5 / self.degree)
        return factors, factors


@dataclasses.dataclass(frozen=True)
class LowRankSketch(ProductFeatures):
    """φ as a feature map of `lm.ops.linear_attention`; its parameters are Θ, [factors, rank, D (+ 1), M]."""

    nonnegative: bool
    affine: bool
    rank: int
    n_features: int
    dtype: DTypeLike | None = None

    def products(self, factors: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Returns W with the rows of Θ in the order factor, rank, feature."""
        weight, shift = (factors[:, :, :-1], factors[:, :, -1].reshape(-1)) if self.affine else (factors, None)
        return weight.swapaxes(2, 3).reshape(-1, weight.shape[2]), shift

    def of_products(self, wx_RxT: jax.Array, x_DxT: jax.Array, queries: bool) -> jax.Array:
        terms = []
        for term in range(self.rank):
            starts = range(term * self.n_features, wx_RxT.shape[0], self.rank * self.n_features)
            factors = [wx_RxT[at : at + self.n_features] for at in starts]
            terms.append(functools.reduce(jnp.multiply, factors))
        features_MxT = functools.reduce(jnp.add, terms)
        return jnp.square(features_MxT) if self.nonnegative else features_MxT


class LlopsAttention(NormedModule, LinearModule):
    """Θ^Q and Θ^K, shared by the heads of the layer, and the two layer normalizations."""

    normed_dtype = jnp.float32  # powers of the vectors follow

    def __init__(self, config: Llops, dims: HeadDims, rngs: nnx.Rngs):
        self.config = config
        self.dims = dims
        self.signed = config.renormalize and not config.nonnegative
        self.denominator_bias, self.epsilon = config.denominator_bias, config.stabilizer
        q_factors, k_factors = config.init_factors(rngs.params(), dims.head_dim)
        kind = declare('matrix', 'factor', 'rank', 'head', 'features')
        self.q_factors, self.k_factors = nnx.Param(q_factors, **kind), nnx.Param(k_factors, **kind)
        if config.layer_norm:
            self.make_norms(dims.head_dim, rngs, **score_start(config.offset, dims.head_dim, gain=1.0))

    @property
    def norms(self) -> HeadNorms | None:
        return super().norms if self.config.layer_norm else None

    def make_call(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, v_BxLxKxD: jax.Array) -> LinearCall:
        config = self.config
        options = Options(
            feature_map=config.sketch(v_BxLxKxD.dtype),
            denominator_bias=config.denominator_bias,
            normalize=config.renormalize and not self.signed,
        )
        factors = (self.q_factors[...], self.k_factors[...])
        return LinearCall(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, *factors, options=options)


def based_size(n_features: int, affine: bool) -> int:
    """Returns the largest r whose Taylor map fits `n_features`: r (r + 1) / 2 products, with `affine` also 1 and x."""
    r = 0
    while (r + 1) * (r + 2) // 2 + affine * (r + 2) <= n_features:
        r += 1
    return r


def based_factors(config: Llops, w_DxR: jax.Array, random: jax.Array, *, queries: bool) -> jax.Array:
    """Returns Θ with which φ is BASED's Taylor map of y = r^(-1/4) x W (LLoPS §3.3): products y_a y_b with a ≤ b.

    Inner products are s²/2, and with `config.affine` 1 + s + s²/2. At a degree above 2, further factors are the
    constant 1 of [1, x]: the map is the same, and training can raise its degree. Features and ranks that the map leaves
    free start without effect but with a gradient: `random` fills their factors, one of which is zero.

    Args:
        config: of degree 2 without squares, or affine of a higher degree.
        w_DxR: the compression; r is at most `based_size`.
        random: [factors, rank, D (+ 1), n_features].
        queries: True for the factors of queries; a free feature is zero on the queries' side only.
    """
    size, r = w_DxR.shape
    y = jnp.zeros((size + config.affine, r)).at[:size].set(w_DxR * r**-0.25)
    a, b = jnp.triu_indices(r)
    first, second = y[:, a] * jnp.where(a == b, 0.5**0.5, 1.0), y[:, b]
    if config.affine:
        one = jnp.zeros((size + 1, 1)).at[-1].set(1.0)
        first = jnp.concatenate([one, y, first], axis=1)
        second = jnp.concatenate([jnp.broadcast_to(one, (size + 1, 1 + r)), second], axis=1)
    used = first.shape[1]
    factors = random.at[0, 1:, :, :used].set(0.0)
    factors = factors.at[0, 0, :, :used].set(first).at[1, 0, :, :used].set(second)
    if config.n_factors > 2:
        factors = factors.at[2:, 0, :, :used].set(0.0).at[2:, 0, -1, :used].set(1.0)
    return factors.at[0, :, :, used:].set(0.0) if queries else factors
