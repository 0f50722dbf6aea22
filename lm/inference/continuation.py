"""The text that follows one prompt, while its tokens arrive."""

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lm.data.tokenizers import Tokenizer
from lm.errors import ConfigError


class Stops(NamedTuple):
    """The end of a continuation: the first text of `texts`, or a token of `ids` (id → name)."""

    texts: Sequence[str] = ()
    ids: Mapping[int, str] = {}

    @classmethod
    def find(cls, tokenizer: Tokenizer, names: Sequence[str]) -> 'Stops':
        """Returns the stops of these texts. Tokens that the tokenizer writes like this stop, too: many have no text.

        Raises ConfigError for an empty text.
        """
        if '' in names:
            raise ConfigError("--stop '': must hold a character, or be the name of a token")
        pieces = {tokenizer.piece(i): i for i in reversed(range(tokenizer.vocab_size))} if names else {}
        return cls(tuple(names), {pieces[name]: name for name in names if name in pieces})

    def find_text(self, text: str, since: int = 0) -> tuple[int, str] | None:
        """Returns where the first text that is complete begins, and which it is, if it ends after `since`.

        Where several overlap, the first complete one counts: how many tokens come at once must not matter.
        """
        places = ((text.find(stop, max(0, since - len(stop) + 1)), stop) for stop in self.texts)
        found = [(at + len(stop), at, stop) for at, stop in places if at >= 0]
        return min(found)[1:] if found else None

    def count_open(self, text: str) -> int:
        """Returns how many characters at the end of `text` may begin a text that stops."""
        longest = min(len(text), max(map(len, self.texts), default=1) - 1)
        return next((n for n in range(longest, 0, -1) if any(stop.startswith(text[-n:]) for stop in self.texts)), 0)


def decode_after(
    decode: Callable[[Sequence[int]], str], before: Sequence[int] | np.ndarray, tokens: Iterable[int] | np.ndarray
) -> str:
    """Returns the text of tokens that follow others. By themselves, tokenizers may drop a space before the first."""
    last = [int(token) for token in before[-1:]]
    return decode([*last, *map(int, tokens)])[len(decode(last)) :]


class TextStream:
    """The text of tokens that arrive in parts; the cost of a part does not depend on the earlier text.

    Characters can span tokens: bytes without a complete character wait for the next part.
    """

    LONGEST = 64
    """The most tokens that wait: a longer sequence of broken bytes will not become a character."""

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int] | np.ndarray = ()):
        """`before`: the token before the first one."""
        self._decode = decode
        self._before = list(map(int, before))  # the last written token; tokenizers may drop a space before the first
        self._waiting: list[int] = []
        self._written = 0  # characters of waiting tokens that are already written

    def __call__(self, tokens: Iterable[int], last: bool = False) -> str:
        """Returns the text that can be written after these tokens; with `last`, all of it."""
        self._waiting += map(int, tokens)
        text = decode_after(self._decode, self._before, self._waiting)
        whole = text if last or len(self._waiting) > self.LONGEST else text.rstrip('\ufffd')
        new = whole[self._written :]
        if whole == text and self._waiting:
            self._before, self._waiting, self._written = self._waiting[-1:], [], 0
        else:
            self._written = len(whole)
        return new


def show_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Returns the text of token ids for people.

    Between two documents stands the name of the end-of-document token, which has no text.
    """
    parts = np.split(np.asarray(ids), np.flatnonzero(np.asarray(ids) == tokenizer.eod_id))
    return tokenizer.piece(tokenizer.eod_id).join(map(tokenizer.decode, parts))


class Continuation:
    """The text that follows a prompt, with its end.

    Attributes:
        before: the text of the prompt.
        text: what follows, before its stop.
        stop: the text or the name of the token that ended it; None: nothing has.
        ended: true after a stop, or after `max_tokens` tokens.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        prompt: Sequence[int] | np.ndarray,
        max_tokens: int,
        stops: Stops,
    ):
        """`prompt`: token ids; the first one begins the document, and is not shown."""
        self.before = decode([int(token) for token in prompt[1:]])
        self.text = ''
        self.stop: str | None = None
        self.ended = False
        self._known, self._left, self._stops = len(prompt) - 1, max_tokens, stops
        self._stream = TextStream(decode, prompt[-1:] if self._known else ())
        self._begins: list[int] = []  # the place in the text of each token
        self._shown = 0

    @property
    def tokens(self) -> int:
        """The number of tokens that wrote the text."""
        return len(self._begins)

    def add(self, tokens: Iterable[int] | np.ndarray) -> str:
        """Adds tokens that follow the first one of the prompt; returns the text that can be shown now."""
        for token in map(int, tokens):
            if self._known:
                self._known -= 1
            elif not self.ended:
                self._add_one(token)
        end = len(self.text) if self.ended else len(self.text) - self._stops.count_open(self.text)
        new, self._shown = self.text[self._shown : end], max(self._shown, end)
        return new

    def _add_one(self, token: int) -> None:
        self.stop = self._stops.ids.get(token)
        length = len(self.text)
        if self.stop is None:
            self._begins.append(length)
            self._left -= 1
        self.ended = self.stop is not None or not self._left
        self.text += self._stream([token] if self.stop is None else [], last=self.ended)
        if found := self._stops.find_text(self.text, length):
            begin, self.stop = found
            self.text, self.ended = self.text[:begin], True
            del self._begins[bisect.bisect_left(self._begins, begin) :]
