"""A model whose query heads share key heads, as the equal model with a key head for each query head.

Linear attention has one state per key head. A student with more key heads than its teacher has larger states, and
begins with copies of the teacher's (HALO, 2026, Table 3).
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lm.attention import Attention
from lm.attention.options import MODEL
from lm.errors import ConfigError
from lm.model.config import ModelConfig
from lm.model.functions import ModelFunctions, Weights
from lm.model.options import ResolvedLayer
from lm.parameters import Declaration


class _Run(NamedTuple):
    """Heads that stand side by side on an axis.

    Attributes:
        length: the numbers of all heads together.
        size: the numbers of a head.
        copies: how many heads stand for each one in the model with more heads.
    """

    length: int
    size: int
    copies: int


def unshare_key_heads(functions: ModelFunctions) -> ModelFunctions:
    """Returns the functions of the model in which each query head has a key head and a value head of its own.

    A layer with more values than queries keeps their number. Raises ConfigError for a mechanism that numbers its heads.
    """
    config = functions.config
    for mechanism in config.pattern:
        heads = config.resolve(mechanism).heads
        if mechanism.numbers_heads and heads.keys < heads.queries:
            raise ConfigError(
                f'clone_key_heads = True: heads of @{mechanism.gin_name}() differ by their number, so copies compute '
                'something else; set it to False'
            )
    values = config.layer.n_value_heads
    if values is not None and values < config.layer.n_heads:
        values = None
    mechanisms = tuple(_unshare(config, values, mechanism) for mechanism in config.pattern)
    config = dataclasses.replace(config, n_kv_heads=None, n_value_heads=values, attention=mechanisms)
    return ModelFunctions(config, functions.dtype)


def _unshare(config: ModelConfig, model_values: int | None, mechanism: Attention) -> Attention:
    """Returns the mechanism of such layers; `model_values` is the model's number of value heads.

    It leaves to the model what it left to it, where that gives the same heads.
    """
    heads = config.resolve(mechanism).heads
    given = model_values if mechanism.n_value_heads == MODEL else mechanism.n_value_heads
    wanted = max(heads.queries, heads.values)
    changes: dict[str, Any] = {} if mechanism.n_kv_heads == MODEL else {'n_kv_heads': None}
    if (given or heads.queries) != wanted:
        changes['n_value_heads'] = None if wanted == heads.queries else wanted
    return dataclasses.replace(mechanism, **changes) if changes else mechanism


def clone_key_heads(functions: ModelFunctions, weights: Weights) -> Weights:
    """Returns the weights of `unshare_key_heads(functions)` that compute what `weights` compute.

    Each key head and value head is repeated for the query heads that share it, and so is what a mechanism has for it.

    Raises ConfigError for an array of a mechanism in which the places of the heads are unknown.
    """
    whole = unshare_key_heads(functions)

    def widen(
        path: tuple[Any, ...], array: jax.Array, aim: jax.ShapeDtypeStruct, declaration: Declaration | None = None
    ) -> jax.Array:
        if array.shape == aim.shape:
            return array
        own, wide = (each.config.resolve(each.config.stacks[path[1].key]) for each in (functions, whole))
        layouts = _list_layouts(own, wide).get(declaration.part if declaration else 'mechanism', [])
        for axis, lengths in enumerate(zip(array.shape, aim.shape, strict=True)):
            if lengths[0] != lengths[1]:
                found = (runs for runs in layouts if _measure(runs) == lengths)
                if (runs := next(found, None)) is None:
                    name = f'@{functions.config.stacks[path[1].key].gin_name}()'
                    raise ConfigError(
                        f'clone_key_heads = True: the heads of {name} in its array {jax.tree_util.keystr(path[2:])} '
                        f'of shape {array.shape[1:]} are unknown; set it to False'
                    )
                array = _repeat_heads(array, axis, runs)
        return array

    map_all = jax.tree_util.tree_map_with_path
    params = map_all(widen, weights['params'], whole.abstract['params'], functions.declared)
    return weights | {'params': params, 'buffers': map_all(widen, weights['buffers'], whole.abstract['buffers'])}


def _list_layouts(own: ResolvedLayer, wide: ResolvedLayer) -> dict[str, list[list[_Run]]]:
    """Returns the orders in which axes of a layer's arrays may hold heads, by part of the model.

    `own` has the options of the layer, and `wide` its options in the model with more heads.
    """
    size, heads = own.dims.head_dim, own.dims.n_kv_heads
    keys, values = wide.heads.keys // own.heads.keys, wide.heads.values // own.heads.values
    lengths = own.qkv_sizes
    key_run = _Run(lengths[1], size, keys)
    # A further input of a mechanism has a number or several for each head, or numbers that all heads read.
    inputs = [
        _Run(width, width, 1) if width == wanted else _Run(width, width // heads, values)
        for width, wanted in zip(own.widths, wide.widths, strict=True)
    ]
    return {
        'attention': [[_Run(lengths[0], size, 1), key_run, _Run(lengths[2], own.dims.value_size, values)], [key_run]],
        'mechanism': [inputs, [_Run(heads * size, size, values)], [_Run(heads, 1, values)]],
    }


def _measure(runs: Iterable[_Run]) -> tuple[int, int]:
    """Returns the length of an axis with these heads, and its length with their copies."""
    return sum(run.length for run in runs), sum(run.length * run.copies for run in runs)


def _repeat_heads(array: jax.Array, axis: int, runs: Sequence[_Run]) -> jax.Array:
    """Returns the array with copies of each head beside it."""
    pieces = jnp.split(array, np.cumsum([run.length for run in runs])[:-1], axis=axis)

    def repeat(piece: jax.Array, run: _Run) -> jax.Array:
        before, after = piece.shape[:axis], piece.shape[axis + 1 :]
        heads = piece.reshape(*before, run.length // run.size, run.size, *after)
        return jnp.repeat(heads, run.copies, axis=axis).reshape(*before, run.length * run.copies, *after)

    return jnp.concatenate([repeat(*pair) for pair in zip(pieces, runs, strict=True)], axis=axis)
