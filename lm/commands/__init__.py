"""The verbs of the `lm` command, one file each. A file that defines `VERB` is a verb: nothing else lists it.

Importing a verb imports nothing heavy, so that `lm --help` answers at once. Each
`make_call` imports what its work needs.
"""

import dataclasses
import importlib
import pkgutil
import types

from lm.commands.verb import Verb


def find_verbs() -> dict[str, Verb]:
    """Returns name → verb of all files here, in the order of `lm --help`."""
    modules = [importlib.import_module(module.name) for module in pkgutil.iter_modules(__path__, f'{__name__}.')]
    verbs = [_complete(module) for module in modules if hasattr(module, 'VERB')]
    return {verb.name: verb for verb in sorted(verbs, key=lambda verb: verb.place)}


def _complete(module: types.ModuleType) -> Verb:
    """Returns the verb of a file with its functions. Files of `lm import` and `lm export` end in _run."""
    name = module.__name__.rpartition('.')[2].removesuffix('_run')
    return dataclasses.replace(module.VERB, name=name, add_flags=module.add_flags, make_call=module.make_call)
