"""A tiny model that computes as the model of a configuration does: all kinds of its layers, with small sizes.

Every combination of a mechanism and a feed-forward layer is there once, and a single one twice. Options keep their
values; only sizes shrink: widths, heads, features, blocks and windows. Ratios of heads stay.
"""

import dataclasses
from typing import Any

from lm.attention import Attention
from lm.attention.options import MODEL
from lm.config.configurable import Configurable
from lm.errors import ConfigError
from lm.model import ModelConfig
from lm.ops.errors import OperationError

LENGTH = 139
"""Tokens of a window: more than two blocks of any operation on a CPU, and a multiple of none."""
VOCABULARY, WIDTH, HIDDEN, HEAD, VALUE = 32, 16, 16, 8, 6
MOST_KEY_HEADS = 2
SIZES = {
    'window': 11,
    'block': 24,
    'n_features': 32,
    'sketch_size': 4,
    'sketches': 2,
    'network_width': 2,
    'feature_dim': 4,
    'parts': 2,
    'n_experts': 8,
    'hidden_dim': 8,
    'shared_dim': 8,
    'latent_rank': 8,
    'latent_query_rank': 8,
    'shared_key_dim': 2,
    'output_gate_rank': 4,
    'head_dim': HEAD,
}
"""The largest value of fields of mechanisms and feed-forward layers."""


def shrink(model: ModelConfig) -> ModelConfig:
    """Returns the configuration of the tiny model."""
    pairs = [(attention, model.find_feed_forward(i)) for i, attention in enumerate(model.layers)]
    kinds = list(dict.fromkeys(pairs))
    own = model.layer
    heads = _shrink_heads(own.n_heads, own.n_kv_heads, own.n_value_heads)
    sizes = {name: _limit(name, getattr(own, name)) for name in SIZES if hasattr(own, name)}
    sizes |= zip(('n_heads', 'n_kv_heads', 'n_value_heads'), heads, strict=True)
    sizes |= {'head_dim': HEAD, 'value_dim': _shrink_value(own.head_dim, own.value_dim)}
    return dataclasses.replace(
        model,
        vocab_size=VOCABULARY,
        n_layers=max(2, len(kinds)),
        d_model=WIDTH,
        base_width=model.base_width and (WIDTH if model.base_width >= model.d_model else WIDTH // 2),
        layer=dataclasses.replace(own, **sizes),
        hidden_dim=HIDDEN,
        attention=tuple(_shrink_part(_shrink_layer(attention, model)) for attention, _ in kinds),
        feed_forward=tuple(_leave_out_balance(_shrink_part(kind)) for _, kind in kinds),
        learned_positions=model.learned_positions and LENGTH,
        dtype='float32',
        unroll=1,
    )


def _limit(name: str, value: Any) -> Any:
    return min(value, SIZES[name]) if isinstance(value, int) and not isinstance(value, bool) else value


def _shrink_part(config: Any) -> Any:
    """Returns a mechanism or a feed-forward layer with small sizes.

    A size that the others forbid keeps its value, such as a number of experts that the groups do not divide.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        small = _shrink_part(value) if isinstance(value, Configurable) else value
        small = _limit(field.name, small) if field.name in SIZES else small
        if small != value:
            try:
                config = dataclasses.replace(config, **{field.name: small})
            except (ConfigError, OperationError):
                continue
    return config


def _leave_out_balance(kind: Any) -> Any:
    """Returns a feed-forward layer without the loss that gradients contain and the loss of the model does not."""
    return dataclasses.replace(kind, balance=0.0) if getattr(kind, 'balance', 0) else kind


def _shrink_layer(attention: Attention, model: ModelConfig) -> Attention:
    """Returns a mechanism whose own heads, if it has some, are few and small."""
    given = {name: getattr(attention, name) for name in ('n_heads', 'n_kv_heads', 'n_value_heads')}
    changes: dict[str, Any] = {}
    if any(value != MODEL for value in given.values()):
        chosen = [getattr(model.layer, name) if value == MODEL else value for name, value in given.items()]
        changes = dict(zip(given, _shrink_heads(*chosen), strict=True))
    if attention.value_dim != MODEL:
        size = model.layer.head_dim if attention.head_dim == MODEL else attention.head_dim
        changes['value_dim'] = _shrink_value(size, attention.value_dim)
    return dataclasses.replace(attention, **changes)


def _shrink_heads(queries: int, keys: int | None, values: int | None) -> tuple[int, int | None, int | None]:
    """Returns few heads with the same ratios."""
    key_heads = keys or queries
    few = min(key_heads, MOST_KEY_HEADS)
    return few * queries // key_heads, keys and few, values and few * values // key_heads


def _shrink_value(size: int, value: int | None) -> int | None:
    """Returns the size of a value: another one than of a key where they differ."""
    if value is None or value == size:
        return value and HEAD
    return VALUE if value < size else HEAD + 2
