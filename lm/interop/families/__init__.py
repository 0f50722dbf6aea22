"""Shapes of checkpoints that `lm import` reads, one file each. Importing this package registers all of them."""

import contextlib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from lm.config.configurable import import_modules
from lm.errors import ConfigError, MismatchError
from lm.interop.families.base import FAMILIES, Family

import_modules(__name__, __path__)

__all__ = ['FAMILIES', 'Family', 'choose', 'reading_config']


def choose(config: Mapping[str, Any], path: pathlib.Path) -> Family:
    """Returns the family of a checkpoint with this config.json, which lies at `path`.

    Raises ConfigError if no family reads the checkpoint, or no model here computes the same; the message names what
    differs. Raises MismatchError if the config.json lacks something.
    """
    kind = config.get('model_type')
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ConfigError(f'{path}: model_type = {kind!r}: can be imported are {", ".join(sorted(FAMILIES))}')
    with reading_config(path):
        differences = FAMILIES[kind].differences(config)
    if differences:
        raise ConfigError(f'{path}: a {kind} model that no model here equals: it has {"; ".join(differences)}')
    return FAMILIES[kind]


@contextlib.contextmanager
def reading_config(path: pathlib.Path) -> Iterator[None]:
    """Turns what the configuration of the checkpoint at `path` lacks, and values of another kind, into a
    MismatchError."""
    try:
        yield
    except KeyError as error:
        where = path if path.is_file() else path / 'config.json'
        raise MismatchError(f'{where}: lacks {error}; fetch it again') from None
    except (AttributeError, TypeError, ValueError) as error:
        where = path if path.is_file() else path / 'config.json'
        raise MismatchError(f'{where}: has a value of another kind ({error}); compare it with its source') from error
