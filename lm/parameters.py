"""What a model holds: parameters, each of which says what it is where it is made, and arrays that are never trained.

    nnx.Param(value, **declare('matrix', 'heads', 'head', 'features'))
    nnx.Linear(…, kernel_metadata=declare('matrix', 'embed', 'mlp', part='glu'))

Optimizer, sharding and reports read the declarations (`declarations`); none of them looks at names or shapes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

KINDS = ('matrix', 'gain', 'bias', 'embedding')
PARTS = ('embedding', 'attention', 'mechanism', 'glu', 'norms')
LAYER = 'layer'
"""The axis over the layers, in front of the others where layers are stacked."""


@dataclasses.dataclass(frozen=True)
class Declaration:
    """What a parameter is.

    Attributes:
        kind: 'matrix' (something is multiplied by it and summed), 'gain', 'bias' or 'embedding'.
        axes: the meaning of each axis.
        part: of the model, for reports; 'mechanism' is what an attention mechanism has of its own.
        pieces: sizes of the matrices that stand side by side on the last axis, if there is more than one.
        output: whether nothing but logits is made of what it gives: the last norm, an output matrix of its own.
    """

    kind: str
    axes: tuple[str, ...]
    part: str = 'mechanism'
    pieces: tuple[int, ...] = ()
    output: bool = False

    @property
    def decayed(self) -> bool:
        """Whether weight decay pulls it towards zero."""
        return self.kind == 'matrix'


class Buffer(nnx.Variable):
    """A non-trainable array (a random projection): saved in checkpoints, never updated by the optimizer."""


def declare(
    kind: str, *axes: str, part: str = 'mechanism', pieces: tuple[int, ...] = (), output: bool = False
) -> dict[str, Any]:
    """The metadata of a parameter; `Declaration` says what the arguments mean."""
    if kind not in KINDS or part not in PARTS:
        raise ValueError(f'{kind!r}, part = {part!r}: must be one of {KINDS} and of {PARTS}')
    return {'declaration': Declaration(kind, axes, part, pieces, output)}


def layer_norm(
    size: int, axis: str, rngs: nnx.Rngs, *, part: str = 'mechanism', output: bool = False, **options: Any
) -> nnx.LayerNorm:
    """Layer normalization whose gain and bias are declared; `options` are flax's."""
    kinds = {'scale_metadata': 'gain', 'bias_metadata': 'bias'}
    metadata = {name: declare(kind, axis, part=part, output=output) for name, kind in kinds.items()}
    return nnx.LayerNorm(size, epsilon=1e-5, rngs=rngs, **metadata, **options)


def rms_norm(
    size: int, axis: str, rngs: nnx.Rngs, *, part: str = 'mechanism', output: bool = False, **options: Any
) -> nnx.RMSNorm:
    """Root-mean-square normalization (Zhang and Sennrich 2019) whose gain is declared; `options` are flax's."""
    says = declare('gain', axis, part=part, output=output)
    return nnx.RMSNorm(size, epsilon=1e-5, rngs=rngs, scale_metadata=says, **options)


NORMS = {'layer': layer_norm, 'rms': rms_norm}
"""By the name that configurations use."""


def stack(module: nnx.Module) -> None:
    """Says of all parameters below `module` that they have one more axis in front, over layers."""
    for _, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Param) and (told := variable.get_metadata('declaration', None)):
            variable.set_metadata(declaration=dataclasses.replace(told, axes=(LAYER, *told.axes)))


def shared_axis(shape: Sequence[int], devices: int, names: Sequence[str] = ()) -> int | None:
    """The axis over which devices share an array: the first of which each gets a multiple of 8, which fills registers;
    else the largest that their number divides. Never that over the layers, which the model's loop takes apart. None:
    each device has the array whole.

    Args:
        names: what each axis means, if that is known.
    """
    axes = [i for i, n in enumerate(shape) if n % devices == 0 and LAYER not in names[i : i + 1]]
    full = [i for i in axes if shape[i] // devices % 8 == 0]
    return full[0] if full else max(axes, key=lambda i: shape[i], default=None)


def declarations(model: nnx.Module) -> dict[str, Any]:
    """What each parameter of a model, which may be abstract, says it is: a nested dict like the parameters' own.

    Raises ValueError where one says nothing, or has not as many axes as it says.
    """

    def told(path, variable):
        found = variable.get_metadata('declaration', None)
        if found is None or len(found.axes) != len(variable.shape):
            name = '.'.join(str(getattr(key, 'key', key)) for key in path)
            raise ValueError(f'{name}: of shape {variable.shape}, says that it is {found}; see lm.parameters.declare')
        return found

    state = nnx.state(model, nnx.Param)
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    found = jax.tree_util.tree_map_with_path(told, state, is_leaf=is_variable)
    return nnx.to_pure_dict(found)
