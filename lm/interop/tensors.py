"""Files of tensors: safetensors, in one file or several."""

import importlib.util
import os
import pathlib
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from lm.errors import MismatchError, MissingPackageError, writing
from lm.files import parse_json

WEIGHTS = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
"""The file that lists the file of each tensor, if there are several files."""


def check_safetensors() -> None:
    """Raises ConfigError if the package is not installed."""
    if importlib.util.find_spec('safetensors') is None:
        raise MissingPackageError('model.safetensors', 'safetensors', 'exchange')


def write_tensors(folder: pathlib.Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes model.safetensors with `metadata` in its header. Raises LmError if it cannot be written."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    with writing(folder / WEIGHTS):
        try:
            save_file(dict(tensors), folder / WEIGHTS, {'format': 'pt', **metadata})
        except SafetensorError as error:  # names and sizes are right here, so it is an error of the system
            raise OSError(str(error).rpartition('I/O error: ')[2]) from error
        # The library makes a file that only its owner may read. The other files of an export have the mode of the
        # umask.
        mask = os.umask(0)
        os.umask(mask)
        (folder / WEIGHTS).chmod(0o666 & ~mask)


def read_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """Returns name → float32 array of all tensors of a folder. Raises MismatchError if there are none, or
    damaged ones."""
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
        parts = parse_json((folder / INDEX).read_text())['weight_map'].values()
    except (ValueError, KeyError, AttributeError):
        raise MismatchError(f'{folder / INDEX}: is damaged; fetch it again') from None
    return [folder / pathlib.PurePath(part).name for part in sorted(set(parts))]
