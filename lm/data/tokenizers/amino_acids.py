"""One token per amino acid, in the letters of IUPAC.

     0      <end>
     1      <mask>
     2–21   the 20 standard amino acids: A C D E F G H I K L M N P Q R S T V W Y
     22–27  rare and ambiguous amino acids: B (D or N), J (I or L), O, U, X (any), Z (E or Q)

Sequences are written in capitals; lower case, which FASTA has for masked regions, is read as the same amino acids.
"""

import json
from collections.abc import Iterable, Sequence

import numpy as np

from lm.config.configurable import configurable
from lm.data.tokenizers.base import Tokenizer
from lm.data.tokenizers.config import TokenizerChoice
from lm.errors import ConfigError, MismatchError
from lm.files import parse_json

STANDARD = 'ACDEFGHIKLMNPQRSTVWY'
LETTERS = f'{STANDARD}BJOUXZ'
END, MASK = '<end>', '<mask>'
_HEAD = b'{"amino_acids": '


@configurable('amino_acids', resume=True)
class AminoAcidsConfig(TokenizerChoice):
    """One token per amino acid: nothing is trained and nothing can be set."""

    def contents(self) -> bytes:
        return _HEAD + json.dumps([END, MASK, *LETTERS]).encode() + b'}\n'


class AminoAcids(Tokenizer):
    """The 20 standard amino acids, 6 other letters, the end of a sequence and a mask."""

    what = 'amino acids'
    file_name = 'amino_acids.json'
    library = 'numpy'
    probe = LETTERS

    def __init__(self, model: bytes, eod: int | str | None = None):
        """Raises MismatchError if the contents are damaged, ConfigError for another end-of-document token."""
        try:
            self._pieces = parse_json(model)['amino_acids']
            letters = {piece: i for i, piece in enumerate(self._pieces) if len(piece) == 1}
            ends = {piece: i for i, piece in enumerate(self._pieces) if len(piece) > 1}
            self._ids = np.full(256, -1, np.int32)
            for letter, index in letters.items():
                self._ids[[ord(letter), ord(letter.lower())]] = index
            end, mask = ends[END], ends[MASK]
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise MismatchError(f'{self.file_name}: damaged ({error}); restore the file') from None
        if isinstance(eod, str) and eod not in ends:
            raise ConfigError(f'tokenizer.end_of_document = {eod!r}: amino acids have {END}; delete this')
        super().__init__(model, len(self._pieces), ends[eod] if isinstance(eod, str) else end if eod is None else eod)
        self.mask_id, self.special_ids = mask, tuple(ends.values())

    @classmethod
    def recognises(cls, model: bytes) -> bool:
        return model.startswith(_HEAD)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Raises MismatchError for what is no amino acid."""
        found = []
        for text in texts:
            ids = self._ids[np.frombuffer(text.encode('latin-1', 'replace'), np.uint8)]
            if len(ids) and ids.min() < 0:
                letter = text[int(ids.argmin())]
                raise MismatchError(
                    f'{letter!r} is no amino acid ({LETTERS}); take it out, or read FASTA with @fasta()'
                )
            found.append(ids)
        return found

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        pieces = (self._pieces[i] for i in np.asarray(ids, np.int64).tolist())
        return ''.join(piece for piece in pieces if len(piece) == 1)

    def piece(self, index: int) -> str:
        return self._pieces[index]
