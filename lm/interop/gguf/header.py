"""The header of a GGUF file: its bounds are checked before the package `gguf`, which trusts all counts, reads it."""

import math
import pathlib
import struct
from typing import BinaryIO

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

MOST_DIMENSIONS = 4
SMALLEST_FIELD = 13
"""Bytes of a field with an empty name and a value of one byte."""
SMALLEST_TENSOR = 24
"""Bytes that describe a tensor with an empty name and no dimension."""
SIZES = {
    **{GGUFValueType[name]: 1 for name in ('UINT8', 'INT8', 'BOOL')},
    **{GGUFValueType[name]: 2 for name in ('UINT16', 'INT16')},
    **{GGUFValueType[name]: 4 for name in ('UINT32', 'INT32', 'FLOAT32')},
    **{GGUFValueType[name]: 8 for name in ('UINT64', 'INT64', 'FLOAT64')},
}
"""Type of a value → its bytes."""


def check_header(path: pathlib.Path) -> None:
    """Walks the header once. Raises ValueError if a count or a size reaches beyond the file, or has no meaning."""
    with path.open('rb') as file:
        walk = _Walk(file, path.stat().st_size)
        if walk.take(4) != b'GGUF':
            raise ValueError('it does not begin with GGUF')
        if walk.take(4)[:2] == b'\0\0':
            walk.order = '>'
        tensors, fields = walk.number('Q'), walk.number('Q')
        walk.check_count(fields, SMALLEST_FIELD, 'fields')
        for _ in range(fields):
            name = walk.text()
            try:
                walk.skip_value(GGUFValueType(walk.number('I')))
            except ValueError as error:
                raise ValueError(f'{name!r}: {error}') from None
        walk.check_count(tensors, SMALLEST_TENSOR, 'tensors')
        for _ in range(tensors):
            name = walk.text()
            dimensions = walk.number('I')
            if dimensions > MOST_DIMENSIONS:
                raise ValueError(f'tensor {name!r} has {dimensions} dimensions')
            count = math.prod(walk.number('Q') for _ in range(dimensions))
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(walk.number('I'))]
            if walk.number('Q') + count // block * size > walk.size:
                raise ValueError(f'tensor {name!r} of {count} numbers reaches beyond the file')


class _Walk:
    """A place in a file of `size` bytes that moves on; nothing is read that the file does not hold."""

    def __init__(self, file: BinaryIO, size: int):
        self._file, self.size, self._at, self.order = file, size, 0, '<'

    def take(self, count: int) -> bytes:
        self.check_count(count, 1, 'bytes')
        self._at += count
        return self._file.read(count)

    def number(self, kind: str) -> int:
        """Reads an unsigned number, of 4 bytes ('I') or 8 ('Q')."""
        return struct.unpack(self.order + kind, self.take(struct.calcsize(kind)))[0]

    def text(self) -> str:
        return self.take(self.number('Q')).decode('utf-8')

    def check_count(self, count: int, each: int, what: str) -> None:
        """Raises ValueError if the rest of the file is too short for `count` things of at least `each` bytes."""
        if count * each > self.size - self._at:
            raise ValueError(f'{count} {what} reach beyond the file')

    def skip_value(self, kind: GGUFValueType) -> None:
        if kind is GGUFValueType.STRING:
            self.text()
        elif kind is not GGUFValueType.ARRAY:
            self.take(SIZES[kind])
        else:
            of, count = GGUFValueType(self.number('I')), self.number('Q')
            if of is GGUFValueType.ARRAY:
                raise ValueError('it is an array of arrays, which no model has')
            if of is GGUFValueType.STRING:
                self.check_count(count, 8, 'texts')
                for _ in range(count):
                    self.text()
            else:
                self.check_count(count, SIZES[of], 'numbers')
                self._at += count * SIZES[of]
                self._file.seek(self._at)
