import dataclasses
import gzip
import importlib.metadata
import json
import os
import pathlib
import pickle
import random
import re
import struct

import flax
import pytest
from corpora import CORPORA, documents, needs_corpora, words, write_real_tfds, write_text, write_tfds

from lm.config.configurable import REGISTRY
from lm.data.prepare.cleaning import CLEANINGS
from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.settings import choose_splits
from lm.data.sources import base, patterns
from lm.data.sources import tfds as tfds_module
from lm.data.sources.folder import Folder
from lm.data.sources.jsonl import Jsonl
from lm.data.sources.python_sources import PythonSources
from lm.data.sources.text_files import TextFiles
from lm.data.sources.tfds import Tfds
from lm.errors import ConfigError, MismatchError


def texts(source, split, **options):
    return [d.text for d in documents(source, split, **options) if not d.error]


def test_text_files_in_the_layout_of_pg19(tmp_path):
    write_text(tmp_path, files=3)
    (tmp_path / 'metadata.csv').write_text('0,"A title, with a comma",1900,link\n')
    source = TextFiles(path=str(tmp_path))
    assert source.splits() == ('train', 'validation', 'test')
    assert texts(source, 'train') == [(tmp_path / 'train' / f'{i}.txt').read_text() for i in range(3)]
    assert len(texts(source, 'test')) == 1
    assert source.identity()['layout'] == 'pg19'


def folder_of(tmp_path, numbers, split='validation'):
    folder = tmp_path / f'{len(list(tmp_path.iterdir()))}' / split
    folder.mkdir(parents=True)
    for number in numbers:
        (folder / f'{number}.txt').write_text('a book')
    return TextFiles(path=str(folder.parent))


def test_pg19_is_known_by_the_names_and_the_number_of_its_books(tmp_path):
    books = [10_762 + 977 * i for i in range(50)]
    assert folder_of(tmp_path, books).published_words('validation', 50) == 3_007_061
    assert folder_of(tmp_path, [*books, *(b + 1 for b in books)], 'test').published_words('test', 100) == 6_966_499
    assert folder_of(tmp_path, books[:-1]).published_words('validation', 49) is None
    assert folder_of(tmp_path, books).published_words('validation', 49) is None  # one of the books is a bad record
    assert folder_of(tmp_path, range(50)).published_words('validation', 50) is None
    assert folder_of(tmp_path, range(10_000, 10_050)).published_words('validation', 50) is None
    assert folder_of(tmp_path, [f'{b}-0' for b in books]).published_words('validation', 50) is None
    assert folder_of(tmp_path, books, 'train').published_words('train', 50) is None
    described = folder_of(tmp_path, range(50))
    (tmp_path / described.path / 'metadata.csv').write_text('')
    assert described.published_words('validation', 50) == 3_007_061
    assert Tfds(name='pg19').published_words('test', 100) == 6_966_499
    assert Tfds(name='c4/en').published_words('test', 100) is None
    assert Jsonl(path='x').published_words('test', 100) is None


def test_a_flat_folder_is_split_by_hash(tmp_path):
    for i in range(40):
        (tmp_path / f'{i}.txt').write_text(f'document {i}\r\n')
    (tmp_path / 'notes.md').write_text('not text')
    source = TextFiles(path=str(tmp_path), validation_fraction=0.1)
    train, validation = texts(source, 'train'), texts(source, 'validation')
    assert (len(train), len(validation)) == (36, 4)
    assert sorted(train + validation) == sorted(f'document {i}\r\n' for i in range(40))
    assert validation != train[:4]
    assert validation == texts(TextFiles(path=str(tmp_path), validation_fraction=0.1), 'validation')


FOLDERS = [cls for cls in Folder.__subclasses__() if 'path' in {field.name for field in dataclasses.fields(cls)}]


@pytest.mark.parametrize('source', FOLDERS, ids=lambda cls: cls.gin_name)
def test_every_source_of_a_folder_reads_its_files_and_no_others(source, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(f'no {source.suffix} files under ')):
        texts(source(path=str(tmp_path)), 'train')
    names = [f'{i}{source.suffix}' for i in range(30)]
    for name in (*names, 'other.zip'):
        (tmp_path / name).write_text(f'text of {name}\n')
    found = {split: texts(source(path=str(tmp_path)), split) for split in source(path=str(tmp_path)).splits()}
    assert sorted(text for split in found.values() for text in split) == sorted(f'text of {name}\n' for name in names)
    assert 0 < len(found['validation']) < len(found['train'])


def test_a_single_file_is_cut_at_a_line(tmp_path):
    text = words(5000, seed=3)
    (tmp_path / 'input.txt').write_text(text)
    train, validation = (texts(TextFiles(path=str(tmp_path)), split)[0] for split in ('train', 'validation'))
    assert train + validation == text
    assert train.endswith('\n')
    assert 0.03 < len(validation) / len(text) < 0.05


@pytest.mark.parametrize(
    ('text', 'end'),
    [('word ' * 100, ' '), ('word ' * 100 + '\n', ' '), ('é' * 100, 'é'), ('a\n' + 'é' * 200 + '\n', 'é')],
    ids=['words', 'words and an end', 'no space', 'a long last line'],
)
def test_a_single_line_is_cut_at_a_space_or_a_character(tmp_path, text, end):
    (tmp_path / 'text8.txt').write_text(text)
    source = TextFiles(path=str(tmp_path), validation_fraction=0.033)
    train, validation = (texts(source, split)[0] for split in ('train', 'validation'))
    assert train + validation == text
    assert train.endswith(end)
    assert 0.01 < len(validation) / len(text) < 0.04


def test_names_of_files_need_not_be_utf_8(tmp_path):
    for name in (b'caf\xe9.txt', b'tea.txt', b'water.txt'):
        pathlib.Path(os.fsdecode(os.fsencode(tmp_path) + b'/' + name)).write_text(repr(name))
    source = TextFiles(path=str(tmp_path), validation_fraction=0.3)
    assert len(texts(source, 'train') + texts(source, 'validation')) == 3


def test_bad_text_files_are_named(tmp_path):
    write_text(tmp_path, files=1)
    (tmp_path / 'train' / 'latin.txt').write_bytes('café'.encode('latin-1'))
    (tmp_path / 'train' / 'long.txt').write_text('x' * 200_000)
    errors = {d.id: d.error for d in documents(TextFiles(path=str(tmp_path)), 'train', max_bytes=100_000) if d.error}
    assert errors == {
        'train/latin.txt': 'invalid UTF-8',
        'train/long.txt': 'longer than prepare.max_document_bytes = 100000',
    }


def test_jsonl_by_split_and_by_share(tmp_path):
    lines = [json.dumps({'text': words(30, seed=i), 'url': 'x'}) + '\n' for i in range(300)]
    expected = [json.loads(line)['text'] for line in lines]
    (tmp_path / 'train.jsonl').write_text(''.join(lines))
    with gzip.open(tmp_path / 'validation.jsonl.gz', 'wt') as file:
        file.writelines(lines[:7])
    for path in (tmp_path, tmp_path / '{split}.jsonl*'):
        source = Jsonl(path=str(path))
        assert source.splits() == ('train', 'validation')
        assert texts(source, 'train') == expected
        assert texts(source, 'validation') == expected[:7]
    source = Jsonl(path=str(tmp_path / 'train.jsonl'), validation_fraction=0.2)
    train, validation = texts(source, 'train'), texts(source, 'validation')
    assert 40 < len(validation) < 80
    assert sorted(train + validation) == sorted(expected)


def test_files_with_one_name_in_many_folders_are_held_out_individually(tmp_path):
    for i in range(60):
        (tmp_path / f'{i}').mkdir()
        (tmp_path / f'{i}' / 'data.jsonl').write_text(json.dumps({'text': f'document {i}'}))
    (tmp_path / '0' / 'other.jsonl').write_text(json.dumps({'text': 'other'}))
    source = Jsonl(path=f'{tmp_path}/*/*.jsonl', validation_fraction=0.3)
    train, validation = texts(source, 'train'), texts(source, 'validation')
    assert 8 < len(validation) < 30
    assert len({*train, *validation}) == 61
    # Files of a unique name count by the name alone, in any folder.
    hashed = [source._hashed(f'{tmp_path}/0/{name}.jsonl@7') for name in ('other', 'data')]
    assert hashed == ['other.jsonl@7', '/0/data.jsonl@7']


def test_a_file_that_is_also_there_packed_is_refused(tmp_path):
    (tmp_path / 'train.jsonl').write_text('{"text": "a"}')
    (tmp_path / 'train.jsonl.gz').write_bytes(gzip.compress(b'{"text": "a"}'))
    for path in (tmp_path, tmp_path / '*'):
        with pytest.raises(ConfigError, match=r'train.jsonl.gz lies there both packed and unpacked; move one of the'):
            Jsonl(path=str(path)).splits()


def test_jsonl_does_not_depend_on_the_cuts(tmp_path, monkeypatch):
    lines = [json.dumps({'text': words(1 + i % 40, seed=i)}) for i in range(200)]
    (tmp_path / 'train.jsonl').write_text('\n'.join(lines))  # no newline at the end
    source = Jsonl(path=str(tmp_path))
    whole = documents(source, 'train')
    assert len(whole) == 200
    for size in (1, 2, 97, 4096):
        for module in (base, patterns):
            monkeypatch.setattr(module, 'shard_bytes', lambda total, size=size: size)
        assert len(source.shards('train')) > 5
        assert documents(source, 'train') == whole


def test_a_byte_order_mark_before_json_is_ignored(tmp_path):
    lines = [json.dumps({'text': text}, ensure_ascii=False) for text in ('\ufeffa', 'b')]
    (tmp_path / 'train.jsonl').write_text('\n'.join(lines), encoding='utf-8-sig')
    assert [d.text for d in documents(Jsonl(path=str(tmp_path)), 'train')] == ['\ufeffa', 'b']


def test_bad_lines_are_named(tmp_path):
    good = json.dumps({'text': 'good'}).encode() + b'\n'
    bad = {
        b'{"text": "caf\xe9"}\n': 'invalid UTF-8',
        b'{"text": \n': 'invalid JSON',
        b'[1]\n': "no text in field 'text'",
        b'{"text": 3}\n': "no text in field 'text'",
        b'{"text": "' + b'x' * 5000 + b'"}\n': 'longer than prepare.max_document_bytes = 1000',
    }
    content = b''.join(good + line + b'\n' for line in bad)
    for name in ('train.jsonl', 'train.jsonl.gz'):
        (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith('.gz') else content)
        found = documents(Jsonl(path=str(tmp_path / name.replace('train', '{split}'))), 'train', max_bytes=1000)
        assert [d.error for d in found if d.error] == list(bad.values())
        assert [d.text for d in found if not d.error] == ['good'] * len(bad)
        at = [int(d.id.split('@')[1]) for d in found]
        assert all(content[a : a + 1] in b'{[' for a in at)


def test_a_truncated_gzip_stops(tmp_path):
    content = gzip.compress(''.join(json.dumps({'text': words(50, seed=i)}) + '\n' for i in range(99)).encode())
    (tmp_path / 'train.jsonl.gz').write_bytes(content[:-2000])
    with pytest.raises(MismatchError, match=r'train.jsonl.gz: damaged behind byte \d+'):
        documents(Jsonl(path=str(tmp_path)), 'train')


def test_an_empty_gzip_stops(tmp_path):
    (tmp_path / 'train.jsonl.gz').write_bytes(b'')
    with pytest.raises(MismatchError, match=r'train.jsonl.gz: empty, .*fetch it again'):
        Jsonl(path=str(tmp_path)).shards('train')


def test_paths_that_are_no_regular_file_are_not_read(tmp_path):
    """A folder is skipped. A file that would hang, or that has vanished with its disk, is refused."""
    write_text(tmp_path, files=2)
    (tmp_path / 'train' / 'folder.txt').mkdir()
    (tmp_path / 'train.jsonl').mkdir()
    source = TextFiles(path=str(tmp_path))
    assert len(texts(source, 'train')) == 2
    with pytest.raises(ConfigError, match='no such files'):
        Jsonl(path=str(tmp_path)).splits()
    os.mkfifo(tmp_path / 'train' / 'pipe.txt')
    (tmp_path / 'test' / 'link.txt').symlink_to('nowhere')
    for split, name in (('train', 'pipe'), ('test', 'link')):
        with pytest.raises(MismatchError, match=rf'{name}.txt: a broken link or no regular file; mend it'):
            source.shards(split)
    with pytest.raises(MismatchError, match='/dev/zero: a broken link or no regular file'):
        Jsonl(path='/dev/zero').splits()


def test_linked_folders_are_read_once(tmp_path):
    """A link to a folder around the source is named among the files that are not read."""
    folder, other = tmp_path / 'a' / 'text', tmp_path / 'other'
    for path in (folder / 'real' / 'one.txt', other / 'inner' / 'two.txt', other / 'three.md', tmp_path / 'not.txt'):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.stem)
    links = {'circle': folder, 'first': other, 'second': other / 'inner', 'up': tmp_path, 'same': folder / 'real'}
    for name, target in links.items():
        (folder / name).symlink_to(target)
    (other / 'inner' / 'back').symlink_to(other)
    source = TextFiles(path=str(folder))
    names = {part.file for split in source.splits() for shard in source.shards(split) for part in shard.parts}
    assert names == {'real/one.txt', 'first/inner/two.txt'}
    assert sorted(texts(source, 'train') + texts(source, 'validation')) == ['one', 'two']
    assert source.list_unread() == ['first/three.md', 'up']


def test_brackets_are_a_pattern_unless_a_file_or_folder_has_that_name(tmp_path):
    for name in ('text [2]', 'text 2'):
        (tmp_path / name).mkdir()
        for file in ('part-0', 'part-1', 'part-2', 'part-[0-1]'):
            (tmp_path / name / f'{file}.jsonl').write_text(json.dumps({'text': f'{name}/{file}'}) + '\n')

    def found(pattern):
        source = Jsonl(path=str(tmp_path / pattern))
        return [d.text for split in source.splits() for shard in source.shards(split) for d in source.read(shard, 100)]

    assert sorted(found('text [2]/part-?.jsonl')) == [f'text [2]/part-{i}' for i in range(3)]
    assert sorted(found('text [12]/part-[01].jsonl')) == ['text 2/part-0', 'text 2/part-1']
    assert found('text 2/part-[0-1].jsonl') == ['text 2/part-[0-1]']


def test_an_invalid_pattern_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"jsonl.path = '.*/\*\*x': Invalid pattern.*; write another pattern"):
        Jsonl(path=f'{tmp_path}/**x').splits()


def test_python_sources_are_there_and_reproducible():
    source = pickle.loads(pickle.dumps(PythonSources()))
    train, validation = documents(source, 'train'), documents(source, 'validation')
    assert sum(len(d.text) for d in train) > 5_000_000
    assert len(validation) > 10
    assert not [d for d in train + validation if d.error or 'site-packages' in d.id or not d.text]
    assert {'json/decoder.py', 'ast.py'} <= {d.id for d in train + validation}


def test_sources_of_packages():
    source = PythonSources(packages=('flax', 'optax'))
    read = {split: {d.id: d.text for d in documents(source, split)} for split in ('train', 'validation')}
    ids = read['train'].keys() | read['validation'].keys()
    assert {'ast.py', 'site-packages/flax/nnx/module.py', 'site-packages/optax/losses/__init__.py'} <= ids
    assert not [name for name in ids if name.startswith('/') or '/tests/' in name]
    assert not read['train'].keys() & read['validation'].keys()
    path = pathlib.Path(flax.__file__).parent / 'nnx' / 'module.py'
    assert (read['train'] | read['validation'])['site-packages/flax/nnx/module.py'] == path.read_text()
    assert source.identity()['packages'] == {name: importlib.metadata.version(name) for name in ('flax', 'optax')}
    assert 'packages' not in PythonSources().identity()
    with pytest.raises(ConfigError, match=r"python_sources.packages = 'nope': no such package is installed"):
        PythonSources(packages=('nope',)).shards('train')


@pytest.mark.parametrize(
    ('source', 'message'),
    [
        (TextFiles(path='/nowhere'), "text_files.path = '/nowhere': no such folder"),
        (Jsonl(path='/nowhere/*.jsonl'), r"jsonl.path = '/nowhere/\*.jsonl': no such files"),
        (Tfds(name='pg19', data_dir='/nowhere'), "tfds.name = 'pg19'.*not prepared under /nowhere"),
    ],
)
def test_missing_data(source, message):
    with pytest.raises(ConfigError, match=message):
        source.splits()


def test_data_that_is_not_there_says_what_to_install(monkeypatch):
    monkeypatch.setattr(tfds_module.importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[tfds\]' and run this again"):
        Tfds(name='wiki40b/en', data_dir='/nowhere').fetch(print)


TEXTS = [words(20 + i, seed=i) for i in range(30)] + ['é ▁ 😀', b'caf\xe9', '']


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp('tfds')
    write_tfds(folder, {'train': TEXTS, 'test': TEXTS[:3]}, version='1.0.0')
    write_tfds(folder, {'train': TEXTS[:5]}, version='0.9.10')
    return folder


def test_tfds_array_record(data_dir, monkeypatch):
    source = Tfds(name='tiny', data_dir=str(data_dir))
    assert source.splits() == ('train', 'test')
    assert source.identity() == {'kind': 'tfds', 'name': 'tiny', 'version': '1.0.0', 'text_feature': 'text'}
    found = documents(source, 'train')
    assert sorted(d.text for d in found if not d.error) == sorted(t for t in TEXTS if isinstance(t, str))
    assert [d.error for d in found if d.error] == ['invalid UTF-8']
    monkeypatch.setattr(tfds_module, 'shard_bytes', lambda total: 500)
    monkeypatch.setattr(base, 'shard_bytes', lambda total: 500)
    assert len(source.shards('train')) > 5
    assert documents(source, 'train') == found
    assert len(documents(Tfds(name='tiny', data_dir=str(data_dir), version='0.9.10'), 'train')) == 5
    with pytest.raises(ConfigError, match=r"tfds.text_feature = 'body': tiny has .*text"):
        Tfds(name='tiny', data_dir=str(data_dir), text_feature='body').shards('train')
    with pytest.raises(ConfigError, match=r'version 3.0.0: not prepared'):
        Tfds(name='tiny', data_dir=str(data_dir), version='3.0.0').splits()


def as_tf_records(folder):
    """Converts a prepared data set from ArrayRecord files to TFRecord files."""
    from array_record.python.array_record_module import ArrayRecordReader

    for path in folder.glob('*.array_record*'):
        reader = ArrayRecordReader(str(path))
        framed = b''
        for record in reader.read(0, reader.num_records()):
            head = struct.pack('<Q', len(record))
            for part in (head, record):
                framed += part + tfds_module.masked_crc(part)
        reader.close()
        (folder / path.name.replace('array_record', 'tfrecord')).write_bytes(framed)
        path.unlink()
    info = folder / 'dataset_info.json'
    info.write_text(info.read_text().replace('array_record', 'tfrecord'))


def test_tfds_tf_record(data_dir, tmp_path, monkeypatch):
    write_tfds(tmp_path, {'train': TEXTS, 'test': TEXTS[:3]})
    expected = documents(Tfds(name='tiny', data_dir=str(tmp_path)), 'train')
    as_tf_records(tmp_path / 'tiny' / '1.0.0')
    tfds_module._info.cache_clear()
    source = Tfds(name='tiny', data_dir=str(tmp_path))
    monkeypatch.setattr(tfds_module, 'shard_bytes', lambda total: 500)
    found = documents(source, 'train')
    assert [(d.text, d.error) for d in found] == [(d.text, d.error) for d in expected]
    file = next((tmp_path / 'tiny' / '1.0.0').glob('*train.tfrecord*'))
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    with pytest.raises(MismatchError, match=r'damaged at record \d+'):
        documents(source, 'train')
    file.write_bytes(b'\x01' + content[1:])
    with pytest.raises(MismatchError, match='damaged at record 0'):
        documents(source, 'train')
    for seed in range(200):  # no flipped bit is read, wherever it is
        damaged, draw = bytearray(content), random.Random(seed)
        damaged[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        file.write_bytes(damaged)
        with pytest.raises(MismatchError, match=r'damaged at record \d+'):
            documents(source, 'train')


def test_checksum_of_tf_records():
    """crc32c has the check value 0xE3069283. The format rotates it right by 15 bits and adds 0xA282EAD8."""
    assert tfds_module.masked_crc(b'123456789') == struct.pack('<I', 0xC78AB0E5)


@pytest.mark.parametrize(
    ('name', 'remedy'),
    [
        ('wiki40b/en:1.3.0', "tfds.name = 'wiki40b/en' and tfds.version = '1.3.0'"),
        ('pg19[:50%]', "tfds.name = 'pg19' and prepare.splits to whole splits"),
        ('pg19:1.0.0[:50%]', "tfds.name = 'pg19' and tfds.version = '1.0.0' and prepare.splits to whole splits"),
    ],
)
def test_what_stands_behind_the_name_of_a_dataset_has_a_field_of_its_own(name, remedy):
    with pytest.raises(ConfigError, match=re.escape(f'tfds.name = {name!r}: must be a name alone; set {remedy}')):
        Tfds(name=name)


@pytest.mark.parametrize(
    ('name', 'remedy'),
    [
        ('train[:50%]', "('train',)"),
        ('train[10:20]', "('train',)"),
        ('train[10:', "('train',)"),
        ('train[:50%] + test', "('train', 'test')"),
        ('train+test', "('train', 'test')"),
        ('test+test[5:]', "('test',)"),
    ],
)
def test_parts_and_sums_of_splits_are_named_with_the_splits(name, remedy, data_dir):
    config = PrepareConfig(source=Tfds(name='tiny', data_dir=str(data_dir)), splits=(name,))
    with pytest.raises(ConfigError, match=re.escape(f'prepare.splits: {name!r} is a part or a sum')) as raised:
        choose_splits(config)
    assert str(raised.value).endswith(f'set prepare.splits = {remedy}')
    with pytest.raises(
        ConfigError, match=re.escape("'train': must be a list, each item a string or None, not str (write ('train',)")
    ):
        PrepareConfig(splits='train')  # type: ignore


def test_tfds_damaged_array_record(data_dir, tmp_path):
    write_tfds(tmp_path, {'train': TEXTS})
    file = next((tmp_path / 'tiny' / '1.0.0').glob('*train.array_record*'))
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(MismatchError, match='damaged at record 0'):
        documents(Tfds(name='tiny', data_dir=str(tmp_path)), 'train')


@needs_corpora
def test_the_real_tfds_data_sets(tmp_path):
    write_real_tfds(tmp_path)
    for name, splits, records in (('pg19', 3, 8), ('wiki40b/en', 3, 82), ('c4/en', 2, 856)):
        source = Tfds(name=name, data_dir=str(tmp_path))
        assert len(source.splits()) == splits
        found = documents(source, 'train')
        assert (len(found), [d.error for d in found if d.error]) == (records, [])
    by_hand = texts(Jsonl(path=str(CORPORA / 'wiki40b_en')), 'train')
    assert sorted(texts(Tfds(name='wiki40b/en', data_dir=str(tmp_path)), 'train')) == sorted(by_hand)
    stripped = [CLEANINGS['wiki40b_strip'](text) for text in by_hand]
    assert not [text for text in stripped if '_START_' in text or '_NEWLINE_' in text]
    assert [CLEANINGS['wiki40b_keep'](text) for text in by_hand] == by_hand


def test_wiki40b_markers():
    article = (
        '\n_START_ARTICLE_\nTitle\n_START_SECTION_\nHead\n_START_PARAGRAPH_\nOne._NEWLINE_Two.\n_START_PARAGRAPH_\nX'
    )
    assert CLEANINGS['wiki40b_strip'](article) == 'Title\nHead\nOne.\nTwo.\nX'
    assert CLEANINGS['none'](article) == article


def test_a_new_source_file_is_found():
    """No other file names the source. It can be named in gin, and error messages list it."""
    files = {path.stem for path in pathlib.Path(base.__file__).parent.glob('*.py')} - {'__init__'}
    sources = {name: cls for name, cls in REGISTRY.items() if issubclass(cls, base.Source)}
    assert files - {cls.__module__.rpartition('.')[2] for cls in sources.values()} == {'base', 'folder', 'patterns'}
    assert {'arrow', 'fasta', 'jsonl', 'python_sources', 'text_files', 'tfds'} <= sources.keys()
    listed = ', '.join(f'@{name}()' for name in sorted(sources))
    with pytest.raises(ConfigError, match=re.escape(f'one of {listed}')):
        PrepareConfig(source='jsonl')
