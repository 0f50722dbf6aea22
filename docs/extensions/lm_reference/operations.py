"""The operations of `lm.ops`: for each package what its `__all__` lists."""

import importlib
import inspect
from types import ModuleType

from lm import ops
from lm.ops.platform import Implementations
from lm_reference.markdown import code, docstring
from lm_reference.python import describe_class, describe_function, heading, shorten


def page() -> str:
    """A section per operation."""
    return '\n\n'.join(_operation(importlib.import_module(f'lm.ops.{name}')) for name in ops.OPERATIONS)


def _operation(module: ModuleType) -> str:
    found = {name: getattr(module, name) for name in module.__all__}
    functions = {name: value for name, value in found.items() if inspect.isfunction(value)}
    classes = {name: value for name, value in found.items() if isinstance(value, type)}
    others = {name: value for name, value in found.items() if name not in functions | classes}
    parts = [heading(module.__name__, 2), docstring(module.__doc__)]
    parts += [describe_function(f'{module.__name__}.{name}', value) for name, value in functions.items()]
    parts += [describe_class(f'{module.__name__}.{name}', value) for name, value in classes.items()]
    tables = {name: value for name, value in others.items() if isinstance(value, Implementations)}
    parts += [f'{code(name)}, the implementations: {", ".join(map(code, value))}.' for name, value in tables.items()]
    if constants := [f'{name} = {shorten(repr(others[name]))}' for name in others if name not in tables]:
        parts.append(f'Types and constants: {", ".join(map(code, constants))}.')
    return '\n\n'.join(parts)
