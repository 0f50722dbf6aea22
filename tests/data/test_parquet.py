import io
import json
import re
import sys

import pytest
from corpora import documents, texts, words
from rich.console import Console

from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.stages import prepare
from lm.data.sources.jsonl import Jsonl
from lm.data.sources.parquet import Parquet
from lm.data.store import TokenStore
from lm.data.tokenizers import TokenizerConfig
from lm.errors import ConfigError, MismatchError

pyarrow = pytest.importorskip('pyarrow')
TEXTS = [words(1 + i % 40, seed=i) for i in range(200)]


def write(path, texts=TEXTS, kind='string', rows=30, **options):
    """Writes a file of row groups, with another column and a column of a similar name in front."""
    import pyarrow.parquet

    columns = {'meta': [{'text': 'no'}] * len(texts), 'text': pyarrow.array(texts, kind)}
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=rows, **options)
    return str(path)


@pytest.mark.parametrize('kind', ['string', 'large_string', 'binary'])
def test_rows_come_in_order_by_split(tmp_path, kind):
    content = [text.encode() for text in TEXTS] if kind == 'binary' else TEXTS
    write(tmp_path / 'train-00000-of-00002.parquet', content[:150], kind)
    write(tmp_path / 'train-00001-of-00002.parquet', content[150:], kind)
    write(tmp_path / 'validation.parquet', content[:7], kind, compression='zstd')
    for path in (tmp_path, tmp_path / '{split}*.parquet'):
        source = Parquet(path=str(path))
        assert source.splits() == ('train', 'validation')
        assert texts(source, 'train') == TEXTS
        assert texts(source, 'validation') == TEXTS[:7]


@pytest.mark.parametrize('place', ['data/{}-0000{}-of-00002.parquet', '{}/000{}.parquet'])
def test_a_snapshot_of_the_hub_is_read(tmp_path, place):
    """A snapshot in the hub's cache has links to files that are named by their hashes."""
    (tmp_path / 'blobs').mkdir()
    for i, (split, some) in enumerate((('train', TEXTS[:150]), ('train', TEXTS[150:]), ('test', TEXTS[:7]))):
        blob = tmp_path / 'blobs' / str(i)
        link = tmp_path / 'snapshot' / place.format(split, i)
        link.parent.mkdir(parents=True, exist_ok=True)
        write(blob, some)
        link.symlink_to(blob)
    source = Parquet(path=str(tmp_path / 'snapshot'))
    assert source.splits() == ('train', 'test')
    assert texts(source, 'train') == TEXTS
    assert texts(source, 'test') == TEXTS[:7]


def test_row_groups_are_the_parts(tmp_path):
    source = Parquet(path=write(tmp_path / 'x.parquet'))
    parts = [part for shard in source.shards('train') for part in shard.parts]
    assert [(part.start, part.stop) for part in parts] == [(i, i + 1) for i in range(7)]
    assert 0.8 < sum(part.bytes for part in parts) / sum(len(text) + 4 for text in TEXTS) < 1.2


def test_a_share_is_held_out(tmp_path):
    source = Parquet(path=write(tmp_path / 'x.parquet'), validation_fraction=0.2)
    train, validation = texts(source, 'train'), texts(source, 'validation')
    assert 25 < len(validation) < 55
    assert sorted(train + validation) == sorted(TEXTS)


def test_bad_rows_are_named(tmp_path):
    source = Parquet(path=write(tmp_path / 'train.parquet', [b'good', b'caf\xe9', None, b'x' * 2000], 'binary'))
    assert [(d.text, d.error) for d in documents(source, 'train', 1000) + documents(source, 'validation', 1000)] == [
        ('good', None),
        ('', 'invalid UTF-8'),
        ('', "no text in field 'text'"),
        ('', 'longer than prepare.max_document_bytes = 1000'),
    ]


def test_wrong_columns_and_files_are_one_line(tmp_path, monkeypatch):
    path = write(tmp_path / 'x.parquet', write_page_checksum=True, compression='none')
    for column in ('body', 'meta'):
        with pytest.raises(ConfigError, match=rf"parquet.text_field = '{column}': .* has meta .*, text \(string\)"):
            Parquet(path=path, text_field=column).shards('train')
    with pytest.raises(ConfigError, match=r'no such files; name a file, a folder of {split}.parquet or a pattern'):
        Parquet(path=str(tmp_path / 'nothing')).splits()
    content = (tmp_path / 'x.parquet').read_bytes()
    source = Parquet(path=path)
    shards = source.shards('train')
    place = content.index(TEXTS[39][-30:].encode())
    (tmp_path / 'x.parquet').write_bytes(content[:place] + b'!' + content[place + 1 :])
    with pytest.raises(MismatchError, match=r'x.parquet: not a readable Parquet file \(.*\); fetch the file again$'):
        list(source.read(shards[0], 10**8))
    for broken in (b'', content[:-20], b'text, not Parquet' * 9):
        (tmp_path / 'x.parquet').write_bytes(broken)
        with pytest.raises(MismatchError, match=r'x.parquet: not a readable Parquet file'):
            source.shards('train')
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, 'pyarrow', None)
        with pytest.raises(ConfigError, match=r"needs pyarrow; pip install -e '\.\[parquet\]'"):
            source.shards('train')


def test_a_store_from_parquet_equals_a_store_from_json_lines(tmp_path):
    for split, own in {'train': TEXTS, 'validation': TEXTS[:9]}.items():
        write(tmp_path / f'{split}.parquet', own)
        (tmp_path / f'{split}.jsonl').write_text(''.join(json.dumps({'text': text}) + '\n' for text in own))
    prints = set()
    for source in (Parquet(path=str(tmp_path)), Jsonl(path=str(tmp_path))):
        config = PrepareConfig(source=source, tokenizer=TokenizerConfig(vocab_size=400), processes=2)
        info = prepare(config, str(tmp_path / source.gin_name), Console(file=io.StringIO()))
        prints.add(info['fingerprint'])
    assert len(prints) == 1


def test_a_missing_validation_split_is_said(tmp_path):
    """The remedy that is printed works; sources with the split, and chosen splits, say nothing of it."""
    (tmp_path / 'in').mkdir()
    write(tmp_path / 'in' / 'train-00000-of-00001.parquet')
    tokenizer = TokenizerConfig(vocab_size=300)

    def said(name: str, path: str, **options) -> str:
        config = PrepareConfig(source=Parquet(path=path), tokenizer=tokenizer, processes=1, **options)
        output = io.StringIO()
        prepare(config, str(tmp_path / name), Console(file=output))
        return output.getvalue()

    shown = said('a', str(tmp_path / 'in'))
    assert 'there is no validation split' in shown
    assert "train with data.eval_split = 'train'" in shown
    remedy = re.search(r"hold out 5 % of the documents by parquet.path = '(.+?)'", shown)[1]
    assert 'no validation split' not in said('b', remedy)
    assert TokenStore.open(str(tmp_path / 'b')).splits == ('train', 'validation')
    assert 'no validation split' not in said('c', str(tmp_path / 'in'), splits=('train',))


def test_a_missing_split_names_bindings_that_every_verb_has(tmp_path):
    write(tmp_path / 'train.parquet')
    config = PrepareConfig(source=Parquet(path=str(tmp_path)), tokenizer=TokenizerConfig(vocab_size=300), processes=1)
    prepare(config, str(tmp_path / 'store'), Console(file=io.StringIO()))
    with pytest.raises(ConfigError, match=r'has train; choose .* data\.eval_split or evaluate\.split') as error:
        TokenStore.open(str(tmp_path / 'store')).tokens('validation')
    assert '--' not in str(error.value)
