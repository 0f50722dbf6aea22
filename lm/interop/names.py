"""The names of exported tensors, and the arrays of a checkpoint that hold them.

     here                                    exported                                  shape
     params.embedding.embedding              embedding.weight                          [V, D]
     params.blocks.P.X.kernel [layer, …]     layers.N.X.weight                         transposed: [out, in], as PyTorch
     params.blocks.P.X.scale                 layers.N.X.weight                         of normalizations
     params.blocks.P.X.bias                  layers.N.X.bias                           of normalizations, model.biases
     params.blocks.P.attention.Y             layers.N.attention.Y                      as it is, what a mechanism has
     buffers.blocks.P.attention.Y            layers.N.attention.Y                      random projections
     params.final_norm.{scale,bias}          final_norm.{weight,bias}
     params.head                             head.weight                               [V, D], without tied embeddings
     params.positions.embedding              positions.weight                          model.learned_positions

Layer N of a pattern of n mechanisms is entry N // n of the stacked arrays of block N % n. If the last repeat of the
pattern is cut, its layers have blocks of their own after the n. X is one of attention_norm, qkv (queries, keys and
values, in that order), attention_out, glu_norm, glu_in (values, then gates, if there are any) and glu_out.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from lm.checkpoint.snapshot import flatten
from lm.checkpoint.stored_array import StoredArray
from lm.errors import MismatchError
from lm.interop.deferred import Deferred

ENDINGS = {'kernel': 'weight', 'scale': 'weight', 'embedding': 'weight', 'head': 'head.weight'}


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of an exported tensor in a checkpoint: entry `layer` of the array `source` (None: the whole array)."""

    name: str
    source: str
    layer: int | None
    transposed: bool

    def read(self, tensors: Mapping[str, Any]) -> np.ndarray:
        """Returns the numbers of this place of the array."""
        tensor = np.asarray(tensors[self.name])
        return tensor.T if self.transposed else tensor

    def take(self, leaf: Any) -> np.ndarray:
        """Returns the tensor, from the array."""
        if isinstance(leaf, StoredArray):
            found = leaf.read_all() if self.layer is None else leaf.read_row(self.layer)
        else:
            found = np.asarray(leaf)[... if self.layer is None else self.layer]
        return found.T if self.transposed else found

    def shape_in(self, leaf: Any) -> tuple[int, ...]:
        """Returns the tensor's shape, from the array's shape."""
        shape = tuple(leaf.shape if self.layer is None else leaf.shape[1:])
        return shape[::-1] if self.transposed else shape


def places(weights: Mapping[str, Any]) -> list[Place]:
    """Returns the place of every tensor of a model. `weights` holds params and buffers, which may be abstract."""
    flat = flatten(weights)
    layers = {s.split('.')[2]: leaf.shape[0] for s, leaf in flat.items() if s.split('.')[1] == 'blocks'}
    repeats = layers.get('0', 0)
    n = sum(count == repeats for count in layers.values())  # the others are of a repeat that is cut
    found = []
    for source, leaf in flat.items():
        parts = source.split('.')[1:]
        transposed = parts[-1] == 'kernel'
        parts[-1] = ENDINGS.get(parts[-1], parts[-1])
        if parts[0] != 'blocks':
            found.append(Place('.'.join(parts), source, None, transposed))
            continue
        block = int(parts[1])
        for i in range(leaf.shape[0]):
            layer = i * n + block if block < n else repeats * n + block - n
            name = '.'.join(['layers', str(layer), *parts[2:]])
            found.append(Place(name, source, i, transposed))
    return found


def to_tensors(weights: Mapping[str, object]) -> dict[str, Any]:
    """Returns exported name → float32 array (`Deferred`). An array on disk is read when a tensor is asked for."""
    flat = flatten(weights)
    order = {name: i for i, name in enumerate(flat)}
    return {
        place.name: Deferred(
            place.shape_in(flat[place.source]),
            functools.partial(place.take, flat[place.source]),
            (order[place.source], place.layer or 0),
        )
        for place in places(weights)
    }


def from_tensors(tensors: Mapping[str, object], abstract: Mapping[str, object], what: str) -> Any:
    """Returns the weights, as nested dicts like `abstract`. Raises the errors of `find_places`."""
    flat, expected = flatten(abstract), find_places(tensors, abstract, what)
    # Only now: a damaged configuration could ask for more memory than there is.
    arrays = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in flat.items()}
    for place in expected:
        arrays[place.source][... if place.layer is None else place.layer] = place.read(tensors)
    return jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in flat])


def find_places(tensors: Mapping[str, Any], abstract: Mapping[str, Any], what: str) -> list[Place]:
    """Returns the places of tensors, which need only shapes.

    Raises MismatchError, which begins with `what`, if a tensor is missing, left over, or of another shape.
    """
    flat = flatten(abstract)
    expected = places(abstract)
    names = {place.name for place in expected}
    if missing := sorted(names - set(tensors)):
        raise MismatchError(f'{what}: lacks {missing[0]}, and {len(missing) - 1} more of the {len(names)} tensors')
    if extra := sorted(set(tensors) - names):
        raise MismatchError(f'{what}: has {extra[0]}, which the model has not; {len(extra) - 1} more')
    for place in expected:
        tensor, shape = tensors[place.name], place.shape_in(flat[place.source])
        if tensor.shape != shape:
            raise MismatchError(f'{what}: {place.name} is {list(tensor.shape)}, of the model {list(shape)}')
    return expected
