"""Performer: attention through random features (Choromanski et al. 2020 and 2021), causal by the block engine."""

import math
from typing import Self

import jax
from flax import nnx
from jax.typing import DTypeLike

from lm.attention.base import HeadDims
from lm.attention.linear import LinearAttention, LinearModule, linear_flops_per_token
from lm.attention.maps.projections import PROJECTIONS
from lm.attention.maps.random_features import FEATURES, SOFTMAX_FEATURES, Projection, RandomFeatures
from lm.config.configurable import configurable, field
from lm.errors import ConfigError
from lm.ops.linear_attention import LinearCall, Options
from lm.ops.linear_attention.decode import DecodeState
from lm.parameters import Buffer


@configurable('performer')
class Performer(LinearAttention):
    """Weights ⟨φ(q_i), φ(k_j)⟩ / Σ_j' ⟨φ(q_i), φ(k_j')⟩; the defaults are PolySketchFormer's (§4): FAVOR+, 2048
    features, block 1024, one φ for the heads of a layer. The protein models of 2020 are `features = 'relu'`, 256."""

    features: str = field(default='positive', choices=tuple(FEATURES), help='the random feature map')
    n_features: int = field(default=2048, minimum=2, even=True, help='features of each query and key')
    projection: str = field(
        default='orthogonal', choices=tuple(PROJECTIONS), help='how the rows of the projection are drawn'
    )
    redraw_every: int | None = field(
        default=None, minimum=1, help='training steps after which it is drawn anew; None: never'
    )
    renormalize: bool = field(default=True, help='divide by the sum of the weights')
    causal: bool = field(
        default=True, help='False: every token sees all others, as with model.causal = False in any mechanism'
    )
    scale: float | None = field(default=None, above=0, help='factor of the scores; None is 1 / sqrt(head size)')
    stabilizer: float = field(
        default=1e-6, minimum=0, help='keeps denominators of softmax estimators and signed ones from 0'
    )
    kernel_epsilon: float = field(default=1e-3, minimum=0, help='added to the features of generalized kernels')
    block: int | None = field(
        default=1024, minimum=1, resume=True, help='tokens per block (changes speed, not results); None: the fastest'
    )

    def __post_init__(self):
        kind = FEATURES[self.features]
        guard = 'stabilizer' if kind.signed or self.features in SOFTMAX_FEATURES else 'kernel_epsilon'
        if self.renormalize and not getattr(self, guard):
            raise ConfigError(
                f'performer.{guard} = 0.0: must be above 0, for all weights of a query may vanish; '
                'or set performer.renormalize = False'
            )

    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'PerformerAttention':
        return PerformerAttention(self, dims, rngs)

    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        rows = self.n_features // FEATURES[self.features].per_row
        project = 2.0 * rows * dims.head_dim * (dims.n_heads + dims.n_kv_heads)
        return project + linear_flops_per_token(
            dims, length, self.n_features, self.n_features, causal=self.causal, block=self.block
        )

    def why_causal(self) -> None:
        return None

    @classmethod
    def kernel_forms(cls) -> dict[str, Self]:
        return {'performer 2048': cls(n_features=2048, block=None)}

    def feature_map(self, head_dim: int) -> RandomFeatures:
        """Returns φ as a function of (parameters, queries or keys)."""
        return FEATURES[self.features](
            scale=self.scale or head_dim**-0.5,
            epsilon=self.stabilizer,
            kernel_epsilon=self.kernel_epsilon,
            # Generalized kernels have no exponential to rescale.
            rescale=self.renormalize and self.features in SOFTMAX_FEATURES,
        )


class PerformerAttention(LinearModule):
    """Has no parameters; the projection is a buffer."""

    def __init__(self, config: Performer, dims: HeadDims, rngs: nnx.Rngs):
        self.config = config
        self.dims = dims
        self.feature_map = config.feature_map(dims.head_dim)
        self.signed = config.renormalize and self.feature_map.signed
        self.epsilon = config.stabilizer
        self.estimates_softmax = config.features in SOFTMAX_FEATURES
        projection_RxD, phases_R = self._draw(rngs.projections())
        self.projection = Buffer(projection_RxD)
        self.phases = None if phases_R is None else Buffer(phases_R)

    def _draw(self, key):
        projection_key, phases_key = jax.random.split(key)
        rows = self.config.n_features // self.feature_map.per_row
        projection_RxD = PROJECTIONS[self.config.projection](projection_key, rows, self.dims.head_dim)
        if not self.feature_map.has_phases:
            return projection_RxD, None
        return projection_RxD, jax.random.uniform(phases_key, (rows,), maxval=2 * math.pi)

    def redraw(self, key: jax.Array) -> None:
        """Draws the projection anew (§4.2); does nothing unless `redraw_every` is set."""
        if self.config.redraw_every is None:
            return
        projection_RxD, phases_R = self._draw(key)
        self.projection[...] = projection_RxD
        if self.phases is not None:
            self.phases[...] = phases_R

    def init_state(self, batch: int, max_length: int, dtype: DTypeLike, documents: bool = False) -> DecodeState:
        if not self.config.causal:
            raise ConfigError('performer.causal = False: cannot generate token by token; set it to True')
        return super().init_state(batch, max_length, dtype, documents)

    def make_call(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, v_BxLxKxD: jax.Array) -> LinearCall:
        projection = Projection(self.projection[...], None if self.phases is None else self.phases[...])
        options = Options(
            feature_map=self.feature_map,
            block=self.config.block,
            denominator_bias=0.0,
            normalize=self.config.renormalize and not self.signed,
            causal=self.config.causal,
        )
        return LinearCall(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, projection, projection, options=options)
