"""Files of ready tokens: the store holds the tokens of the file, and can decode them."""

import dataclasses
import io
import struct

import numpy as np
import pytest
from corpora import words
from rich.console import Console

from lm.data import tokenizers
from lm.data.dataset import DataConfig
from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.stages import prepare
from lm.data.sources.megatron import Megatron
from lm.data.sources.token_files import TokenFiles
from lm.data.store import TokenStore
from lm.data.tokenizers import TokenizerConfig
from lm.data.tokenizers.sentencepiece import train
from lm.errors import ConfigError, MismatchError

TEXTS = [words(5 + i % 60, seed=i) for i in range(120)]
EOD = 1


@pytest.fixture(scope='module')
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp('tokenizer') / 'x.model'
    path.write_bytes(train(TokenizerConfig(vocab_size=500), TEXTS))
    return path


@pytest.fixture(scope='module')
def documents(model):
    """Returns the token ids of each text, without an end token."""
    tokenizer = tokenizers.load(model)
    return [tokenizer.encode(text) for text in TEXTS]


def ended(documents) -> np.ndarray:
    return np.concatenate([part for ids in documents for part in (ids, [EOD])])


def write_llm_c(path, tokens, dtype):
    header = np.zeros(256, '<i4')
    header[:3] = {2: 20_240_520, 4: 20_240_801}[np.dtype(dtype).itemsize], 1, len(tokens)
    path.write_bytes(header.tobytes() + tokens.astype(dtype).tobytes())


def write_megatron(base, documents, code, dtype, sequences_a_document=1):
    """Writes the file as Megatron-LM's IndexedDatasetBuilder does."""
    pieces = [piece for ids in documents for piece in np.array_split(ids.astype(dtype), sequences_a_document)]
    lengths = np.array([len(piece) for piece in pieces], '<i4')
    pointers = (np.cumsum(lengths, dtype='<i8') - lengths) * np.dtype(dtype).itemsize
    bounds = np.arange(0, len(pieces) + 1, sequences_a_document).astype('<i8')
    head = b'MMIDIDX\0\0' + struct.pack('<QBQQ', 1, code, len(pieces), len(bounds))
    base.with_suffix('.idx').write_bytes(head + lengths.tobytes() + pointers.tobytes() + bounds.tobytes())
    base.with_suffix('.bin').write_bytes(np.concatenate(pieces).tobytes())


def prepared(source, model, path, **options):
    output = io.StringIO()
    config = PrepareConfig(source=source, processes=1, tokenizer=TokenizerConfig(model_path=str(model)), **options)
    prepare(config, str(path), Console(file=output, width=200))
    return TokenStore.open(str(path)), output.getvalue()


def all_tokens(store, split='train'):
    return store.read(split, 0, store.tokens(split))


def check(store, split, texts, documents):
    np.testing.assert_array_equal(all_tokens(store, split), ended(documents))
    np.testing.assert_array_equal(store.document_ends(split), np.cumsum([len(ids) + 1 for ids in documents]))
    assert store.documents(split) == len(texts)
    assert store.bytes(split) == sum(len(text.encode()) for text in texts)
    assert store.words(split) == sum(len(text.split()) for text in texts)


@pytest.mark.parametrize('kind', ['nanogpt', 'llm.c 16', 'llm.c 32'])
def test_tokens_of_bin_files(kind, documents, model, tmp_path):
    folder = tmp_path / 'bin'
    folder.mkdir()
    for name, own in {'train': documents[:100], 'val': documents[100:]}.items():
        if kind == 'nanogpt':
            ended(own).astype('<u2').tofile(folder / f'{name}.bin')
        else:
            write_llm_c(folder / f'{name}.bin', ended(own), '<u2' if kind.endswith('16') else '<u4')
    store, printed = prepared(TokenFiles(path=str(folder), eod=EOD), model, tmp_path / 'store')
    assert store.splits == ('train', 'validation')
    check(store, 'train', TEXTS[:100], documents[:100])
    check(store, 'validation', TEXTS[100:], documents[100:])
    assert '100 % of 120 documents that were compared encode to themselves' in printed
    assert store.tokenizer().decode(all_tokens(store)[: len(documents[0])]) == TEXTS[0]


def test_an_end_before_each_document_stays_where_it_is(documents, model, tmp_path):
    """llm.c puts the end there. The store adds the one end that it needs, after the last document."""
    tokens = np.concatenate([part for ids in documents for part in ([EOD], ids)])
    (tmp_path / 'bin').mkdir()
    write_llm_c(tmp_path / 'bin' / 'edu_train_000001.bin', tokens, '<u2')
    source = TokenFiles(path=str(tmp_path / 'bin' / 'edu_{split}_*.bin'), eod=EOD)
    store, _ = prepared(source, model, tmp_path / 'store')
    np.testing.assert_array_equal(all_tokens(store), [*tokens, EOD])
    assert store.documents('train') == 121


@pytest.mark.parametrize('unit', [2, 50, 1000, 10**9])
def test_cutting_a_file_changes_no_document(unit, documents, tmp_path, monkeypatch):
    monkeypatch.setattr('lm.data.sources.token_files.BLOCK', 37)
    tokens = np.concatenate([ended(documents[:20]), documents[20]])
    tokens.astype('<u2').tofile(tmp_path / 'x.bin')
    source = TokenFiles(path=str(tmp_path / 'x.bin'), eod=EOD)
    found = [d for part in source.parts(tmp_path / 'x.bin', unit) for d in source.read_part(part, 10**9)]
    np.testing.assert_array_equal(np.concatenate([d.tokens for d in found]), tokens)
    assert [len(d.tokens) for d in found] == [len(ids) + 1 for ids in documents[:20]] + [len(documents[20])]
    starts = [int(d.id.rpartition('@')[2]) for d in found]
    assert starts == [0, *np.cumsum([len(d.tokens) for d in found])[:-1].tolist()]


@pytest.mark.parametrize(('code', 'dtype'), [(8, '<u2'), (4, '<i4')])
@pytest.mark.parametrize('is_ended', [True, False])
def test_tokens_of_megatron(code, dtype, is_ended, documents, model, tmp_path):
    (tmp_path / 'm').mkdir()
    given = [np.append(ids, EOD) for ids in documents] if is_ended else documents
    write_megatron(tmp_path / 'm' / 'train_text_document', given[:100], code, dtype, sequences_a_document=2)
    write_megatron(tmp_path / 'm' / 'valid_text_document', given[100:], code, dtype)
    source = Megatron(path=str(tmp_path / 'm' / '{split}_text_document.idx'))
    store, printed = prepared(source, model, tmp_path / 'store')
    check(store, 'train', TEXTS[:100], documents[:100])
    check(store, 'validation', TEXTS[100:], documents[100:])
    assert '100 % of 120 documents that were compared encode to themselves' in printed
    index = tmp_path / 'm' / 'train_text_document.idx'
    for unit in (100, 3000):
        parts = source.parts(index, unit)
        assert len(parts) > 1
        found = [d.tokens for part in parts for d in source.read_part(part, 10**9)]
        np.testing.assert_array_equal(np.concatenate(found), np.concatenate(given[:100]))


def test_files_that_do_not_fit_are_refused(documents, model, tmp_path):
    ended(documents).astype('<u2').tofile(tmp_path / 'train.bin')
    source = TokenFiles(path=str(tmp_path / 'train.bin'), eod=EOD)
    with pytest.raises(ConfigError, match=r"token_files.eod = 2: the tokenizer's end-of-document token is 1; set"):
        prepared(dataclasses.replace(source, eod=2), model, tmp_path / 'store')
    with pytest.raises(ConfigError, match=r'@token_files\(\): holds tokens; name the tokenizer that made them'):
        prepare(PrepareConfig(source=source), str(tmp_path / 'store'), Console(file=io.StringIO()))
    with pytest.raises(ConfigError, match=r"holds tokens, which cannot be cleaned; set prepare.cleaning = 'none'"):
        prepared(source, model, tmp_path / 'store', cleaning='wiki40b_strip')
    assert not (tmp_path / 'store').exists()
    np.array([5, 900, EOD], '<u2').tofile(tmp_path / 'other.bin')
    with pytest.raises(MismatchError, match=r'other.bin@0 holds ids up to 900, the tokenizer has 500; name'):
        prepared(TokenFiles(path=str(tmp_path / 'other.bin'), eod=EOD), model, tmp_path / 's', splits=('train',))
    write_llm_c(tmp_path / 'c.bin', ended(documents), '<u2')
    (tmp_path / 'c.bin').write_bytes((tmp_path / 'c.bin').read_bytes()[:-2])
    with pytest.raises(MismatchError, match=r'c.bin: cut off, or not of uint16; fetch'):
        TokenFiles(path=str(tmp_path / 'c.bin'), eod=EOD).shards('train')
    write_megatron(tmp_path / 'm', documents, 8, '<u2')
    whole = (tmp_path / 'm.idx').read_bytes()
    for content in (whole[:100], b'MMIDIDX\0\0' + whole[9:17] + b'\x09' + whole[18:], b'TNTIDX\0\0' + whole[8:]):
        (tmp_path / 'bad.idx').write_bytes(content)
        with pytest.raises(MismatchError, match=r'bad.idx: not a readable index of Megatron'):
            Megatron(path=str(tmp_path / 'bad.idx')).shards('train')
        import lm.data.sources.megatron as module

        module._read_index.cache_clear()
    (tmp_path / 'm.bin').write_bytes((tmp_path / 'm.bin').read_bytes()[:-2])
    source = Megatron(path=str(tmp_path / 'm.idx'))
    with pytest.raises(MismatchError, match=r'm.bin: cut off in document 119; fetch'):
        [list(source.read(shard, 10**9)) for split in ('train', 'validation') for shard in source.shards(split)]


@pytest.mark.parametrize(('first', 'recorded'), [(3, 3), (None, None), (7, None), ('some', None)])
def test_a_store_says_with_which_token_its_documents_begin(first, recorded, documents, model, tmp_path):
    """A special token before every document counts, and no other one."""
    own = [[*([] if first is None or (first == 'some' and i) else [3 if first == 'some' else first]), *ids]
           for i, ids in enumerate(documents)]  # fmt: skip
    (tmp_path / 'bin').mkdir()
    for name in ('train', 'val'):
        ended(own).astype('<u2').tofile(tmp_path / 'bin' / f'{name}.bin')
    store, _ = prepared(TokenFiles(path=str(tmp_path / 'bin'), eod=EOD), model, tmp_path / 'store')
    assert store.info['tokenizer']['begin_id'] == store.begin_id == recorded
    assert store.documents('train') == len(TEXTS)
    if recorded is not None:
        data = DataConfig(path='x', begin_id=3)
        begin = data.text_begin(store)
        tokens = np.concatenate([[EOD], all_tokens(store)]).astype(np.int32)
        np.testing.assert_array_equal(begin.make_inputs(tokens[None])[0], tokens[:-1])
        with pytest.raises(MismatchError, match=r'data\.begin_id = 2: the documents of x begin with token 3 already'):
            DataConfig(path='x', begin_id=2).text_begin(store)
        assert DataConfig(path='x').text_begin(store) is None
