"""The entries of dataset.json that readers of a token store count on.

The checksum of the file shows damage alone: a stranger can compute it, too.
"""

import re
from collections.abc import Iterator, Mapping
from typing import TypeGuard

MOST = 2**53
"""A limit for counts of tokens, documents, words and bytes."""
LARGEST_VOCABULARY = {'uint16': 2**16, 'uint32': 2**31}
"""Type of the tokens → the most pieces that it can number."""
COUNTS = ('documents', 'bytes', 'words', 'tokens')


def find_wrong_entries(info: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Yields name and value of each entry that has a type, a sign or a size that no store has."""
    tokenizer, splits = _as_dict(info.get('tokenizer')), _as_dict(info.get('splits'))
    dtype, size, eod_id = info.get('dtype'), tokenizer.get('vocab_size'), tokenizer.get('eod_id')
    begin_id, settings = tokenizer.get('begin_id'), info.get('settings', {})
    pieces = size if type(size) is int else 0
    known = isinstance(dtype, str) and dtype in LARGEST_VOCABULARY
    checks = {
        'dtype': (dtype, known),
        'source': (info.get('source'), isinstance(info.get('source'), dict)),
        'fingerprint': (info.get('fingerprint'), isinstance(info.get('fingerprint'), str)),
        'tokenizer.sha256': (tokenizer.get('sha256'), isinstance(tokenizer.get('sha256'), str)),
        'tokenizer.vocab_size': (size, known and 0 < pieces <= LARGEST_VOCABULARY[str(dtype)]),
        'tokenizer.eod_id': (eod_id, eod_id is None or (is_count(eod_id) and eod_id < pieces)),
        'tokenizer.begin_id': (begin_id, begin_id is None or (is_count(begin_id) and begin_id < pieces)),
        'tokenizer.file': (tokenizer.get('file'), is_name(tokenizer.get('file', 'tokenizer.model'))),
        'splits': (info.get('splits'), bool(splits)),
        'settings': (settings, isinstance(settings, dict) and isinstance(settings.get('source', {}), dict)),
    }
    yield from ((name, value) for name, (value, is_right) in checks.items() if not is_right)
    for name, split in splits.items():
        if not is_name(name):
            yield 'splits', name
        yield from _find_wrong_in_split(f'splits.{name}', _as_dict(split))


def _find_wrong_in_split(name: str, split: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    if not isinstance(split.get('sha256'), str):
        yield f'{name}.sha256', split.get('sha256')
    yield from ((f'{name}.{count}', split.get(count)) for count in COUNTS if not is_count(split.get(count)))
    if 'published_words' in split and not is_count(split['published_words']):
        yield f'{name}.published_words', split['published_words']


def is_count(value: object) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < MOST


def is_name(value: object) -> bool:
    """Returns whether a value can name a file or folder below the store."""
    return isinstance(value, str) and re.fullmatch(r'[\w][\w.+=-]{0,127}', value) is not None


def _as_dict(value: object) -> Mapping[str, object]:
    return value if isinstance(value, dict) else {}
