"""FASTA, as UniProt distributes TrEMBL (uniprot_trembl.fasta.gz): behind `>` and a name, lines of amino acids."""

import codecs
import dataclasses
from collections.abc import Iterator

from lm.config.configurable import configurable, field
from lm.data.sources.base import Document, Part, too_long
from lm.data.sources.patterns import PACKED, LinePatterns, lines
from lm.data.tokenizers.amino_acids import LETTERS

NO_NAME = 'amino acids before the first line that begins with >'
STOP = '*'
"""Where translation stops; one behind the last amino acid says nothing that the end of the sequence does not."""


@configurable('fasta')
class Fasta(LinePatterns):
    """Files of proteins, plain or gzipped, a document each: its amino acids as one line of capitals.

    A folder holds files {split}.fasta[.gz], {split}.fa[.gz] or {split}.faa[.gz] and the like; else all such files of it
    belong together, and a share of the sequences is held out. Names are left out, and so are white space, lines that
    begin with `;`, and a stop at the end; lower case (masked regions) becomes upper case. A sequence that holds
    anything else, such as a gap or a stop inside, is a bad record.
    """

    max_length: int | None = field(
        default=None,
        minimum=1,
        help='longer sequences are cut to so many amino acids (Performer App. C.1: 1024); None: none',
    )

    suffixes = tuple(f'.{name}{packed}' for name in ('fasta', 'fa', 'faa') for packed in ('', PACKED))
    unsplit = tuple(f'*{suffix}' for suffix in suffixes)

    def read_part(self, part: Part, max_bytes: int) -> Iterator[Document]:
        packed, record = part.file.endswith(PACKED), None
        # Records whose first line begins in the part belong to it; the last one may end after the part.
        for offset, line in lines(part, -1, max_bytes):
            identifier = f'{part.file}@{offset}'
            line = line if line is None or offset else line.removeprefix(codecs.BOM_UTF8)
            if line is not None and line.startswith(b'>'):
                yield from self._documents(record, max_bytes)
                record = _Record(identifier)
                if not packed and offset >= part.stop:
                    return
            elif record is not None:
                record.add(line, max_bytes)
            elif part.start == 0 and (line is None or _residues(line)):
                record = _Record(identifier, NO_NAME)
        yield from self._documents(record, max_bytes)

    def _documents(self, record: '_Record | None', max_bytes: int) -> Iterator[Document]:
        if record is None:
            return
        if record.error:
            yield Document(record.identifier, error=record.error)
        elif record.pieces is None:
            yield too_long(record.identifier, max_bytes)
        else:
            text = b''.join(record.pieces).decode('latin-1').upper().removesuffix(STOP)
            foreign = [letter for letter in sorted(set(text)) if letter not in LETTERS]
            if foreign:
                yield Document(record.identifier, error=f'{foreign[0]!r} is no amino acid')
            else:
                yield Document(record.identifier, text[: self.max_length])


@dataclasses.dataclass
class _Record:
    """A sequence while it is read; `pieces` is None once it is too long."""

    identifier: str
    error: str | None = None
    pieces: list[bytes] | None = dataclasses.field(default_factory=list)
    size: int = 0

    def add(self, line: bytes | None, max_bytes: int) -> None:
        if self.pieces is None:
            return
        residues = None if line is None else _residues(line)
        self.size += max_bytes + 1 if residues is None else len(residues)
        if self.size > max_bytes:
            self.pieces = None
        elif residues:
            self.pieces.append(residues)


def _residues(line: bytes) -> bytes:
    """Returns the letters that a line adds to a sequence."""
    return b'' if line.startswith(b';') else b''.join(line.split())
