"""The base of all tokenizers.

A kind is one class on `Tokenizer` in its own file. A tokenizer is the contents of one file, which lies beside the token
store; their SHA-256 is the fingerprint.
"""

import abc
import hashlib
import itertools
import re
from collections.abc import Iterable, Sequence

import numpy as np

from lm.data.tokenizers.config import TokenizerConfig

PROBE = ' a  b\n\n\tc\r\n\x00 ﬀ é Å 😀 </s> <0x41> '
"""A text that a lossless tokenizer decodes to itself."""


def token_dtype(vocab_size: int) -> np.dtype:
    """Returns the smallest type that holds the ids of a vocabulary: uint16 or uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


class Tokenizer(abc.ABC):
    """Text ↔ token ids.

    Attributes:
        model: the contents of its file.
        sha256: the hash of the contents.
        vocab_size: ids are below it.
        eod_id: the end-of-document token.
        end_ids: the tokens that end documents by their names, the one that counts by default first.
        dtype: the type of its ids, uint16 or uint32.
        lossless: decoding returns spaces, line breaks and rare characters.
        mask_id: the token that stands for a hidden one; None: it has none.
        begin_id: the token that its file puts before every text; None: none. Only runs that were imported with the file
            begin with it: training here separates documents by `eod_id` alone.
        special_ids: tokens that no text holds, the end-of-document token among them.
    """

    what = ''
    """The kind in words, for messages."""
    file_name = 'tokenizer.model'
    """The name of its file in a token store."""
    library = ''
    """The package that encodes, whose version is recorded."""
    probe = PROBE
    """A text that a lossless tokenizer of the kind decodes to itself."""
    mask_id: int | None = None
    begin_id: int | None = None
    names_begin = False
    """The file names `begin_id`. Of other kinds the checkpoint around the file does."""
    holds_text = True
    """False: tokens are values. A value is a byte of the data, and the data have no words."""

    def __init__(self, model: bytes, vocab_size: int, eod_id: int):
        self.model, self.vocab_size, self.eod_id = model, vocab_size, eod_id
        self.end_ids: tuple[int, ...] = (eod_id,)
        self.special_ids: tuple[int, ...] = (eod_id,)
        self.sha256 = hashlib.sha256(model).hexdigest()
        self.dtype = token_dtype(vocab_size)
        self.lossless: bool = self.decode(self.encode_batch([self.probe])[0]) == self.probe

    @classmethod
    @abc.abstractmethod
    def recognises(cls, model: bytes) -> bool:
        """Returns whether the contents of a file seem to be of this kind."""

    @classmethod
    def complete(cls, content: bytes, config: TokenizerConfig) -> bytes:
        """Completes the contents of a foreign file of this kind; returns the contents of other kinds unchanged."""
        return content

    @abc.abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the token ids [tokens] of each text, without end-of-document tokens; uses one thread."""

    def encode_marked(self, text: str) -> np.ndarray:
        """Returns the token ids [tokens] of a text in which names of special tokens stand for these tokens."""
        named = {name: i for i in self.special_ids if (name := self.piece(i))}
        names = '|'.join(map(re.escape, sorted(named, key=len, reverse=True)))
        parts = [part for part in re.split(f'({names})', text) if part]
        texts = iter(self.encode_batch([part for part in parts if part not in named]))
        found = [np.array([named[part]]) if part in named else next(texts) for part in parts]
        return np.concatenate([np.array([], np.int32), *found])

    def encode_answers(self, text: str, answers: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """Encodes like `encode_marked`; returns ids [tokens], and booleans [tokens]: which belong to `answers`."""
        ends = [0, *(place for span in answers for place in span), len(text)]
        parts = [self.encode_marked(text[a:b]) for a, b in itertools.pairwise(ends)]
        belongs = [np.full(len(ids), i % 2 == 1) for i, ids in enumerate(parts)]
        return np.concatenate(parts), np.concatenate(belongs)

    @abc.abstractmethod
    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """Returns the text of token ids; end-of-document and other control tokens have none."""

    @abc.abstractmethod
    def piece(self, index: int) -> str:
        """Returns the piece with this id as the tokenizer writes it; '' where no piece has this id."""

    def encode(self, text: str) -> np.ndarray:
        """Returns the token ids [tokens] of `text`, without an end-of-document token."""
        return self.encode_documents([text])[0][:-1]

    def encode_documents(self, texts: Sequence[str], special_tokens: bool = False) -> tuple[np.ndarray, np.ndarray]:
        """Encodes many documents at once, which is faster than one by one; with `special_tokens` as `encode_marked`.

        Returns:
            The ids of all documents [tokens], uint16 or uint32, the end-of-document token behind each; and the number
            of tokens of each document, that one included [documents], int64.
        """
        eod = np.array([self.eod_id], np.int32)
        encoded = list(map(self.encode_marked, texts)) if special_tokens else self.encode_batch(texts)
        lengths = np.array([len(ids) + 1 for ids in encoded], np.int64)
        return np.concatenate([part for ids in encoded for part in (ids, eod)]).astype(self.dtype), lengths
