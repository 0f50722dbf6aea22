"""JSON lines."""

import json
from collections.abc import Iterator

from lm.config.configurable import configurable, field
from lm.data.sources.base import Document, Part, too_long
from lm.data.sources.patterns import LinePatterns, lines


@configurable('jsonl')
class Jsonl(LinePatterns):
    """JSON lines, one document each, plain or gzipped; a folder holds files {split}.jsonl[.gz] and the like."""

    text_field: str = field(default='text', help='the key that holds the text')

    suffixes = ('.jsonl', '.jsonl.gz')

    def read_part(self, part: Part, max_bytes: int) -> Iterator[Document]:
        for offset, line in lines(part, part.stop, max_bytes):
            identifier = f'{part.file}@{offset}'
            if line is None:
                yield too_long(identifier, max_bytes)
            elif line.strip():
                yield self._document(identifier, line)

    def explain_form(self, head: bytes, name: str) -> str | None:
        if head.removeprefix(b'\xef\xbb\xbf').lstrip().startswith(b'['):
            return "is a JSON array, not lines; write one object per line, as jq -c '.[]' does"
        return super().explain_form(head, name)

    def _document(self, identifier: str, line: bytes) -> Document:
        try:
            record = json.loads(line.decode('utf-8-sig'))  # a byte order mark, as Windows writes, is none of the JSON
        except UnicodeDecodeError:
            return Document(identifier, error='invalid UTF-8')
        except (ValueError, RecursionError):
            return Document(identifier, error='invalid JSON')
        return self.read_record(identifier, record)

    def read_record(self, identifier: str, record: object) -> Document:
        """Returns the document of a line, or an error in its place."""
        text = record.get(self.text_field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            return Document(identifier, error=f'no text in field {self.text_field!r}')
        return Document(identifier, text)
