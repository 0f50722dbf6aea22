"""Operations of attention and their neighbours for JAX, with kernels for TPUs and Hopper GPUs; see README.md.

Each operation is a package with a function, its call object and its implementations: a reference that reads like the
formula, XLA, and kernels. The packages import only jax and numpy. They are imported when they are first used.
"""

import importlib
from types import ModuleType

from lm.ops.errors import OperationError

OPERATIONS = (
    'cross_entropy',
    'delta_rule',
    'exact_attention',
    'gated_units',
    'linear_attention',
    'rotary',
    'short_convolution',
    'sketch_networks',
)

__all__ = ['OPERATIONS', 'OperationError']


def __getattr__(name: str) -> ModuleType:
    if name not in OPERATIONS:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return importlib.import_module(f'{__name__}.{name}')
