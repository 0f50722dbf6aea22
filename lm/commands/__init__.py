"""The verbs of the `lm` command, one file each. A file that defines `VERB` is a verb: nothing else lists it.

Importing a verb imports nothing heavy, so that `lm --help` answers at once. Each
`make_call` imports what its work needs.
"""

import importlib
import pkgutil

from lm.commands.verb import Verb


def find_verbs() -> dict[str, Verb]:
    """Returns name → verb of all files here, in the order of `lm --help`."""
    modules = [importlib.import_module(module.name) for module in pkgutil.iter_modules(__path__, f'{__name__}.')]
    verbs: list[Verb] = [module.VERB for module in modules if hasattr(module, 'VERB')]
    return {verb.name: verb for verb in sorted(verbs, key=lambda verb: verb.place)}
