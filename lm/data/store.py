"""The token store, which `lm prepare` writes. Training and evaluation read it.

    dataset.json            source, cleaning, counts, fingerprints; written last, so its presence means "finished"
    tokenizer.model         the tokenizer (of Hugging Face: tokenizer.json; ranks: tokenizer.tiktoken)
    {split}/tokens          zarr3 array, uint16 or uint32: the documents one after another, each ended by the eod token
    {split}/document_ends   zarr3 array, int64: offset behind the eod token of each document

The arrays are sharded into a few large files and checksummed (crc32c) in small chunks. A random window costs one or two
short reads, on a local disk and in a bucket (gs://, s3://). A damaged byte is an error, never a token.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from lm.buckets import waiting_for
from lm.data import pg19, tokenizers
from lm.data.page_cache import CachedArray
from lm.data.store_entries import find_wrong_entries
from lm.errors import AbsentError, ConfigError, LmError, MismatchError, UnnamedError
from lm.files import (
    check_scheme,
    explain_identity,
    folder_spec,
    is_damage,
    is_remote,
    local_path,
    parse_json,
)
from lm.text import make_visible

CHUNK = 2**14
"""Elements read and checksummed together."""
SHARD = 2**26
"""Elements in a file: 128 MB of uint16."""
CODECS = [{'name': 'bytes', 'configuration': {'endian': 'little'}}, {'name': 'crc32c'}]
"""The codecs of a chunk, and of the index of a file."""
INDEX_CACHE_BYTES = 2**26
COPIES = 'in_train'
"""The entry of a split in dataset.json: its documents that are also in train, and their tokens."""
MARK = 2**31
"""The bit of a token that is read and not predicted, where a store marks answers."""
MARKS = 'marks_answers'
"""The entry of dataset.json of such a store."""
REMEDY = 'the token store is damaged; copy or prepare it again'
VERIFIED = 2**24
"""Elements that `TokenStore.verify` holds in memory."""


NamedFile = tuple[str, bytes | None]
"""The name and the contents of a file; None: it is missing."""


class TokenStore:
    """A finished token store, opened for reading."""

    def __init__(self, path: str, info: dict[str, Any]):
        self.path, self.info = path, info
        self._kvstore = open_kvstore(path)
        # A cache keeps the shards' indexes; the contents never change, so nothing is revalidated.
        self._context = ts.Context({'cache_pool': {'total_bytes_limit': INDEX_CACHE_BYTES}})
        self._arrays: dict[tuple[str, str], ts.TensorStore] = {}
        self._cached: dict[str, CachedArray | None] = {}
        self._tokenizer: tokenizers.Tokenizer | None = None

    @classmethod
    def open(cls, path: str, timeout: float | None = None) -> 'TokenStore':
        """Opens the store at `path`: a folder, gs://… or s3://…; after `timeout` seconds it counts as out of reach.

        Raises:
            UnnamedError: `path` is empty.
            AbsentError: there is no finished store.
            MismatchError: its dataset.json is damaged.
            LmError: it cannot be reached.
        """
        if not path:
            raise UnnamedError(
                "data.path = '': name the token store, for example --gin_param \"data.path = 'data/pg19'\""
            )
        info = read_info(path, timeout)
        if info is None:
            is_relative = not is_remote(path) and not os.path.isabs(path)
            where = f' ({os.path.abspath(path)}, from the current folder)' if is_relative else ''
            raise AbsentError(
                f'data.path = {path!r}: no finished token store is there{where}; run `lm prepare` first, or name the '
                'folder where it is now: --set data.path=FOLDER'
            )
        return cls(path, info)

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.info['splits'])

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokens, the documents' ends and the tokenizer. It does not depend on paths and versions."""
        return self.info['fingerprint']

    @property
    def fingerprints(self) -> dict[str, str]:
        """Name → value that a checkpoint depends on."""
        return {'data': self.fingerprint, 'tokenizer': self.info['tokenizer']['sha256']}

    @property
    def vocab_size(self) -> int:
        """The number of pieces of the tokenizer."""
        return self.info['tokenizer']['vocab_size']

    @property
    def begin_id(self) -> int | None:
        """The token that each document of the store begins with; None: none, or the store is of an earlier version."""
        return self.info['tokenizer'].get('begin_id')

    @property
    def marks_answers(self) -> bool:
        """Only some tokens are predicted in training (`read_marked`)."""
        return bool(self.info.get(MARKS))

    def tokens(self, split: str) -> int:
        """Returns the number of tokens, the end-of-document tokens among them."""
        return self._split(split)['tokens']

    def documents(self, split: str) -> int:
        return self._split(split)['documents']

    def bytes(self, split: str) -> int:
        """Returns the number of UTF-8 bytes of the cleaned text."""
        return self._split(split)['bytes']

    def words(self, split: str) -> int:
        """Words by which perplexity is normalised: those that the data's authors publish, else those between white
        space."""
        found, source = self._split(split), self.info['source']
        published = found.get('published_words')
        # Older stores record only their source.
        if published is None and 'pg19' in (source.get('name'), source.get('layout')):
            published = pg19.published_words(split, found['documents'])
        return found['words'] if published is None else published

    def copied_share(self, split: str) -> float | None:
        """Returns the share of the tokens that belong to copies of training documents; None where nothing is known."""
        found = self._split(split)
        return found[COPIES]['tokens'] / found['tokens'] if COPIES in found else None

    def read(self, split: str, start: int, stop: int) -> np.ndarray:
        """Returns token ids [stop - start], uint16 or uint32. Raises MismatchError for damaged or missing data."""
        return self.read_many(split, [start], stop - start)[0]

    def read_many(self, split: str, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """Windows of token ids, read concurrently.

        Args:
            starts: offsets of the windows [n].
            length: tokens in a window.

        Returns:
            [n, length], uint16 or uint32.
        """
        windows = self.read_stored(split, starts, length)
        return windows & np.uint32(MARK - 1) if self.marks_answers else windows

    def read_marked(self, split: str, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """Reads windows [n, length] like `read_many`, int32; ~token stands for a token that is not predicted."""
        windows = self.read_stored(split, starts, length)
        if not self.marks_answers:
            return windows.astype(np.int32)
        ids = (windows & np.uint32(MARK - 1)).astype(np.int32)
        return np.where(windows >= MARK, ~ids, ids)

    def read_stored(self, split: str, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """Reads windows [n, length] like `read_many`, with the marks that they have in the files."""
        array, total = self._array(split, 'tokens'), self.tokens(split)
        firsts: list[int] = np.asarray(starts, np.int64).tolist()
        for start in firsts:
            if not 0 <= start <= start + length <= total:
                raise IndexError(f'tokens {start} to {start + length} of split {split!r}, which has {total}')
        cached = self._find_cached(split, array)
        windows = None if cached is None else cached.read(firsts, length)
        if windows is None:
            try:
                (windows,) = read_windows([array], starts, length)
            except ValueError as error:
                raise self.explain_damage(split, 'tokens', error) from None
        # An accelerator takes the nearest row of the embedding for such a token, and reports nothing.
        ids = windows & np.uint32(MARK - 1) if self.marks_answers else windows
        if ids.size and (largest := int(ids.max())) >= self.vocab_size:
            what = f'token {largest} is beyond the {self.vocab_size} pieces of the tokenizer'
            raise MismatchError(f'{self.path}: split {split!r}: {what}; prepare the data again')
        return windows

    def document_ends(self, split: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Offsets behind each document's end-of-document token, of the documents from `start` to `stop`, by default of
        all [stop - start], int64, ascending. All ends of 10⁹ documents take 8 GB."""
        try:
            return self._array(split, 'document_ends')[start:stop].read().result()
        except ValueError as error:
            raise self.explain_damage(split, 'document_ends', error) from None

    def read_tokenizer_file(self) -> NamedFile:
        """Returns the name of the tokenizer's file and its contents, which need no library; None: it is missing."""
        name = self.info['tokenizer'].get('file', 'tokenizer.model')
        return name, read_file(self._kvstore, name)

    def tokenizer(self) -> tokenizers.Tokenizer:
        """Returns the tokenizer that made the tokens. Raises MismatchError if its file is missing or another one."""
        if self._tokenizer is None:
            name, model = self.read_tokenizer_file()
            if model is None:
                raise MismatchError(f'{self.path}: {name} is missing; restore it or prepare the data again')
            if hashlib.sha256(model).hexdigest() != self.info['tokenizer']['sha256']:
                raise MismatchError(
                    f'{self.path}: {name} is not the one that made the tokens (SHA-256 differs from '
                    'dataset.json); restore it or prepare the data again'
                )
            self._tokenizer = tokenizers.from_bytes(model, self.info['tokenizer'].get('eod_id'), name)
        return self._tokenizer

    def verify(self, split: str) -> None:
        """Reads the whole split, in blocks, and compares it with dataset.json. Raises MismatchError."""
        digest, total, documents = hashlib.sha256(), self.tokens(split), self.documents(split)
        for start in range(0, total, VERIFIED):
            digest.update(self.read_stored(split, [start], min(VERIFIED, total - start)).data)
        for start in range(0, documents, VERIFIED):
            ends = self.document_ends(split, start, min(start + VERIFIED, documents))
            digest.update(ends.astype('<i8', copy=False).data)
        if digest.hexdigest() != self._split(split)['sha256']:
            raise MismatchError(
                f'{self.path}: split {split!r} is not what dataset.json describes; prepare the data again'
            )

    def _split(self, split: str) -> dict[str, Any]:
        try:
            return self.info['splits'][split]
        except KeyError:
            raise ConfigError(
                f'split {split!r}: {self.path} has {", ".join(self.splits)}; choose one of them with data.train_split, '
                'data.eval_split or evaluate.split, or prepare it'
            ) from None

    def _array(self, split: str, name: str) -> ts.TensorStore:
        if (split, name) not in self._arrays:
            found = self._split(split)
            expected = {'tokens': (self.info['dtype'], found['tokens']), 'document_ends': ('int64', found['documents'])}
            array = self.open_array(split, name, *expected[name])
            if any((size or 0) > SHARD for size in array.chunk_layout.read_chunk.shape or ()):
                raise self.explain_damage(split, name, 'its chunks are larger than a file of a store')
            self._arrays[split, name] = array
        return self._arrays[split, name]

    def open_array(self, split: str, name: str, dtype: str, count: int, remedy: str = REMEDY) -> ts.TensorStore:
        """Opens an array of `write_array_file` for reading. Raises the errors of `explain_damage`."""
        spec = _spec(self.path, split, name) | {'fill_missing_data_reads': False, 'recheck_cached_data': False}
        try:
            array = ts.open(spec, open=True, context=self._context).result()
        except ValueError as error:
            raise self.explain_damage(split, name, error, remedy) from None
        if (array.dtype.name, array.shape) != (dtype, (count,)):
            what = f'is {array.dtype.name}{list(array.shape)}, not {dtype}[{count}]'
            raise self.explain_damage(split, name, what, remedy)
        return array

    def _find_cached(self, split: str, tokens: ts.TensorStore) -> CachedArray | None:
        """Returns the reader of tokens in the page cache; None where they lie in a bucket, or otherwise than here."""
        if split not in self._cached:
            layout, found = tokens.chunk_layout, None
            chunk, shard = ((part.shape or (None,))[0] or 0 for part in (layout.read_chunk, layout.write_chunk))
            codecs = tokens.spec().to_json()['metadata']['codecs']
            if not is_remote(self.path) and chunk and _is_sharded_as_here(codecs):
                folder = f'{local_path(self.path)}/{split}/tokens/c'
                indexes = max(1, INDEX_CACHE_BYTES * chunk // (16 * shard))
                found = CachedArray(folder, tokens.dtype.numpy_dtype, chunk, shard, indexes)
            self._cached[split] = found
        return self._cached[split]

    def explain_damage(self, split: str, name: str, error: Exception | str, remedy: str = REMEDY) -> LmError:
        """Returns the error for an array: MismatchError if it is damaged, LmError if the read failed."""
        text = str(error).split(' [')[0]
        where = f'{self.path}: split {split!r}, array {name!r}: {text}'
        if is_damage(text):
            return MismatchError(f'{where}: {remedy}')
        return LmError(f'{where}: the read failed')


def read_info(path: str, timeout: float | None = None) -> dict[str, Any] | None:
    """Returns the contents of dataset.json; None where no store is finished. Raises MismatchError if damaged."""
    try:
        with waiting_for(path):
            raw = read_file(open_kvstore(path), 'dataset.json', timeout)
    except TimeoutError:
        raise LmError(f'data.path = {path!r}: no answer within {timeout:g} seconds') from None
    except ValueError as error:
        raise LmError(f'data.path = {path!r}: {str(error).split(" [")[0]}{explain_identity(path)}') from None
    if raw is None:
        return None
    try:
        info = parse_json(raw)
        if info['checksum'] != _checksum(info):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise MismatchError(
            f'{path}: dataset.json is damaged or was edited; restore it or prepare the data again'
        ) from None
    for name, value in find_wrong_entries(info):
        shown = make_visible(repr(value)[:100])
        raise MismatchError(f'{path}: dataset.json has {name} = {shown}, as no store has; prepare the data again')
    return info


def write_info(path: str, info: dict[str, Any]) -> dict[str, Any]:
    """Writes dataset.json, which makes the store a finished one. Returns `info` with its fingerprint and checksum."""
    content = {k: v['sha256'] for k, v in info['splits'].items()} | {'tokenizer': info['tokenizer']['sha256']}
    info = info | {'fingerprint': hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()}
    info = info | {'checksum': _checksum(info)}
    write_file(path, 'dataset.json', json.dumps(info, indent=2, ensure_ascii=False).encode() + b'\n')
    return info


def write_array_file(path: str, split: str, name: str, number: int, elements: np.ndarray, count: int) -> None:
    """Writes one file of an array of `count` elements: `elements` are all of file `number`, which begins at SHARD times
    it. Any processes may write the files, in any order and several times."""
    spec, start, target = _new_array(path, split, name, count, elements.dtype.name), number * SHARD, open_kvstore(path)
    array = ts.open(spec | {'kvstore': {'driver': 'memory'}}, create=True, context=ts.Context()).result()
    assert array.kvstore is not None
    names = ['zarr.json']
    if len(elements) == SHARD:
        whole = ts.open(spec, open=True, assume_metadata=True, context=ts.Context()).result()
        whole[start : start + SHARD].write(elements, can_reference_source_data_indefinitely=True).result()
    else:
        # It is encoded in memory: TensorStore would keep what lies in the file already, behind the end of the array.
        array[start : start + len(elements)].write(elements).result()
        names.append(f'c/{number}')
    for key in names:
        target.write(f'{split}/{name}/{key}', array.kvstore.read(key).result().value).result()


def find_missing_files(path: str, split: str, name: str, count: int) -> list[int]:
    """Returns the numbers of the files that an array of `count` elements lacks, and deletes files of larger arrays."""
    kvstore, prefix = open_kvstore(path), f'{split}/{name}/'
    expected = {f'{prefix}c/{number}' for number in range(-(-count // SHARD))}
    found = {key.decode() for key in kvstore.list(ts.KvStore.KeyRange(prefix, f'{prefix[:-1]}0')).result()}
    for key in found - expected - {f'{prefix}zarr.json'}:
        kvstore.write(key, None).result()
    return sorted(int(key.rpartition('/')[2]) for key in expected - found)


def read_windows(arrays: Sequence[ts.TensorStore], starts: Sequence[int] | np.ndarray, length: int) -> list[np.ndarray]:
    """Reads the elements [n, length] of each array from `starts` [n] on, all at once. Raises ValueError."""
    windows = [np.empty((len(starts), length), array.dtype.numpy_dtype) for array in arrays]
    with ts.Batch() as batch:
        reads = [[array[int(s) : int(s) + length].read(batch=batch) for s in starts] for array in arrays]
    for own, reads_of_array in zip(windows, reads, strict=True):
        for i, read in enumerate(reads_of_array):
            own[i] = read.result()
    return windows


def _new_array(path: str, split: str, name: str, count: int, dtype: str) -> dict[str, Any]:
    return {
        **_spec(path, split, name),
        # Chunks of zeros are stored like all others: only so is a missing chunk known to be lost.
        'store_data_equal_to_fill_value': True,
        'metadata': {
            'shape': [count],
            'data_type': dtype,
            'chunk_grid': {'name': 'regular', 'configuration': {'chunk_shape': [SHARD]}},
            'codecs': [
                {
                    'name': 'sharding_indexed',
                    'configuration': {'chunk_shape': [CHUNK], 'codecs': CODECS, 'index_codecs': CODECS},
                }
            ],
        },
    }


def _is_sharded_as_here(codecs: list[dict[str, Any]]) -> bool:
    """Tells whether an array has the codecs of `_new_array`, whatever the sizes of its chunks are."""
    if [codec['name'] for codec in codecs] != ['sharding_indexed']:
        return False
    found = codecs[0]['configuration']
    return found['codecs'] == found['index_codecs'] == CODECS and found.get('index_location', 'end') == 'end'


def open_kvstore(path: str) -> ts.KvStore:
    """Returns TensorStore's view of a folder or a bucket. Raises ConfigError for an address of another kind."""
    check_scheme(path, 'data.path')
    if not is_remote(path):
        local_path(path, 'data.path')  # which names the field where there is no such user
    try:
        return ts.KvStore.open(folder_spec(path)).result()
    except ValueError as error:
        raise ConfigError(
            f'data.path = {path!r}: {str(error).split(" [")[0]}; use a folder, gs://… or s3://…'
        ) from None


def read_file(kvstore: ts.KvStore, name: str, timeout: float | None = None) -> bytes | None:
    result = kvstore.read(name).result(timeout)
    return result.value if result.state == 'value' else None


def write_file(path: str, name: str, content: bytes) -> None:
    """Writes one file of the store; it appears whole or not at all."""
    open_kvstore(path).write(name, content).result()


def _spec(path: str, split: str, name: str) -> dict[str, Any]:
    return {'driver': 'zarr3', 'kvstore': folder_spec(f'{path.rstrip("/")}/{split}/{name}')}


def _checksum(info: dict[str, Any]) -> str:
    content = {k: v for k, v in info.items() if k != 'checksum'}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
