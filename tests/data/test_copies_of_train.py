"""Documents that stand in train and in another split: they are counted, stored, printed and shown in reports."""

import io
import json
import shutil
import tempfile

import numpy as np
import pytest
from corpora import words
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_runs import evaluate, write_run
from rich.console import Console
from test_chain import config  # noqa: F401 (a fixture)

from lm.attention.softmax import Softmax
from lm.cli import main
from lm.data.mixture import Mixture
from lm.data.prepare.copies import count_copies
from lm.data.prepare.counts import ShardCounts
from lm.data.prepare.parts import Share
from lm.data.prepare.shards import HASHES, TokenizedShard, name_shard, name_shards, read_counts, write_shard
from lm.data.prepare.shared_folder import SharedFolder
from lm.data.prepare.stages import prepare
from lm.data.store import TokenStore


def write(folder: SharedFolder, base: str, hashes: list[int]) -> None:
    """Writes a shard whose document with hash h has h + 1 tokens."""
    lengths = np.array(hashes, np.int64) + 1
    tokens = np.zeros(lengths.sum(), np.uint16)
    write_shard(folder, base, TokenizedShard([tokens], [lengths], [np.array(hashes, np.uint64)], ShardCounts()))


SHARDS = st.lists(st.lists(st.integers(0, 30), max_size=8), min_size=1, max_size=4)


@settings(max_examples=50)
@given(train=SHARDS, validation=SHARDS, test=SHARDS)
def test_copies_are_counted_like_a_set_counts_them(train, validation, test):
    drawn = {'train': train, 'validation': validation, 'test': test}
    with tempfile.TemporaryDirectory() as path:
        folder, counts = SharedFolder(path), {}
        for split, shards in drawn.items():
            for i, own in enumerate(shards):
                write(folder, name_shard(split, i), own)
            counts[split] = read_counts(folder, name_shards(split, len(shards)))
        found = count_copies(folder, counts)
        assert count_copies(folder, {'validation': counts['validation']}) == {}
        counts['train'][0].sha256.pop(HASHES)
        assert count_copies(folder, counts) == {}, 'a shard of an earlier version'
    known = {h for own in train for h in own}
    for split in ('validation', 'test'):
        copies = [h for own in drawn[split] for h in own if h in known]
        assert found[split] == {'documents': len(copies), 'tokens': sum(copies) + len(copies)}


@pytest.mark.parametrize('machines', [1, 2])
def test_copies_are_printed_and_stored(machines, config, tmp_path):  # noqa: F811
    texts = [words(200, seed=n) for n in (11, 22, 400)]
    (tmp_path / 'text' / 'validation.jsonl').write_text('\n'.join(json.dumps({'text': text}) for text in texts))
    path, said = str(tmp_path / 'store'), Console(file=io.StringIO(), width=300)
    if machines == 1:
        prepare(config, path, said)
    else:
        prepare(config, path, share=Share(0, 2))
        prepare(config, path, share=Share(1, 2), console=said)
    assert 'validation: 2 of 3 documents (' in said.file.getvalue()
    assert '% of the tokens) are copies of documents in train' in said.file.getvalue()
    store = TokenStore.open(path)
    found = store.info['splits']['validation']['in_train']
    assert found['documents'] == 2
    assert store.copied_share('validation') == found['tokens'] / store.tokens('validation')
    assert store.copied_share('train') is None
    assert Mixture({'a': store, 'b': store}, [1, 1]).copied_share('validation') == store.copied_share('validation')


def test_one_line_says_where_there_are_none(config, tmp_path):  # noqa: F811
    said = Console(file=io.StringIO(), width=300)
    prepare(config, str(tmp_path / 'store'), said)
    (line,) = (line for line in said.file.getvalue().splitlines() if 'copies' in line)
    assert line == 'validation: none of its documents are copies of documents in train'
    assert TokenStore.open(str(tmp_path / 'store')).copied_share('validation') == 0


def test_an_evaluation_states_the_share(reference_run, tmp_path, monkeypatch, capsys):
    run = tmp_path / 'run'
    shutil.copytree(reference_run[0], run)
    monkeypatch.setattr(TokenStore, 'copied_share', lambda self, split: 0.25)
    assert main(['evaluate', '--run_dir', str(run), '--json']) == 0
    assert json.loads(capsys.readouterr().out)['copied_share'] == 0.25
    monkeypatch.setattr(TokenStore, 'copied_share', lambda self, split: 0.0)
    assert main(['evaluate', '--run_dir', str(run), '--json']) == 0
    assert 'copied_share' not in json.loads(capsys.readouterr().out)


def test_a_report_shows_the_share_beside_the_perplexity(tmp_path, capsys):
    for name in ('copied', 'sound'):
        write_run(tmp_path / name, Softmax(), steps=100)
    evaluate(tmp_path / 'copied', copied_share=0.25)
    paths = [str(tmp_path / name) for name in ('copied', 'sound')]
    assert main(['report', *paths, '--out', str(tmp_path / 'out'), '--no_pictures']) == 0
    table = (tmp_path / 'out' / 'report.md').read_text()
    assert 'copies of train' in table
    assert '25.0%' in table
    assert main(['report', paths[1], '--out', str(tmp_path / 'other'), '--no_pictures']) == 0
    assert 'copies of train' not in (tmp_path / 'other' / 'report.md').read_text()
