"""Ranks of byte pairs, as tiktoken reads them: a line for each piece, its bytes in base64 and its id.

Such a file does not say how text is split before the ranks count, nor which id ends a document. What is kept is the
file behind a first line that does, so that it is a whole tokenizer:

    {"ranks": {"pattern": "…", "special": {"<|endoftext|>": 50256}}}
"""

import base64
import json
import re
from collections.abc import Iterable, Sequence

import numpy as np

from lm.data.tokenizers.base import Tokenizer
from lm.data.tokenizers.config import TokenizerConfig
from lm.data.tokenizers.patterns import PATTERNS
from lm.errors import ConfigError, MismatchError, require
from lm.files import parse_json

END = '<|endoftext|>'
PUBLISHED_ENDS = {50_256: 50_256, 50_280: 50_256, 100_256: 100_257, 199_998: 199_999}
"""Number of ranks → id of END in the vocabularies that OpenAI has published; in others it is the next free one."""
PUBLISHED_SPECIALS = {
    128_000: {
        '<|end_of_text|>': 128_001,
        '<|begin_of_text|>': 128_000,
        '<|start_header_id|>': 128_006,
        '<|end_header_id|>': 128_007,
        '<|eot_id|>': 128_009,
    }
}
"""Number of ranks → the special tokens of Llama 3, first the token that ends a document."""
MOST_IDS = 2**31
"""Ids are below this number: tokens are int32 here."""
_LINE = re.compile(rb'[A-Za-z0-9+/=]+ \d+\r?(\n|\Z)')
_HEAD = b'{"ranks": '
MOST_SPACES = 999_000
"""White space in a row that tiktoken splits: its regular expressions give up after a million steps, which is a panic.
Longer runs are cut, for it has no tokens of them."""
_LONG_SPACES = re.compile(rf'((?<!\s)\s{{{MOST_SPACES},}})')


class Ranks(Tokenizer):
    """Ranks of byte pairs with their pattern."""

    what = 'ranks of byte pairs (tiktoken)'
    file_name = 'tokenizer.tiktoken'
    library = 'tiktoken'

    def __init__(self, model: bytes, eod: int | str | None = None):
        """Raises ConfigError without the library `tiktoken`, MismatchError if the contents are damaged."""
        for package in ('tiktoken', 'regex'):
            require(package, 'a file of ranks', 'tokenizers')
        import regex  # tiktoken needs it, too
        import tiktoken

        try:
            head, _, lines = model.partition(b'\n')
            facts = parse_json(head)['ranks']
            ranks, special = _parse(lines), _check_special(facts['special'])
            self._encoding = tiktoken.Encoding(
                'ranks', pat_str=facts['pattern'], mergeable_ranks=ranks, special_tokens=special
            )
            if not all(found.group() for found in regex.finditer(facts['pattern'], self.probe)):  # tiktoken would panic
                raise ValueError('its pattern finds empty parts')
        except (ValueError, KeyError, TypeError, regex.error) as error:
            raise MismatchError(f'ranks of byte pairs: damaged: {error}; restore the file') from None
        if isinstance(eod, str) and eod.isdecimal():
            eod = int(eod)
        if isinstance(eod, str) and eod not in special:
            raise ConfigError(f'tokenizer.end_of_document = {eod!r}: the tokenizer has {", ".join(special)}')
        eod_id = eod if isinstance(eod, int) else special[eod or next(iter(special))]
        # Vocabularies have ids between their ranks and their special tokens that nothing has.
        self._special, self._pieces = set(special.values()), frozenset(ranks.values())
        super().__init__(model, self._encoding.max_token_value + 1, eod_id)
        self.special_ids = tuple(sorted(self._special | {eod_id}))

    @classmethod
    def recognises(cls, model: bytes) -> bool:
        return model.startswith(_HEAD)

    @classmethod
    def complete(cls, content: bytes, config: TokenizerConfig) -> bytes:
        """Returns a bare file of ranks with its first line. Raises MismatchError if it is damaged."""
        if not _LINE.match(content):
            return content
        try:
            ranks = _parse(content)
        except ValueError as error:
            raise MismatchError(f'ranks of byte pairs: damaged: {error}') from None
        facts = {'pattern': PATTERNS[config.pattern], 'special': _special_tokens(ranks, config.end_of_document)}
        return _HEAD + json.dumps(facts).encode() + b'}\n' + content

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encode = self._encoding.encode_ordinary
        return [np.concatenate([np.array(encode(part), np.int32) for part in _cut(text)]) for text in texts]

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        return self._encoding.decode([i for i in np.asarray(ids, np.int64).tolist() if i in self._pieces])

    def piece(self, index: int) -> str:
        is_known = index in self._pieces or index in self._special
        return repr(self._encoding.decode_single_token_bytes(index))[2:-1] if is_known else ''


def _special_tokens(ranks: dict[bytes, int], end: str | None) -> dict[str, int]:
    """Returns name → id of the special tokens, first the token behind each document, which `end` names or numbers.

    Raises ConfigError for a name that a published vocabulary does not have, and for the number of a piece.
    """
    if end and end.isdecimal():
        if int(end) in ranks.values() or int(end) >= MOST_IDS:
            raise ConfigError(f"tokenizer.end_of_document = {end!r}: is the number of a piece; give a special token's")
        return {f'<|{end}|>': int(end)}
    if len(ranks) in PUBLISHED_SPECIALS:
        known = PUBLISHED_SPECIALS[len(ranks)]
        name = end or next(iter(known))
        if name not in known:
            raise ConfigError(
                f'tokenizer.end_of_document = {end!r}: a vocabulary of {len(ranks)} ranks has {", ".join(known)}; '
                'name one of these, or give its number as text'
            )
        return {name: known[name], **known}
    return {end or END: PUBLISHED_ENDS.get(len(ranks), max(ranks.values()) + 1)}


def _cut(text: str) -> list[str]:
    """Parts of a text, the text itself but for the longest runs of white space."""
    if len(text) < MOST_SPACES:
        return [text]
    parts = _LONG_SPACES.split(text)
    for i in range(len(parts) - 2, 0, -2):
        parts[i : i + 1] = [parts[i][j : j + MOST_SPACES] for j in range(0, len(parts[i]), MOST_SPACES)]
    return parts


def _parse(lines: bytes) -> dict[bytes, int]:
    """Returns piece → id. Raises ValueError for other lines, two pieces with one id, and a byte without one."""
    ranks = {}
    for line in filter(None, lines.splitlines()):
        piece, rank = line.split()
        ranks[base64.b64decode(piece, validate=True)] = _check_id(int(rank))
    if len(set(ranks.values())) != len(ranks):  # tiktoken panics
        raise ValueError('two pieces have the same rank')
    if absent := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f'without the byte {absent[0]}; every byte needs a rank')
    return ranks


def _check_special(special: object) -> dict[str, int]:
    """Returns the special tokens of a first line. Raises ValueError unless they are names with ids, at least one."""
    if not isinstance(special, dict) or not special:
        raise ValueError('its first line names no special tokens')
    return {str(name): _check_id(index) for name, index in special.items()}


def _check_id(index: object) -> int:
    """Returns the id of a token. Raises ValueError if it is none."""
    if type(index) is not int or not 0 <= index < MOST_IDS:
        raise ValueError(f'{index!r} is no id of a token')
    return index
