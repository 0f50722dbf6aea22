"""Files of tensors: safetensors, in one file or several."""

import dataclasses
import functools
import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from lm.errors import LmError, MismatchError, writing
from lm.files import AnyPath, parse_json
from lm.interop.deferred import Deferred
from lm.interop.tensor_file import TYPES, TensorFile

WEIGHTS = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
"""The file that lists the file of each tensor, if there are several files."""
PART = 'model-{:05}-of-{:05}.safetensors'
"""The name of one of several files, by its number and their number."""
WRAPPERS = ('_orig_mod.', 'module.')
"""Beginnings of all names of a model that was saved inside torch.compile, or inside a data-parallel wrapper."""
WRITTEN_BYTES = 2**26
"""So much of a tensor is converted at a time, or one of its rows."""
TENSORS_HELD, BESIDE_TENSORS = 3, 1e9
"""An import or export holds the largest tensor at most so often, and needs so many bytes beside it."""
NAMES = {dtype: name for name, dtype in TYPES.items()}
"""Type → its name in the header of a file."""
DTYPES = {'float32': np.dtype(np.float32), 'bfloat16': np.dtype(jnp.bfloat16)}
"""The types of the numbers that are written."""


def predict_memory(size: int, what: str, whole: int = 0) -> str:
    """Returns a line on the memory that an import or export needs, whose largest piece is `what` of `size` bytes.

    `whole` are the bytes of a model that stands in memory beside it.
    """
    most = (whole + TENSORS_HELD * size + BESIDE_TENSORS) / 1e9
    beside = f', beside the model of {whole / 1e9:.2f} GB with merged adapters' if whole else ''
    return f'takes at most {most:.1f} GB of memory: {what} has {size / 1e9:.2f} GB{beside}'


@dataclasses.dataclass(frozen=True)
class WeightFiles:
    """The form in which weights are written: the type of their numbers, and the most bytes of a file (None: any)."""

    dtype: str = 'float32'
    most_bytes: int | None = None

    def write(self, folder: pathlib.Path, tensors: Mapping[str, Deferred], metadata: Mapping[str, str]) -> None:
        """Writes model.safetensors, or several files and their index, with `metadata` in the headers.

        The memory holds one tensor at a time. Equal tensors give equal bytes. A tensor is never cut: a larger one has a
        file of its own. Raises LmError if a file cannot be written.
        """
        parts: list[list[str]] = [[]]
        size, dtype = 0, DTYPES[self.dtype]
        for name, tensor in tensors.items():
            own = tensor.size * dtype.itemsize
            if self.most_bytes is not None and parts[-1] and size + own > self.most_bytes:
                parts, size = [*parts, []], 0
            parts[-1].append(name)
            size += own
        files = [WEIGHTS] if len(parts) == 1 else [PART.format(i, len(parts)) for i in range(1, len(parts) + 1)]
        places: dict[str, tuple[str, int]] = {}
        for file, names in zip(files, parts, strict=True):
            begins = begin_file(folder / file, {name: tensors[name].shape for name in names}, dtype, metadata)
            places |= {name: (file, begin) for name, begin in begins.items()}
        for name in sorted(tensors, key=lambda name: tensors[name].origin):
            file, begin = places[name]
            write_tensor(folder / file, begin, tensors[name], dtype)
        if len(parts) > 1:
            total = sum(tensor.size for tensor in tensors.values()) * dtype.itemsize
            weight_map = {name: file for name, (file, _) in sorted(places.items())}
            with writing(folder / INDEX):
                index = {'metadata': {'total_size': total}, 'weight_map': weight_map}
                (folder / INDEX).write_text(json.dumps(index, indent=2) + '\n')


def is_weights(name: str) -> bool:
    """Tells whether `WeightFiles.write` may have written a file of this name."""
    return name in (WEIGHTS, INDEX) or re.fullmatch(r'model-\d{5}-of-\d{5}\.safetensors', name) is not None


def begin_file(
    path: pathlib.Path, shapes: Mapping[str, Sequence[int]], dtype: np.dtype, metadata: Mapping[str, str]
) -> dict[str, int]:
    """Makes a file of tensors of these shapes with `metadata` in its header; returns where each tensor begins in it.

    The library itself writes what is in memory as a whole, and the order of its metadata changes from call to call.
    https://huggingface.co/docs/safetensors describes the format.
    """
    header: dict[str, object] = {'__metadata__': {'format': 'pt', **metadata}}
    begins, end = {}, 0
    for name, shape in shapes.items():
        begins[name], end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {'dtype': NAMES[dtype], 'shape': list(shape), 'data_offsets': [begins[name], end]}
    text = json.dumps(header, separators=(',', ':')).encode()
    text += b' ' * (-len(text) % 8)
    with writing(path), path.open('wb') as file:
        file.write(len(text).to_bytes(8, 'little') + text)
    return {name: 8 + len(text) + begin for name, begin in begins.items()}


def write_tensor(path: pathlib.Path, begin: int, tensor: Deferred, dtype: np.dtype) -> None:
    """Writes a tensor to its place in a file, some rows at a time. Raises LmError if the file cannot be written."""
    rows = np.atleast_1d(np.asarray(tensor))
    several = max(1, WRITTEN_BYTES // max(1, rows[:1].size * dtype.itemsize))
    with writing(path), path.open('r+b') as file:
        file.seek(begin)
        for start in range(0, len(rows), several):
            part = np.ascontiguousarray(rows[start : start + several], dtype)
            file.write(part.reshape(-1).view(np.uint8).data)


def read_tensors(folder: AnyPath) -> dict[str, Any]:
    """Returns name → float32 array of all tensors of a folder, which is read when it is asked for (`Deferred`).

    Raises MismatchError if there are none, or damaged ones.
    """
    tensors: dict[str, Any] = {}
    places = {}
    for file in _files(folder):
        for name, shape in file.shapes.items():
            tensor = Deferred(shape, functools.partial(file.read, name))
            known = tensors.setdefault(name, tensor)
            if known is not tensor and not np.array_equal(np.asarray(known), np.asarray(tensor), equal_nan=True):
                raise MismatchError(
                    f"tensor '{name}': differs between {places[name]} and {file.path}; keep the right file alone"
                )
            places[name] = file.path
    return drop_wrappers(tensors)


def count_tensors(folder: AnyPath) -> int:
    """Returns how many tensors the files of a folder hold. Raises MismatchError as `read_tensors`."""
    return sum(len(file.shapes) for file in _files(folder))


def drop_wrappers(tensors: dict[str, object]) -> dict[str, Any]:
    """Returns the tensors under the names of the model itself, without the names of what it was wrapped in."""
    for wrapper in WRAPPERS:
        if tensors and all(name.startswith(wrapper) for name in tensors):
            return drop_wrappers({name.removeprefix(wrapper): tensor for name, tensor in tensors.items()})
    return tensors


def read_metadata(folder: AnyPath) -> dict[str, str]:
    """Returns the texts in the header of the first file of tensors; {} where none can be read: `read_tensors` tells."""
    try:
        return _files(folder)[0].metadata
    except (LmError, IndexError):
        return {}


def _files(folder: AnyPath) -> list[TensorFile]:
    return [TensorFile(folder / name) for name in _list_names(folder)]


def _list_names(folder: AnyPath) -> list[str]:
    if (folder / WEIGHTS).exists():
        return [WEIGHTS]
    if not (folder / INDEX).exists():
        raise MismatchError(f'{folder}: holds neither {WEIGHTS} nor {INDEX}; other formats are not read')
    try:
        parts = parse_json((folder / INDEX).read_bytes())['weight_map'].values()
        return [pathlib.PurePath(part).name for part in sorted(set(parts))]
    except (ValueError, KeyError, AttributeError, TypeError):
        raise MismatchError(f'{folder / INDEX}: is damaged; fetch it again') from None
