"""One token per value of a byte, and one for the end of a document: images, audio and other data that are no text.

    0–255  the values
    256    <end>

As text, a value is one character, so that texts can be joined and cut: Braille patterns, from U+2800 for 0 to U+28FF
for 255.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from lm.config.configurable import configurable
from lm.data.tokenizers.base import Tokenizer
from lm.data.tokenizers.config import TokenizerChoice
from lm.errors import ConfigError, MismatchError

HEAD = b'{"byte_values": 256}\n'
END = 256
FIRST = 0x2800


@configurable('byte_values', resume=True)
class ByteValuesConfig(TokenizerChoice):
    """One token per value of a byte: nothing is trained and nothing can be set."""

    def contents(self) -> bytes:
        return HEAD


class ByteValues(Tokenizer):
    """The 256 values, and the end of a document."""

    what = 'values of bytes'
    file_name = 'byte_values.json'
    library = 'numpy'
    probe = ''.join(chr(FIRST + value) for value in range(END))
    holds_text = False

    def __init__(self, model: bytes, eod: int | str | None = None):
        """Raises ConfigError for another end-of-document token."""
        if eod not in (None, END):
            raise ConfigError(f'tokenizer.end_of_document = {eod!r}: values of bytes have {END}; delete this')
        super().__init__(model, END + 1, END)

    @classmethod
    def recognises(cls, model: bytes) -> bool:
        return model == HEAD

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Raises MismatchError for other characters."""
        found = [np.frombuffer(text.encode('utf-32-le'), np.uint32).astype(np.int64) - FIRST for text in texts]
        for ids in found:
            if len(wrong := ids[(ids < 0) | (ids >= END)]):
                character = chr(wrong[0] + FIRST)
                raise MismatchError(f'{character!r} is no value of a byte; values are written as U+2800 to U+28FF')
        return [ids.astype(np.int32) for ids in found]

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        values = np.asarray(ids, np.int64)
        return (values[values < END] + FIRST).astype('<u4').tobytes().decode('utf-32-le')

    def piece(self, index: int) -> str:
        return '<end>' if index == END else chr(FIRST + index)
