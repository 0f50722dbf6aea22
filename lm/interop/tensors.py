"""Files of tensors: safetensors, whole or in parts."""

import importlib.util
import json
import os
import pathlib
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from lm.errors import ConfigError, MismatchError, writing

WEIGHTS = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
"""The file that lists which file holds which tensor, where there are several."""


def check_safetensors() -> None:
    """Raises ConfigError where the package is not installed."""
    if importlib.util.find_spec('safetensors') is None:
        raise ConfigError("safetensors is not installed: pip install 'lm-tpu[exchange]'")


def write_tensors(folder: pathlib.Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes model.safetensors; `metadata` stands in its header. Raises LmError where it cannot be written."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    with writing(folder / WEIGHTS):
        try:
            save_file(dict(tensors), folder / WEIGHTS, {'format': 'pt', **metadata})
        except SafetensorError as error:  # of names and sizes, which are right here, or of the system
            raise OSError(str(error).rpartition('I/O error: ')[2]) from error
        # The library makes a file that its owner alone may read: the others of an export have the mode of the umask.
        mask = os.umask(0)
        os.umask(mask)
        (folder / WEIGHTS).chmod(0o666 & ~mask)


def read_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Name → float32 array of all tensors of a folder. Raises MismatchError where there are none, or damaged ones."""
    from safetensors import SafetensorError, safe_open

    tensors = {}
    for path in _files(folder):
        try:
            with safe_open(path, framework='flax') as file:  # NumPy has no bfloat16
                for name in file.keys():  # noqa: SIM118 (not a mapping)
                    tensors[name] = np.asarray(file.get_tensor(name).astype(jnp.float32))
        except (OSError, SafetensorError) as error:
            raise MismatchError(f'{path} cannot be read ({" ".join(str(error).split())}); fetch it again') from None
    return tensors


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (folder / INDEX).exists():
        raise MismatchError(f'{folder}: holds neither {WEIGHTS} nor {INDEX}; other formats are not read')
    try:
        parts = json.loads((folder / INDEX).read_text())['weight_map'].values()
    except (ValueError, KeyError, AttributeError):
        raise MismatchError(f'{folder / INDEX}: is damaged; fetch it again') from None
    return [folder / pathlib.PurePath(part).name for part in sorted(set(parts))]
