import json
import os
import random
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tiny
from corpora import words

from lm.data import page_cache
from lm.data import store as store_module
from lm.data.batches import Order
from lm.data.dataset import DataConfig
from lm.data.store import TokenStore, write_file, write_info
from lm.data.tokenizers import TokenizerConfig
from lm.data.tokenizers.sentencepiece import SentencePiece, train
from lm.errors import ConfigError, LmError, MismatchError
from lm.summary.stores import inspect_store

MODEL = train(TokenizerConfig(vocab_size=400), [words(5000, seed=2)])


def write_store(path, tokens, ends, splits=('train', 'validation'), published=None, **info):
    import hashlib

    digest = hashlib.sha256(tokens.tobytes() + ends.astype('<i8').tobytes()).hexdigest()
    for split in splits:
        tiny.write_array(path, split, 'tokens', tokens)
        tiny.write_array(path, split, 'document_ends', ends)
    counts = {'documents': len(ends), 'bytes': 10, 'words': 5, 'tokens': len(tokens), 'sha256': digest}
    tokenizer = SentencePiece(MODEL)
    write_file(path, 'tokenizer.model', MODEL)
    write_info(
        path,
        {
            'source': {'kind': 'tfds', 'name': 'pg19'},
            'dtype': tokens.dtype.name,
            'splits': {
                split: counts | ({'published_words': published[split]} if published else {}) for split in splits
            },
            'tokenizer': {'sha256': tokenizer.sha256, 'eod_id': 1, 'vocab_size': 400},
        }
        | info,
    )


@pytest.fixture(scope='module')
def tokens():
    made = np.random.default_rng(0).integers(0, 400, 100_000).astype(np.uint16)
    made[20_000:60_000] = 0  # chunks of zeros are data too
    return made


@pytest.fixture(scope='module')
def original(tmp_path_factory, tokens):
    path = tmp_path_factory.mktemp('store') / 'original'
    write_store(str(path), tokens, np.array([10, 5000, 100_000]))
    return path


@pytest.fixture
def copy(tmp_path, original):
    return shutil.copytree(original, tmp_path / 'copy')


@pytest.mark.smoke
def test_reads_what_was_written(original, tokens):
    store = TokenStore.open(str(original))
    assert store.splits == ('train', 'validation')
    assert store.tokens('train') == 100_000
    np.testing.assert_array_equal(store.document_ends('train'), [10, 5000, 100_000])
    starts = np.random.default_rng(1).integers(0, 100_000 - 999, 50)
    windows = store.read_many('train', starts, 999)
    assert windows.dtype == np.uint16
    np.testing.assert_array_equal(windows, np.stack([tokens[s : s + 999] for s in starts]))
    np.testing.assert_array_equal(store.read('validation', 99_990, 100_000), tokens[-10:])
    assert store.read('train', 5, 5).shape == (0,)
    store.verify('train')
    assert store.tokenizer().decode(store.tokenizer().encode('the end')) == 'the end'


def test_many_files_and_wide_tokens(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, 'SHARD', 2**15)
    tokens = np.random.default_rng(0).integers(0, 2**31, 100_000).astype(np.uint32)
    write_store(str(tmp_path), tokens, np.array([100_000]), tokenizer={'sha256': 'x', 'eod_id': 1, 'vocab_size': 2**31})
    assert len(list((tmp_path / 'train' / 'tokens' / 'c').iterdir())) == 4
    np.testing.assert_array_equal(TokenStore.open(str(tmp_path)).read('train', 1, 99_999), tokens[1:-1])


def test_windows_of_several_chunks_and_files_come_from_the_page_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, 'SHARD', 2**15)
    made = np.random.default_rng(0).integers(0, 400, 150_000).astype(np.uint16)
    write_store(str(tmp_path), made, np.array([150_000]))
    starts = [0, 2**14 - 5, 2**15 - 5, 70_000, 2**14 - 5, 150_000 - 40_000]
    reading = TokenStore.open(str(tmp_path))
    for length in (1, 10, 2**14, 40_000):
        expected = np.stack([made[s : s + length] for s in starts])
        np.testing.assert_array_equal(reading.read_many('train', starts, length), expected)
        with monkeypatch.context() as one:
            one.setattr(page_cache, 'NO_WAIT', None)
            np.testing.assert_array_equal(reading.read_many('train', starts, length), expected)


def test_chunks_of_the_page_cache_are_checked(copy, tokens):
    array = page_cache.CachedArray(str(copy / 'train' / 'tokens' / 'c'), np.dtype(np.uint16), 2**14, 2**26, 1)
    starts = [5, 60_000]
    windows = array.read(starts, 100)
    if windows is None:
        pytest.skip('this file system does not say what lies in the page cache')
    np.testing.assert_array_equal(windows, np.stack([tokens[s : s + 100] for s in starts]))
    (file,) = (copy / 'train' / 'tokens' / 'c').iterdir()
    content = file.read_bytes()
    for position in (30, -10):  # in the first chunk, and in the index
        damaged = bytearray(content)
        damaged[position] ^= 1
        file.write_bytes(damaged)
        assert array.read(starts, 100) is None
    file.write_bytes(content[:-1])
    assert array.read(starts, 100) is None
    file.unlink()
    assert array.read(starts, 100) is None


@pytest.mark.parametrize(
    ('absent', 'is_read'), [(1, True), (page_cache.MOST_WAITS, True), (page_cache.MOST_WAITS + 1, False)]
)
def test_few_chunks_may_come_from_a_disk(copy, tokens, monkeypatch, absent, is_read):
    starts = [i * 2**14 for i in range(6)]
    plain, missed = os.preadv, set(range(absent))

    def preadv(file, buffers, offset, flags=0):
        if flags and missed:
            missed.pop()
            raise BlockingIOError
        return plain(file, buffers, offset)

    monkeypatch.setattr(os, 'preadv', preadv)
    monkeypatch.setattr(page_cache, 'NO_WAIT', 8)
    array = page_cache.CachedArray(str(copy / 'train' / 'tokens' / 'c'), np.dtype(np.uint16), 2**14, 2**26, 1)
    windows = array.read(starts, 100)
    assert (windows is not None) is is_read
    if windows is not None:
        np.testing.assert_array_equal(windows, np.stack([tokens[s : s + 100] for s in starts]))


def test_windows_of_one_chunk_share_its_read(copy, tokens, monkeypatch):
    plain, offsets = os.preadv, []

    def preadv(file, buffers, offset, flags=0):
        offsets.append(offset)
        return plain(file, buffers, offset)

    monkeypatch.setattr(os, 'preadv', preadv)
    monkeypatch.setattr(page_cache, 'NO_WAIT', 8)
    array = page_cache.CachedArray(str(copy / 'train' / 'tokens' / 'c'), np.dtype(np.uint16), 2**14, 2**26, 1)
    starts = [2**14 + 7, 5, 2**14 - 50, 9_000, 2**14]
    found = array.read(starts, 100)
    assert found is not None
    assert len(offsets) == 2
    np.testing.assert_array_equal(found, np.stack([tokens[s : s + 100] for s in starts]))


def test_a_checked_chunk_gives_only_what_is_asked_until_a_read_waits(copy, tokens, monkeypatch):
    plain, sizes, waiting = os.preadv, [], []

    def preadv(file, buffers, offset, flags=0):
        if flags and waiting:
            waiting.pop()
            raise BlockingIOError
        sizes.append(plain(file, buffers, offset))
        return sizes[-1]

    monkeypatch.setattr(os, 'preadv', preadv)
    monkeypatch.setattr(page_cache, 'NO_WAIT', 8)
    array = page_cache.CachedArray(str(copy / 'train' / 'tokens' / 'c'), np.dtype(np.uint16), 2**14, 2**26, 1)
    chunk, crc = 2**15, page_cache.CRC_BYTES

    def read(starts, length):
        sizes.clear()
        found = array.read(starts, length)
        assert found is not None
        np.testing.assert_array_equal(found, np.stack([tokens[s : s + length] for s in starts]))
        return sizes

    assert read([5], 100) == [chunk + crc]
    assert read([9_000], 100) == [200]
    assert read([9_000, 5], 100) == [chunk + crc], 'windows of one chunk share its read'
    assert read([2**14 - 50], 100) == [chunk + crc] * 2
    assert read([2**14 - 50], 100) == [200 + crc]
    assert read([5], 40_000) == [chunk + crc] * 3
    assert read([5], 40_000) == [80_000 + 2 * crc]
    waiting.append(True)
    assert read([5], 100) == [chunk + crc]
    assert read([2**14], 100) == [chunk + crc]
    assert read([2**14 + 9, 5], 100) == [200, 200]


def test_fingerprint_depends_on_the_data_alone(tmp_path, original, tokens):
    ends = np.array([10, 5000, 100_000])
    write_store(str(tmp_path / 'same'), tokens, ends, source={'kind': 'text_files', 'path': 'elsewhere'})
    write_store(str(tmp_path / 'other'), tokens, ends - [0, 1, 0])
    fingerprints = [TokenStore.open(str(p)).fingerprint for p in (original, tmp_path / 'same', tmp_path / 'other')]
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_no_flipped_bit_is_read_silently(copy, tokens):
    """The test flips bits in every file of the store. A harmless flip (in padding) must leave the tokens as
    they were."""
    draw = random.Random(0)
    refused = 0
    for path in sorted(p for p in copy.rglob('*') if p.is_file() and 'validation' not in p.parts):
        content = path.read_bytes()
        for _ in range(15):
            damaged = bytearray(content)
            damaged[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            path.write_bytes(damaged)
            try:
                store = TokenStore.open(str(copy))
                store.tokenizer()
                np.testing.assert_array_equal(store.read('train', 0, 100_000), tokens)
                np.testing.assert_array_equal(store.document_ends('train'), [10, 5000, 100_000])
            except MismatchError:
                refused += 1
        path.write_bytes(content)
    assert refused > 50


def test_damage_is_named(copy):
    file = copy / 'train' / 'tokens' / 'c' / '0'
    content = bytearray(file.read_bytes())
    content[50_000] ^= 4
    file.write_bytes(content)
    store = TokenStore.open(str(copy))
    with pytest.raises(MismatchError, match=r"split 'train', array 'tokens': DATA_LOSS.*tokens/c/0.* prepare it again"):
        store.read('train', 0, 100_000)
    with pytest.raises(MismatchError) as error:
        store.read('train', 0, 100_000)
    assert 'tensorstore' not in str(error.value)  # nor its specification of many lines
    assert len(store.read('train', 90_000, 100_000)) == 10_000
    file.unlink()
    with pytest.raises(MismatchError, match=r"split 'train', array 'tokens': .*missing"):
        TokenStore.open(str(copy)).read('train', 0, 10)
    (copy / 'train' / 'tokens' / 'zarr.json').unlink()
    with pytest.raises(MismatchError, match=r"split 'train', array 'tokens'"):
        TokenStore.open(str(copy)).read('train', 0, 10)


@pytest.mark.parametrize(
    ('text', 'kind', 'remedy'),
    [
        ('DATA_LOSS: bad [where=1] [what=2]', MismatchError, 'the token store is damaged; copy or prepare it again'),
        ('UNAVAILABLE: away [where=1]', LmError, 'the read failed'),
        ('PERMISSION_DENIED: no', LmError, 'the read failed'),
        ('UNKNOWN: Input/output error', LmError, 'the read failed'),
        ('RESOURCE_EXHAUSTED: Too many open files', LmError, 'the read failed'),
        ('NOT_FOUND: gone', MismatchError, 'the token store is damaged; copy or prepare it again'),
        ('Error opening "zarr3" driver: bad', MismatchError, 'the token store is damaged; copy or prepare it again'),
    ],
)
def test_messages_of_tensorstore_are_cut_to_a_line(original, text, kind, remedy):
    error = TokenStore.open(str(original)).explain_damage('train', 'tokens', ValueError(text))
    assert type(error) is kind
    assert str(error) == f"{original}: split 'train', array 'tokens': {text.partition(' [')[0]}: {remedy}"


def test_arrays_that_differ_from_the_description_are_refused(copy, tokens):
    tiny.write_array(copy, 'train', 'tokens', tokens[:-1])
    with pytest.raises(MismatchError, match=r', not '):
        TokenStore.open(str(copy)).read('train', 0, 10)
    tiny.write_array(copy, 'train', 'tokens', tokens[::-1])
    with pytest.raises(MismatchError, match=r"split 'train' is not what dataset.json describes"):
        TokenStore.open(str(copy)).verify('train')


def test_missing_edited_and_foreign_parts(copy, tmp_path):
    with pytest.raises(ConfigError, match=r'data.path'):
        TokenStore.open(DataConfig().path)
    with pytest.raises(
        MismatchError, match=r'no finished token store is there; run `lm prepare` first, or .* --set data.path=FOLDER'
    ):
        TokenStore.open(str(tmp_path / 'nothing'))
    for path in ('http://x/y', 'https://x/y', 'ftp://x/y'):
        with pytest.raises(ConfigError, match=rf"data.path = '{path}': .*:// is not supported; use a folder"):
            TokenStore.open(path)
    with pytest.raises(ConfigError, match=r"data.path = '~nosuchuser': no such user"):
        TokenStore.open('~nosuchuser')
    with pytest.raises(ConfigError, match=r"split 'test': .* has train, validation"):
        TokenStore.open(str(copy)).tokens('test')
    with pytest.raises(IndexError):
        TokenStore.open(str(copy)).read('train', 99_999, 100_001)
    other = train(TokenizerConfig(vocab_size=401), [words(5000, seed=2)])
    (copy / 'tokenizer.model').write_bytes(other)
    with pytest.raises(MismatchError, match=r'tokenizer.model is not the one'):
        TokenStore.open(str(copy)).tokenizer()
    info = json.loads((copy / 'dataset.json').read_text())
    info['splits']['train']['words'] += 1
    for content in (json.dumps(info).encode(), b'', b'\xff\x00', b'[]', b'[' * 100_000):
        (copy / 'dataset.json').write_bytes(content)
        with pytest.raises(MismatchError, match=r'dataset.json is damaged or was edited'):
            TokenStore.open(str(copy))


def test_published_word_counts_replace_own_counts(tmp_path, tokens):
    write_store(str(tmp_path), tokens[:1000], np.array([1000]), ('test',), published={'test': 77})
    assert TokenStore.open(str(tmp_path)).words('test') == 77


def test_published_word_counts_of_pg19_in_stores_that_do_not_record_them(tmp_path, tokens):
    def words_of(documents, split, **info):
        path = str(tmp_path / f'{documents}-{split}-{len(info)}')
        write_store(path, tokens[:1000], np.arange(1, documents + 1), (split,), **info)
        return TokenStore.open(path).words(split)

    assert words_of(50, 'validation') == 3_007_061
    assert words_of(100, 'test') == 6_966_499
    assert words_of(100, 'test', source={'kind': 'text_files', 'layout': 'pg19'}) == 6_966_499
    assert words_of(99, 'test') == 5
    assert words_of(50, 'validation', source={'kind': 'tfds', 'name': 'c4/en'}) == 5


def test_preparing_and_reading_import_no_heavy_library():
    heavy = ['jax', 'tensorflow', 'tensorflow_datasets', 'clu', 'gin']
    code = f'import sys, lm.data.store, lm.data.prepare.stages; print([m for m in {heavy} if m in sys.modules])'
    assert subprocess.check_output([sys.executable, '-c', code], text=True).strip() == '[]'


def test_verifying_holds_few_ends_of_documents(original, monkeypatch):
    sizes, read = [], TokenStore.document_ends
    monkeypatch.setattr(store_module, 'VERIFIED', 2)
    monkeypatch.setattr(TokenStore, 'read', lambda self, split, start, stop: np.arange(0, np.uint16))
    monkeypatch.setattr(TokenStore, 'tokens', lambda self, split: 0)
    monkeypatch.setattr(TokenStore, 'document_ends', lambda *args: sizes.append(len(found := read(*args))) or found)
    with pytest.raises(MismatchError, match=r'is not what dataset\.json describes'):
        TokenStore.open(str(original)).verify('train')
    assert sizes == [2, 1]


def test_a_store_of_ten_trillion_tokens_is_opened_described_and_read(tmp_path):
    """Only the last file of each array is there."""
    shard = store_module.SHARD
    tokens, documents = 149_012 * shard + 5000, 15 * shard + 1000
    assert (tokens > 10**13, documents > 10**9) == (True, True)
    last = tokens - tokens // shard * shard
    elements = np.arange(last, dtype=np.uint16) % 400
    store_module.write_array_file(str(tmp_path), 'train', 'tokens', tokens // shard, elements, tokens)
    ends = tokens - np.arange(documents % shard)[::-1]
    store_module.write_array_file(str(tmp_path), 'train', 'document_ends', documents // shard, ends, documents)
    split = {'documents': documents, 'bytes': 4 * tokens, 'words': tokens, 'tokens': tokens, 'sha256': ''}
    tokenizer = {'sha256': '', 'vocab_size': 400, 'eod_id': 1}
    info = {'source': {}, 'dtype': 'uint16', 'splits': {'train': split}, 'tokenizer': tokenizer}
    write_info(str(tmp_path), info)
    store = TokenStore.open(str(tmp_path))
    np.testing.assert_array_equal(store.document_ends('train', documents - 3), tokens - np.array([2, 1, 0]))
    assert inspect_store(str(tmp_path))['splits']['train']['documents'] == documents
    order = Order(tokens, 2048, seed=0)
    starts = order(np.arange(order.count - 10**5, order.count + 10**5))  # two epochs
    assert starts.min() >= 0
    assert starts.max() + 2049 <= tokens
    assert len(np.unique(starts[: 10**5])) == len(np.unique(starts[10**5 :])) == 10**5
    np.testing.assert_array_equal(store.read('train', tokens - 2049, tokens), elements[-2049:])
    with pytest.raises(MismatchError, match=r'array .tokens.: '):
        store.read_many('train', starts[:1], 2049)
