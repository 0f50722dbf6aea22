"""Files of sources in forms that other programs write: they are read, or a line says what is not."""

import base64
import gzip
import itertools
import json
import re

import pytest

from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.stages import prepare
from lm.data.sources.jsonl import Jsonl
from lm.data.sources.text_files import TextFiles
from lm.data.store import TokenStore
from lm.data.tokenizers import TokenizerConfig
from lm.data.tokenizers.ranks import Ranks
from lm.errors import AbsentError, ConfigError
from lm.experiment import load
from lm.files import check_scheme

ROWS = [json.dumps({'text': f'document number {i} of some words'}) + '\n' for i in range(80)]


@pytest.mark.parametrize('name', ['val', 'valid', 'dev', 'validation'])
def test_other_names_of_the_validation_split_are_known(name, tmp_path):
    (tmp_path / 'train.jsonl').write_text(''.join(ROWS))
    (tmp_path / f'{name}.jsonl').write_text(ROWS[0])
    assert Jsonl(path=str(tmp_path)).splits() == ('train', 'validation')


def test_files_that_no_split_takes_are_named(tmp_path, capsys):
    folder = tmp_path / 'in'
    folder.mkdir()
    for i, row in enumerate(ROWS):
        (folder / f'{i}.txt').write_text(row)
    (folder / 'mark.txt').write_bytes(b'\xef\xbb\xbfA book of Windows.\n')
    (folder / 'A.TXT').write_text('upper case')
    (folder / 'b.txt.gz').write_bytes(gzip.compress(b'packed'))
    source, choice = TextFiles(path=str(folder)), TokenizerConfig(vocab_size=300)
    prepare(PrepareConfig(source=source, tokenizer=choice, processes=1), str(tmp_path / 'store'))
    assert 'no split takes 2 files of the source: A.TXT, b.txt.gz' in capsys.readouterr().out
    store = TokenStore.open(str(tmp_path / 'store'))
    texts = ''.join(store.tokenizer().decode(store.read(s, 0, store.tokens(s))) for s in store.splits)
    assert 'A book of Windows.' in texts
    assert '\ufeff' not in texts
    (tmp_path / 'lines').mkdir()
    (tmp_path / 'lines' / 'train.jsonl').write_text(''.join(ROWS))
    (tmp_path / 'lines' / 'extra.jsonl').write_text(ROWS[0])
    assert Jsonl(path=str(tmp_path / 'lines')).list_unread() == ['extra.jsonl']


@pytest.mark.parametrize(
    ('name', 'content', 'what'),
    [
        ('a.jsonl.zst', b'\x28\xb5\x2f\xfdxxxx', 'is packed with zstd, which is not read; unpack it'),
        ('a.jsonl', gzip.compress(b'{}', mtime=0), 'is packed with gzip; give it a name that ends in .gz'),
        ('a.jsonl', b'BZh91AY', 'is packed with bzip2'),
        ('a.json', b' \n[{"text": "x"}]', "is a JSON array, not lines; write one object per line, as jq -c '.[]' does"),
    ],
)
def test_packed_files_and_arrays_are_named(name, content, what, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(f'{name} {what}')):
        Jsonl(path=str(tmp_path / name)).shards('train')


def test_a_folder_without_lines_says_what_it_holds(tmp_path):
    (tmp_path / 'train.jsonl.zst').write_bytes(b'x')
    with pytest.raises(ConfigError, match=r'no such files.*the folder holds train\.jsonl\.zst'):
        Jsonl(path=str(tmp_path)).splits()


def test_documents_of_llama_3_end_with_its_token():
    pytest.importorskip('tiktoken')
    pieces = [bytes([i]) for i in range(256)] + [bytes(p) for p in itertools.product(range(256), repeat=2)]
    more = (bytes(p) for p in itertools.product(range(97, 123), range(256), range(97, 123)))
    pieces += itertools.islice(more, 128_000 - len(pieces))
    content = b''.join(base64.b64encode(p) + b' %d\n' % i for i, p in enumerate(pieces))

    def find_end(end):
        return Ranks(Ranks.complete(content, TokenizerConfig(end_of_document=end)), end).eod_id

    found = {end: find_end(end) for end in (None, '<|end_of_text|>', '<|eot_id|>', '128001', '128003')}
    assert list(found.values()) == [128_001, 128_001, 128_009, 128_001, 128_003]
    with pytest.raises(ConfigError, match=r'a vocabulary of 128000 ranks has <\|end_of_text\|>'):
        find_end('<|endoftext|>')
    with pytest.raises(ConfigError, match='is the number of a piece'):
        find_end('5')


def test_a_byte_order_mark_in_a_gin_file_is_none_of_it(tmp_path):
    (tmp_path / 'a.gin').write_bytes(b'\xef\xbb\xbftrain.steps = 7\n')
    assert load([str(tmp_path / 'a.gin')]).train.steps == 7


def test_variables_in_paths_are_refused_and_relative_paths_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ('$HOME/tokens', 'a/${USER}/b'):
        with pytest.raises(ConfigError, match='variables of the environment are not expanded'):
            check_scheme(path, 'data.path')
    (tmp_path / '$plain').mkdir()
    check_scheme('$plain', 'data.path')
    check_scheme('cost_in_$', 'data.path')
    with pytest.raises(AbsentError, match=rf"data.path = 'store': .*\({tmp_path}/store, from the current folder\)"):
        TokenStore.open('store')
