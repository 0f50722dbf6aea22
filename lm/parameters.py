"""The arrays of a model: parameters, which are declared where they are made, and arrays that are never trained.

    nnx.Param(value, **declare('matrix', 'heads', 'head', 'features'))
    nnx.Linear(…, kernel_metadata=declare('matrix', 'embed', 'mlp', part='glu'))

Optimizer, sharding and reports read the declarations. None of them looks at names or shapes.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

KINDS = ('matrix', 'gain', 'bias', 'embedding')
PARTS = ('embedding', 'attention', 'mechanism', 'glu', 'norms')
EPSILON = 1e-5
"""Added to the variance in a normalization, where nothing else is asked for."""
AVERAGE = 'average'
"""The mean of the last parameters in a training state, if the run keeps one."""
LAYER = 'layer'
"""The axis over the layers, the first one of stacked layers."""


@dataclasses.dataclass(frozen=True)
class Declaration:
    """The declaration of a parameter.

    Attributes:
        kind: 'matrix' (something is multiplied by it and summed), 'gain', 'bias' or 'embedding'.
        axes: the meaning of each axis.
        part: the part of the model, for reports; 'mechanism': the parameter belongs to an attention mechanism.
        pieces: sizes of the matrices that stand side by side on the last axis, if there is more than one.
        output: only the logits depend on its product: the last norm, or a separate output matrix.
    """

    kind: str
    axes: tuple[str, ...]
    part: str = 'mechanism'
    pieces: tuple[int, ...] = ()
    output: bool = False

    @property
    def decayed(self) -> bool:
        """True where weight decay applies."""
        return self.kind == 'matrix'


class Buffer(nnx.Variable):
    """A non-trainable array (a random projection): saved in checkpoints, never updated by the optimizer."""


def declare(
    kind: str, *axes: str, part: str = 'mechanism', pieces: tuple[int, ...] = (), output: bool = False
) -> dict[str, Any]:
    """Returns the metadata of a parameter. `Declaration` describes the arguments."""
    if kind not in KINDS or part not in PARTS:
        raise ValueError(f'{kind!r}, part = {part!r}: must be one of {KINDS} and of {PARTS}')
    return {'declaration': Declaration(kind, axes, part, pieces, output)}


def layer_norm(
    size: int, axis: str, rngs: nnx.Rngs, *, part: str = 'mechanism', output: bool = False, **options: Any
) -> nnx.LayerNorm:
    """Returns a layer normalization whose gain and bias are declared; `options` are flax's, such as `epsilon`."""
    kinds = {'scale_metadata': 'gain', 'bias_metadata': 'bias'}
    metadata = {name: declare(kind, axis, part=part, output=output) for name, kind in kinds.items()}
    options = {'epsilon': EPSILON} | options
    return nnx.LayerNorm(size, rngs=rngs, **metadata, **options)


def rms_norm(
    size: int, axis: str, rngs: nnx.Rngs, *, part: str = 'mechanism', output: bool = False, **options: Any
) -> nnx.RMSNorm:
    """Returns a root-mean-square normalization (Zhang and Sennrich 2019) with a declared gain; `options`: flax's."""
    metadata = declare('gain', axis, part=part, output=output)
    options = {'epsilon': EPSILON} | options
    return nnx.RMSNorm(size, rngs=rngs, scale_metadata=metadata, **options)


NORMS = {'layer': layer_norm, 'rms': rms_norm}
"""The normalizations by their names in configurations."""


def stack(module: nnx.Module) -> None:
    """Declares one more axis in front, over layers, for all parameters below `module`."""
    for _, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Param) and (declared := variable.get_metadata('declaration', None)):
            variable.set_metadata(declaration=dataclasses.replace(declared, axes=(LAYER, *declared.axes)))


def shared_axis(shape: Sequence[int], devices: int, names: Sequence[str] = ()) -> int | None:
    """Returns the axis over which devices share an array; None: each device has the whole array.

    It is the first axis on which each device gets a multiple of 8, which fills registers. If there is none, it is the
    largest axis that the number of devices divides. It is never the axis over the layers, along which the model's loop
    runs.

    Args:
        names: the meaning of each axis, if it is known.
    """
    axes = [i for i, n in enumerate(shape) if n % devices == 0 and LAYER not in names[i : i + 1]]
    full = [i for i in axes if shape[i] // devices % 8 == 0]
    return full[0] if full else max(axes, key=lambda i: shape[i], default=None)


def declarations(model: nnx.Module, kind: type[nnx.Param] = nnx.Param) -> dict[str, object]:
    """Returns the declarations of all parameters of a model, which may be abstract: a nested dict like the parameters.

    `kind`: the class of the parameters that count.

    Raises ValueError for a parameter that is not declared, or whose axes do not match its declaration.
    """

    def read(path, variable):
        found = variable.get_metadata('declaration', None)
        if found is None or len(found.axes) != len(variable.shape):
            name = '.'.join(str(getattr(key, 'key', key)) for key in path)
            raise ValueError(f'{name}: of shape {variable.shape}, is declared as {found}; see lm.parameters.declare')
        return found

    state = nnx.state(model, kind)
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    found = jax.tree_util.tree_map_with_path(read, state, is_leaf=is_variable)
    return nnx.to_pure_dict(found)
