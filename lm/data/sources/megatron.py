"""Megatron's indexed token files: NAME.bin holds the tokens, NAME.idx says where each document lies.

NAME.idx   b'MMIDIDX\\0\\0', version 1 (uint64), code of the tokens' type (uint8), number of sequences and of
           document bounds (uint64); then of each sequence its length (int32) and its first byte in NAME.bin (int64),
           and the sequences at which documents begin, with the number of sequences at the end (int64)
"""

import functools
import itertools
from collections.abc import Iterator

import numpy as np

from lm.config.configurable import configurable
from lm.data.sources.base import Document, Part, hold_tokens
from lm.data.sources.patterns import FilePatterns
from lm.errors import MismatchError
from lm.files import AnyPath, file_size, open_source

MAGIC = b'MMIDIDX\0\0'
TYPES = {1: 'u1', 2: 'i1', 3: '<i2', 4: '<i4', 5: '<i8', 8: '<u2'}
"""Code → type of the tokens."""


@configurable('megatron')
class Megatron(FilePatterns):
    """Token ids of Megatron-LM's preprocess_data.py, whose tokenizer is `tokenizer.model_path`; `path` names the .idx
    files. A part is a range of documents."""

    suffixes = ('.idx',)
    aliases = ('validation', 'valid'), ('validation', 'val')
    holds_tokens = True

    def parts(self, path: AnyPath, unit: int) -> list[Part]:
        dtype, starts, _ = _read_index(str(path))
        sizes = np.diff(starts) * dtype.itemsize
        groups = np.flatnonzero(np.diff(np.cumsum(sizes) // max(1, unit), prepend=0))
        cuts = sorted({0, *groups.tolist(), len(sizes)})
        return [Part(str(path), a, b, int(sizes[a:b].sum())) for a, b in itertools.pairwise(cuts)]

    def read_part(self, part: Part, max_bytes: int) -> Iterator[Document]:
        dtype, starts, first = _read_index(part.file)
        path = open_source(f'{part.file.removesuffix(".idx")}.bin')
        ends = first + starts[1:] * dtype.itemsize
        if (size := file_size(path)) < ends[part.stop - 1]:  # the lengths in an index may ask for any memory
            document = int(np.argmax(ends > size))
            raise MismatchError(f'{path}: cut off in document {document}; fetch the file again')
        with path.open('rb') as file:
            file.seek(first + int(starts[part.start]) * dtype.itemsize)
            for document in range(part.start, part.stop):
                length = int(starts[document + 1] - starts[document])
                tokens = np.frombuffer(file.read(length * dtype.itemsize), dtype)
                yield hold_tokens(f'{part.file}@{document}', tokens, max_bytes)


@functools.lru_cache(maxsize=4)
def _read_index(name: str) -> tuple[np.dtype, np.ndarray, int]:
    """Returns (type of the tokens, offset of each document in tokens and behind them the end of the last, first byte).

    Raises MismatchError for what is no such index, or one of tokens that do not lie one after another.
    """
    raw = open_source(name, 'megatron.path').read_bytes()
    try:
        if raw[:9] != MAGIC or int.from_bytes(raw[9:17], 'little') != 1:
            raise ValueError('not an index of version 1')
        dtype = np.dtype(TYPES[raw[17]])
        sequences, bounds = np.frombuffer(raw, '<u8', 2, 18).tolist()
        lengths = np.frombuffer(raw, '<i4', sequences, 34)
        pointers = np.frombuffer(raw, '<i8', sequences, 34 + 4 * sequences)
        documents = np.frombuffer(raw, '<i8', bounds, 34 + 12 * sequences)
        offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        first = int(pointers[0]) if sequences else 0
        if first < 0 or (lengths < 0).any() or (pointers - first != offsets[:-1] * dtype.itemsize).any():
            raise ValueError('its sequences do not lie one after another')
        if (np.diff(documents, prepend=0, append=sequences) < 0).any():
            raise ValueError('its documents do not lie one after another')
        return dtype, offsets[documents], first
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        reason = f'unknown type of tokens {error}' if isinstance(error, KeyError) else str(error)
        raise MismatchError(f'{name}: not a readable index of Megatron ({reason}); fetch the file again') from None
