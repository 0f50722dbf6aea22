"""The first layer whose activations are not finite, where a figure of finite weights is not.

B batch, L length, D model width, N places: the embedding, both halves of each layer, and the last norm.
"""

import contextlib
from collections.abc import Iterator
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from lm.errors import Diverged
from lm.model import Transformer
from lm.ops.documents import Documents
from lm.ops.errors import OperationError
from lm.ops.sequence import over_tokens
from lm.pod.mesh import replicated, round_up_rows

REMEDY = 'all weights are finite, so the activations overflow; choose an earlier step, or another run'


def refuse_not_finite(
    model: Transformer, inputs_L: np.ndarray, what: str, documents: Documents | None = None
) -> NoReturn:
    """Raises Diverged for a figure that is not finite, and names the first layer that is not.

    Args:
        model: with finite weights.
        inputs_L: token ids of a window that the model has read.
        what: the figure, for the message.
        documents: how the documents of the window are separated; None: they are not.
    """
    where = find_layer(model, inputs_L, documents)
    raise Diverged(f'{what} is not finite{f", first in {where}" if where else ""}: {REMEDY}')


def find_layer(model: Transformer, inputs_L: np.ndarray, documents: Documents | None = None) -> str | None:
    """Returns the first place of the model whose output for any token is not finite.

    Returns None if there is none, as where only logits or decoding states overflow, or if devices cannot compute the
    window as a whole.
    """
    graph, weights = nnx.split(model)
    shardings = (leaf.sharding for leaf in jax.tree.leaves(weights))
    meshes = (sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding))
    mesh = next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)
    tokens_BxL = np.repeat(inputs_L[None], round_up_rows(1, mesh) if mesh else 1, axis=0)

    def watch(weights: nnx.State, tokens_BxL: jax.Array) -> jax.Array:
        positions, starts_BxL = jnp.arange(tokens_BxL.shape[1]), None
        if documents is not None:
            positions, starts_BxL = documents.of(tokens_BxL)

        def on_part(weights: nnx.State, *arrays: jax.Array) -> jax.Array:
            found = [jnp.isfinite(x_BxLxD).all(-1) for x_BxLxD in _compute_places(nnx.merge(graph, weights), *arrays)]
            return jnp.stack(found, axis=-1)

        axes = (None, 1, positions.ndim - 1, None if starts_BxL is None else 1)
        return over_tokens(on_part, axes)(weights, tokens_BxL, positions, starts_BxL)

    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        try:
            program = jax.jit(watch, out_shardings=replicated(mesh) if mesh else None)
            finite_N = np.asarray(program(weights, tokens_BxL))[0].all(axis=0)
        except (jax.errors.JaxRuntimeError, OperationError):  # chunks and decoding need less memory, and no whole parts
            return None
    return None if finite_N.all() else name_places(model)[int(finite_N.argmin())]


def _compute_places(
    model: Transformer, tokens_BxL: jax.Array, positions: jax.Array, starts_BxL: jax.Array | None
) -> Iterator[jax.Array]:
    """Yields the output of each place in turn, [B, L, D]."""
    x_BxLxD, rotations = model.embed(tokens_BxL, positions), model.rotate_positions(positions)
    yield x_BxLxD
    for i in range(model.config.n_layers):
        block, rotation = model.layer(i), rotations[model.config.find_layer(i)[0]]
        mixed_BxLxD = block.mix(block.normalize(x_BxLxD), rotation, starts_BxL)
        yield mixed_BxLxD
        x_BxLxD = block.finish(x_BxLxD, mixed_BxLxD)
        yield x_BxLxD
    yield model.final_norm(x_BxLxD)


def name_places(model: Transformer) -> list[str]:
    """Names the places, in the order in which they are computed. Layers count from 0."""
    layers = [f'layer {i} ({part})' for i in range(model.config.n_layers) for part in ('attention', 'feed-forward')]
    return ['the embedding', *layers, 'the last norm']
