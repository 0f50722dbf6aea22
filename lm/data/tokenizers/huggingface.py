"""tokenizer.json of Hugging Face, read by its library `tokenizers`.

Names of special tokens that stand in a text are text: they are encoded as their characters, except by `encode_marked`.
What a tokenizer.json says of padding, truncation and tokens at the beginning of a text does not count here. Only
imported runs begin a text with that token.
"""

import functools
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lm.data.tokenizers.base import Tokenizer
from lm.errors import ConfigError, MismatchError, require
from lm.files import parse_json

if TYPE_CHECKING:
    import tokenizers

ENDS = ('<|endoftext|>', '<|end_of_text|>', '<｜end▁of▁sentence｜>', '</s>', '<eos>', '[EOS]')
"""How the token behind a document is called, the first special one; another one is tokenizer.end_of_document.

Gemma has `</s>` too, as a token for text in HTML.
"""

MASKS = ('[MASK]', '<mask>')
"""How the token is called that stands for a hidden one."""


class HuggingFace(Tokenizer):
    """A tokenizer.json."""

    what = 'tokenizer.json of Hugging Face'
    file_name = 'tokenizer.json'
    library = 'tokenizers'
    names_begin = True

    def __init__(self, model: bytes, eod: int | str | None = None):
        """Raises ConfigError without the library `tokenizers` or an end-of-document token, MismatchError if damaged."""
        os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')  # `lm prepare` has a process for each core
        require('tokenizers', 'tokenizer.json', 'tokenizers')
        import tokenizers

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
        if (largest := max(vocabulary.values(), default=0)) >= 2**31:  # tokens are int32 here
            raise MismatchError(f'tokenizer.json: has a token of the id {largest}; restore the file')
        ends = _find_ends(self._tokenizer, vocabulary)
        end = _choose_end(vocabulary, ends, eod)
        self.mask_id = next((vocabulary[name] for name in MASKS if name in vocabulary), None)
        # A file may have them as tokens that are found in a text, where they would end a document in its middle.
        names = [self._tokenizer.id_to_token(i) for i in (end, self.mask_id) if i is not None]
        self._tokenizer.add_special_tokens([name for name in names if name is not None])
        super().__init__(model, max(vocabulary.values()) + 1, end)
        self.end_ids, self.special_ids = ends, tuple(sorted(_find_special(self._tokenizer) | {self.eod_id}))

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

    def encode_marked(self, text: str) -> np.ndarray:
        return np.array(self._marked.encode(text, add_special_tokens=False).ids, np.int32)

    def encode_answers(self, text: str, answers: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        found = self._marked.encode(text, add_special_tokens=False)
        starts = np.array([start for start, _ in found.offsets], np.int64)
        belongs = np.zeros(len(starts), bool)
        for first, end in answers:
            belongs |= (first <= starts) & (starts < end)
        return np.array(found.ids, np.int32), belongs

    @functools.cached_property
    def _marked(self) -> 'tokenizers.Tokenizer':
        """The same tokenizer, for texts with special tokens."""
        import tokenizers

        made = tokenizers.Tokenizer.from_str(self._tokenizer.to_str())
        made.encode_special_tokens = False
        return made

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return self._tokenizer.decode(np.asarray(ids, np.int64).tolist(), skip_special_tokens=True)

    def piece(self, index: int) -> str:
        return self._tokenizer.id_to_token(index) or ''


def _find_begin(tokenizer: 'tokenizers.Tokenizer') -> int | None:
    """Returns the token that the post-processor puts before a text; None: there is none."""
    try:
        whole, text = (tokenizer.encode('a', add_special_tokens=more).ids for more in (True, False))
    except Exception:  # it does not know this text
        return None
    return whole[0] if whole[:1] != text[:1] else None


def _find_special(tokenizer: 'tokenizers.Tokenizer') -> set[int]:
    """Returns the tokens that the file marks as special."""
    return {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}


def _find_ends(tokenizer: 'tokenizers.Tokenizer', vocabulary: dict[str, int]) -> tuple[int, ...]:
    """Returns the special tokens with a name of `ENDS`, in this order. Where no token is special, each may be one."""
    special, named = _find_special(tokenizer), [vocabulary[name] for name in ENDS if name in vocabulary]
    return tuple(i for i in named if i in special or not special)


def _choose_end(vocabulary: dict[str, int], ends: Sequence[int], eod: int | str | None) -> int:
    if isinstance(eod, int):
        return eod
    if eod is not None and eod not in vocabulary:
        raise ConfigError(f'tokenizer.end_of_document = {eod!r}: the tokenizer has no such token')
    if eod is None and not ends:
        raise ConfigError(
            f'tokenizer.end_of_document = None: the tokenizer has none of {", ".join(ENDS)} as a special token; '
            'name the token that stands behind a document'
        )
    return ends[0] if eod is None else vocabulary[eod]
