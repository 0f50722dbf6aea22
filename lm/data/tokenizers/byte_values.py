"""One token per value of a byte, and one for the end of a document: images, audio and other data that are no text.

    0–255  the values
    256    <end>

People read and write values as two hexadecimal digits each, with spaces between them: '00 7f ff'.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from lm.config.configurable import configurable
from lm.data.tokenizers.base import Tokenizer
from lm.data.tokenizers.config import TokenizerChoice
from lm.errors import ConfigError, MismatchError

HEAD = b'{"byte_values": 256}\n'
END = 256


@configurable('byte_values', resume=True)
class ByteValuesConfig(TokenizerChoice):
    """One token per value of a byte: nothing is trained and nothing can be set."""

    def settings(self) -> dict[str, str]:
        return {'kind': self.gin_name}

    def contents(self) -> bytes:
        return HEAD


class ByteValues(Tokenizer):
    """The 256 values, and the end of a document."""

    what = 'values of bytes'
    file_name = 'byte_values.json'
    library = 'numpy'
    probe = bytes(range(256)).hex(' ')
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
        """Raises MismatchError for what is not pairs of hexadecimal digits."""
        try:
            return [np.frombuffer(bytes.fromhex(text), np.uint8).astype(np.int32) for text in texts]
        except ValueError as error:
            raise MismatchError(
                f"values of bytes are pairs of hexadecimal digits, such as '00 7f ff' ({error})"
            ) from None

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        values = np.asarray(ids, np.int64)
        return values[values < END].astype(np.uint8).tobytes().hex(' ')

    def piece(self, index: int) -> str:
        return '<end>' if index == END else f'{index:02x}'
