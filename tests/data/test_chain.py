"""The chain from source to token: damage between two commands heals, and a store is proved again from its source."""

import io
import json
import os
import pathlib

import pytest
from corpora import words
from in_process import stay_in_process
from rich.console import Console

from lm.cli import main
from lm.data.prepare import chain, stages
from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.counts import ShardCounts, check_content, decode_counts, encode_counts
from lm.data.prepare.parts import Share
from lm.data.prepare.stages import prepare
from lm.data.sources.jsonl import Jsonl
from lm.data.store import TokenStore, read_info
from lm.data.tokenizers import TokenizerConfig
from lm.errors import ConfigError, LmError, MismatchError


@pytest.fixture
def config(tmp_path, monkeypatch) -> PrepareConfig:
    """Returns a preparation of several shards."""
    stay_in_process(monkeypatch)
    monkeypatch.setattr('lm.data.sources.base.MIN_SHARD_BYTES', 20_000)
    folder = tmp_path / 'text'
    folder.mkdir()
    for i in range(4):
        lines = [json.dumps({'text': words(200, seed=10 * i + n)}) for n in range(12)]
        (folder / f'train-{i}.jsonl').write_text('\n'.join(lines))
    (folder / 'validation.jsonl').write_text(json.dumps({'text': words(300, seed=1)}))
    return PrepareConfig(source=Jsonl(path=str(folder)), tokenizer=TokenizerConfig(vocab_size=400), processes=1)


def flip(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    'a bit of the tokens': ('.tokens', flip),
    'a bit of the lengths': ('.lengths', flip),
    'a bit of the counts': ('.json', flip),
    'cut tokens': ('.tokens', lambda path: path.write_bytes(path.read_bytes()[:-2])),
    'no tokens': ('.tokens', pathlib.Path.unlink),
    'no lengths': ('.lengths', pathlib.Path.unlink),
    'nested counts': ('.json', lambda path: path.write_text('[' * 100_000)),
}


def damage(folder: pathlib.Path, kind: str) -> None:
    suffix, apply = DAMAGES[kind]
    apply(sorted(folder.rglob(f'train/*{suffix}'))[1])


def read_splits(path: pathlib.Path) -> dict:
    info = read_info(str(path))
    assert info is not None
    return info['splits']


@pytest.mark.parametrize('kind', DAMAGES)
def test_a_part_that_is_damaged_between_two_machines_is_made_again(kind, config, tmp_path):
    prepare(config, str(tmp_path / 'one'))
    path, said = tmp_path / 'two', io.StringIO()
    assert prepare(config, str(path), share=Share(0, 2)) is None
    damage(path / 'parts', kind)
    assert prepare(config, str(path), share=Share(1, 2), console=Console(file=said, width=300)) is not None
    assert 'of the intermediate files is damaged or gone: this shard is made again' in said.getvalue()
    assert read_splits(path) == read_splits(tmp_path / 'one')
    for split in ('train', 'validation'):
        TokenStore.open(str(path)).verify(split)
    assert (path / 'chain.jsonl').read_bytes() == (tmp_path / 'one' / 'chain.jsonl').read_bytes()


def test_storage_that_damages_each_time_ends_with_the_file(config, tmp_path, monkeypatch):
    path, assemble = tmp_path / 'store', stages._assemble

    def disturb(*arguments):
        damage(path / 'parts', 'a bit of the tokens')
        return assemble(*arguments)

    monkeypatch.setattr(stages, '_assemble', disturb)
    with pytest.raises(LmError, match=r'train/000001\.tokens of the intermediate files is damaged'):
        prepare(config, str(path))


def test_a_damaged_tokenizer_tokenizes_nothing(config, tmp_path):
    path = tmp_path / 'store'
    assert prepare(config, str(path), share=Share(0, 2)) is None
    flip(next(path.rglob('tokenizer.model')))
    with pytest.raises(LmError, match=r'tokenizer\.model of the intermediate files is damaged; delete all of them'):
        prepare(config, str(path), share=Share(1, 2))


def test_counts_of_an_earlier_version_are_read():
    """They have no digests, so that nothing is compared, and their store has no chain."""
    assert decode_counts(b'{"documents": 3, "tokens": 7, "sizes": {".tokens": 14}}') == ShardCounts(
        documents=3, tokens=7
    )
    counts = ShardCounts(documents=3, sha256={'.tokens': 'a'}, source='b')
    assert decode_counts(encode_counts(counts)) == counts
    assert check_content(ShardCounts(), 'train/000000', '.tokens', b'any') == b'any'
    assert chain.write_chain('nowhere', {'train': [ShardCounts(documents=3)]}) == {}


def prove(config, path, share=1.0) -> str:
    console = Console(file=io.StringIO(), width=300)
    chain.prove(config, str(path), share, console)
    return console.file.getvalue()


def test_a_store_is_proved_from_its_source(config, tmp_path):
    path = tmp_path / 'store'
    prepare(config, str(path))
    lines = (path / 'chain.jsonl').read_text().splitlines()
    assert len(lines) > 3
    assert f'{len(lines)} of {len(lines)} shards proved: the source is the same' in prove(config, path)
    assert f'2 of {len(lines)} shards proved' in prove(config, path, 0.01)
    with pytest.raises(ConfigError, match=r'--prove 1\.5: must be above 0'):
        prove(config, path, 1.5)


def test_a_source_that_another_of_its_size_and_time_has_replaced_is_named(config, tmp_path):
    path = tmp_path / 'store'
    prepare(config, str(path))
    file = tmp_path / 'text' / 'train-2.jsonl'
    times = os.stat(file).st_mtime_ns
    file.write_text(file.read_text().replace('a', 'b', 1))
    os.utime(file, ns=(times, times))
    with pytest.raises(MismatchError, match=r'train, shard .*train-2\.jsonl.*: the documents of the source have'):
        prove(config, path)


def test_tokens_of_another_source_are_named(config, tmp_path, monkeypatch):
    path = tmp_path / 'store'
    prepare(config, str(path))
    read = TokenStore.read_stored
    monkeypatch.setattr(TokenStore, 'read_stored', lambda *arguments: read(*arguments) ^ 1)
    with pytest.raises(MismatchError, match='its tokens differ from the tokens of the source'):
        prove(config, path)


def test_a_damaged_chain_proves_nothing(config, tmp_path):
    path = tmp_path / 'store'
    prepare(config, str(path))
    flip(path / 'chain.jsonl')
    with pytest.raises(MismatchError, match=r'chain\.jsonl: is damaged or gone'):
        prove(config, path)


def test_the_command_proves_a_finished_store_only(capsys, tmp_path):
    flags = ['prepare', '--gin_file', 'data/text.gin', '--set', f'text_files.path={tmp_path}', '--prove', '0.5']
    assert main([*flags, '--set', f'data.path={tmp_path}/none', '--shard', '0/2']) == 2
    assert '--prove: compares a finished store' in capsys.readouterr().err
    assert main([*flags, '--set', f'data.path={tmp_path}/none']) == 44
    assert 'no finished token store is there' in capsys.readouterr().err
