"""Arrow files: both formats hold the texts of the same rows as Parquet, and so do the folders that `datasets` saves."""

import json
import pathlib
import sys

import numpy as np
import pytest
from corpora import documents, texts, words

from lm.data.sources.arrow import Arrow
from lm.errors import ConfigError, MismatchError

pyarrow = pytest.importorskip('pyarrow')
TEXTS = [words(1 + i % 40, seed=i) for i in range(200)]


def write(path, texts=TEXTS, kind='string', rows=30, stream=True):
    """Writes a file of record batches, with another column in front."""
    import pyarrow.ipc

    table = pyarrow.table({'meta': [{'text': 'no'}] * len(texts), 'text': pyarrow.array(texts, kind)})
    path.parent.mkdir(parents=True, exist_ok=True)
    with (pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return str(path)


@pytest.mark.parametrize('stream', [True, False])
@pytest.mark.parametrize('kind', ['string', 'large_string', 'binary'])
def test_rows_come_in_order_by_split(tmp_path, kind, stream):
    content = [text.encode() for text in TEXTS] if kind == 'binary' else TEXTS
    write(tmp_path / 'train-00000-of-00002.arrow', content[:150], kind, stream=stream)
    write(tmp_path / 'train-00001-of-00002.arrow', content[150:], kind, stream=stream)
    write(tmp_path / 'validation.arrow', content[:7], kind, stream=stream)
    for path in (tmp_path, tmp_path / '{split}*.arrow'):
        source = Arrow(path=str(path))
        assert source.splits() == ('train', 'validation')
        assert texts(source, 'train') == TEXTS
        assert texts(source, 'validation') == TEXTS[:7]


@pytest.mark.parametrize('stream', [True, False])
def test_cutting_a_file_changes_no_document(tmp_path, stream):
    path = tmp_path / 'x.arrow'
    source = Arrow(path=write(path, stream=stream), validation_fraction=0.2)
    whole, cut = source.parts(path, 10**9), source.parts(path, 2000)
    assert [(part.start, part.stop) for part in whole] == [(0, 7)]
    assert len(cut) > 2
    assert [part.start for part in cut[1:]] == [part.stop for part in cut[:-1]]
    assert 0.8 < sum(part.bytes for part in cut) / sum(len(text) + 4 for text in TEXTS) < 1.2
    read = [[d for part in parts for d in source.read_part(part, 10**8)] for parts in (whole, cut)]
    assert read[0] == read[1]
    assert [d.text for d in read[0]] == TEXTS
    train, validation = texts(source, 'train'), texts(source, 'validation')
    assert 25 < len(validation) < 55
    assert sorted(train + validation) == sorted(TEXTS)


def test_what_datasets_saves(tmp_path):
    """`DatasetDict.save_to_disk` writes one folder per split, `Dataset.save_to_disk` writes one folder."""
    write(tmp_path / 'dict' / 'train' / 'data-00000-of-00002.arrow', TEXTS[:100])
    write(tmp_path / 'dict' / 'train' / 'data-00001-of-00002.arrow', TEXTS[100:])
    write(tmp_path / 'dict' / 'test' / 'data-00000-of-00001.arrow', TEXTS[:9])
    (tmp_path / 'dict' / 'dataset_dict.json').write_text('{"splits": ["train", "test"]}')
    source = Arrow(path=str(tmp_path / 'dict'))
    assert source.splits() == ('train', 'test')
    assert texts(source, 'train') == TEXTS
    assert texts(source, 'test') == TEXTS[:9]
    write(tmp_path / 'one' / 'data-00000-of-00001.arrow')
    source = Arrow(path=str(tmp_path / 'one'), validation_fraction=0.2)
    assert source.splits() == ('train', 'validation')
    assert sorted(texts(source, 'train') + texts(source, 'validation')) == sorted(TEXTS)
    assert texts(source, 'validation')


def test_what_datasets_keeps_in_its_cache(tmp_path):
    """`load_dataset` gives these names, in a folder of hashes. The files that `map` leaves there belong to no split."""
    write(tmp_path / 'my_corpus-train-00000-of-00002.arrow', TEXTS[:100])
    write(tmp_path / 'my_corpus-train-00001-of-00002.arrow', TEXTS[100:])
    write(tmp_path / 'my_corpus-validation.arrow', TEXTS[:9])
    write(tmp_path / 'cache-0123456789abcdef.arrow', ['a column that was made'])
    source = Arrow(path=str(tmp_path))
    assert source.splits() == ('train', 'validation')
    assert texts(source, 'train') == TEXTS
    assert texts(source, 'validation') == TEXTS[:9]


@pytest.mark.interop
def test_a_data_set_of_datasets_by_itself(tmp_path):
    """The library itself writes the data, in both of its ways."""
    datasets = pytest.importorskip('datasets', reason='needs datasets: scripts/test.sh -m interop')
    for split, some in {'train': TEXTS, 'validation': TEXTS[:9]}.items():
        (tmp_path / f'{split}.jsonl').write_text('\n'.join(json.dumps({'text': text}) for text in some))
    files = {split: str(tmp_path / f'{split}.jsonl') for split in ('train', 'validation')}
    made = datasets.load_dataset('json', data_files=files, cache_dir=str(tmp_path / 'cache'))
    made.save_to_disk(str(tmp_path / 'saved'))
    (cached,) = {path.parent for path in (tmp_path / 'cache').rglob('*.arrow')}
    for folder in (cached, tmp_path / 'saved'):
        source = Arrow(path=str(folder))
        assert source.splits() == ('train', 'validation')
        assert texts(source, 'train') == TEXTS
        assert texts(source, 'validation') == TEXTS[:9]


def test_bad_rows_files_and_columns_are_named(tmp_path, monkeypatch):
    source = Arrow(path=write(tmp_path / 'train.arrow', [b'good', b'caf\xe9', None, b'x' * 2000], 'binary'))
    assert [(d.text, d.error) for d in documents(source, 'train', 1000) + documents(source, 'validation', 1000)] == [
        ('good', None),
        ('', 'invalid UTF-8'),
        ('', "no text in field 'text'"),
        ('', 'longer than prepare.max_document_bytes = 1000'),
    ]
    path = write(tmp_path / 'x.arrow')
    for column in ('body', 'meta'):
        with pytest.raises(ConfigError, match=rf"arrow.text_field = '{column}': .* has meta .*, text \(string\)"):
            Arrow(path=path, text_field=column).shards('train')
    whole = (tmp_path / 'x.arrow').read_bytes()
    for content in (whole[: len(whole) // 2], b'', b'something else' * 100):
        (tmp_path / 'cut.arrow').write_bytes(content)
        with pytest.raises(MismatchError, match=r'cut.arrow: not a readable Arrow file \(.*fetch the file again'):
            documents(Arrow(path=str(tmp_path / 'cut.arrow')), 'train')
    monkeypatch.setitem(sys.modules, 'pyarrow', None)
    with pytest.raises(ConfigError, match=r"@arrow\(\): needs pyarrow; pip install -e '\.\[parquet\]'"):
        Arrow(path=path).shards('train')


@pytest.mark.parametrize('kind', ['string', 'large_string', 'binary'])
def test_offsets_that_lead_out_of_the_file_are_one_line(kind, tmp_path):
    """pyarrow follows them without a look, and the process is aborted."""
    content = [text.encode() for text in TEXTS] if kind == 'binary' else TEXTS
    path = write(tmp_path / 'train.arrow', content, kind, rows=len(content))
    offsets = np.cumsum([0, *map(len, content)]).astype('<i8' if kind == 'large_string' else '<i4').tobytes()
    whole = pathlib.Path(path).read_bytes()
    at = whole.index(offsets) + 100 * (len(offsets) // (len(content) + 1))
    for wrong in (b'\xff\xff\xff\x7f', b'\xff\xff\xff\xff', bytes(4)):
        pathlib.Path(path).write_bytes(whole[:at] + wrong + whole[at + 4 :])
        with pytest.raises(MismatchError, match=r'train\.arrow: not a readable Arrow file \(.*ffset'):
            texts(Arrow(path=path), 'train')


@pytest.mark.parametrize('stream', [True, False])
def test_a_name_of_a_column_that_is_no_text_is_one_line(stream, tmp_path):
    path = pathlib.Path(write(tmp_path / 'train.arrow', stream=stream))
    path.write_bytes(path.read_bytes().replace(b'meta', b'\xffeta'))
    with pytest.raises(MismatchError, match=r'train\.arrow: not a readable Arrow file \(.*utf-8'):
        texts(Arrow(path=str(path)), 'train')
