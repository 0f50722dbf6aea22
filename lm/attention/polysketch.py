"""Polysketch: polynomial attention in linear time, by sketching far weights and computing near ones exactly
(PolySketchFormer)."""

import dataclasses
import math
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx

from lm.attention.base import HeadDims, NormedModule, arrays_of, score_scale, score_start
from lm.attention.linear import LinearAttention, LinearModule, linear_flops_per_token
from lm.attention.maps.sketch_moments import mean_weight_ratio
from lm.attention.maps.sketches import SKETCHES, MeanSketch, Sketch, Sketched
from lm.attention.recurrent.gate import Gated
from lm.config.configurable import configurable, field
from lm.errors import ConfigError
from lm.ops.exact_attention import polynomial_attention
from lm.ops.linear_attention import IMPLEMENTATIONS, SQUARE, LinearCall, Options, PolynomialKernel
from lm.ops.platform import sequence_shards
from lm.ops.rotary import HeadNorms
from lm.parameters import declare, layer_norm


def power_of_two(value: int) -> str | None:
    """Checks `degree`."""
    return None if value & (value - 1) == 0 else 'must be a power of two (2, 4, 8, 16)'


def number_or_convention(value: float | str) -> str | None:
    """Checks `far_factor`."""
    if isinstance(value, str):
        return None if value in ('mean', 'published') else "must be a number above 0, 'mean' or 'published'"
    return None if value > 0 else 'must be above 0'


@configurable('polysketch')
class Polysketch(Gated, LinearAttention):
    """Weights ⟨ψ(q'_i), ψ(k'_j)⟩² / (b + Σ), where ' is layer normalization and ⟨ψ(x), ψ(y)⟩ ≈ ⟨x, y⟩^(degree/2);
    with `local`, ⟨q'_i, k'_j⟩^degree where i and j are in the same block. A context of one block is then computed
    exactly. With `gate` all weights fade, far and near. The defaults are the paper's, which does not say where scores
    start (`offset`); its draft has block 256, `sketch = 'srht'` and `per_head = True`.

    The published code of random sketches differs from the paper: it has `far_factor = 'published'`,
    `sketch_norm = 'tied'` and `offset = 0` (google-research/polysketchformer: model.py, polysketch_attention.py)."""

    sketch: str = field(default='learned', choices=tuple(SKETCHES), help='how the polynomial is sketched')
    sketch_size: int = field(default=32, minimum=1, help='numbers a sketch has (r); the features are their r² products')
    sketches: int = field(
        default=1, minimum=1, help='independent sketches (m), whose inner products are averaged; (m r)² features'
    )
    sketch_norm: str | None = field(
        default=None,
        choices=('tied', 'separate'),
        help="gains and biases of the sketch alone: 'tied', one layer norm for queries and keys, 'separate', two; "
        'None: gains and biases of the exact weights. Learned sketches then have the norms of their networks alone',
    )
    far_factor: float | str = field(
        default=1.0,
        check=number_or_convention,
        help="factor of sketched weights: a number; 'mean': unrelated keys weigh at first what exact weights give "
        "them; 'published': r^-2 at degree 4, both random matrices are divided by √r",
    )
    learn_far_factor: bool = field(default=False, help='each query head learns its factor, from `far_factor` on')
    degree: int = field(
        default=4, minimum=2, maximum=16, check=power_of_two, help='power of the scores; at 2 nothing is lost'
    )
    local: bool = field(default=True, help='exact weights inside a block')
    block: int = field(
        default=1024, minimum=1, help='tokens per block of exact weights; without `local` it has no effect'
    )
    network_width: int = field(
        default=8, minimum=1, help="hidden units of a learned sketch's networks, in multiples of sketch_size"
    )
    per_head: bool = field(default=False, help='each key head has its own sketch; False: one for the layer')
    denominator_bias: float = field(
        default=1.0, minimum=0, formerly='bias', help='b: keeps the denominator from zero; 0, as the first draft has it'
    )
    offset: float = field(default=2.0, minimum=0, help='first mean of scores, in their standard deviations')
    implementation: str | None = field(
        default=None,
        choices=tuple(IMPLEMENTATIONS),
        resume=True,
        help="how it is computed; None: the platform's best; results agree",
    )

    def __post_init__(self):
        if isinstance(self.far_factor, str) and self.sketch != 'gaussian':
            raise ConfigError(
                f"polysketch.far_factor = {self.far_factor!r}: is known for polysketch.sketch = 'gaussian' alone; "
                'give a number'
            )

    def factor(self, dims: HeadDims) -> float:
        """Returns the first factor of sketched weights."""
        power = self.degree // 2
        if self.far_factor == 'mean':
            ratio = mean_weight_ratio(dims.head_dim, self.sketch_size, power, self.sketches, self.offset)
            return 1 / ratio
        if self.far_factor == 'published':  # both matrices of each of power - 1 nodes, and ψ occurs four times
            return float(self.sketch_size) ** (-2 * (power - 1))
        assert not isinstance(self.far_factor, str)
        return self.far_factor

    def portable(self, dims: HeadDims) -> dict[str, object]:
        return super().portable(dims) | {'far_factor': self.factor(dims)}

    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'PolysketchAttention':
        return PolysketchAttention(self, dims, rngs)

    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        """Counts the r (r + 1) / 2 products of a sketch that differ. Kernels form them in tiles of 8 × 8: 640 where 528
        differ at r = 32, 2,304 for 2,080 at r = 64."""
        size = self.sketches * self.sketch_size if self.degree > 2 else dims.head_dim
        compared, block = (dims.head_dim, self.block) if self.local else (size, None)
        engine = linear_flops_per_token(dims, length, size * (size + 1) // 2, compared, block=block)
        if self.why_exact(length):
            return engine
        kind = SKETCHES[self.sketch]
        sketch = self.sketches * kind.flops(dims.head_dim, self.sketch_size, self.degree // 2, self.network_width)
        return engine + (dims.n_heads + dims.n_kv_heads) * sketch

    def why_exact(self, length: int) -> str | None:
        if not self.local or length > self.block:
            return None
        return (
            f'polysketch.block = {self.block:,}: covers the context, so all weights are exact and no sketch takes part'
        )

    def why_part(self, tokens: int) -> str | None:
        if not self.local or tokens % self.block == 0:
            return None
        return f'no multiple of polysketch.block = {self.block:,}'

    def why_causal(self) -> str | None:
        if self.local:
            return 'polysketch.local = True: the exact blocks have the causal mask; set it to False'
        return super().why_causal()

    @classmethod
    def kernel_forms(cls) -> dict[str, Self]:
        sizes = ((32, 256), (32, 512), (32, 1024), (64, 256), (64, 1024))
        forms = {f'polysketch r={r} block={block}': cls(sketch_size=r, block=block) for r, block in sizes}
        forms |= {'polysketch r=32 without local': cls(sketch_size=32, local=False)}
        return forms | {f'polysketch r=32 block={block} gate': cls(block=block, gate=True) for block in (256, 1024)}


class PolysketchAttention(NormedModule, LinearModule):
    """The layer normalizations of polynomial attention, and the sketch, which queries and keys share.

    With a norm of the sketch's own (`sketch_norm`), `normalize` leaves gains and biases out: `near_vectors` applies the
    ones of the exact weights, and `sketched` the ones of the sketch.
    """

    def __init__(self, config: Polysketch, dims: HeadDims, rngs: nnx.Rngs):
        self.config = config
        self.dims = dims
        self.implementation = config.implementation
        self.make_norms(dims.head_dim, rngs, **score_start(config.offset, dims.head_dim))
        self.gate = config.build_gate(dims)
        self.log_factor = -config.degree * math.log(score_scale(config.degree, dims.head_dim))
        n = dims.n_kv_heads if config.per_head else 1
        kind = SKETCHES[config.sketch]

        def draw() -> Sketch:
            return kind(n, dims.head_dim, config.sketch_size, config.degree // 2, config.network_width, rngs)

        self.sketch = draw() if config.sketches == 1 else MeanSketch([draw() for _ in range(config.sketches)])
        self.sketch_norms = _own_norms(config, dims, rngs)
        self.log_far_factor = _log_far_factor(config, dims) if config.learn_far_factor else None

    @property
    def norms(self) -> HeadNorms | None:
        norms = super().norms
        if norms is None or self.config.sketch_norm is None:
            return norms
        ones, zeros = jnp.ones_like(norms.q_scale_C), jnp.zeros_like(norms.q_bias_C)
        return HeadNorms(ones, zeros, ones, zeros, norms.dtype)

    def near_vectors(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the vectors that the exact kernel compares, from normalized queries and keys."""
        if self.config.sketch_norm is None:
            return q_BxLxHxD, k_BxLxKxD
        return _scaled(self.q_norm, q_BxLxHxD), _scaled(self.k_norm or self.q_norm, k_BxLxKxD)

    @jax.named_scope('sketches')
    def sketched(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array) -> Sketched:
        """Computes ψ of normalized queries and keys, [B, L, H, m r] and [B, L, K, m r]; also returns `near_vectors`.

        The features of queries have the root of the factor of far weights, so that no kernel knows of the factor.
        """
        n = self.dims.n_kv_heads if self.config.per_head else 1
        q, k = q_BxLxHxD, k_BxLxKxD
        if self.sketch_norms is not None:
            q, k = _scaled(self.sketch_norms[0], q), _scaled(self.sketch_norms[-1], k)
        found = self.sketch.of_each(*(x.reshape(*x.shape[:2], n, -1, x.shape[-1]) for x in (q, k)))
        found = jax.tree.map(
            lambda x_BxLxNxGxM: x_BxLxNxGxM.reshape(*x_BxLxNxGxM.shape[:2], -1, x_BxLxNxGxM.shape[-1]), found
        )
        (q_BxLxHxR, k_BxLxKxR), vectors = found
        if self.config.sketch_norm is not None:
            vectors = self.near_vectors(q_BxLxHxD, k_BxLxKxD)
        if self.log_far_factor is not None:
            q_BxLxHxR = (q_BxLxHxR * jnp.exp(self.log_far_factor[...] / 2)[:, None]).astype(q_BxLxHxR.dtype)
        elif (factor := self.config.factor(self.dims)) != 1.0:
            q_BxLxHxR = q_BxLxHxR * math.sqrt(factor)
        return Sketched((q_BxLxHxR, k_BxLxKxR), tuple(vectors))

    def make_call(
        self,
        q_BxLxHxD: jax.Array,
        k_BxLxKxD: jax.Array,
        v_BxLxKxD: jax.Array,
        gate_BxLxK: jax.Array | None = None,
    ) -> LinearCall:
        # By default the sketch sees what the exact kernel sees, so that both weigh a pair alike: the paper considers q
        # and k only after layer normalization (§2.1). (The published code feeds its networks the vectors before it.)
        config = self.config
        (q_BxLxHxR, k_BxLxKxR), (q_BxLxHxD, k_BxLxKxD) = self.sketched(q_BxLxHxD, k_BxLxKxD)
        scale = score_scale(config.degree, self.dims.head_dim)
        if scale != 1.0:  # sketches multiply to scores' power degree / 2
            q_BxLxHxR, k_BxLxKxR = (x * scale ** (config.degree // 4) for x in (q_BxLxHxR, k_BxLxKxR))
        log_decay_BxLxK = None if self.gate is None else self.gate.log_decay(k_BxLxKxD, gate_BxLxK)
        options = Options(powers=SQUARE, denominator_bias=config.denominator_bias * scale**config.degree)
        call = LinearCall(q_BxLxHxR, k_BxLxKxR, v_BxLxKxD, log_decay_BxLxK=log_decay_BxLxK, options=options)
        if not config.local:
            return call
        options = dataclasses.replace(options, local=PolynomialKernel(config.degree, scale), block=config.block)
        return dataclasses.replace(call, q_local_BxLxHxC=q_BxLxHxD, k_local_BxLxKxC=k_BxLxKxD, options=options)

    def mix(
        self,
        q_BxLxHxD: jax.Array,
        k_BxLxKxD: jax.Array,
        v_BxLxKxD: jax.Array,
        gate_BxLxK: jax.Array | None = None,
        *,
        starts_BxL: jax.Array | None = None,
    ) -> jax.Array:
        config = self.config
        length = q_BxLxHxD.shape[1] * sequence_shards()
        if config.local and length <= config.block:  # one block is exact: no sketch takes part
            scale = score_scale(config.degree, self.dims.head_dim)
            # No kernel of one block knows decay.
            able = self.gate is None or config.implementation in ('xla', 'reference')
            return polynomial_attention(
                *self.near_vectors(q_BxLxHxD, k_BxLxKxD),
                v_BxLxKxD,
                degree=config.degree,
                scale=scale,
                denominator_bias=config.denominator_bias * scale**config.degree,
                starts_BxL=starts_BxL,
                log_decay_BxMxK=self.gate and self.gate.log_decay(k_BxLxKxD, gate_BxLxK),
                implementation=config.implementation if able else None,
            )
        return super().mix(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, gate_BxLxK, starts_BxL=starts_BxL)


def _scaled(norm: nnx.LayerNorm, x_BxLxNxD: jax.Array) -> jax.Array:
    """Applies gain and bias of a layer normalization to vectors of mean 0 and variance 1."""
    gain_D, bias_D = arrays_of(norm)
    return (x_BxLxNxD.astype(jnp.float32) * gain_D + bias_D).astype(x_BxLxNxD.dtype)


def _own_norms(config: Polysketch, dims: HeadDims, rngs: nnx.Rngs) -> nnx.List | None:
    """Returns layer normalizations of the sketch alone, one or two; None where it has none, or maps that normalize."""
    if config.sketch_norm is None or SKETCHES[config.sketch].normalizes:
        return None
    start = score_start(config.offset, dims.head_dim)
    gain, bias = (nnx.initializers.constant(start[name]) for name in ('gain', 'bias'))
    n = 1 if config.sketch_norm == 'tied' else 2
    return nnx.List(layer_norm(dims.head_dim, 'head', rngs, scale_init=gain, bias_init=bias) for _ in range(n))


def _log_far_factor(config: Polysketch, dims: HeadDims) -> nnx.Param:
    start_H = jnp.full((dims.n_heads,), math.log(config.factor(dims)), jnp.float32)
    return nnx.Param(start_H, **declare('bias', 'heads'))
