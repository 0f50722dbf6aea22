"""A token for each byte of UTF-8, and one for the end of a document (Xue et al. 2022, ByT5, without its sentinels)."""

from collections.abc import Iterable, Sequence

import numpy as np

from lm.config.configurable import configurable
from lm.data.tokenizers.base import Tokenizer
from lm.data.tokenizers.config import TokenizerChoice
from lm.errors import ConfigError

HEAD = b'{"byte_level": 256}\n'
END = 256


# `prepare.tokenizer = @byte_level()`. A kind whose files users bring with `tokenizer.model_path` needs no choice.
@configurable('byte_level', resume=True)
class ByteLevelConfig(TokenizerChoice):
    """A token for each byte: nothing is trained and nothing can be set."""

    def contents(self) -> bytes:
        return HEAD


# The contents of one file are the whole tokenizer. The file lies beside the tokens; its SHA-256 is the fingerprint.
class ByteLevel(Tokenizer):
    """The 256 bytes, and the end of a document."""

    what = 'bytes'
    file_name = 'byte_level.json'
    library = 'numpy'

    def __init__(self, model: bytes, eod: int | str | None = None):
        """Raises ConfigError for another end-of-document token."""
        if eod not in (None, END):
            raise ConfigError(f'tokenizer.end_of_document = {eod!r}: bytes have {END}; delete this')
        super().__init__(model, END + 1, END)

    @classmethod
    def recognises(cls, model: bytes) -> bool:
        return model == HEAD

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8).astype(np.int32) for text in texts]

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return bytes(i for i in np.asarray(ids, np.int64).tolist() if i < END).decode(errors='replace')

    def piece(self, index: int) -> str:
        return '<end>' if index == END else repr(bytes([index]))[2:-1]
