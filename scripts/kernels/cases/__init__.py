"""Calls of operations whose TPU kernels `scripts.kernels.cycles` compiles, one file per operation.

Each file has a function `cases`. This package finds the files by itself.
"""

import importlib
import pkgutil

from scripts.kernels.cases.base import Case, KernelCall

__all__ = ['Case', 'KernelCall', 'cases']


def cases() -> dict[str, Case]:
    """Returns name → the function that makes the call to compile, of all operations."""
    modules = [importlib.import_module(f'{__name__}.{module.name}') for module in pkgutil.iter_modules(__path__)]
    return {name: case for module in modules if hasattr(module, 'cases') for name, case in module.cases().items()}
