"""Preparations in parts: any number of machines, killed, repeated and at once, give the bytes of one machine."""

import dataclasses
import io
import json
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
import tiny
from corpora import words, write_text
from in_process import stay_in_process
from rich.console import Console
from test_prepare import digests

from lm.cli import main
from lm.data import store
from lm.data.prepare import stages
from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.parts import PartedPreparation, Share
from lm.data.prepare.stages import prepare
from lm.data.sources.jsonl import Jsonl
from lm.data.sources.text_files import TextFiles
from lm.data.store import TokenStore
from lm.data.tokenizers import TokenizerConfig
from lm.errors import ConfigError, LmError, MismatchError

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMALL = TokenizerConfig(vocab_size=400)


@pytest.fixture
def fast(monkeypatch):
    stay_in_process(monkeypatch)


@pytest.fixture
def small_files(monkeypatch):
    """Gives the arrays files of 8 KB, so that a store has many."""
    monkeypatch.setattr(store, 'SHARD', 2**12)
    monkeypatch.setattr(store, 'CHUNK', 2**10)


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    """Returns a folder of JSON lines whose shards and documents differ in size; some records are bad."""
    folder = tmp_path_factory.mktemp('text')
    lines = [json.dumps({'text': words(20 + 300 * (i % 7), seed=i)}).encode() for i in range(120)]
    lines[7:7] = [b'{"text": "caf\xe9"}', b'{"text": ""}', b'no json']
    for i in range(9):
        (folder / f'train-{i}.jsonl').write_bytes(b'\n'.join(lines[i::9]))
    (folder / 'validation.jsonl').write_bytes(b'\n'.join(lines[:5]))
    return folder


@pytest.fixture
def config(corpus, monkeypatch):
    monkeypatch.setattr('lm.data.sources.base.MIN_SHARD_BYTES', 20_000)
    return PrepareConfig(source=Jsonl(path=str(corpus)), tokenizer=SMALL, processes=1)


def say(call, *arguments, **options):
    """Returns what a preparation prints."""
    console = Console(file=io.StringIO(), width=200)
    call(*arguments, console=console, **options)
    return console.file.getvalue()


@pytest.mark.parametrize('machines', [1, 2, 7])
def test_the_number_of_machines_changes_no_byte(machines, config, tmp_path, fast, small_files):
    prepare(config, str(tmp_path / 'one'))
    reference = digests(tmp_path / 'one')
    assert sum(name.startswith('train/tokens/c/') for name in reference) > 5
    path, order = tmp_path / 'parts', list(range(machines))
    random.Random(0).shuffle(order)
    for i in order[:-1]:
        said = say(prepare, config, str(path), share=Share(i, machines))
        assert f'--shard {i}/{machines} is done; ' in said
        assert f'--shard {order[-1]}/{machines}' in said
        assert f'--shard {i}/{machines} makes' not in said
        prepare(config, str(path), share=Share(i, machines))  # once more
    info = prepare(config, str(path), share=Share(order[-1], machines))
    assert digests(path) == reference
    assert {p.name for p in path.iterdir()} == {p.name for p in (tmp_path / 'one').iterdir()}
    assert info['splits']['train']['bad_records'] == 3
    assert 'nothing to do' in say(prepare, config, str(path), share=Share(0, machines))
    for split in ('train', 'validation'):
        TokenStore.open(str(path)).verify(split)


def test_the_store_is_assembled_in_shares_and_by_hand(config, tmp_path, fast, small_files, monkeypatch):
    prepare(config, str(tmp_path / 'one'))
    path = tmp_path / 'parts'
    with pytest.raises(ConfigError, match=r'--assemble: .*parts has no parts; make them with'):
        prepare(config, str(path), share=Share(0, 1), only_assemble=True)
    prepare(config, str(path), share=Share(0, 3))
    missing = r'parts: \d+ of \d+ shards .* missing; the same `lm prepare` with --shard 1/3, --shard 2/3 makes them'
    with pytest.raises(LmError, match=missing):
        prepare(config, str(path), share=Share(0, 1), only_assemble=True)
    with monkeypatch.context() as patch:
        patch.setattr(stages, '_assemble', lambda *_: 1 / 0)  # the last machine is killed
        with pytest.raises(ZeroDivisionError):
            prepare(config, str(path), share=Share(0, 1))
    for name in ('train/tokens/zarr.json', 'train/tokens/c/99', 'train/document_ends/c/0'):  # of another preparation
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text('{}')
    for i in (2, 0):
        assert 'other shares of it are missing' in say(
            prepare, config, str(path), share=Share(i, 3), only_assemble=True
        )
        assert not (path / 'dataset.json').exists()
    prepare(config, str(path), share=Share(1, 3), only_assemble=True)
    assert digests(path) == digests(tmp_path / 'one')


def test_a_file_that_is_lost_between_is_made_again(config, tmp_path, fast, small_files, monkeypatch):
    prepare(config, str(tmp_path / 'one'))
    path, finish = tmp_path / 'parts', PartedPreparation.finish

    def lose(*arguments):
        (path / 'train/tokens/c/1').unlink()
        return finish(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(PartedPreparation, 'finish', lose)
        with pytest.raises(LmError, match='train/tokens: a file is gone; run lm prepare --assemble'):
            prepare(config, str(path), share=Share(0, 1))
    prepare(config, str(path), share=Share(0, 1), only_assemble=True)
    assert digests(path) == digests(tmp_path / 'one')


def test_a_machine_that_comes_late_leaves_nothing_behind(config, tmp_path, fast, monkeypatch):
    """Another machine finishes the store while this one has its settings, and while it tokenises."""
    path, begin, tokenize_all = str(tmp_path / 'parts'), PartedPreparation.begin, stages._tokenize_all

    def begin_late(*arguments):
        monkeypatch.setattr(PartedPreparation, 'begin', begin)
        prepare(config, path)
        return begin(*arguments)

    monkeypatch.setattr(PartedPreparation, 'begin', begin_late)
    assert prepare(config, path, share=Share(0, 2)) == store.read_info(path)
    reference = digests(tmp_path / 'parts')
    (tmp_path / 'parts' / 'dataset.json').unlink()

    def tokenize_late(*arguments):
        monkeypatch.setattr(stages, '_tokenize_all', tokenize_all)
        prepare(config, path)
        tokenize_all(*arguments)

    monkeypatch.setattr(stages, '_tokenize_all', tokenize_late)
    assert prepare(config, path, share=Share(0, 2)) == store.read_info(path)
    assert digests(tmp_path / 'parts') == reference


def test_another_configuration_is_refused(config, corpus, tmp_path, fast):
    path = str(tmp_path / 'parts')
    prepare(config, path, share=Share(0, 2))
    with pytest.raises(
        ConfigError, match=r"is unfinished and was begun with prepare.cleaning = 'none', not 'wiki40b_strip'"
    ):
        prepare(dataclasses.replace(config, cleaning='wiki40b_strip'), path, share=Share(1, 2))
    (versions,) = (tmp_path / 'parts').rglob('versions.json')
    versions.write_text(json.dumps(json.loads(versions.read_text()) | {'sentencepiece': '0.0.1'}))
    with pytest.raises(ConfigError, match=r'parts are made with sentencepiece 0.0.1, not \d.*; install that version'):
        prepare(config, path, share=Share(1, 2))


def test_one_machine_goes_on_with_the_parts_of_others(config, tmp_path, fast):
    prepare(config, str(tmp_path / 'one'))
    prepare(config, str(tmp_path / 'parts'), share=Share(1, 3))
    assert 'shards were finished before' in say(prepare, config, str(tmp_path / 'parts'))
    assert digests(tmp_path / 'parts') == digests(tmp_path / 'one')


def test_what_an_earlier_version_has_left_is_replaced(config, tmp_path, fast):
    """One machine kept its intermediate files in a folder of another name."""
    (tmp_path / 'store' / 'unfinished' / 'train').mkdir(parents=True)
    (tmp_path / 'store' / 'unfinished' / 'settings.json').write_text('{}')
    said = say(prepare, config, str(tmp_path / 'store'))
    assert 'store/unfinished: unfinished work of an earlier version is deleted; this version makes it anew' in said
    assert not (tmp_path / 'store' / 'unfinished').exists()


@pytest.mark.parametrize('held_out', [0.0001, None])
def test_an_empty_split_of_several_machines_leaves_no_parts_behind(held_out, config, corpus, tmp_path, fast):
    """Other settings, which the message asks for, begin anew."""
    if held_out is None:
        (tmp_path / 'text').mkdir()
        (tmp_path / 'text' / 'train.jsonl').write_bytes((corpus / 'validation.jsonl').read_bytes())
        (tmp_path / 'text' / 'validation.jsonl').write_bytes(b'no json')
        source, kind = Jsonl(path=str(tmp_path / 'text')), MismatchError
    else:
        source, kind = Jsonl(path=str(corpus / 'validation.jsonl'), validation_fraction=held_out), ConfigError
    empty, path = dataclasses.replace(config, source=source), str(tmp_path / 'parts')
    prepare(empty, path, share=Share(0, 2))
    with pytest.raises(kind, match="split 'validation'"):
        prepare(empty, path, share=Share(1, 2))
    assert not (tmp_path / 'parts').exists()
    assert prepare(dataclasses.replace(empty, splits=('train',)), path)['splits'].keys() == {'train'}


def test_a_mistake_leaves_no_parts_behind(config, tmp_path, fast):
    large = dataclasses.replace(config, tokenizer=TokenizerConfig(vocab_size=1_000_000))
    with pytest.raises(ConfigError, match='the text is too small for it'):
        prepare(large, str(tmp_path / 'parts'), share=Share(0, 2))
    prepare(config, str(tmp_path / 'parts'), share=Share(0, 2))  # with the right size


def test_strict_stops_where_another_machine_has_skipped_bad_records(config, tmp_path, fast):
    strict = dataclasses.replace(config, strict=True)
    with pytest.raises(MismatchError, match=r'document .*jsonl@\d+: .*; mend it'):
        prepare(strict, str(tmp_path / 'strict'), share=Share(0, 1))
    for i in range(2):
        prepare(config, str(tmp_path / 'parts'), share=Share(i, 3))
    with pytest.raises(MismatchError, match=r'document .*jsonl@\d+: .*; mend it, or run without --strict'):
        prepare(strict, str(tmp_path / 'parts'), share=Share(2, 3))


@pytest.mark.parametrize('text', ['2/2', '1', '-1/2', 'a/b', '1/2/3', '0/0'])
def test_a_wrong_share_is_refused(text, capsys):
    assert main(['prepare', f'--shard={text}']) == 2
    assert f'--shard {text}: write I/N with I from 0 to N - 1' in capsys.readouterr().err


def test_killed_and_repeated_machines_change_no_byte(tmp_path):
    """SIGKILL comes while the tokenizer is made, while shards are tokenised, and while the store is written. Two of
    the three processes at the end have the same share."""
    corpus = write_text(tmp_path / 'text', files=6, n=60_000)
    config = PrepareConfig(source=TextFiles(path=str(corpus)), tokenizer=SMALL, processes=1)
    prepare(config, str(tmp_path / 'one'))
    path = tmp_path / 'parts'
    flags = ['--set', f'text_files.path={corpus}', '--set', 'prepare.source=@text_files()', '--processes', '1']
    flags += ['--set', 'tokenizer.vocab_size=400', '--set', f'data.path={path}']

    def start(share):
        command = [sys.executable, '-m', 'lm', 'prepare', *flags, '--shard', share]
        streams = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT}
        return subprocess.Popen(command, cwd=ROOT, env=tiny.environment(), text=True, **streams)

    moments = [
        ('0/2', lambda: list(path.glob('parts/*/tokenizer.lease'))),
        ('1/2', lambda: list(path.glob('parts/*/*/*.json'))),
        ('0/1', lambda: list(path.glob('*/tokens/zarr.json'))),
    ]
    for share, moment in moments:
        process = start(share)
        while not moment() and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (path / 'dataset.json').exists(), 'it was killed too late'
    together = [start(share) for share in ('0/2', '1/2', '0/2')]
    outputs = [process.communicate(timeout=120)[0] for process in together]
    assert [process.returncode for process in together] == [0, 0, 0], outputs
    assert digests(path) == digests(tmp_path / 'one')
    assert not (path / 'parts').exists()
