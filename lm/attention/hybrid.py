"""Hybrid attention: exact softmax over the N most recent keys, a polynomial of exp for the older ones.

Graef et al. (2024), "Approximate attention". With s the scaled dot product of a query and a key,

    o = (t + u) / (D₁ + D₂)     t, D₁: Σ exp(s) v and Σ exp(s) over the N most recent keys        (eq. 2.1, 2.2)
                                u, D₂: Σ P(s) v and Σ P(s) over all older keys, through sums of monomials of the keys
                                       times values, which all queries of a key head share        (eq. 5.3, §5.4)

all scaled by exp(-m), m the largest score among the recent keys or 0 (eq. 2.3, 2.4). P is a polynomial of exp, or the
product of one polynomial for each of p parts of the dot product (§6). Nothing is learned: a model that was trained
with softmax runs under it unchanged. Where |s| leaves the interval, P is not exp, and with odd degrees not even
positive; that is the paper's approximation, not something this file corrects.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from lm.attention.base import HeadDims, exact_flops_per_token
from lm.attention.linear import LinearModule, linear_flops_per_token
from lm.attention.maps.monomials import APPROXIMATIONS, Monomials, n_terms
from lm.attention.windowed import WindowedAttention
from lm.config.configurable import configurable, field
from lm.errors import ConfigError
from lm.ops.linear_attention import ExpKernel, LinearCall, Options, decode

MOST_TERMS = 2**23
"""Sums of a head, twice the paper's most: of each there are as many numbers as of a value. Listing many more would take
all time and memory before anything is computed."""


@configurable('hybrid')
class Hybrid(WindowedAttention):
    """Exact softmax nearby, a polynomial of it far away; `softmax` checkpoints run under it."""

    window: int = field(default=200, minimum=1, help='most recent keys, the own included, that are weighed exactly (N)')
    degree: int = field(default=2, minimum=1, maximum=8, help='of the polynomial (n)')
    parts: int = field(default=1, minimum=1, help='partial products into which the dot product is split (p)')
    approximation: str = field(
        default='taylor', choices=tuple(APPROXIMATIONS), help='how the polynomial approximates exp'
    )
    radius: float = field(
        default=1.0, above=0, help='scores in [-radius, radius] are approximated (chebyshev, minimax)'
    )
    scale: float | None = field(default=None, above=0, help='factor of the scores; None is 1 / sqrt(head size)')
    implementation: str | None = field(
        default=None,
        choices=('reference', 'xla'),
        resume=True,
        help="'reference' weighs each pair by itself, quadratic in the length: for high degrees, which have too many "
        'sums; results agree',
    )

    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'HybridAttention':
        if dims.head_dim % self.parts:
            raise ConfigError(f'hybrid.parts = {self.parts}: must divide model.head_dim = {dims.head_dim}')
        terms = n_terms(dims.head_dim, self.degree, self.parts)
        if terms > MOST_TERMS:
            raise ConfigError(
                f'hybrid.degree = {self.degree}, hybrid.parts = {self.parts}: make {terms:.2g} sums of a head of '
                f'{dims.head_dim}, more than {MOST_TERMS:,}; lower one of them'
            )
        return HybridAttention(self, dims)

    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        exact = exact_flops_per_token(dims, length, self.window)
        if self.why_exact(length):
            return exact
        terms = n_terms(dims.head_dim, self.degree, self.parts)
        older = linear_flops_per_token(dims, length - self.window, terms, dims.head_dim if self.direct else terms)
        return exact + older * (length - self.window) / length

    def portable(self, dims: HeadDims) -> dict[str, object]:
        return super().portable(dims) | {'coefficients': self.coefficients.tolist()}

    @property
    def direct(self) -> bool:
        """The powers of the operation suffice, which weigh pairs inside a block without forming the terms."""
        return self.parts == 1 and (self.degree <= 2 or self.implementation == 'reference')

    @property
    def coefficients(self) -> np.ndarray:
        """The coefficients of each part's polynomial; every part covers its share of the interval."""
        return APPROXIMATIONS[self.approximation](self.degree, self.radius / self.parts)


class HybridAttention(LinearModule):
    """Has no parameters. Its state is a ring of N keys and values, and the sums over those that have left it."""

    def __init__(self, config: Hybrid, dims: HeadDims):
        self.config = config
        self.dims = dims
        self.scale = config.scale or dims.head_dim**-0.5
        self.implementation = config.implementation

    def init_state(self, batch: int, max_length: int, dtype: DTypeLike, documents: bool = False) -> decode.DecodeState:
        if self.config.implementation == 'reference':
            raise ConfigError(
                "hybrid.implementation = 'reference': computes whole windows alone, and keeps no sums; set it to None"
            )
        return super().init_state(batch, max_length, dtype, documents)

    def make_call(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, v_BxLxKxD: jax.Array) -> LinearCall:
        config = self.config
        options = Options(local=ExpKernel(self.scale), window=config.window, denominator_bias=0.0)
        weights: tuple[jax.Array, ...] = ()
        if config.direct:
            options = dataclasses.replace(options, powers=tuple(config.coefficients.tolist()))
        else:
            monomials = Monomials(config.degree, config.parts)
            options = dataclasses.replace(options, feature_map=monomials)
            weights = (jnp.asarray(monomials.weights(config.coefficients, self.dims.head_dim)),)
        return LinearCall(
            q_BxLxHxD * self.scale,
            k_BxLxKxD,
            v_BxLxKxD,
            q_parameters=weights,
            k_parameters=(),
            q_local_BxLxHxC=q_BxLxHxD,
            k_local_BxLxKxC=k_BxLxKxD,
            options=options,
        )
