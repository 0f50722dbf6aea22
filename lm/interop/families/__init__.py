"""Shapes of checkpoints that `lm import` reads, one file each. Importing this package registers all of them."""

import pathlib
from collections.abc import Mapping
from typing import Any

from lm.config.configurable import import_modules
from lm.errors import ConfigError
from lm.interop.families.base import FAMILIES, Family

import_modules(__name__, __path__)

__all__ = ['FAMILIES', 'Family', 'choose']


def choose(config: Mapping[str, Any], path: pathlib.Path) -> Family:
    """Returns the family of a checkpoint with this config.json, which lies at `path`.

    Raises ConfigError if no family reads the checkpoint, or no model here computes the same; the message names what
    differs.
    """
    kind = config.get('model_type')
    if kind not in FAMILIES:
        raise ConfigError(f'{path}: model_type = {kind!r}: can be imported are {", ".join(sorted(FAMILIES))}')
    if differences := FAMILIES[kind].differences(config):
        raise ConfigError(f'{path}: a {kind} model that no model here equals: it has {"; ".join(differences)}')
    return FAMILIES[kind]
