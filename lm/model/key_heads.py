"""A model whose query heads share key heads, as the equal model with a key head for each query head.

Linear attention has one state per key head. A student with more key heads than its teacher has larger states, and
begins with copies of the teacher's (HALO, 2026, Table 3).
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm.attention.base import MODEL
from lm.model.functions import ModelFunctions, Weights


def unshare_key_heads(functions: ModelFunctions) -> ModelFunctions:
    """Returns the functions of the model in which each query head has a key head and a value head of its own."""
    config = functions.config
    mechanisms = tuple(
        mechanism if mechanism.n_kv_heads == MODEL else dataclasses.replace(mechanism, n_kv_heads=None)
        for mechanism in config.pattern
    )
    return ModelFunctions(dataclasses.replace(config, n_kv_heads=None, attention=mechanisms), functions.dtype)


def clone_key_heads(functions: ModelFunctions, weights: Weights) -> Weights:
    """Returns the weights of `unshare_key_heads(functions)` that compute what `weights` compute.

    Each key head and value head is repeated for the query heads that share it.
    """
    whole = unshare_key_heads(functions)

    def widen(path: tuple[Any, ...], array: jax.Array, aim: jax.ShapeDtypeStruct) -> jax.Array:
        if array.shape == aim.shape:
            return array
        own = functions.config.resolve(functions.config.stacks[path[1].key])
        copies, head_dim = own.heads.queries // own.heads.keys, own.dims.head_dim

        def repeat(part: jax.Array, size: int) -> jax.Array:
            heads = part.reshape(*part.shape[:-1], -1, size)
            return jnp.repeat(heads, copies, axis=-2).reshape(*part.shape[:-1], -1)

        if array.shape[-1] != sum(own.qkv_sizes):  # a norm of the whole projection of keys
            return repeat(array, head_dim)
        queries, keys, values = jnp.split(array, np.cumsum(own.qkv_sizes)[:-1], axis=-1)
        return jnp.concatenate([queries, repeat(keys, head_dim), repeat(values, own.dims.value_size)], axis=-1)

    params = jax.tree_util.tree_map_with_path(widen, weights['params'], whole.abstract['params'])
    return weights | {'params': params}
