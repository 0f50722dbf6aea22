"""Files of ready tokens: nanoGPT's .bin and llm.c's.

nanoGPT writes token ids one after another (uint16) and nothing else. llm.c writes 256 numbers before them (int32): a
number that tells the type, a version, the number of tokens, zeros. Either may hold an end-of-document token behind or
before each document; here it ends the document before it.
"""

import itertools
from collections.abc import Iterator

import numpy as np

from lm.config.configurable import configurable, field
from lm.data.sources.base import Document, Part, hold_tokens
from lm.data.sources.patterns import FilePatterns
from lm.errors import ConfigError, MismatchError
from lm.files import AnyPath, file_size, open_source

HEADER_BYTES = 1024
MAGICS = {20_240_520: 'uint16', 20_240_801: 'uint32'}
"""First number of llm.c's header → type of the tokens."""
BLOCK = 2**20
"""Tokens read at a time."""


@configurable('token_files')
class TokenFiles(FilePatterns):
    """Token ids of nanoGPT (.bin without a header) or llm.c (with one), whose tokenizer is `tokenizer.model_path`. A
    part is a range of tokens; a document belongs to the part that it begins in."""

    eod: int = field(default=50_256, minimum=0, help='the end-of-document token in the files, as the tokenizer has it')
    dtype: str = field(default='uint16', choices=('uint16', 'uint32'), help='of files without a header')

    suffixes = ('.bin',)
    aliases = (('validation', 'val'),)
    holds_tokens = True

    def check_eod(self, eod: int) -> None:
        if eod != self.eod:
            raise ConfigError(
                f"token_files.eod = {self.eod}: the tokenizer's end-of-document token is {eod}; set token_files.eod = "
                f'{eod}, or the tokenizer that made the tokens'
            )

    def parts(self, path: AnyPath, unit: int) -> list[Part]:
        dtype, _, count = self._layout(path)
        step = max(1, unit // dtype.itemsize)
        cuts = [*range(0, count, step), count]
        return [Part(str(path), a, b, (b - a) * dtype.itemsize) for a, b in itertools.pairwise(cuts)]

    def read_part(self, part: Part, max_bytes: int) -> Iterator[Document]:
        dtype, offset, count = self._layout(open_source(part.file))
        begun, pieces = part.start, []
        is_inside = part.start == 0  # else up to the first end the tokens belong to the part before
        with open_source(part.file).open('rb') as file:
            position = max(0, part.start - 1)
            file.seek(offset + position * dtype.itemsize)
            while position < count and (begun < part.stop or not is_inside):
                block = np.frombuffer(file.read(BLOCK * dtype.itemsize), dtype)
                last = 0
                for end in np.flatnonzero(block == self.eod) + 1:
                    if is_inside:
                        tokens = np.concatenate([*pieces, block[last:end]])
                        yield hold_tokens(f'{part.file}@{begun}', tokens, max_bytes)
                    is_inside, pieces, last, begun = True, [], int(end), position + int(end)
                    if begun >= part.stop:
                        return
                if is_inside:
                    pieces.append(block[last:])
                position += len(block)
            if is_inside and begun < min(part.stop, count):
                yield hold_tokens(f'{part.file}@{begun}', np.concatenate(pieces), max_bytes)

    def _layout(self, path: AnyPath) -> tuple[np.dtype, int, int]:
        """Returns (type of the tokens, bytes before the first, how many). Raises MismatchError for a cut file."""
        size = file_size(path)
        with path.open('rb') as file:
            head = np.frombuffer(file.read(HEADER_BYTES), '<i4', count=3) if size >= HEADER_BYTES else np.zeros(3)
        magic, _, declared = map(int, head)
        dtype = np.dtype(MAGICS.get(magic, self.dtype)).newbyteorder('<')
        offset = HEADER_BYTES if magic in MAGICS else 0
        count, rest = divmod(size - offset, dtype.itemsize)
        if rest or (offset and declared != count):
            raise MismatchError(
                f'{path}: cut off, or not of {dtype.name}; fetch the file again or set token_files.dtype'
            )
        return dtype, offset, count
