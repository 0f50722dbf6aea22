"""The model section of a configuration."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lm.attention import DEFAULT, Attention, HeadDims
from lm.attention.base import GATES, MODEL
from lm.attention.rotary_scaling import RotaryScaling
from lm.config.configurable import Configurable, configurable, field
from lm.errors import ConfigError
from lm.model.feed_forward import DenseLayer, FeedForward, FeedForwardShape
from lm.model.feed_forward.base import ACTIVATIONS
from lm.model.options import LatentOptions, LayerOptions, OutputGate, ProjectedHeads, RotaryOptions
from lm.ops.residuals import RESIDUAL_NAME
from lm.parameters import EPSILON, NORMS

_POLICIES = jax.checkpoint_policies
_RESIDUALS, _DOTS = _POLICIES.save_only_these_names(RESIDUAL_NAME), _POLICIES.dots_with_no_batch_dims_saveable


def _dots(primitive: Any, *arguments: Any, **parameters: Any) -> bool:
    """Tells whether 'dots' keeps the result of an operation. It keeps reductions too (norm statistics): they are one
    number per token, and recomputing them reads the layer's activations again."""
    kept = _DOTS(primitive, *arguments, **parameters) or _RESIDUALS(primitive, *arguments, **parameters)
    return kept or primitive.name in ('reduce_sum', 'ragged_dot_general')


REMAT = {
    'none': _POLICIES.everything_saveable,
    'dots': _dots,
    'dense': _DOTS,
    'attention': _RESIDUALS,
    'full': _POLICIES.nothing_saveable,
}
"""The values that a layer keeps for its backward pass, from the most memory to the least.

'none': all. 'dots': products with parameters, sums of norms and the inputs of attention's backward pass. 'dense': the
products alone. 'attention': attention alone. 'full': nothing. The layer's input is always kept. Attention keeps its
output, so no other part needs to keep it.
"""

PLACEMENTS = ('before', 'after', 'both')
"""The places of the normalizations around attention and the feed-forward layer."""
SPANS = ('head', 'projection')
"""The parts of queries and keys that `qk_norm` normalizes."""


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
    n_heads: int = field(default=12, minimum=1, help='query heads of each layer')
    n_kv_heads: int | None = field(default=None, minimum=1, help='grouped-query attention; None: as many as n_heads')
    n_value_heads: int | None = field(
        default=None,
        minimum=1,
        help='value heads, a multiple of the key heads, which are repeated (Qwen3-Next); None: as many as key heads',
    )
    head_dim: int = field(default=64, minimum=2, even=True, help='size of a head')
    value_dim: int | None = field(
        default=None, minimum=1, help='size of a value, where it differs from keys; None: head_dim'
    )
    latent_rank: int | None = field(
        default=None,
        minimum=1,
        omit_default=True,
        help='rank of keys and values, which are made of so many numbers per token, normalized (multi-head latent '
        'attention, Kimi Linear); None: they have matrices of their own',
    )
    shared_key_dim: int = field(
        default=0,
        minimum=0,
        omit_default=True,
        help='channels of a key, the last ones, that all heads share; needs latent_rank',
    )
    latent_query_rank: int | None = field(
        default=None,
        minimum=1,
        omit_default=True,
        help='rank of queries, which are made of so many numbers per token, normalized (q_lora_rank of DeepSeek-V2); '
        'needs latent_rank; None: queries have a matrix of their own',
    )
    rotary_decoupled: bool = field(
        default=False,
        omit_default=True,
        help='rotary positions turn the shared channels of keys alone, and the same channels of queries (DeepSeek-V2); '
        'needs shared_key_dim',
    )
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
    rotary_base: float | None = field(
        default=10_000.0, above=1, help='of the wavelengths of rotary positions; None: no such'
    )
    rotary_fraction: float = field(
        default=1.0, above=0, maximum=1, help='share of the channels of each head that rotary positions turn'
    )
    rotary_scaling: RotaryScaling | None = field(
        default=None, help='change of the frequencies of rotary positions for longer contexts; None: none'
    )
    key_offset: float = field(
        default=0.0,
        minimum=0,
        maximum=1,
        help='share of the channels of each key that come from the token before; those without positions first',
    )
    learned_positions: int | None = field(
        default=None, minimum=1, help='number of position embeddings, which are added to the token embeddings'
    )
    convolution: int | None = field(
        default=None,
        minimum=2,
        maximum=16,
        help='tokens of a causal convolution of queries, keys and values; usual is 4',
    )
    qk_norm: bool = field(default=False, help='RMSNorm of the queries and keys of each head, before they are rotated')
    qk_norm_span: str = field(
        default='head',
        choices=SPANS,
        help='what qk_norm normalizes: each head, or the whole projection of queries or keys (OLMo 2)',
    )
    output_norm: bool = field(
        default=False, help='RMSNorm of what attention gives, of each head, before the output gate (Qwen3-Next)'
    )
    output_gate: bool = field(
        default=False, help='what attention gives is multiplied by silu(x W), as in RetNet and Mamba-2'
    )
    output_gate_form: str = field(
        default='silu', choices=tuple(GATES), help='of the output gate; sigmoid: as in Qwen3-Next and Kimi Linear'
    )
    output_gate_inputs: float = field(
        default=1.0, above=0, maximum=1, help='share of the channels of x, the first ones, that the output gate reads'
    )
    output_gate_rank: int | None = field(
        default=None,
        minimum=1,
        help='rank of the matrix of the output gate, which is then two (Kimi Linear: the head size); None: it is whole',
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
    unroll: int = field(
        default=1, minimum=1, resume=True, help='layers per scan iteration; n_layers: no loop, where remat saves less'
    )

    def __post_init__(self):
        mechanisms, kinds = _list(self.attention), self.feed_forwards
        if not mechanisms:
            raise ConfigError('model.attention = []: name at least one mechanism, such as @softmax()')
        if not kinds:
            raise ConfigError('model.feed_forward = []: name at least one kind of layer, such as @dense()')
        for attention in mechanisms:
            self._check_heads(attention)
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
        return tuple(self.pattern[i % len(self.pattern)] for i in range(self.n_layers))

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
        return [layer for layer in range(self.n_layers) if self.find_layer(layer)[0] == stack]

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

    def resolve(self, attention: Attention) -> LayerOptions:
        """Returns the options of the layers of a mechanism: its own, and the model's where it leaves them to it."""
        heads = self._count_heads(attention)
        head_dim, value_dim = self._choose(attention, 'head_dim'), self._choose(attention, 'value_dim')
        share, rank = (self._choose(attention, f'output_gate_{name}') for name in ('inputs', 'rank'))
        base, *rest = (self._choose(attention, f'rotary_{name}') for name in ('base', 'fraction', 'scaling'))
        latent = self._choose_latent(attention)
        turned = latent.shared if latent is not None and latent.decoupled else head_dim
        form = attention.output_gate
        if form == MODEL:
            form = self.output_gate_form if self.output_gate else None
        dims = HeadDims(
            max(heads.queries, heads.values),
            heads.values,
            head_dim,
            self.causal,
            None if value_dim == head_dim else value_dim,
        )
        return LayerOptions(
            dims=dims,
            heads=heads,
            latent=latent,
            rotary=None if base is None else RotaryOptions(turned, base, *rest),
            key_offset=self._choose(attention, 'key_offset'),
            convolution=self._choose(attention, 'convolution'),
            qk_norm=self.qk_norm_span if self._choose(attention, 'qk_norm') else None,
            output_norm=self._choose(attention, 'output_norm'),
            gate=None if form is None else OutputGate(form, max(1, round(share * self.d_model)), rank),
            projections=tuple(attention.projections(dims).items()),
        )

    def _choose(self, attention: Attention, name: str) -> Any:
        value = getattr(attention, name)
        return getattr(self, name) if value == MODEL else value

    def _choose_latent(self, attention: Attention) -> LatentOptions | None:
        rank = self._choose(attention, 'latent_rank')
        names = 'shared_key_dim', 'latent_query_rank', 'rotary_decoupled'
        return None if rank is None else LatentOptions(rank, *(self._choose(attention, name) for name in names))

    def _count_heads(self, attention: Attention) -> ProjectedHeads:
        queries = self._choose(attention, 'n_heads')
        keys = self._choose(attention, 'n_kv_heads') or queries
        return ProjectedHeads(queries, keys, self._choose(attention, 'n_value_heads') or keys)

    def _check_heads(self, attention: Attention) -> None:
        """Raises ConfigError for numbers of heads of which none divides the other, and for impossible latent keys."""
        heads = self._count_heads(attention)

        def named(name: str, value: Any) -> str:
            owner = 'model' if getattr(attention, name) == MODEL else attention.gin_name
            return f'{owner}.{name} = {value}'

        self._check_latent(attention, named)
        queries, keys = named('n_heads', heads.queries), named('n_kv_heads', heads.keys)
        values = named('n_value_heads', heads.values)
        if heads.queries % heads.keys:
            raise ConfigError(f'{keys}: must divide {queries}')
        if heads.values % heads.keys:
            raise ConfigError(f'{values}: must be a multiple of {keys}')
        if heads.values % heads.queries and heads.queries % heads.values:
            raise ConfigError(f'{values}: must divide {queries}, or be a multiple of it')

    def _check_latent(self, attention: Attention, named: Callable[[str, Any], str]) -> None:
        heads, latent = self._count_heads(attention), self._choose_latent(attention)
        shared, size = self._choose(attention, 'shared_key_dim'), self._choose(attention, 'head_dim')
        if shared and latent is None:
            raise ConfigError(f'{named("shared_key_dim", shared)}: keys are not latent; set latent_rank')
        for name in ('latent_query_rank', 'rotary_decoupled'):
            if latent is None and (value := self._choose(attention, name)):
                raise ConfigError(f'{named(name, value)}: keys are not latent; set latent_rank')
        if latent is None:
            return
        self._check_decoupled(attention, latent, named)
        if shared >= size:
            raise ConfigError(f'{named("shared_key_dim", shared)}: must be less than {named("head_dim", size)}')
        if not heads.queries == heads.keys == heads.values:
            raise ConfigError(
                f'{named("latent_rank", latent.rank)}: each head has a key and a value of its own; set n_kv_heads and '
                'n_value_heads to None'
            )
        if self.biases or self.qkv_biases:
            raise ConfigError(f'{named("latent_rank", latent.rank)}: latent keys have no biases; set them to False')

    def _check_decoupled(self, attention: Attention, latent: LatentOptions, named: Callable[[str, Any], str]) -> None:
        setting = named('rotary_decoupled', True)
        if not latent.decoupled:
            return
        if not latent.shared:
            raise ConfigError(f'{setting}: no channels are shared that positions could turn; set shared_key_dim')
        if latent.shared % 2:
            raise ConfigError(
                f'{named("shared_key_dim", latent.shared)}: positions turn pairs of channels; make it even'
            )
        if self._choose(attention, 'rotary_base') is None:
            raise ConfigError(
                f'{setting}: there are no rotary positions; set rotary_base, or rotary_decoupled to False'
            )
        if self._choose(attention, 'key_offset'):
            raise ConfigError(
                f'{setting}: keys that come from the token before have no published form; set key_offset to 0'
            )

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

    def flops_per_token(self, length: int) -> float:
        """Returns the floating-point operations per token of a training step at context `length`: three times the
        forward pass.

        Multiply-adds count 2; causal attention counts half its square; rematerialisation, norms and look-ups do not
        count. This is the numerator of the model FLOP utilisation (MFU).
        """
        dense, attention = self.d_model * self.vocab_size + self.feed_forward_products, 0.0
        for stack, mechanism in enumerate(self.stacks):
            options, layers = self.resolve(mechanism), self.count_layers(stack)
            dense += layers * options.count_products(self.d_model)
            attention += layers * mechanism.flops_per_token(options.dims, length)
        return 3 * (2 * dense + attention)


def _list(choice: Any) -> tuple[Any, ...]:
    """Returns the choices of a field that holds one or several."""
    return choice if isinstance(choice, tuple) else (choice,)
