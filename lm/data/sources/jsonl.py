"""JSON lines."""

import gzip
import itertools
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from lm.config.configurable import configurable, field
from lm.data.sources.base import Document, Part, file_size, too_long
from lm.data.sources.patterns import FilePatterns
from lm.errors import MismatchError
from lm.files import open_path


@configurable('jsonl')
class Jsonl(FilePatterns):
    """JSON lines, one document each, plain or gzipped; a folder holds files {split}.jsonl[.gz] and the like."""

    text_field: str = field('text', help='the key that holds the text')

    suffixes = ('.jsonl', '.jsonl.gz')

    def parts(self, path: Any, unit: int) -> list[Part]:
        size = file_size(path)
        if path.name.endswith('.gz'):
            if not size:
                raise MismatchError(f'{path}: empty, without even the head of a gzip file; fetch it again')
            # Can only be read from its beginning; text is about three times as long.
            return [Part(str(path), 0, -1, 3 * size)]
        return [Part(str(path), a, b, b - a) for a, b in itertools.pairwise([*range(0, size, unit), size])]

    def read_part(self, part: Part, max_bytes: int, wanted: Callable[[str], bool]) -> Iterator[Document]:
        for offset, line in _lines(part, max_bytes):
            identifier = f'{part.file}@{offset}'
            if not wanted(identifier):
                continue
            if line is None:
                yield too_long(identifier, max_bytes)
            elif line.strip():
                yield self._document(identifier, line)

    def _document(self, identifier: str, line: bytes) -> Document:
        try:
            record = json.loads(line.decode('utf-8'))
        except UnicodeDecodeError:
            return Document(identifier, error='invalid UTF-8')
        except (ValueError, RecursionError):
            return Document(identifier, error='invalid JSON')
        text = record.get(self.text_field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            return Document(identifier, error=f'no text in field {self.text_field!r}')
        return Document(identifier, text)


def _lines(part: Part, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Offset and content of each line that begins in the part; None for content longer than `max_bytes`."""
    with open_path(part.file).open('rb') as file:
        packed = part.file.endswith('.gz')
        stream: BinaryIO = gzip.GzipFile(fileobj=file) if packed else file
        offset = part.start
        if offset:  # the line that crosses the beginning belongs to the part before
            stream.seek(offset - 1)
            offset += _skip_line(stream, -1)
        while packed or offset < part.stop:
            try:
                line = stream.readline(max_bytes + 1)
                length = len(line)
                whole = length <= max_bytes or line.endswith(b'\n')
                if not whole:
                    length = _skip_line(stream, length)
            except (EOFError, zlib.error, gzip.BadGzipFile, OSError) as error:
                raise MismatchError(
                    f'{part.file}: damaged behind byte {offset} ({error}); fetch the file again'
                ) from None
            if not line:
                return
            yield offset, line if whole else None
            offset += length


def _skip_line(stream: BinaryIO, length: int) -> int:
    """Reads to the end of the line in pieces; returns `length` plus what was read."""
    while piece := stream.readline(1_000_000):
        length += len(piece)
        if piece.endswith(b'\n'):
            break
    return length
