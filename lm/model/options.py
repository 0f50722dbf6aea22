"""One layer, as its mechanism and the model's section describe it together (`ModelConfig.resolve`)."""

import dataclasses
from collections.abc import Callable
from typing import Any

from lm.attention import Attention, HeadDims
from lm.attention.options import MODEL, LayerOptions
from lm.attention.rotary_scaling import RotaryScaling
from lm.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class RotaryOptions:
    """The rotary positions of a layer: the arguments of `lm.model.positions.rotary` besides the positions.

    `head_dim` is the number of channels that are turned: all of a head, or those that all heads share.
    """

    head_dim: int
    base: float
    fraction: float = 1.0
    scaling: RotaryScaling | None = None


@dataclasses.dataclass(frozen=True)
class ProjectedHeads:
    """The heads of queries, keys and values that a layer projects. Queries and keys are repeated to as many as values
    where there are fewer of them (`HeadDims` counts them after that)."""

    queries: int
    keys: int
    values: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResolvedLayer(LayerOptions):
    """One layer: its options, none of them left open, and what follows from them.

    Layers that compute the same are equal: sizes that follow from others are stated, and what has no effect is the
    default.

    Attributes:
        d_model: the width of the model.
        causal: whether later keys are hidden from a query.
        projections: the names and widths of further inputs of the mechanism (`Attention.projections`).
    """

    d_model: int
    causal: bool
    projections: tuple[tuple[str, int], ...] = ()

    def __post_init__(self):
        """Checks nothing: the model and the mechanism have checked their options."""

    @property
    def heads(self) -> ProjectedHeads:
        """The heads, as the layer projects them."""
        keys = self.n_kv_heads or self.n_heads
        return ProjectedHeads(self.n_heads, keys, self.n_value_heads or keys)

    @property
    def dims(self) -> HeadDims:
        """The heads, as the mechanism sees them."""
        heads, value_dim = self.heads, None if self.value_dim == self.head_dim else self.value_dim
        return HeadDims(max(heads.queries, heads.values), heads.values, self.head_dim, self.causal, value_dim)

    @property
    def rotary(self) -> RotaryOptions | None:
        """None: queries and keys are not rotated."""
        if self.rotary_base is None:
            return None
        turned = self.shared_key_dim if self.rotary_decoupled else self.head_dim
        return RotaryOptions(turned, self.rotary_base, self.rotary_fraction, self.rotary_scaling)

    @property
    def norm_span(self) -> str | None:
        """The span of the RMSNorms of queries and keys, a head or the whole projection; None: there are none."""
        return self.qk_norm_span if self.qk_norm else None

    @property
    def gate_inputs(self) -> int:
        """The channels of the layer's input that the output gate reads."""
        return max(1, round(self.output_gate_inputs * self.d_model))

    @property
    def widths(self) -> tuple[int, ...]:
        """The columns of the further inputs of the mechanism."""
        return tuple(width for _, width in self.projections)

    @property
    def qkv_sizes(self) -> tuple[int, int, int]:
        """The columns of queries, keys and values."""
        heads, dims = self.heads, self.dims
        return heads.queries * dims.head_dim, heads.keys * dims.head_dim, heads.values * dims.value_size

    @property
    def projected_sizes(self) -> tuple[int, ...]:
        """The columns of the matrix of queries, keys and values; of queries alone where the others are latent."""
        return self.qkv_sizes if self.latent_rank is None else self.qkv_sizes[:1]

    @property
    def down_sizes(self) -> tuple[int, ...]:
        """The columns of the matrix that makes the latent numbers, and the channels of a key that all heads share."""
        return tuple(filter(None, (self.latent_rank, self.shared_key_dim)))

    @property
    def latent_sizes(self) -> tuple[int, int]:
        """The columns of the matrix that makes keys and values of the latent numbers."""
        _, keys, values = self.qkv_sizes
        return keys - self.heads.keys * self.shared_key_dim, values

    @property
    def width(self) -> int:
        """The numbers per token that attention returns."""
        return self.dims.n_heads * self.dims.value_size

    @property
    def repeats(self) -> bool:
        """Tells whether queries or keys are repeated before the mechanism has them."""
        return (self.heads.queries, self.heads.keys) != (self.dims.n_heads, self.dims.n_kv_heads)

    def count_products(self, d_model: int) -> int:
        """Returns the sizes of the layer's matrices around the mechanism, together."""
        gate, latent, rank = 0, 0, self.latent_query_rank
        if self.output_gate:
            inputs, own = self.gate_inputs, self.output_gate_rank
            gate = inputs * self.width if own is None else own * (inputs + self.width)
        if self.latent_rank is not None:
            latent = d_model * sum(self.down_sizes) + self.latent_rank * sum(self.latent_sizes)
        projected = sum(self.projected_sizes) * (rank or d_model) + d_model * (rank or 0)
        return projected + d_model * (self.width + sum(self.widths)) + gate + latent


def settle(options: LayerOptions, attention: Attention, d_model: int, causal: bool) -> ResolvedLayer:
    """Returns a layer of a mechanism: with its own options, and the model's where it leaves them to it.

    It has no further inputs yet.
    """
    names = [spec.name for spec in dataclasses.fields(LayerOptions)]
    own = {name: getattr(attention, name) for name in names if getattr(attention, name) != MODEL}
    layer = ResolvedLayer(**{name: getattr(options, name) for name in names} | own, d_model=d_model, causal=causal)
    heads = layer.heads
    idle = {
        'qk_norm_span': not layer.qk_norm,
        'rotary_fraction': layer.rotary_base is None,
        'rotary_scaling': layer.rotary_base is None,
        **dict.fromkeys(('output_gate_form', 'output_gate_inputs', 'output_gate_rank'), not layer.output_gate),
    }
    stated = {'n_kv_heads': heads.keys, 'n_value_heads': heads.values, 'value_dim': layer.dims.value_size}
    defaults = {spec.name: spec.default for spec in dataclasses.fields(LayerOptions) if idle.get(spec.name)}
    return dataclasses.replace(layer, **stated, **defaults)


def check_layer(layer: ResolvedLayer, attention: Attention, has_biases: bool) -> None:
    """Raises ConfigError for numbers of heads of which none divides the other, and for impossible latent keys."""

    def named(name: str, value: Any) -> str:
        owner = 'model' if getattr(attention, name) == MODEL else attention.gin_name
        return f'{owner}.{name} = {value}'

    _check_latent(layer, named, has_biases)
    heads = layer.heads
    queries, keys = named('n_heads', heads.queries), named('n_kv_heads', heads.keys)
    values = named('n_value_heads', heads.values)
    if heads.queries % heads.keys:
        raise ConfigError(f'{keys}: must divide {queries}')
    if heads.values % heads.keys:
        raise ConfigError(f'{values}: must be a multiple of {keys}')
    if heads.values % heads.queries and heads.queries % heads.values:
        raise ConfigError(f'{values}: must divide {queries}, or be a multiple of it')


def _check_latent(layer: ResolvedLayer, named: Callable[[str, Any], str], has_biases: bool) -> None:
    rank, heads, shared = layer.latent_rank, layer.heads, layer.shared_key_dim
    if rank is None:
        for name in ('shared_key_dim', 'latent_query_rank', 'rotary_decoupled'):
            if value := getattr(layer, name):
                raise ConfigError(f'{named(name, value)}: keys are not latent; set latent_rank')
        return
    if layer.rotary_decoupled:
        _check_decoupled(layer, named)
    if shared >= layer.head_dim:
        raise ConfigError(f'{named("shared_key_dim", shared)}: must be less than {named("head_dim", layer.head_dim)}')
    if not heads.queries == heads.keys == heads.values:
        raise ConfigError(
            f'{named("latent_rank", rank)}: each head has a key and a value of its own; set n_kv_heads and '
            'n_value_heads to None'
        )
    if has_biases:
        raise ConfigError(f'{named("latent_rank", rank)}: latent keys have no biases; set them to False')


def _check_decoupled(layer: ResolvedLayer, named: Callable[[str, Any], str]) -> None:
    setting, shared = named('rotary_decoupled', True), layer.shared_key_dim
    if not shared:
        raise ConfigError(f'{setting}: no channels are shared that positions could turn; set shared_key_dim')
    if shared % 2:
        raise ConfigError(f'{named("shared_key_dim", shared)}: positions turn pairs of channels; make it even')
    if layer.rotary_base is None:
        raise ConfigError(f'{setting}: there are no rotary positions; set rotary_base, or rotary_decoupled to False')
    if layer.key_offset:
        raise ConfigError(
            f'{setting}: keys that come from the token before have no published form; set key_offset to 0'
        )
