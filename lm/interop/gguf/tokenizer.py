"""The tokenizer of a GGUF file, in a form that other programs read.

Byte-level BPE becomes a tokenizer.json of Hugging Face: the file has its pieces and merges, and the name of the way in
which text is split before them. SentencePiece becomes a model file of SentencePiece: the file has its pieces with their
scores and kinds, and how white space is treated.
"""

import json
import struct
from collections.abc import Mapping

from lm.data.tokenizers.patterns import PATTERNS
from lm.interop.hyperparameters import Hyperparameters

UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
"""Kinds of pieces that count here, as both GGUF and SentencePiece number them."""
BYTE_LEVEL, SENTENCEPIECE = 'gpt2', 'llama'
"""Values of `tokenizer.ggml.model`."""
SPACE = '\u2581'
"""The character of a space in pieces of SentencePiece."""

_DIGITS = {'type': 'Digits', 'individual_digits': True}
_PLAIN = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': True}
_MAPPED = _PLAIN | {'use_regex': False}


def _split_by(pattern: str) -> list[Mapping[str, object]]:
    return [{'type': 'Split', 'pattern': {'Regex': pattern}, 'behavior': 'Isolated', 'invert': False}, _MAPPED]


_QWEN2 = PATTERNS['cl100k'].replace(r'\p{N}{1,3}', r'\p{N}')
_NAMES: tuple[tuple[list[Mapping[str, object]], tuple[str, ...]], ...] = (
    ([_PLAIN], ('gpt-2', 'olmo', 'mpt', 'phi-2', 'roberta-bpe')),
    ([_DIGITS, _PLAIN], ('smollm', 'starcoder', 'refact', 'codeshell')),
    (_split_by(PATTERNS['cl100k']), ('llama-bpe', 'llama3', 'llama-v3', 'dbrx', 'smaug-bpe')),
    (_split_by(_QWEN2), ('qwen2', 'stablelm2', 'deepseek-r1-qwen')),
    (_split_by(PATTERNS['o200k']), ('gpt-4o', 'llama4')),
)
SPLITS = {name: split for split, names in _NAMES for name in names}
"""`tokenizer.ggml.pre` → how text is split, as llama.cpp does it (`llama-vocab.cpp`)."""
NORMALIZED = ('qwen2', 'deepseek-r1-qwen')
"""Values of `tokenizer.ggml.pre` whose texts are composed (NFC) first."""
WHOLE_PIECES = ('llama-bpe', 'llama3', 'llama-v3')
"""Values of `tokenizer.ggml.pre` that take a part of the text which is a piece as it is, without merges."""


class UnreadableTokenizerError(Exception):
    """The file does not say enough of its tokenizer."""


def write_tokenizer(metadata: Hyperparameters) -> tuple[str, bytes]:
    """Returns (name, contents) of the tokenizer's file.

    Args:
        metadata: the keys behind 'tokenizer.ggml.', with their values.

    Raises UnreadableTokenizerError, which says what is missing.
    """
    kind = metadata.get('model')
    if kind not in (BYTE_LEVEL, SENTENCEPIECE):
        raise UnreadableTokenizerError(f'tokenizer.ggml.model = {kind!r} is not known')
    for name in ('tokens', 'merges' if kind == BYTE_LEVEL else 'scores'):
        if name not in metadata:
            raise UnreadableTokenizerError(f'tokenizer.ggml.{name} is missing')
    if kind == BYTE_LEVEL:
        return 'tokenizer.json', json.dumps(make_byte_level(metadata), ensure_ascii=False).encode()
    return 'tokenizer.model', make_sentencepiece(metadata)


def find_begin(metadata: Hyperparameters) -> int | None:
    """Returns the token that stands before every text; None: there is none.

    SentencePiece's models have one, unless the file says otherwise.
    """
    is_added = metadata.flag('add_bos_token', metadata.get('model') == SENTENCEPIECE)
    return metadata.find_integer('bos_token_id') if is_added else None


def make_byte_level(metadata: Hyperparameters) -> dict[str, object]:
    """Returns a tokenizer.json."""
    split, tokens = metadata.text('pre', 'gpt-2'), metadata.texts('tokens')
    if split not in SPLITS:
        raise UnreadableTokenizerError(f'tokenizer.ggml.pre = {split!r} is not known')
    kinds = metadata.integers('token_type') or [1] * len(tokens)
    added = [
        {
            **{'id': i, 'content': token, 'special': kind == CONTROL},
            **dict.fromkeys(('single_word', 'lstrip', 'rstrip', 'normalized'), False),
        }
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    model = {
        **{'type': 'BPE', 'dropout': None, 'unk_token': None, 'fuse_unk': False, 'byte_fallback': False},
        'ignore_merges': split in WHOLE_PIECES,
        'vocab': {token: i for i, token in enumerate(tokens)},
        'merges': [merge.split(' ', 1) for merge in metadata.texts('merges')],
    }
    return {
        'version': '1.0',
        'truncation': None,
        'padding': None,
        'added_tokens': added,
        'normalizer': {'type': 'NFC'} if split in NORMALIZED else None,
        'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': SPLITS[split]},
        'post_processor': None if (begin := find_begin(metadata)) is None else _begin_with(tokens[begin], begin),
        'decoder': _PLAIN,
        'model': model,
    }


def _begin_with(token: str, index: int) -> dict[str, object]:
    """Returns the post-processor that puts one token before every text."""
    first = {'SpecialToken': {'id': token, 'type_id': 0}}
    text, other = ({'Sequence': {'id': name, 'type_id': i}} for i, name in enumerate('AB'))
    return {
        'type': 'TemplateProcessing',
        'single': [first, text],
        'pair': [first, text, other],
        'special_tokens': {token: {'id': token, 'ids': [index], 'tokens': [token]}},
    }


def make_sentencepiece(metadata: Hyperparameters) -> bytes:
    """Returns a model of SentencePiece (`sentencepiece_model.proto`): BPE by the scores of the pieces."""
    tokens, scores = metadata.texts('tokens'), metadata.numbers('scores')
    kinds = metadata.integers('token_type') or [1] * len(tokens)
    # llama.cpp writes the spaces of user-defined pieces as they are. SentencePiece looks for pieces in escaped text.
    tokens = [
        token.replace(' ', SPACE) if kind == USER_DEFINED else token for token, kind in zip(tokens, kinds, strict=True)
    ]
    pieces = [
        _field(1, _field(1, token.encode()) + _field(2, score) + _field(3, kind))
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
    ]
    names = {'unknown': (40, 45), 'bos': (41, 46), 'eos': (42, 47), 'padding': (43, 48)}
    trainer = _field(3, 2) + _field(4, len(tokens)) + _field(35, int(BYTE in kinds))
    for name, (number, piece) in names.items():
        index = metadata.find_integer(f'{name}_token_id')
        if index is None and name == 'unknown':
            index = kinds.index(UNKNOWN) if UNKNOWN in kinds else 0
        trainer += _field(number, -1 if index is None else index)
        trainer += b'' if index is None else _field(piece, tokens[index].encode())
    normalizer = _field(1, b'identity')
    if charsmap := metadata.integers('precompiled_charsmap'):
        normalizer = _field(1, b'user_defined') + _field(2, bytes(charsmap))
    normalizer += _field(3, int(metadata.flag('add_space_prefix', True)))
    normalizer += _field(4, int(metadata.flag('remove_extra_whitespaces'))) + _field(5, 1)
    return b''.join(pieces) + _field(2, trainer) + _field(3, normalizer)


def _field(number: int, value: int | float | bytes) -> bytes:
    """Returns a field of a protocol buffer: a varint, a float of 4 bytes, or bytes behind their length."""
    if isinstance(value, float):
        return _varint(number << 3 | 5) + struct.pack('<f', value)
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    value &= 2**64 - 1
    parts: list[int] = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])
