"""Documents are held out by their texts: copies stay together, in every source and on any number of machines."""

import dataclasses
import io
import json
import re

import numpy as np
import pytest
import test_arrow
import test_images
import test_parquet
import test_ready_tokens
from corpora import words
from in_process import stay_in_process
from rich.console import Console
from test_prepare import digests

from lm.cli import main
from lm.data.prepare.chain import prove
from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.parts import Share
from lm.data.prepare.stages import prepare
from lm.data.sources import base, patterns
from lm.data.sources.arrow import Arrow
from lm.data.sources.images import Images
from lm.data.sources.jsonl import Jsonl
from lm.data.sources.megatron import Megatron
from lm.data.sources.parquet import Parquet
from lm.data.sources.proteins.fasta import Fasta
from lm.data.sources.text_files import TextFiles
from lm.data.sources.token_files import TokenFiles
from lm.data.store import COPIES, read_info, write_info
from lm.data.tokenizers import TokenizerConfig
from lm.errors import ConfigError, MismatchError

TEXTS = [words(5 + i % 20, seed=i % 40) for i in range(120)]
"""Three copies of each text, or more."""
TOKENS = [np.frombuffer(text.encode(), np.uint8) + 2 for text in TEXTS]


def write_lines(path, texts=TEXTS):
    path.write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts))
    return str(path)


def write_files(path, texts=TEXTS):
    path.mkdir()
    for i, text in enumerate(texts):
        (path / f'{i}.txt').write_text(text)
    return str(path)


def write_proteins(path):
    path.write_text(''.join(f'>name {i}\n{"ACDEFGHIKLMNPQRSTVWY"[i % 13 :]}\n' for i in range(120)))
    return str(path)


def write_tokens(path):
    test_ready_tokens.write_llm_c(path, test_ready_tokens.ended(TOKENS), np.uint16)
    return str(path)


def write_megatron(path):
    test_ready_tokens.write_megatron(path, TOKENS, 8, '<u2')
    return str(path)


def write_images(path):
    test_images.write(path, np.tile(test_images.draw(40, 0), (3, 1, 1, 1)))
    return str(path)


SOURCES = {
    'jsonl': lambda p: Jsonl(path=write_lines(p / 'a.jsonl'), validation_fraction=0.2),
    'text files': lambda p: TextFiles(path=write_files(p / 'a'), validation_fraction=0.2),
    'fasta': lambda p: Fasta(path=write_proteins(p / 'a.fa'), validation_fraction=0.2),
    'parquet': lambda p: Parquet(path=test_parquet.write(p / 'a.parquet', TEXTS), validation_fraction=0.2),
    'arrow': lambda p: Arrow(path=test_arrow.write(p / 'a.arrow', TEXTS), validation_fraction=0.2),
    'token files': lambda p: TokenFiles(path=write_tokens(p / 'a.bin'), eod=1, validation_fraction=0.2),
    'megatron': lambda p: Megatron(path=write_megatron(p / 'a.idx'), validation_fraction=0.2),
    'images': lambda p: Images(path=write_images(p / 'a.npz'), validation_fraction=0.2),
}


def read_splits(source) -> dict[str, list[tuple[str, bytes]]]:
    """Returns split → places and digests of its documents."""
    return {
        split: [(d.id, d.digest()) for shard in source.shards(split) for d in source.read(shard, 10**6)]
        for split in source.splits()
    }


@pytest.mark.parametrize('kind', SOURCES)
def test_copies_stay_together_and_no_document_is_lost(kind, tmp_path, monkeypatch):
    source = SOURCES[kind](tmp_path)
    found = read_splits(source)
    train, validation = ({digest for _, digest in found[split]} for split in ('train', 'validation'))
    assert train
    assert validation
    assert not train & validation
    places = [place for own in found.values() for place, _ in own]
    assert len(places) == len(set(places)) == 120
    old = read_splits(source.keep_old_split())
    assert sorted(place for own in old.values() for place, _ in own) == sorted(places)
    assert {digest for _, digest in old['train']} & {digest for _, digest in old['validation']}
    for module in (base, patterns):  # the split does not depend on the cuts
        monkeypatch.setattr(module, 'shard_bytes', lambda total: 700)
    assert read_splits(source) == found


def test_the_old_split_is_the_one_of_earlier_versions(tmp_path):
    """The places are what version 1.0.0 held out before documents were held out by their texts."""
    texts = [f'document {i % 8} of some words' for i in range(40)]
    lines = Jsonl(path=write_lines(tmp_path / 'all.jsonl', texts), validation_fraction=0.2).keep_old_split()
    files = TextFiles(path=write_files(tmp_path / 'txt', texts), validation_fraction=0.2).keep_old_split()
    found = [[place.rpartition('/')[2] for place, _ in read_splits(s)['validation']] for s in (lines, files)]
    assert found[0] == [f'all.jsonl@{offset}' for offset in (259, 296, 703, 851, 1295)]
    assert found[1] == [f'{i}.txt' for i in (1, 18, 2, 20, 27, 28, 34, 39)]
    assert 'held_out_by' not in lines.identity()
    assert lines != dataclasses.replace(lines, path='other')


def test_files_without_copies_are_held_out_as_they_always_were(tmp_path):
    source = TextFiles(path=write_files(tmp_path / 'txt', [f'text number {i}' for i in range(40)]))
    assert read_splits(source) == read_splits(source.keep_old_split())


@pytest.mark.parametrize(
    ('texts', 'fraction', 'held_out'),
    [
        (['a'] * 19 + ['b'], 0.05, {'b'}),
        (['a'] * 19 + ['b'], 0.9, {'b'}),  # the many copies would leave nothing to train on
        (['a', 'b'], 0.05, None),
        (['a', 'b'], 0.99, None),
        (['a'] * 3 + ['b'] * 3, 0.05, None),
        ([''] * 9 + ['b'], 0.3, {'b'}),
    ],
)
def test_small_folders_keep_both_splits(texts, fraction, held_out, tmp_path):
    found = read_splits(TextFiles(path=write_files(tmp_path / 'txt', texts), validation_fraction=fraction))
    train, validation = ({digest for _, digest in found[split]} for split in ('train', 'validation'))
    assert len(train) == len(validation) == 1
    assert train != validation
    if held_out:
        assert validation == {base.Document('', text).digest() for text in held_out}


@pytest.fixture
def config(tmp_path, monkeypatch) -> PrepareConfig:
    """Returns a preparation of several shards that hold copies."""
    stay_in_process(monkeypatch)
    monkeypatch.setattr('lm.data.sources.base.MIN_SHARD_BYTES', 3000)
    source = Jsonl(path=write_lines(tmp_path / 'all.jsonl'), validation_fraction=0.2)
    return PrepareConfig(source=source, tokenizer=TokenizerConfig(vocab_size=320), processes=1)


def say(function, *arguments, **options) -> str:
    output = io.StringIO()
    function(*arguments, Console(file=output, width=200), **options)
    return output.getvalue()


def test_shares_of_machines_make_the_store_of_one(config, tmp_path):
    said = say(prepare, config, str(tmp_path / 'one'))
    assert 'validation: none of its documents are copies of documents in train' in said
    for i in range(3):
        prepare(config, str(tmp_path / 'three'), share=Share(i, 3))
    assert digests(tmp_path / 'three') == digests(tmp_path / 'one')
    splits = read_info(str(tmp_path / 'one'))['splits']
    assert splits['train']['documents'] + splits['validation']['documents'] == 120
    assert splits['validation'][COPIES]['documents'] == 0


def prepare_old(config, path, **options):
    """Prepares as earlier versions did."""
    old = dataclasses.replace(config, source=config.require_source().keep_old_split())
    return prepare(old, str(path), **options)


@pytest.mark.parametrize('kind', ['jsonl', 'text files'])
def test_old_stores_and_old_beginnings_keep_their_split(kind, config, tmp_path, monkeypatch):
    (tmp_path / 'more').mkdir()
    config = dataclasses.replace(config, source=SOURCES[kind](tmp_path / 'more'))
    new = prepare(config, str(tmp_path / 'new'))
    with monkeypatch.context() as patch:  # what is begun or finished says nothing of the rule, as in earlier versions
        patch.setattr('lm.data.prepare.parts.keep_split', lambda config, begun: config)
        patch.setattr('lm.data.prepare.stages.keep_split', lambda config, settings: config)
        old = prepare_old(config, tmp_path / 'old')
        assert prepare_old(config, tmp_path / 'begun', share=Share(0, 2)) is None
    assert old['settings']['source'].keys() == new['settings']['source'].keys() - {'held_out_by'}
    assert old['fingerprint'] != new['fingerprint']
    before = digests(tmp_path / 'old')
    assert 'is already prepared: nothing to do' in say(prepare, config, str(tmp_path / 'old'))
    assert 'proved' in say(prove, config, str(tmp_path / 'old'), 1.0)
    assert digests(tmp_path / 'old') == before
    # The other machine has this version.
    prepare(config, str(tmp_path / 'begun'), share=Share(1, 2))
    assert digests(tmp_path / 'begun') == before
    assert 'proved' in say(prove, config, str(tmp_path / 'new'), 1.0)


def test_a_store_of_a_stranger_without_its_settings_is_one_line(config, tmp_path):
    info, path = prepare(config, str(tmp_path / 'store')), str(tmp_path / 'store')
    facts = {name: value for name, value in info.items() if name not in ('settings', 'checksum', 'fingerprint')}
    write_info(path, facts)
    with pytest.raises(ConfigError, match=r'is finished and was prepared with prepare\.\w+ = None'):
        prepare(config, path)
    write_info(path, facts | {'settings': {'source': 7}})
    with pytest.raises(MismatchError, match=r"dataset\.json has settings = \{'source': 7\}, as no store has"):
        prepare(config, path)


@pytest.mark.parametrize('form', ['lines', 'files'])
def test_a_text_that_is_all_there_is_cannot_be_held_out(form, tmp_path, capsys):
    texts = ['one text again and again\n' * 20] * 30
    source, path = {'lines': ('jsonl', tmp_path / 'a.jsonl'), 'files': ('text_files', tmp_path / 'a')}[form]
    (write_lines if form == 'lines' else write_files)(path, texts)
    values = {'prepare.source': f'@{source}()', f'{source}.path': path, 'data.path': tmp_path / 'store'}
    values |= {'prepare.tokenizer': '@tokenizer()', 'tokenizer.vocab_size': 280}
    flags = [flag for name, value in values.items() for flag in ('--set', f'{name}={value}')]
    assert main(['prepare', '--processes', '1', *flags]) == 2
    said = capsys.readouterr().err
    assert re.search(rf'{source}.validation_fraction = 0.05: .*copies.* stay together', said)
    assert not (tmp_path / 'store').exists()


def test_a_planted_share_that_is_almost_empty_is_named(config, tmp_path):
    """The smallest share holds no document out; the message names it, and leaves nothing behind."""
    source = dataclasses.replace(config.source, validation_fraction=1e-9)
    with pytest.raises(ConfigError, match=r"jsonl.validation_fraction = 1e-09: .* left to the split 'validation'"):
        prepare(dataclasses.replace(config, source=source), str(tmp_path / 'store'))
    source = dataclasses.replace(config.source, validation_fraction=1 - 1e-9)
    with pytest.raises(ConfigError, match=r'left to the split'):
        prepare(dataclasses.replace(config, source=source), str(tmp_path / 'store'))
    assert not (tmp_path / 'store').exists()
