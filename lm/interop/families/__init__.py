"""Shapes of checkpoints that `lm import` reads, one file each. Importing this package registers all of them."""

import contextlib
import difflib
from collections.abc import Callable, Iterator

from lm.config.configurable import import_modules
from lm.errors import ConfigError, MismatchError
from lm.files import AnyPath
from lm.interop.families.base import FAMILIES, Family
from lm.interop.hyperparameters import Hyperparameters

import_modules(__name__, __path__)

__all__ = ['FAMILIES', 'Family', 'check_layers', 'choose', 'reading_config']

LAYERS = ('num_hidden_layers', 'n_layer', 'block_count')
"""The names of the number of layers."""
MANY_LAYERS = 1000
"""More layers than any published model has."""


def choose(config: Hyperparameters, path: AnyPath) -> Family:
    """Returns the family of a checkpoint with this config.json, which lies at `path`.

    Raises ConfigError if no family reads the checkpoint, or no model here computes the same; the message names what
    differs. Raises MismatchError if the config.json lacks something.
    """
    kind = config.get('model_type')
    if not isinstance(kind, str) or kind not in FAMILIES:
        known = f'can be imported are {", ".join(sorted(FAMILIES))}'
        raise ConfigError(f'{path}: model_type = {kind!r}: {known}{describe_nearest(kind, config)}')
    with reading_config(path):
        differences = FAMILIES[kind].differences(config)
    if differences:
        raise ConfigError(f'{path}: a {kind} model that no model here equals: it has {"; ".join(differences)}')
    return FAMILIES[kind]


def describe_nearest(kind: object, config: Hyperparameters) -> str:
    """Returns which family has the nearest name to a `model_type` that is not read, and what it does not compute of a
    config.json; '' where no name is near."""
    names = difflib.get_close_matches(kind, FAMILIES, 1) if isinstance(kind, str) else []
    if not names:
        return ''
    try:
        differences = FAMILIES[names[0]].differences(config)
    except (KeyError, ValueError):  # its entries are of another kind
        differences = ['other entries']
    differs = '; '.join(differences) or 'nothing that config.json says; compare the code of both'
    return f'. The nearest is {names[0]}; what differs: {differs}'


def check_layers(config: Hyperparameters, count_tensors: Callable[[], int], path: AnyPath) -> None:
    """Raises MismatchError if the checkpoint at `path` names many layers, and more than it has tensors.

    A description of so many layers could take hours.
    """
    for name, value in (config.section('text_config') | config).items():
        if name in LAYERS and isinstance(value, int) and value > MANY_LAYERS and value > (tensors := count_tensors()):
            raise MismatchError(f'{path}: {name} = {value}, and there are only {tensors} tensors; fetch it again')


@contextlib.contextmanager
def reading_config(path: AnyPath) -> Iterator[None]:
    """Turns what the configuration of the checkpoint at `path` lacks, and values of another kind, into a
    MismatchError."""
    try:
        yield
    except KeyError as error:
        where = path if path.is_file() else path / 'config.json'
        raise MismatchError(f'{where}: lacks {error}; fetch it again') from None
    except (AttributeError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        where = path if path.is_file() else path / 'config.json'
        raise MismatchError(f'{where}: has a value of another kind ({error}); compare it with its source') from error
