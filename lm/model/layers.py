"""The layers of two models of equal depth, a teacher and its student, whatever their patterns of mechanisms are.

`ModelConfig.find_layer` says which stack of `Transformer.blocks` has a layer.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from lm.model.block import Block, take_apart
from lm.model.functions import ModelFunctions
from lm.model.transformer import Transformer
from lm.ops.rotary import Rotation

BLOCKS = 'blocks'


class RotatedLayer(NamedTuple):
    """One layer, and the rotation of its positions."""

    block: Block
    rotation: Rotation | None


def scan_pairs(
    student: Transformer,
    teacher: Transformer,
    positions: jax.Array,
    function: Callable[..., tuple[jax.Array, Any]],
    x_BxLxD: jax.Array,
    *given_N: jax.Array,
) -> tuple[jax.Array, Any]:
    """Calls (x, found) = function(x, layer of the student, layer of the teacher, *given) through all layers.

    Both patterns repeat together after a period. One loop runs over the periods, so that a program does not grow with
    the depth; layers behind the last whole period follow one by one. The backward pass computes each call again.

    Args:
        student: the first model.
        teacher: the second one, of the same depth.
        positions: of the tokens.
        function: takes and returns x, and returns what it finds.
        x_BxLxD: the input of the first layer.
        given_N: arrays with a number for each layer.

    Returns:
        the output of the last layer, and what the calls found, stacked over the layers.
    """
    models = (student, teacher)
    counts = [len(model.config.pattern) for model in models]
    depth, period = student.config.n_layers, math.lcm(*counts)
    repeats = depth // period
    rotations = [model.rotate_positions(positions) for model in models]
    parts = [[take_apart(blocks) for blocks in model.blocks] for model in models]

    def call(x_BxLxD, which, states, given):
        def on_layers(x_BxLxD, states, given):
            pair = []
            for model, stacks, turned, state in zip(models, parts, rotations, states, strict=True):
                stack, _ = model.config.find_layer(which)
                block = stacks[stack][0](state, lambda block: block)
                pair.append(RotatedLayer(block, turned[stack]))
            return function(x_BxLxD, *pair, *given)

        return jax.checkpoint(on_layers, prevent_cse=False)(x_BxLxD, states, given)

    def pick(which, cuts, cut_given):
        """Returns the states of one layer of each model, or of all layers in its place of a period."""
        states = [
            jax.tree.map(cut, stacks[model.config.find_layer(which)[0]][1])
            for model, stacks, cut in zip(models, parts, cuts, strict=True)
        ]
        return states, [cut_given(array_N) for array_N in given_N]

    def one_period(x_BxLxD, states):
        found = []
        for which, each in enumerate(states):
            x_BxLxD, one = call(x_BxLxD, which, *each)
            found.append(one)
        return x_BxLxD, jax.tree.map(lambda *leaves: jnp.stack(leaves), *found)

    def cut_places(which):
        """Returns the cuts of arrays with one of every `count` layers: for both models, and for `given_N`."""

        def cut(count):
            return lambda leaf: leaf[which // count : repeats * period // count : period // count]

        return [cut(count) for count in counts], cut(1)

    def cut_layer(i):
        cut = lambda place: lambda leaf: leaf[place]  # noqa: E731
        return [cut(model.config.find_layer(i)[1]) for model in models], cut(i)

    places = [pick(which, *cut_places(which)) for which in range(period)] if repeats else []
    found = []
    if repeats:
        x_BxLxD, by_period = jax.lax.scan(one_period, x_BxLxD, places)
        found.append(jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), by_period))
    for i in range(repeats * period, depth):
        x_BxLxD, one = call(x_BxLxD, i, *pick(i, *cut_layer(i)))
        found.append(jax.tree.map(lambda leaf: leaf[None], one))
    return x_BxLxD, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *found)


def find_copied(
    teacher: ModelFunctions, student: ModelFunctions, same_mechanism: bool = False, kind: str = 'params'
) -> dict:
    """Returns True for each array of the student that it takes from the teacher, a nested dict like the arrays.

    The teacher has it in the same layers and in the same shape. Parameters of a mechanism have a meaning for this
    mechanism alone, and so do its random projections.

    Args:
        same_mechanism: the whole of attention has a meaning for its mechanism alone.
        kind: 'params' or 'buffers'.
    """
    theirs = _flatten(teacher.abstract[kind])
    declared = _flatten(student.declared)
    bound = ('mechanism', 'attention') if same_mechanism else ('mechanism',)

    def is_bound(path):
        return declared[path].part in bound if path in declared else path[2] == 'attention'

    def is_alike(path, leaf):
        sources = _find_sources(path, teacher, student)
        if path[0] == BLOCKS and is_bound(path):
            ours = type(student.config.stacks[path[1]])
            if any(type(teacher.config.stacks[source[1]]) is not ours for source, _ in sources):
                return False
        skipped = 1 if path[0] == BLOCKS else 0
        shape = leaf.shape[skipped:]
        return all(source in theirs and theirs[source].shape[skipped:] == shape for source, _ in sources)

    ours = _flatten(student.abstract[kind])
    return unflatten_dict({path: is_alike(path, leaf) for path, leaf in ours.items()})


def find_misfits(
    teacher: ModelFunctions, student: ModelFunctions
) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Returns the parameters outside attention that both models have, in different shapes.

    Each has its name and two shapes of one layer, the teacher's and the student's.
    """
    theirs, declared = _flatten(teacher.abstract['params']), _flatten(student.declared)
    found = []
    for path, leaf in _flatten(student.abstract['params']).items():
        if declared[path].part in ('mechanism', 'attention'):
            continue
        skipped = 1 if path[0] == BLOCKS else 0
        source, _ = _find_sources(path, teacher, student)[0]
        if source in theirs and (shape := theirs[source].shape[skipped:]) != leaf.shape[skipped:]:
            found.append(('.'.join(map(str, path)), shape, leaf.shape[skipped:]))
    return found


def find_same_layers(teacher: ModelFunctions, student: ModelFunctions) -> set[int]:
    """Returns the stacks of the student whose mechanism, options and parameters are the teacher's in each layer."""
    copied = find_copied(teacher, student)[BLOCKS]
    return {
        which
        for which, mechanism in enumerate(student.config.stacks)
        if all(jax.tree.leaves(copied[which]))
        and all(
            teacher.config.layers[i] == mechanism
            and teacher.config.resolve(mechanism) == student.config.resolve(mechanism)
            for i in student.config.list_layers(which)
        )
    }


def copy_layers(
    teacher: ModelFunctions,
    student: ModelFunctions,
    theirs: Mapping[str, object],
    ours: dict,
    same_mechanism: bool = False,
    kind: str = 'params',
) -> dict:
    """Returns the student's arrays of one kind with the teacher's in the places that `find_copied` names.

    Args:
        theirs: the arrays of the teacher.
        ours: the initial ones of the student.
        same_mechanism: as in `find_copied`.
        kind: as in `find_copied`.
    """
    copied, arrays = _flatten(find_copied(teacher, student, same_mechanism, kind)), _flatten(theirs)

    def take(path, leaf):
        if not copied[path]:
            return leaf
        sources = _find_sources(path, teacher, student)
        layers = [arrays[source] if layer is None else arrays[source][layer] for source, layer in sources]
        return (layers[0] if path[0] != BLOCKS else jnp.stack(layers)).astype(leaf.dtype)

    return unflatten_dict({path: take(path, leaf) for path, leaf in _flatten(ours).items()})


def _flatten(tree: Any) -> dict[tuple, Any]:
    """Returns path → leaf of a nested dict."""
    return cast(dict[tuple, Any], flatten_dict(tree))


def _find_sources(path: tuple, teacher: ModelFunctions, student: ModelFunctions) -> list[tuple[tuple, int | None]]:
    """Returns the paths of the teacher's arrays for an array of the student, one per layer of a stack.

    Beside each is the layer in it; None: it is not stacked.
    """
    if path[0] != BLOCKS:
        return [(path, None)]
    places = [teacher.config.find_layer(i) for i in student.config.list_layers(path[1])]
    return [((BLOCKS, stack, *path[2:]), place) for stack, place in places]
