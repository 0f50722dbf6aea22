"""Shapes of checkpoints that `lm import` reads, one file each. Importing this package registers all of them."""

import pathlib
from typing import Any

from lm.config.configurable import import_modules
from lm.errors import ConfigError, MismatchError
from lm.files import parse_json
from lm.interop.families.base import FAMILIES, Family
from lm.interop.formats import MODEL_TYPE

import_modules(__name__, __path__)

__all__ = ['FAMILIES', 'Family', 'find']


def find(folder: pathlib.Path) -> tuple[Family, dict[str, Any]]:
    """Returns (family, contents of config.json) of a checkpoint.

    Raises:
        MismatchError: config.json is missing or damaged.
        ConfigError: no family reads the checkpoint, or no model here computes the same; the message names what differs.
    """
    path = folder / 'config.json'
    if not path.exists() and (folder / 'config.gin').exists():
        return FAMILIES[MODEL_TYPE], {}
    try:
        config = parse_json(path.read_text())
        kind = config.get('model_type')
    except FileNotFoundError:
        raise MismatchError(f'{path}: there is none; name a folder with config.json and model.safetensors') from None
    except (ValueError, AttributeError, OSError):
        raise MismatchError(f'{path}: cannot be read; fetch it again') from None
    if kind not in FAMILIES:
        raise ConfigError(f'{path}: model_type = {kind!r}: can be imported are {", ".join(sorted(FAMILIES))}')
    if differences := FAMILIES[kind].differences(config):
        raise ConfigError(f'{folder}: a {kind} model that no model here equals: it has {"; ".join(differences)}')
    return FAMILIES[kind], config
