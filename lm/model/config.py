"""The model section of a configuration."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from lm.attention import DEFAULT, Attention, HeadDims
from lm.attention.options import LayerOptions
from lm.config.configurable import Configurable, configurable, field
from lm.errors import ConfigError
from lm.model.feed_forward import DenseLayer, FeedForward, FeedForwardShape
from lm.model.options import ResolvedLayer, check_layer, settle
from lm.ops.gated_units import ACTIVATIONS
from lm.ops.residuals import PRODUCT_NAME, RESIDUAL_NAME
from lm.parameters import EPSILON, NORMS

_POLICIES = jax.checkpoint_policies
_RESIDUALS = _POLICIES.save_only_these_names(RESIDUAL_NAME)
_PRODUCTS = _POLICIES.save_from_both_policies(
    _POLICIES.dots_with_no_batch_dims_saveable, _POLICIES.save_only_these_names(PRODUCT_NAME)
)


def _dots(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
    """Tells whether 'dots' keeps the result of an operation. It keeps reductions too (norm statistics): they are one
    number per token, and recomputing them reads the layer's activations again."""
    kept = _PRODUCTS(primitive, *arguments, **parameters) or _RESIDUALS(primitive, *arguments, **parameters)
    return kept or primitive.name in ('reduce_sum', 'ragged_dot_general')


REMAT = {
    'none': _POLICIES.everything_saveable,
    'dots': _dots,
    'dense': _PRODUCTS,
    'attention': _RESIDUALS,
    'full': _POLICIES.nothing_saveable,
}
"""The values that a layer keeps for its backward pass, from the most memory to the least.

'none': all. 'dots': products with parameters, sums of norms and the inputs of attention's backward pass. 'dense': the
products alone. 'attention': attention alone. 'full': nothing. The layer's input is always kept. Attention keeps its
output, so no other part needs to keep it.
"""

UNROLLED = ('none', 'dots')
"""The levels of `REMAT` at which steps on TPUs have no loop over the layers by default."""

PLACEMENTS = ('before', 'after', 'both')
"""The places of the normalizations around attention and the feed-forward layer."""


@configurable('model')
class ModelConfig(Configurable):
    """Shape and numerics of the model; the defaults are GPT-2 small (110M parameters)."""

    vocab_size: int = field(
        default=32_000, minimum=2, help='rows of the embedding: at least the tokens of the tokenizer'
    )
    n_layers: int = field(default=12, minimum=1, help='layers, each of attention and a feed-forward network')
    d_model: int = field(default=768, minimum=2, even=True, help='width of the residual stream')
    base_width: int | None = field(
        default=None,
        minimum=2,
        help='d_model for which the learning rate was chosen; other widths scale it (µP); None: no scaling',
    )
    layer: LayerOptions = field(default=LayerOptions(), inlined=True, help='of the layers, around their mechanisms')
    hidden_dim: int | None = field(
        default=None,
        minimum=1,
        help='GLU width; None: 8·d_model/3 rounded down to a multiple of 8, without gates 4·d_model',
    )
    feed_forward: FeedForward | tuple[FeedForward, ...] | None = field(
        default=None,
        omit_default=True,
        help='a kind of feed-forward layer, @dense() or @experts(), or a list that repeats over layers; None: @dense()',
    )
    attention: Attention | tuple[Attention, ...] = field(
        default=DEFAULT(), help='one mechanism, or a list that repeats over the layers; its last repeat may be cut'
    )
    causal: bool = field(
        default=True,
        help='False: every token sees all others, as models of @masked() do; softmax, performer and some more can',
    )
    norm: str = field(
        default='layer', choices=tuple(NORMS), help='layer normalization, or RMSNorm: neither mean nor bias'
    )
    norm_epsilon: float = field(
        default=EPSILON, above=0, maximum=0.1, help='added to the variance in the normalizations of the model'
    )
    norm_placement: str = field(
        default='before',
        choices=PLACEMENTS,
        help='before attention and the feed-forward layer; after them, on what they add (OLMo 2); or both (Gemma 2)',
    )
    activation: str = field(default='gelu', choices=tuple(ACTIVATIONS), help='of the gate of the linear units')
    gated: bool = field(default=True, help='gated linear units; False: a linear map, the activation, a linear map')
    biases: bool = field(default=False, help='biases of the linear maps of every layer')
    qkv_biases: bool = field(default=False, help='biases of queries, keys and values alone, as in Qwen 2')
    embedding_scale: float | None = field(
        default=None, above=0, help='factor of the embeddings at the input; None: the root of d_model'
    )
    sinusoids: bool = field(default=True, help='sinusoidal positions, added to the embeddings')
    learned_positions: int | None = field(
        default=None, minimum=1, help='number of position embeddings, which are added to the token embeddings'
    )
    tied: bool = field(
        default=True, help='the output matrix is the input embedding; False: it has parameters of its own'
    )
    logit_cap: float | None = field(
        default=None, above=0, help='soft cap of the logits, cap · tanh(logit / cap); None: no cap'
    )
    dtype: str = field(
        default='auto', choices=('auto', 'float32', 'bfloat16'), help='auto: bfloat16, but float32 on CPU'
    )
    remat: str = field(
        default='none',
        choices=tuple(REMAT),
        resume=True,
        help='how much of a layer the backward pass computes again, from nothing to everything',
    )
    unroll: int | None = field(
        default=None,
        minimum=1,
        resume=True,
        omit_default=True,
        help='layers per turn of the loop over them; n_layers: no loop; None: no loop in a step on TPUs, but 1 where '
        'mesh.fsdp shares parameters or remat recomputes more than dots, and elsewhere',
    )

    def __post_init__(self):
        mechanisms, kinds = _list(self.attention), self.feed_forwards
        if not mechanisms:
            raise ConfigError('model.attention = []: name at least one mechanism, such as @softmax()')
        if not kinds:
            raise ConfigError('model.feed_forward = []: name at least one kind of layer, such as @dense()')
        for attention in mechanisms:
            check_layer(self._settle(attention), attention, self.biases or self.qkv_biases)
        if len(mechanisms) > self.n_layers:
            raise ConfigError(
                f'model.attention lists {len(mechanisms)} mechanisms: more than model.n_layers = {self.n_layers}'
            )
        if len(kinds) > self.n_layers:
            raise ConfigError(
                f'model.feed_forward lists {len(kinds)} layers: more than model.n_layers = {self.n_layers}'
            )
        if self.biases and any(not isinstance(kind, DenseLayer) for kind in kinds):
            raise ConfigError('model.biases = True: experts have no biases; set it to False')
        reasons = (one.why_causal() for one in self.pattern if not self.causal)
        if reason := next(filter(None, reasons), None):
            raise ConfigError(f'model.causal = False: {reason}')

    @property
    def pattern(self) -> tuple[Attention, ...]:
        """The mechanisms of the layers up to the first one from which mechanisms and feed-forward layers repeat."""
        mechanisms = _list(self.attention)
        period = math.lcm(len(mechanisms), len(self.feed_forwards))
        return tuple(mechanisms[i % len(mechanisms)] for i in range(min(period, max(self.n_layers, len(mechanisms)))))

    @property
    def layers(self) -> tuple[Attention, ...]:
        """The mechanism of each layer."""
        pattern = self.pattern
        return tuple(pattern[i % len(pattern)] for i in range(self.n_layers))

    @property
    def repeats(self) -> int:
        """The whole repeats of the pattern."""
        return self.n_layers // len(self.pattern)

    @property
    def stacks(self) -> tuple[Attention, ...]:
        """The mechanism of each stack of layers: the pattern, then the layers of a last repeat that is cut."""
        return self.pattern + self.pattern[: self.n_layers % len(self.pattern)]

    def find_layer(self, layer: int) -> tuple[int, int]:
        """Returns the stack of a layer, and its place there."""
        size = len(self.pattern)
        repeat, place = divmod(layer, size)
        return (place, repeat) if repeat < self.repeats else (size + place, 0)

    def list_layers(self, stack: int) -> list[int]:
        """Returns the layers of a stack."""
        size, repeated = len(self.pattern), len(self.pattern) * self.repeats
        return list(range(stack, repeated, size)) if stack < size else [repeated + stack - size]

    def count_layers(self, stack: int) -> int:
        """Returns the layers of a stack: one per repeat, or one alone."""
        return self.repeats if stack < len(self.pattern) else 1

    @property
    def feed_forwards(self) -> tuple[FeedForward, ...]:
        """The feed-forward layers that repeat over the layers."""
        return _list(DenseLayer() if self.feed_forward is None else self.feed_forward)

    def find_feed_forward(self, layer: int) -> FeedForward:
        """Returns the feed-forward layer of a layer. All layers of a stack have the same."""
        return self.feed_forwards[layer % len(self.feed_forwards)]

    @property
    def feed_forward_shape(self) -> FeedForwardShape:
        """The fields that feed-forward layers read."""
        return FeedForwardShape(self.d_model, self.glu_dim, self.gated, self.activation, self.n_layers)

    @property
    def dims(self) -> HeadDims:
        """The heads of layers whose mechanism has none of its own."""
        return self.resolve(DEFAULT()).dims

    def resolve(self, attention: Attention) -> ResolvedLayer:
        """Returns the layers of a mechanism: with its own options, and the model's where it leaves them to it."""
        layer = self._settle(attention)
        return dataclasses.replace(layer, projections=tuple(attention.projections(layer.dims).items()))

    def _settle(self, attention: Attention) -> ResolvedLayer:
        return settle(self.layer, attention, self.d_model, self.causal)

    @property
    def looks_ahead(self) -> str | None:
        """The setting that lets tokens see later ones; None if no setting does."""
        if not self.causal:
            return 'model.causal = False'
        return next((f'{one.gin_name}.causal = False' for one in self.pattern if not one.causal), None)

    @property
    def widening(self) -> float:
        """The model's width over the base width, for which the learning rate is given."""
        return self.d_model / (self.base_width or self.d_model)

    @property
    def glu_dim(self) -> int:
        return self.hidden_dim or (max(8, 8 * self.d_model // 3 // 8 * 8) if self.gated else 4 * self.d_model)

    @property
    def feed_forward_products(self) -> int:
        """The sizes of the matrices of all feed-forward layers that a token is multiplied with, together."""
        shape = self.feed_forward_shape
        return sum(self.find_feed_forward(layer).count_products(shape) for layer in range(self.n_layers))

    @property
    def idle_parameters(self) -> int:
        """The number of parameters that a token does not use: of experts that it does not choose."""
        shape = self.feed_forward_shape
        return sum(self.find_feed_forward(layer).count_idle(shape) for layer in range(self.n_layers))

    def resolve_dtype(self, platform: str) -> jnp.dtype:
        """Returns the type of products and activations on a platform ('cpu', 'gpu' or 'tpu')."""
        if self.dtype == 'auto':
            return jnp.dtype(jnp.float32 if platform == 'cpu' else jnp.bfloat16)
        return jnp.dtype(self.dtype)

    def resolve_unroll(self, platform: str, shares_parameters: bool) -> int:
        """Returns the layers per turn of the loop over them in a step on a platform; `n_layers`: there is no loop.

        On TPUs a loop copies what kernels keep for the backward pass into stacks, and out again. Without a loop XLA
        keeps what `remat` recomputes: little with UNROLLED. Devices that share parameters gain nothing.
        """
        if self.unroll is not None:
            return self.unroll
        return self.n_layers if platform == 'tpu' and self.remat in UNROLLED and not shares_parameters else 1

    def check_length(self, length: int) -> None:
        """Raises ConfigError if the context has more tokens than there are positions."""
        if self.learned_positions is not None and length > self.learned_positions:
            raise ConfigError(
                f'model.learned_positions = {self.learned_positions}: fewer than the {length} tokens of the context; '
                'shorten train.context_length, evaluate.context_length, the text, --max_tokens, or the lengths of the '
                'task'
            )

    def check_parts(self, parts: int, length: int | None = None, setting: str = 'train.context_length') -> None:
        """Raises ConfigError if a mechanism cannot share a window over this number of devices (`mesh.sequence`).

        `length` is the number of tokens of a window, which `setting` sets; None: it is not known yet.
        """
        reasons = (one.why_whole(self.causal) for one in self.pattern if parts > 1)
        if reason := next(filter(None, reasons), None):
            raise ConfigError(f'mesh.sequence = {parts}: {reason}')
        if length is not None and (reason := self.why_parts(parts, length)):
            raise ConfigError(
                f'mesh.sequence = {parts}: {setting} = {length:,} makes parts of {length // parts:,} tokens, '
                f'{reason}; change one of the three'
            )

    def why_parts(self, parts: int, length: int) -> str | None:
        """Returns why a mechanism cannot split a window of `length` tokens over `parts` devices; None: it can.

        Windows that `parts` does not divide are not split.
        """
        reasons = (one.why_part(length // parts) for one in self.pattern if parts > 1 and length % parts == 0)
        return next(filter(None, reasons), None)

    def count_products(self) -> int:
        """Returns the sizes of the matrices of the model that a token is multiplied with, together."""
        dense = self.d_model * self.vocab_size + self.feed_forward_products
        layers = ((self.resolve(mechanism), self.count_layers(i)) for i, mechanism in enumerate(self.stacks))
        return dense + sum(count * layer.count_products(self.d_model) for layer, count in layers)

    def flops_per_token(self, length: int) -> float:
        """Returns the floating-point operations per token of a training step at context `length`: three times the
        forward pass.

        Multiply-adds count 2; causal attention counts half its square; rematerialisation, norms and look-ups do not
        count. This is the numerator of the model FLOP utilisation (MFU).
        """
        attention = sum(
            self.count_layers(i) * mechanism.flops_per_token(self.resolve(mechanism).dims, length)
            for i, mechanism in enumerate(self.stacks)
        )
        return 3 * (2 * self.count_products() + attention)


def _list(choice: object) -> tuple[Any, ...]:
    """Returns the choices of a field that holds one or several."""
    return choice if isinstance(choice, tuple) else (choice,)
