"""Files of tensors: safetensors, in one file or several."""

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from lm.errors import MismatchError, MissingPackageError, writing
from lm.files import parse_json
from lm.interop.deferred import Deferred

WEIGHTS = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
"""The file that lists the file of each tensor, if there are several files."""
PART = 'model-{:05}-of-{:05}.safetensors'
"""The name of one of several files, by its number and their number."""
KINDS = ('F32', 'BF16', 'F16', 'F64')
"""The types of the numbers that are read, as the headers of files name them."""
WRAPPERS = ('_orig_mod.', 'module.')
"""Beginnings of all names of a model that was saved inside torch.compile, or inside a data-parallel wrapper."""
DTYPES = {'float32': np.dtype(np.float32), 'bfloat16': np.dtype(jnp.bfloat16)}
"""The types of the numbers that are written."""


def check_safetensors() -> None:
    """Raises ConfigError if the package is not installed."""
    if importlib.util.find_spec('safetensors') is None:
        raise MissingPackageError('model.safetensors', 'safetensors', 'exchange')


@dataclasses.dataclass(frozen=True)
class WeightFiles:
    """The form in which weights are written: the type of their numbers, and the most bytes of a file (None: any)."""

    dtype: str = 'float32'
    most_bytes: int | None = None

    def write(self, folder: pathlib.Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
        """Writes model.safetensors, or several files and their index, with `metadata` in the headers.

        A tensor is never cut: a larger one has a file of its own. Raises LmError if a file cannot be written.
        """
        parts: list[dict[str, np.ndarray]] = [{}]
        size, total = 0, 0
        for name, tensor in tensors.items():
            converted = np.ascontiguousarray(tensor.astype(DTYPES[self.dtype]))
            if self.most_bytes is not None and parts[-1] and size + converted.nbytes > self.most_bytes:
                parts, size = [*parts, {}], 0
            parts[-1][name] = converted
            size, total = size + converted.nbytes, total + converted.nbytes
        if len(parts) == 1:
            write_file(folder / WEIGHTS, parts[0], metadata)
            return
        named = {PART.format(i, len(parts)): part for i, part in enumerate(parts, 1)}
        for name, part in named.items():
            write_file(folder / name, part, metadata)
        places = {tensor: name for name, part in named.items() for tensor in part}
        index = {'metadata': {'total_size': total}, 'weight_map': dict(sorted(places.items()))}
        with writing(folder / INDEX):
            (folder / INDEX).write_text(json.dumps(index, indent=2) + '\n')


def is_weights(name: str) -> bool:
    """Tells whether `WeightFiles.write` may have written a file of this name."""
    return name in (WEIGHTS, INDEX) or re.fullmatch(r'model-\d{5}-of-\d{5}\.safetensors', name) is not None


def write_file(path: pathlib.Path, tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str]) -> None:
    """Writes one file of tensors with `metadata` in its header. Raises LmError if it cannot be written."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    with writing(path):
        try:
            save_file(dict(tensors), path, {'format': 'pt', **metadata})
        except SafetensorError as error:  # names and sizes are right here, so it is an error of the system
            raise OSError(str(error).rpartition('I/O error: ')[2]) from error
        # The library makes a file that only its owner may read. The other files of an export have the mode of the
        # umask.
        mask = os.umask(0)
        os.umask(mask)
        path.chmod(0o666 & ~mask)


def read_tensors(folder: pathlib.Path) -> dict[str, Any]:
    """Returns name → float32 array of all tensors of a folder, which is read when it is asked for (`Deferred`).

    Raises MismatchError if there are none, or damaged ones.
    """
    tensors: dict[str, Any] = {}
    places = {}
    for path in _files(folder):
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                described = file.get_slice(name)
                kind = described.get_dtype()
                if kind not in KINDS:
                    raise MismatchError(
                        f"{path}: tensor '{name}' holds {kind}, and weights are {', '.join(KINDS)}; "
                        'fetch a checkpoint that is not quantized'
                    )
                tensor = Deferred(described.get_shape(), functools.partial(_read_tensor, path, name))
                known = tensors.setdefault(name, tensor)
                if known is not tensor and not np.array_equal(np.asarray(known), np.asarray(tensor), equal_nan=True):
                    raise MismatchError(
                        f"tensor '{name}': differs between {places[name]} and {path}; keep the right file alone"
                    )
                places[name] = path
    return drop_wrappers(tensors)


def _read_tensor(path: pathlib.Path, name: str) -> np.ndarray:
    """Reads one tensor as float32. The file is closed again: what was read of it would stay in memory."""
    with _open(path) as file:
        return np.asarray(file.get_tensor(name).astype(jnp.float32))


def count_tensors(folder: pathlib.Path) -> int:
    """Returns how many tensors the files of a folder hold. Raises MismatchError as `read_tensors`."""
    count = 0
    for path in _files(folder):
        with _open(path) as file:
            count += len(file.keys())
    return count


def drop_wrappers(tensors: dict[str, object]) -> dict[str, Any]:
    """Returns the tensors under the names of the model itself, without the names of what it was wrapped in."""
    for wrapper in WRAPPERS:
        if tensors and all(name.startswith(wrapper) for name in tensors):
            return drop_wrappers({name.removeprefix(wrapper): tensor for name, tensor in tensors.items()})
    return tensors


@contextlib.contextmanager
def _open(path: pathlib.Path) -> Iterator[Any]:
    """Opens one file of tensors. Raises MismatchError if it cannot be read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework='flax') as file:  # NumPy has no bfloat16
            yield file
    except (OSError, SafetensorError) as error:
        raise MismatchError(f'{path} cannot be read ({" ".join(str(error).split())}); fetch it again') from None


def read_metadata(folder: pathlib.Path) -> dict[str, str]:
    """Returns the texts in the header of the first file of tensors; {} where none can be read: `read_tensors` tells."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(_files(folder)[0], framework='numpy') as file:
            return file.metadata() or {}
    except (OSError, SafetensorError, MismatchError, IndexError):
        return {}


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (folder / INDEX).exists():
        raise MismatchError(f'{folder}: holds neither {WEIGHTS} nor {INDEX}; other formats are not read')
    try:
        parts = parse_json((folder / INDEX).read_bytes())['weight_map'].values()
        return [folder / pathlib.PurePath(part).name for part in sorted(set(parts))]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise MismatchError(f'{folder / INDEX}: is damaged; fetch it again') from None
