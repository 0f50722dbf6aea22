"""The base of attention mechanisms: a configuration that a gin file names, and the module that it builds.

    configuration   a frozen dataclass, `@configurable('name') class Name(Attention)`; knows its cost
    module          an `nnx.Module`; one per layer, shared by all heads of the layer

Adding a mechanism means adding one file with both; no other module names it. Command lines, benchmarks and the shared
tests find it in the registry. Parameters declare what they are (`lm.parameters.declare`), for weight decay and
sharding. Mechanisms on the linear engine build on `lm.attention.linear`, feature maps on `lm.attention.maps.products`.
"""

import abc
import dataclasses
import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lm.attention.options import LayerOptions, leave_to_model
from lm.config.configurable import configurable_base
from lm.ops.rotary import HeadNorms, RootNorms, Rotation, rotate
from lm.ops.rotary.xla import normalize
from lm.parameters import layer_norm


@dataclasses.dataclass(frozen=True)
class HeadDims:
    """The shape of a layer's heads: `n_heads` queries share `n_kv_heads` keys and values; and whether later keys are
    hidden from a query (`model.causal`).

    Queries and keys have size `head_dim`, and values `value_dim`; None: values have the size of keys.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    causal: bool = True
    value_dim: int | None = None

    @property
    def value_size(self) -> int:
        """The size of a value, and of what a query reads."""
        return self.head_dim if self.value_dim is None else self.value_dim


@configurable_base
@leave_to_model
class Attention(LayerOptions, abc.ABC):
    """Base of the attention configurations (frozen dataclasses made by `@configurable`).

    Where one of its options is 'model', the layer has the model's value (`ModelConfig.resolve`). The mechanism's own
    module does not read them.
    """

    is_default: ClassVar[bool] = False
    """Models have this mechanism where nothing else is configured. Exactly one mechanism sets it."""
    layer_type: ClassVar[str | None] = None
    """The type of layers with this mechanism in `layer_types` of the config.json of published hybrids. Families of
    checkpoints find the mechanism by it. None: it has none."""
    numbers_heads: ClassVar[bool] = False
    """Copies of heads compute something else, because a head depends on its number among the heads."""
    redraw_every = None
    """Training steps after which the random projections are drawn anew; None: never."""
    causal = True
    """False: tokens see later tokens, whatever `model.causal` is."""

    @abc.abstractmethod
    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'AttentionModule':
        """Returns the module of one layer. Draws parameters from `rngs.params()`, buffers from `rngs.projections()`."""

    def kernels_declare_cost(self, dims: HeadDims) -> bool:
        """Returns whether the compiler knows the FLOPs of its TPU kernels; else `lm check` uses `flops_per_token`."""
        return True

    @abc.abstractmethod
    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        """Returns forward floating-point operations per token of one layer at context `length`.

        Causal quadratic mechanisms count half the square. Rematerialization and the projections of q, k, v and o do not
        count.
        """

    def why_causal(self) -> str | None:
        """Returns why no token can see later tokens (`HeadDims.causal = False`), and the remedy; None: they can."""
        return f'@{self.gin_name}() weighs earlier tokens alone; choose another one, such as @softmax()'

    def why_exact(self, length: int) -> str | None:
        """Returns why all weights of a context of `length` tokens are exact, so that nothing is linear or approximate.

        None: the mechanism has no exact part beside another one, or the context is longer.
        """
        return None

    def why_whole(self, causal: bool) -> str | None:
        """Returns why devices cannot share a window (`mesh.sequence`), and the remedy; None: they can.

        `causal` is `model.causal`.
        """
        return None

    def why_part(self, tokens: int) -> str | None:
        """Returns why a device cannot hold a part of a window of so many tokens (`mesh.sequence`); None: it can."""
        return None

    def projections(self, dims: HeadDims) -> dict[str, int]:
        """Returns further arguments of the module besides queries, keys and values: argument → width.

        For each argument the model multiplies the layer's normalized input with a separate matrix. It passes
        [B, L, width] by name, in decoding too.
        """
        return {}

    def portable(self, dims: HeadDims) -> dict[str, object]:
        """Returns its fields as plain values, and values derived from them, for programs that do not read gin.

        `implementation` is left out, because such programs choose how they compute. So are the options of the layer.
        """
        left_out = {option.name for option in dataclasses.fields(LayerOptions)} | {'implementation'}
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in left_out}


class AttentionModule(nnx.Module):
    """One layer's attention. B batch, L length, H query heads, K key/value heads, D head size.

    Values, and what queries read of them, may have another size than queries and keys (`HeadDims.value_dim`).

    Methods that take q, k and v also take the `projections` of the configuration, [B, L, width] each. All of them are
    optional: without them a module computes as with zeros.
    """

    dims: HeadDims

    def __call__(
        self,
        q_BxLxHxD: jax.Array,
        k_BxLxKxD: jax.Array,
        v_BxLxKxD: jax.Array,
        *projected: jax.Array,
        starts_BxL: jax.Array | None = None,
        **named: jax.Array,
    ) -> jax.Array:
        """Computes attention over whole sequences, causal unless `HeadDims.causal` is False.

        Args:
            q_BxLxHxD: queries, after rotary embedding.
            k_BxLxKxD: keys, after rotary embedding; K divides H.
            v_BxLxKxD: values.
            starts_BxL: the first token of each token's document (`lm.ops.documents`), before which it sees nothing;
                None: a sequence is one document.

        Returns:
            [B, L, H, D] in the dtype of v.
        """
        return self.attend(*self.normalize(q_BxLxHxD, k_BxLxKxD), v_BxLxKxD, *projected, starts_BxL=starts_BxL, **named)

    @property
    def norms(self) -> HeadNorms | None:
        """The mechanism's normalization of queries and keys; None: it has none."""
        return None

    def normalize(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns queries and keys as the kernel compares them: after the mechanism's normalization, if it has one."""
        return (q_BxLxHxD, k_BxLxKxD) if self.norms is None else normalize(q_BxLxHxD, k_BxLxKxD, self.norms)

    def prepare(
        self, qk_BxLxNxD: jax.Array, rotation: Rotation | None, roots: RootNorms | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Rotates and normalizes queries and keys of a projection, N = H + K heads, in one pass for `attend`.

        `roots`: the layer's root-mean-square normalizations, before all this.
        """
        return rotate(qk_BxLxNxD, rotation, self.dims.n_heads, self.norms, roots)

    def attend(
        self,
        q_BxLxHxD: jax.Array,
        k_BxLxKxD: jax.Array,
        v_BxLxKxD: jax.Array,
        *projected: jax.Array,
        starts_BxL: jax.Array | None = None,
        **named: jax.Array,
    ) -> jax.Array:
        """Computes attention of queries and keys that `normalize` or `prepare` has returned."""
        o_BxLxHxD = self.mix(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, *projected, starts_BxL=starts_BxL, **named)
        return self.outputs(o_BxLxHxD, v_BxLxKxD)

    @abc.abstractmethod
    def mix(
        self,
        q_BxLxHxD: jax.Array,
        k_BxLxKxD: jax.Array,
        v_BxLxKxD: jax.Array,
        *,
        starts_BxL: jax.Array | None = None,
    ) -> jax.Array:
        """Computes `attend` without `outputs`: a result that is linear in v."""

    def outputs(self, o_BxLxHxD: jax.Array, v_BxLxKxD: jax.Array) -> jax.Array:
        """Returns the mechanism's output, which it computes from the result of `mix` token by token."""
        return o_BxLxHxD

    def weigh(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, *projected: jax.Array, **named: jax.Array) -> jax.Array:
        """Computes the matrix of `mix` from its outputs for one-hot values (Choromanski et al. 2020, App. C.4).

        The rows of mechanisms with means sum to 1. Sketches may weigh negatively, and gates weigh less than 1 in all.

        Returns:
            [B, H, L, L] float32: the weights of query i for value j.
        """
        batch, length, kv_heads, size = k_BxLxKxD.shape

        def weigh_values(first: jax.Array) -> jax.Array:
            """Weighs as many values as a head has channels, from `first` on: [B, L, H, D]."""
            one_hot_LxD = jnp.arange(length)[:, None] == first + jnp.arange(size)
            v_BxLxKxD = jnp.broadcast_to(one_hot_LxD[:, None], (batch, length, kv_heads, size)).astype(k_BxLxKxD.dtype)
            return self.mix(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, *projected, **named).astype(jnp.float32)

        found_NxBxLxHxD = jax.lax.map(weigh_values, jnp.arange(0, length, size))
        found_BxHxLxNxD = jnp.moveaxis(found_NxBxLxHxD, (0, 3), (3, 1))
        return found_BxHxLxNxD.reshape(*found_BxHxLxNxD.shape[:3], -1)[..., :length]

    @abc.abstractmethod
    def init_state(self, batch: int, max_length: int, dtype: DTypeLike, documents: bool = False) -> Any:
        """Returns the decoding state of an empty sequence: a pytree of arrays. Linear mechanisms ignore `max_length`.

        `documents`: the tokens will come with the beginnings of their documents.
        """

    @abc.abstractmethod
    def decode_step(
        self,
        state: object,
        q_BxTxHxD: jax.Array,
        k_BxTxKxD: jax.Array,
        v_BxTxKxD: jax.Array,
        *,
        starts_BxT: jax.Array | None = None,
    ) -> tuple[Any, jax.Array]:
        """Appends T tokens (one when decoding, a piece of the prompt when prefilling); returns (state, [B, T, H, D]).

        The tokens follow the tokens of earlier calls. The outputs equal `__call__` on the whole sequence. `starts_BxT`
        are the `starts_BxL` of these tokens, counted from the first of them: negative before it.
        """

    def over_latent(self, rank: int, shared: int) -> 'AttentionModule | None':
        """Returns the module whose keys are `rank` numbers, which are the values too, and `shared` channels, the same
        for all heads; it weighs equal products of queries and keys like this one.

        None: the weights depend on more than the products, or the state does not grow with the tokens.
        """
        return None

    def redraw(self, key: jax.Array) -> None:
        """Draws its random projections anew from `key` alone; called every `redraw_every` steps."""


class NormedModule(AttentionModule):
    """Layer normalizations of queries and of keys, one each or one for both, shared by the heads of the layer.

    Statistics are float32; `normed_dtype` is the type of the results; None: the type of the inputs. Where `k_norm` is
    None, `q_norm` serves keys too.
    """

    normed_dtype: ClassVar[Any] = None

    tied = False
    """One normalization serves queries and keys."""

    def make_norms(self, head_dim: int, rngs: nnx.Rngs, gain: float = 1.0, bias: float = 0.0) -> None:
        scale_init, bias_init = nnx.initializers.constant(gain), nnx.initializers.constant(bias)

        def make() -> nnx.LayerNorm:
            return layer_norm(head_dim, 'head', rngs, scale_init=scale_init, bias_init=bias_init)

        self.q_norm = make()
        self.k_norm = None if self.tied else make()

    @property
    def norms(self) -> HeadNorms | None:
        q_gain, q_bias = arrays_of(self.q_norm)
        k_gain, k_bias = arrays_of(self.k_norm or self.q_norm)
        return HeadNorms(q_gain, q_bias, k_gain, k_bias, self.normed_dtype)


def arrays_of(norm: nnx.LayerNorm) -> tuple[jax.Array, jax.Array]:
    """Returns gain and bias of a layer normalization."""
    assert norm.scale is not None
    assert norm.bias is not None
    return norm.scale[...], norm.bias[...]


def score_start(offset: float, head_dim: int, gain: float | None = None) -> dict[str, float]:
    """Returns the first gain and bias of `make_norms` for a given mean of scores.

    Scores of unrelated vectors then have a standard deviation of gain² √head_dim and a mean of `offset` standard
    deviations. `gain` = None is the gain with a standard deviation of 1.

    Normalized vectors have a mean of zero. A constant added to one of the two changes no score while the other has no
    bias. So biases that start at zero stay there, and even powers weigh opposite vectors like equal ones.
    (PolySketchFormer, eq. 1 has the offset, α; §2.1 leaves it to the layer normalizations.)
    """
    start = head_dim**-0.25 if gain is None else gain
    return {'gain': start, 'bias': start * math.sqrt(offset) * head_dim**-0.25}


def score_scale(degree: int, head_dim: int) -> float:
    """Returns the factor of scores of layer-normalized vectors before their power `degree` is formed.

    Vectors of size 64 have scores up to 64. Their 16th power leaves float32 as soon as the gains grow. Beyond degree 8
    the factor is therefore a power of two near 1 / size. The denominator's bias is multiplied by the factor's power, so
    weights are the same to the last bit. Numbers stay in range up to gains of 16 (8 at size 256). The factor has a
    lower bound, so that small scores and the bias do not underflow together.
    """
    return 2.0 ** -min(round(math.log2(head_dim)), 112 // degree) if degree > 8 else 1.0


def exact_flops_per_token(dims: HeadDims, length: int, window: int | None = None) -> float:
    """Returns two products (scores, mixture of values) per key that a query sees on average."""
    per_key = 2.0 * dims.n_heads * (dims.head_dim + dims.value_size)
    if not dims.causal:
        return per_key * length
    window = min(length, window or length)
    seen = window - window**2 / (2 * length)
    return per_key * seen
