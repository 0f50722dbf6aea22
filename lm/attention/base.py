"""What every attention mechanism is: a configuration that a gin file names, and the module that it builds.

    configuration   a frozen dataclass, `@configurable('name') class Name(Attention)`; knows its own cost
    module          an `nnx.Module`; one per layer, shared by all heads of the layer

Adding a mechanism means adding one file with both; nothing else names it. Command lines, benchmarks and the shared
tests find it in the registry. Parameters say what they are (`lm.parameters.declare`), so that weight decay and sharding
know. Mechanisms on the linear engine build on `lm.attention.linear`, feature maps on `lm.attention.maps.products`.
"""

import abc
import dataclasses
import math
from typing import Any, ClassVar

import jax
from flax import nnx

from lm.config.configurable import Configurable
from lm.ops.rotary import HeadNorms, Rotation, rotate
from lm.ops.rotary.xla import normalize
from lm.parameters import layer_norm


@dataclasses.dataclass(frozen=True)
class HeadDims:
    """The shape of a layer's heads: `n_heads` queries share `n_kv_heads` keys and values of size `head_dim`; and
    whether later keys are hidden from a query (`model.causal`)."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    causal: bool = True


class Attention(Configurable, abc.ABC):
    """Base of the attention configurations (frozen dataclasses made by `@configurable`)."""

    is_default: ClassVar[bool] = False
    """Models have this mechanism where nothing else is configured. Exactly one mechanism sets it."""
    redraw_every = None
    """Training steps after which the module's random projections are drawn anew; None: never."""
    causal = True
    """False: tokens see later ones, whatever the model says."""

    @abc.abstractmethod
    def build(self, dims: HeadDims, rngs: nnx.Rngs) -> 'AttentionModule':
        """The module of one layer. Parameters are drawn from `rngs.params()`, buffers from `rngs.projections()`."""

    def kernels_declare_cost(self, dims: HeadDims) -> bool:
        """Whether the compiler knows the FLOPs of its TPU kernels; where not, `lm check` takes `flops_per_token`."""
        return True

    @abc.abstractmethod
    def flops_per_token(self, dims: HeadDims, length: int) -> float:
        """Forward floating-point operations per token of one layer at context `length` (causal halving where the
        mechanism is quadratic; rematerialisation not counted; the q, k, v, o projections belong to the model)."""

    def why_causal(self) -> str | None:
        """Why no token can see later ones (`HeadDims.causal = False`), and what to do about it; None: they can."""
        return f'@{self.gin_name}() weighs earlier tokens alone; choose another one, such as @softmax()'

    def why_whole(self, causal: bool) -> str | None:
        """Why devices cannot share a window (`mesh.sequence`), `causal` being the model's, and what to do about it;
        None: they can."""
        return None

    def projections(self, dims: HeadDims) -> dict[str, int]:
        """What the module takes besides queries, keys and values: argument → width. The model multiplies the layer's
        normalized input with a matrix of its own for each, and passes [B, L, width] by name, in decoding too."""
        return {}

    def portable(self) -> dict[str, Any]:
        """Its fields as plain values, for programs that read no gin, and what these would have to work out; not how it
        is computed, which is theirs to decide."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != 'implementation'}


class AttentionModule(nnx.Module):
    """One layer's attention. B batch, L length, H query heads, K key/value heads, D head size.

    Where its configuration asks for `projections`, the methods that take q, k and v take these too, [B, L, width] each.
    All are optional: a module computes without them as with zeros.
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
        """Attention over whole sequences, causal unless `HeadDims.causal` says otherwise.

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
        """The mechanism's own normalization of queries and keys; None: it has none."""
        return None

    def normalize(self, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Queries and keys as the kernel compares them: after the mechanism's own normalization, where it has one."""
        return (q_BxLxHxD, k_BxLxKxD) if self.norms is None else normalize(q_BxLxHxD, k_BxLxKxD, self.norms)

    def prepare(self, qk_BxLxNxD: jax.Array, rotation: Rotation | None) -> tuple[jax.Array, jax.Array]:
        """What `attend` takes: queries and keys of a projection, N = H + K heads, rotated and normalized in one go."""
        return rotate(qk_BxLxNxD, rotation, self.dims.n_heads, self.norms)

    @abc.abstractmethod
    def attend(
        self,
        q_BxLxHxD: jax.Array,
        k_BxLxKxD: jax.Array,
        v_BxLxKxD: jax.Array,
        *,
        starts_BxL: jax.Array | None = None,
    ) -> jax.Array:
        """Like a call, of queries and keys that `normalize` or `prepare` gave."""

    @abc.abstractmethod
    def init_state(self, batch: int, max_length: int, dtype: Any, documents: bool = False) -> Any:
        """The decoding state of an empty sequence: a pytree of arrays. Linear mechanisms ignore `max_length`.

        `documents`: whether its tokens will say where their documents begin.
        """

    @abc.abstractmethod
    def decode_step(
        self,
        state: Any,
        q_BxTxHxD: jax.Array,
        k_BxTxKxD: jax.Array,
        v_BxTxKxD: jax.Array,
        *,
        starts_BxT: jax.Array | None = None,
    ) -> tuple[Any, jax.Array]:
        """Appends T tokens (one when decoding, a piece of the prompt when prefilling) and returns
        (state, [B, T, H, D]).

        Tokens at one call follow those of the calls before; the outputs equal `__call__` on the whole sequence.
        `starts_BxT` are the `starts_BxL` of these tokens, counted from the first of them: negative before it.
        """

    def redraw(self, key: jax.Array) -> None:
        """Replaces its random projections by those drawn from `key` alone; called every `redraw_every` steps."""


class NormedModule(AttentionModule):
    """Two layer normalizations, one for queries and one for keys, each shared by the heads of the layer.

    Statistics are float32; `normed_dtype` is that of the results, None the inputs'.
    """

    normed_dtype: ClassVar[Any] = None

    def make_norms(self, head_dim: int, rngs: nnx.Rngs, gain: float = 1.0, bias: float = 0.0) -> None:
        scale_init, bias_init = nnx.initializers.constant(gain), nnx.initializers.constant(bias)
        self.q_norm, self.k_norm = (
            layer_norm(head_dim, 'head', rngs, scale_init=scale_init, bias_init=bias_init) for _ in range(2)
        )

    @property
    def norms(self) -> HeadNorms | None:
        (q_gain, q_bias), (k_gain, k_bias) = _arrays(self.q_norm), _arrays(self.k_norm)
        return HeadNorms(q_gain, q_bias, k_gain, k_bias, self.normed_dtype)


def _arrays(norm: nnx.LayerNorm) -> tuple[jax.Array, jax.Array]:
    """Returns gain and bias."""
    assert norm.scale is not None
    assert norm.bias is not None
    return norm.scale[...], norm.bias[...]


def score_start(offset: float, head_dim: int, gain: float | None = None) -> dict[str, float]:
    """The first gain and bias of `make_norms`, with which scores of unrelated vectors have the mean `offset`, in their
    standard deviations, and a standard deviation of gain² √head_dim; `gain`: None is the one that makes it 1.

    Normalized vectors have a mean of zero, so nothing changes when the same number is added to all entries of the one
    while the other has no such bias: biases that start at zero stay there, and even powers weigh opposite vectors like
    equal ones. (PolySketchFormer, eq. 1 has the offset, α; §2.1 leaves it to the layer normalizations.)
    """
    start = head_dim**-0.25 if gain is None else gain
    return {'gain': start, 'bias': start * math.sqrt(offset) * head_dim**-0.25}


def score_scale(degree: int, head_dim: int) -> float:
    """What scores of layer-normalized vectors are multiplied with before their power `degree` is formed.

    Vectors of size 64 have scores up to 64, whose 16th power leaves float32 as soon as the gains grow. Beyond degree 8
    it is therefore a power of two near 1 / size: with the denominator's bias times its power, the same weights to the
    last bit, of numbers that stay in range up to gains of 16 (8 at size 256). It goes no further down than leaves room
    for scores below 1, of tokens that see no key like them: their power and the bias must not vanish together.
    """
    return 2.0 ** -min(round(math.log2(head_dim)), 112 // degree) if degree > 8 else 1.0


def exact_flops_per_token(dims: HeadDims, length: int, window: int | None = None) -> float:
    """Two products of size head_dim (scores, mixture of values) for each key that a query sees on average."""
    if not dims.causal:
        return 4.0 * dims.n_heads * dims.head_dim * length
    window = min(length, window or length)
    seen = window - window**2 / (2 * length)
    return 4.0 * dims.n_heads * dims.head_dim * seen
