"""tokenizer.json of Hugging Face, read by its library `tokenizers`.

Names of special tokens that stand in a text are text: they are encoded as their characters. What a tokenizer.json says
of padding, truncation and tokens at the beginning of a text does not count here. Only imported runs begin a text with
that token.
"""

import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from lm.data.tokenizers.base import Tokenizer
from lm.errors import ConfigError, MismatchError, MissingPackageError
from lm.files import parse_json

ENDS = ('<|endoftext|>', '<|end_of_text|>', '<｜end▁of▁sentence｜>', '</s>', '<eos>', '[EOS]')
"""How the token behind a document is called, the first that there is; another one is tokenizer.end_of_document."""

MASKS = ('[MASK]', '<mask>')
"""How the token is called that stands for a hidden one."""


class HuggingFace(Tokenizer):
    """A tokenizer.json."""

    what = 'tokenizer.json of Hugging Face'
    file_name = 'tokenizer.json'
    library = 'tokenizers'

    def __init__(self, model: bytes, eod: int | str | None = None):
        """Raises ConfigError without the library `tokenizers` or an end-of-document token, MismatchError if damaged."""
        os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')  # `lm prepare` has a process for each core
        try:
            import tokenizers
        except ImportError:
            raise MissingPackageError('tokenizer.json', 'tokenizers', 'tokenizers') from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(model.decode())
        except Exception as error:  # the library knows no other class
            reason = ' '.join(str(error).split())[:150]
            raise MismatchError(f'tokenizer.json: {reason}; restore the file') from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True
        self.begin_id = _find_begin(self._tokenizer)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        end = _end(vocabulary, eod)
        self.mask_id = next((vocabulary[name] for name in MASKS if name in vocabulary), None)
        # A file may have them as tokens that are found in a text, where they would end a document in its middle.
        names = [self._tokenizer.id_to_token(i) for i in (end, self.mask_id) if i is not None]
        self._tokenizer.add_special_tokens([name for name in names if name is not None])
        super().__init__(model, max(vocabulary.values()) + 1, end)
        special = {i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special}
        self.special_ids = tuple(sorted(special | {self.eod_id}))

    @classmethod
    def recognises(cls, model: bytes) -> bool:
        try:
            return model.lstrip()[:1] == b'{' and 'model' in parse_json(model)
        except ValueError:
            return False

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        try:
            found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library knows no other class
            raise MismatchError(
                f'tokenizer.json: cannot encode every text ({error}); give it a token for what it does not know'
            ) from None
        return [np.array(one.ids, np.int32) for one in found]

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return self._tokenizer.decode(np.asarray(ids, np.int64).tolist(), skip_special_tokens=True)

    def piece(self, index: int) -> str:
        return self._tokenizer.id_to_token(index) or ''


def _find_begin(tokenizer: Any) -> int | None:
    """Returns the token that the post-processor puts before a text; None: there is none."""
    try:
        whole, text = (tokenizer.encode('a', add_special_tokens=more).ids for more in (True, False))
    except Exception:  # it does not know this text
        return None
    return whole[0] if whole[:1] != text[:1] else None


def _end(vocabulary: dict[str, int], eod: int | str | None) -> int:
    if isinstance(eod, int):
        return eod
    if eod is not None and eod not in vocabulary:
        raise ConfigError(f'tokenizer.end_of_document = {eod!r}: the tokenizer has no such token')
    found = [vocabulary[name] for name in ((eod,) if eod else ENDS) if name in vocabulary]
    if not found:
        raise ConfigError(
            f'tokenizer.end_of_document = None: the tokenizer has none of {", ".join(ENDS)}; '
            'name the token that stands behind a document'
        )
    return found[0]
