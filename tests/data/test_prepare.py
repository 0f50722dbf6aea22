import dataclasses
import hashlib
import io
import json
import multiprocessing
import os
import pathlib
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest
import tiny
from corpora import CORPORA, needs_corpora, words, write_real_tfds, write_text
from rich.console import Console

from lm.data import store, tokenizers
from lm.data.dataset import DataConfig
from lm.data.prepare import stages as prepare_module
from lm.data.prepare.config import PrepareConfig
from lm.data.prepare.run import run as run_command
from lm.data.prepare.shards import Sample
from lm.data.prepare.stages import prepare
from lm.data.prepare.workers import start_workers
from lm.data.sources.base import Shard, inventory
from lm.data.sources.folder import walk_bucket
from lm.data.sources.jsonl import Jsonl
from lm.data.sources.text_files import TextFiles
from lm.data.sources.tfds import Tfds
from lm.data.store import TokenStore
from lm.data.tokenizers import TokenizerConfig
from lm.data.tokenizers.sentencepiece import train
from lm.errors import ConfigError, LmError, MismatchError
from lm.lease import Lease

SMALL = TokenizerConfig(vocab_size=500)
ROOT = pathlib.Path(__file__).resolve().parents[2]


def quiet():
    return Console(file=io.StringIO(), width=100)


def run(source, path, **options):
    options = {'tokenizer': SMALL, 'processes': 1} | options
    return prepare(PrepareConfig(source=source, **options), str(path), quiet())


def digests(folder):
    """Returns name → SHA-256 of the files. TensorStore leaves a `.__lock` where a writer is killed; nobody reads it."""
    files = (path for path in folder.rglob('*') if path.is_file() and path.suffix != '.__lock')
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp('text'), files=8, n=60_000)


@pytest.fixture(scope='module')
def reference(corpus, tmp_path_factory):
    """Returns a store made in one run by one process."""
    path = tmp_path_factory.mktemp('store') / 'reference'
    run(TextFiles(path=str(corpus)), path)
    return path


@pytest.mark.smoke
def test_the_store_holds_the_text(corpus, reference):
    store = TokenStore.open(str(reference))
    tokenizer, files = store.tokenizer(), sorted((corpus / 'train').iterdir())
    tokens, ends = store.read('train', 0, store.tokens('train')), store.document_ends('train')
    documents = np.split(tokens, ends)[:-1]
    assert [tokenizer.decode(d[:-1]) for d in documents] == [file.read_text() for file in files]
    assert all(d[-1] == tokenizer.eod_id and tokenizer.eod_id not in d[:-1] for d in documents)
    text = ''.join(file.read_text() for file in files)
    assert (store.documents('train'), store.bytes('train')) == (8, len(text.encode()))
    assert store.words('train') == sum(len(file.read_text().split()) for file in files)
    assert store.splits == ('train', 'validation', 'test')
    for split in store.splits:
        store.verify(split)
    assert not (reference / 'parts').exists()
    assert (reference / 'bad_records.jsonl').read_text() == ''


def test_the_number_of_processes_changes_no_byte(corpus, reference, tmp_path):
    run(TextFiles(path=str(corpus)), tmp_path / 'other', processes=2)
    assert digests(tmp_path / 'other') == digests(reference)


def test_a_killed_preparation_continues_and_changes_no_byte(corpus, reference, tmp_path):
    """SIGKILL comes while the tokenizer is trained, while shards are tokenized (twice) and while the arrays are
    written."""
    path = tmp_path / 'killed'
    work = path / 'parts'
    finish = tmp_path / 'finish'
    code = (
        'from lm.data.prepare.stages import *; from lm.data.sources.text_files import TextFiles\n'
        'from lm.data.tokenizers import *\n'
        'import os, time\n'
        'from lm.data import store\n'
        'def when_told(*arguments):\n'  # however late the kill comes, it comes before dataset.json is there
        f'    while not os.path.exists({str(finish)!r}):\n'
        '        time.sleep(0.002)\n'
        '    return write_info(*arguments)\n'
        'write_info, store.write_info = store.write_info, when_told\n'
        f'config = PrepareConfig(source=TextFiles(path={str(corpus)!r}), tokenizer={SMALL!r}, processes=2)\n'
        f'prepare(config, {str(path)!r})\n'
    )
    moments = [
        lambda: (work / 'settings.json').exists(),
        lambda: list(work.glob('*/tokenizer.model')),
        lambda: len(list(work.glob('*/train/*.json'))) >= 2,
        lambda: list((path / 'validation').glob('*/zarr.json')),
        lambda: (path / 'test').exists(),
    ]
    for moment in moments:
        process = subprocess.Popen([sys.executable, '-c', code], cwd=ROOT, stdout=subprocess.DEVNULL)
        while not moment() and process.poll() is None:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (path / 'dataset.json').exists(), 'it was killed too late'
        with pytest.raises(MismatchError, match='no finished token store'):
            TokenStore.open(str(path))
    finish.touch()
    output = subprocess.check_output([sys.executable, '-c', code], cwd=ROOT, text=True)
    assert 'shards were finished before' in output
    assert 'training the tokenizer' not in output
    assert digests(path) == digests(reference)


TERMINAL = """
import pathlib, sys, time
from lm.cli import main
from lm.data.prepare import stages

def hold(work, pool, console):
    pool.submit(pathlib.Path(sys.argv[1]).touch).result()
    time.sleep(100)

if __name__ == '__main__':
    stages._train = hold
    sys.exit(main(['prepare', *sys.argv[2:]]))
"""


def test_a_closed_terminal_ends_the_command_and_its_workers(corpus, tmp_path):
    """The system sends the signal to all of them at once."""
    (tmp_path / 'program.py').write_text(TERMINAL)
    bindings = {'prepare.source': '@text_files()', 'text_files.path': str(corpus), 'prepare.processes': 2}
    flags = tiny.params(bindings | {'data.path': str(tmp_path / 'store')})
    command = [sys.executable, str(tmp_path / 'program.py'), str(tmp_path / 'started'), *flags]
    options = dict(env=tiny.environment(), cwd=ROOT, text=True, start_new_session=True)
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, **options)
    while not (tmp_path / 'started').exists() and process.poll() is None:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGHUP)
    errors = process.communicate(timeout=60)[1]  # this ends when the last writer of stderr has ended
    assert (process.returncode, errors) == (42, 'lm prepare: stopped; the same command goes on from here\n')


def test_a_url_is_a_path_too(corpus, reference, tmp_path):
    run(TextFiles(path=str(corpus)), f'file://{tmp_path}/store')
    assert digests(tmp_path / 'store') == digests(reference)
    assert TokenStore.open(f'file://{tmp_path}/store/').fingerprint == TokenStore.open(str(reference)).fingerprint


def test_a_source_that_has_changed_since_is_reported(tmp_path):
    def say() -> str:
        console = Console(file=io.StringIO(), width=60)
        prepare(config, str(tmp_path / 'store'), console)
        return console.file.getvalue()

    text = write_text(tmp_path / 'text', files=4, n=20_000)
    config = PrepareConfig(source=TextFiles(path=str(text)), tokenizer=SMALL, processes=1)
    say()
    held = digests(tmp_path / 'store')
    assert 'has changed' not in say()
    first = next((text / 'train').iterdir())
    (text / 'train' / 'another.txt').write_text('x' * 1000)
    assert re.search(
        r'nothing to do\nbut its source has changed since, from 6 files of [\d.]+kB to 7 files of [\d.]+kB; to prepare '
        r'it anew, delete .*store or name another data\.path\n',
        said := say(),
    ), said
    (text / 'train' / 'another.txt').unlink()
    os.utime(first)  # a copy has other times
    assert 'has changed' not in say()
    first.rename(first.with_name('moved.txt'))
    assert 'kB to others of that size' in say()
    first.with_name('moved.txt').rename(first)
    # There is no message about a source without files, nor a false one about a source that is gone.
    for path in (text / 'train').iterdir():
        path.unlink()
    assert 'has changed' not in say()
    shutil.rmtree(text)
    assert 'its source is not there any more' in (said := say())
    assert 'has changed' not in said
    assert digests(tmp_path / 'store') == held


def test_a_store_of_an_earlier_version_gives_no_message_about_changed_files(corpus, tmp_path):
    source = TextFiles(path=str(corpus))
    run(source, tmp_path / 'store')
    info = {k: v for k, v in store.read_info(str(tmp_path / 'store')).items() if k not in ('files', 'checksum')}
    store.write_info(str(tmp_path / 'store'), info)
    console = quiet()
    prepare(PrepareConfig(source=source, tokenizer=SMALL), str(tmp_path / 'store'), console)
    assert 'has changed' not in console.file.getvalue()


@pytest.mark.parametrize('unit', [1000, 10**9])
def test_the_inventory_of_files_does_not_depend_on_the_cuts(unit, tmp_path):
    for name in 'ab':
        (tmp_path / f'{name}.jsonl').write_text('{"text": "one"}\n' * 500)
    source = Jsonl(path=str(tmp_path / '*.jsonl'))
    parts = [part for path in sorted(tmp_path.iterdir()) for part in source.parts(path, unit)]
    both = [Shard(split, tuple(parts), 0.05) for split in ('train', 'validation')]
    found = inventory(both)
    assert (found['count'], found['bytes']) == (2, 2 * 500 * 16)
    assert found == inventory(shard for split in source.splits() for shard in source.shards(split))


def test_a_finished_store_is_left_alone(corpus, reference):
    before = digests(reference)
    console = quiet()
    config = PrepareConfig(source=TextFiles(path=str(corpus)), tokenizer=SMALL)
    prepare(config, str(reference), console)
    prepare(dataclasses.replace(config, source=TextFiles(path=f'{corpus}/train/../')), str(reference), console)
    assert console.file.getvalue().count('already prepared: nothing to do') == 2
    for change, named in (
        ({'tokenizer': TokenizerConfig(vocab_size=501)}, 'tokenizer.vocab_size = 500, not 501'),
        ({'cleaning': 'wiki40b_strip'}, "prepare.cleaning = 'none', not 'wiki40b_strip'"),
        ({'splits': ('train',)}, 'prepare.splits = '),
        ({'source': TextFiles(path=str(corpus / 'train'))}, 'text_files.path = '),
        ({'source': Jsonl(path=str(corpus / 'train' / '0.txt'))}, "prepare.source = 'text_files', not 'jsonl'"),
    ):
        with pytest.raises(ConfigError, match=f'{named}.*choose another data.path or delete it'):
            prepare(dataclasses.replace(config, **change), str(reference), console)
    assert digests(reference) == before


def test_remains_beside_a_finished_store_are_deleted(corpus, reference):
    """They come from a kill between dataset.json and the end."""
    before = digests(reference)
    left = reference / 'parts' / 'train' / '000000.tokens'
    left.parent.mkdir(parents=True)
    left.write_bytes(b'x' * 1000)
    run(TextFiles(path=str(corpus)), reference)
    assert not (reference / 'parts').exists()
    assert digests(reference) == before


def test_a_store_that_another_preparation_has_finished_meanwhile_is_left_alone(
    corpus, reference, tmp_path, monkeypatch
):
    """Trainings may already read it."""
    path = tmp_path / 'store'
    fetch = TextFiles.fetch

    def slow(self, log):  # it waits until the other preparation has ended
        shutil.copytree(reference, path)
        fetch(self, log)

    monkeypatch.setattr(TextFiles, 'fetch', slow)
    monkeypatch.setattr(prepare_module, '_make_store', lambda *_: pytest.fail('it was made again'))
    assert run(TextFiles(path=str(corpus)), path)['splits']['train']['documents'] == 8
    assert digests(path) == digests(reference)


def test_an_unfinished_store_is_not_mixed(tmp_path, monkeypatch):
    corpus = write_text(tmp_path / 'text', files=2)
    source = TextFiles(path=str(corpus))

    def fails(*_):
        raise LmError('stopped')

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, '_assemble', fails)
        with pytest.raises(LmError, match='stopped'):
            run(source, tmp_path / 'store')
        with pytest.raises(LmError, match='stopped'):
            run(TextFiles(path=f'{corpus}/'), tmp_path / 'store')
        assert sum(path.is_dir() for path in (tmp_path / 'store' / 'parts').iterdir()) == 1
    with pytest.raises(ConfigError, match=r'is unfinished and was begun with prepare.cleaning'):
        run(source, tmp_path / 'store', cleaning='wiki40b_strip')
    (corpus / 'train' / 'new.txt').write_text('new')
    with pytest.raises(ConfigError, match='from other files'):
        run(source, tmp_path / 'store')
    (corpus / 'train' / 'new.txt').unlink()
    assert run(source, tmp_path / 'store')['splits']['train']['documents'] == 2


def test_a_store_shares_no_folder_with_a_run_a_sweep_or_its_source(corpus, tmp_path):
    for mark, held in (('config.gin', 'a run or an export'), ('run.json', 'a run'), ('sweep.json', 'a sweep')):
        folder = tmp_path / mark.partition('.')[0]
        folder.mkdir()
        (folder / mark).write_text('{}')
        (folder / 'tokenizer.model').write_text('of the run')
        with pytest.raises(ConfigError, match=f"data.path = '{folder}': holds {held}, which needs a folder of its own"):
            run(TextFiles(path=str(corpus)), folder)
        assert sorted(path.name for path in folder.iterdir()) == [mark, 'tokenizer.model']
    before = digests(corpus)
    with pytest.raises(ConfigError, match=r"data.path = '.*': is text_files.path, the folder of the text"):
        run(TextFiles(path=str(corpus)), f'{corpus}/../{corpus.name}/')
    assert digests(corpus) == before


def test_a_mistake_leaves_nothing_behind(tmp_path):
    source = TextFiles(path=str(write_text(tmp_path / 'text', files=1)))
    for options, message in (
        ({'tokenizer': TokenizerConfig(vocab_size=1_000_000)}, 'tokenizer.vocab_size = 1000000: the text is too small'),
        ({'splits': ('train', 'dev')}, "prepare.splits: 'dev' is not in the source, which has train, validation, test"),
        ({'tokenizer': TokenizerConfig(model_path='/absent')}, "tokenizer.model_path = '/absent'"),
        ({'tokenizer': dataclasses.replace(SMALL, end_of_document='<eod>')}, 'a trained tokenizer has <pad>, </s>'),
    ):
        with pytest.raises(ConfigError, match=message):
            run(source, tmp_path / 'store', **options)
        assert not (tmp_path / 'store').exists()
    assert run(source, tmp_path / 'store')['splits']['train']['documents'] == 1
    with pytest.raises(ConfigError, match=r'prepare.source = None: choose a source'):
        run(None, tmp_path / 'other')
    with pytest.raises(ConfigError, match=r"data.path = ''"):
        run(source, '')


def test_bad_records_are_counted_and_named_or_stop(tmp_path):
    good = [words(200, seed=i) for i in range(30)]
    lines = [json.dumps({'text': text}).encode() for text in good]
    lines[3:3] = [
        b'{"text": "caf\xe9"}',
        b'{"text": ""}',
        b'{"text": "\\ud800"}',
        b'{"text": "' + b'x' * 50_000 + b'"}',
    ]
    for split in ('train', 'validation'):
        (tmp_path / f'{split}.jsonl').write_bytes(b'\n'.join(lines if split == 'train' else lines[:2]))
    source = Jsonl(path=str(tmp_path))
    info = run(source, tmp_path / 'store', max_document_bytes=40_000)
    assert info['splits']['train']['bad_records'] == 4
    assert info['splits']['train']['documents'] == 30
    bad = [json.loads(line) for line in (tmp_path / 'store' / 'bad_records.jsonl').read_text().splitlines()]
    assert [r['reason'] for r in bad] == [
        'invalid UTF-8',
        'empty',
        'invalid UTF-8',
        'longer than prepare.max_document_bytes = 40000',
    ]
    assert all(r['split'] == 'train' and 'train.jsonl@' in r['document'] for r in bad)
    with pytest.raises(MismatchError, match=r"split 'train', document .*train.jsonl@\d+: invalid UTF-8; mend it"):
        run(source, tmp_path / 'strict', max_document_bytes=40_000, strict=True)
    with pytest.raises(MismatchError, match='without 4 bad records'):
        run(source, tmp_path / 'store', max_document_bytes=40_000, strict=True)


def test_strict_checks_shards_again_that_a_preparation_without_it_began(tmp_path, monkeypatch):
    lines = [json.dumps({'text': words(200, seed=i)}).encode() for i in range(30)]
    for split in ('train', 'validation'):
        (tmp_path / f'{split}.jsonl').write_bytes(b'\n'.join([*lines, b'{"text": ""}']))
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, '_assemble', lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(Jsonl(path=str(tmp_path)), tmp_path / 'store')
    with pytest.raises(MismatchError, match=r'document .*jsonl@\d+: empty; mend it'):
        run(Jsonl(path=str(tmp_path)), tmp_path / 'store', strict=True)
    assert run(Jsonl(path=str(tmp_path)), tmp_path / 'store')['splits']['train']['bad_records'] == 1


def test_published_word_counts_are_recorded(tmp_path):
    """The folder has PG-19's books as its authors distribute them, without its metadata.csv."""
    corpus = write_text(tmp_path / 'text', files=2)
    (corpus / 'validation' / '0.txt').unlink()
    for i in range(50):
        (corpus / 'validation' / f'{1022 + 911 * i}.txt').write_text(words(20, seed=i))
    info = run(TextFiles(path=str(corpus)), tmp_path / 'store')
    assert {name: split.get('published_words') for name, split in info['splits'].items()} == {
        'train': None,
        'validation': 3_007_061,
        'test': None,
    }
    assert info['splits']['validation']['words'] == 50 * 21
    store = TokenStore.open(str(tmp_path / 'store'))
    assert (store.words('validation'), store.words('test')) == (3_007_061, 3001)


def test_a_split_without_documents(tmp_path):
    write_text(tmp_path / 'text', files=1)
    (tmp_path / 'text' / 'test' / '0.txt').write_text('')
    with pytest.raises(MismatchError, match="split 'test': no usable documents"):
        run(TextFiles(path=str(tmp_path / 'text')), tmp_path / 'store')


def test_a_share_that_leaves_no_document_to_validation_is_named_and_can_be_changed(tmp_path):
    """The text is not damaged, and nothing of the first try stands in the way of the second."""
    lines = [json.dumps({'text': f'word{i} again some text ' * 30}) for i in range(10)]
    (tmp_path / 'ten.jsonl').write_text('\n'.join(lines))
    few, small = Jsonl(path=str(tmp_path / 'ten.jsonl')), TokenizerConfig(vocab_size=300)
    with pytest.raises(ConfigError, match=r"^jsonl\.validation_fraction = 0\.05: .*split 'validation'; change it"):
        run(few, tmp_path / 'store', tokenizer=small)
    assert not (tmp_path / 'store').exists()
    info = run(dataclasses.replace(few, validation_fraction=0.5), tmp_path / 'store', tokenizer=small)
    assert min(split['documents'] for split in info['splits'].values()) > 0


def test_an_existing_tokenizer(tmp_path):
    corpus = write_text(tmp_path / 'text', files=1)
    model = train(TokenizerConfig(vocab_size=400), [words(3000, seed=9)])
    (tmp_path / 'own.model').write_bytes(model)
    info = run(
        TextFiles(path=str(corpus)),
        tmp_path / 'store',
        tokenizer=TokenizerConfig(model_path=str(tmp_path / 'own.model')),
    )
    assert info['tokenizer'] == {
        'file': 'tokenizer.model',
        'sha256': hashlib.sha256(model).hexdigest(),
        'vocab_size': 400,
        'begin_id': None,
        'eod_id': 1,
        'lossless': True,
    }
    assert TokenStore.open(str(tmp_path / 'store')).tokenizer().vocab_size == 400


def test_the_end_that_a_checkpoint_names_closes_each_document(tmp_path):
    corpus = write_text(tmp_path / 'text', files=1)
    model = train(TokenizerConfig(vocab_size=400), [words(3000, seed=9)])
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'tokenizer.model').write_bytes(model)
    (tmp_path / 'run' / 'run.json').write_text(json.dumps({'begin_id': 3, 'end_id': 3}))
    chosen = {'tokenizer': TokenizerConfig(model_path=str(tmp_path / 'run'))}
    info = run(TextFiles(path=str(corpus)), tmp_path / 'store', **chosen)
    assert info['tokenizer']['eod_id'] == info['settings']['tokenizer']['end_of_document'] == 3
    made = TokenStore.open(str(tmp_path / 'store'))
    assert made.tokenizer().eod_id == 3
    ends = made.document_ends('train')
    assert set(made.read('train', 0, made.tokens('train'))[np.asarray(ends) - 1]) == {3}
    run(TextFiles(path=str(corpus)), tmp_path / 'store', **chosen)
    (tmp_path / 'run' / 'run.json').unlink()
    with pytest.raises(ConfigError, match=r'tokenizer.end_of_document = 3, not None'):
        run(TextFiles(path=str(corpus)), tmp_path / 'store', **chosen)


def test_the_tokenizer_sample_has_a_limit_and_comes_from_the_whole_text(tmp_path):
    source = TextFiles(path=str(write_text(tmp_path, files=20, n=30_000)))
    config = PrepareConfig(source=source)
    shards = source.shards('train')
    total = sum(shard.bytes for shard in shards)
    sample = list(Sample(config, 300_000, shards))
    assert 200_000 < len(''.join(sample)) <= 300_000
    texts = [path.read_text() for path in sorted((tmp_path / 'train').iterdir())]
    assert sum(any(piece in text for piece in sample) for text in texts) > 5
    assert len(''.join(Sample(config, total, shards))) == total
    assert sample == list(Sample(config, 300_000, shards))


def test_a_second_preparation_and_a_full_disk_are_refused_in_one_line(tmp_path):
    corpus = write_text(tmp_path / 'text', files=2, n=60_000)
    path = tmp_path / 'store'
    experiment = types.SimpleNamespace(
        prepare=PrepareConfig(source=TextFiles(path=str(corpus)), tokenizer=SMALL, processes=1),
        data=DataConfig(path=str(path)),
    )
    with Lease(path / 'parts'), pytest.raises(LmError, match='another `lm prepare` works on it'):
        run_command(prepare, experiment.prepare, experiment.data.path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # the workers get this limit too
    try:
        with pytest.raises(LmError, match=r'File too large.*run the same command again') as error:
            run_command(prepare, experiment.prepare, experiment.data.path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert '\n' not in str(error.value)
    assert not multiprocessing.active_children()
    run_command(prepare, experiment.prepare, experiment.data.path)


def test_no_worker_is_left_when_the_thread_of_the_pool_reaps_them(monkeypatch):
    reap = os.waitpid

    def late(*arguments):
        main = threading.current_thread() is threading.main_thread()
        time.sleep(0.1 * main)  # so that the other thread collects the process
        result = reap(*arguments)
        time.sleep(0.5 * (result[0] and not main))  # the process has ended, and no event says so
        return result

    before = multiprocessing.active_children()
    with start_workers(2) as (pool, _):
        pool.submit(time.sleep, 0).result()
        monkeypatch.setattr(os, 'waitpid', late)
    assert multiprocessing.active_children() == before


def test_signals_of_the_terminal_reach_no_worker_that_starts(capfd):
    before = multiprocessing.active_children()
    with start_workers(1) as (pool, _):
        found = pool.submit(os.getpid)
        (worker,) = (child for child in multiprocessing.active_children() if child not in before)
        for number in (signal.SIGINT, signal.SIGHUP):
            os.kill(worker.pid, number)
        assert found.result() == worker.pid
    assert capfd.readouterr().err == ''


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('', 'a file', r'store(/parts)?: Not a directory; something of another kind is needed there'),
        ('parts', 'a file', r'store/parts: File exists; something of another kind'),
        ('dataset.json', None, r'store: FAILED_PRECONDITION: .*dataset.json.*; run it again when mended'),
        ('parts/settings.json', None, r'store: FAILED_PRECONDITION: .*settings.json.*; run it again when mended'),
        ('parts/settings.json', '{"sour', r'settings.json: damaged; delete .*parts and run'),
    ],
)
def test_files_of_a_wrong_kind_are_reported_in_one_line(tmp_path, name, content, message):
    corpus, path = write_text(tmp_path / 'text', files=1), tmp_path / 'store' / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(parents=True) if content is None else path.write_text(content)
    config = PrepareConfig(source=TextFiles(path=str(corpus)), tokenizer=SMALL, processes=1)
    experiment = types.SimpleNamespace(prepare=config, data=DataConfig(path=str(tmp_path / 'store')))
    with pytest.raises(LmError, match=message) as error:
        run_command(prepare, experiment.prepare, experiment.data.path)
    assert '\n' not in str(error.value)
    assert error.value.exit_code in (2, 44)


def test_a_source_of_one_split_needs_no_other(tmp_path):
    (tmp_path / 'test.jsonl').write_text(''.join(json.dumps({'text': words(200, seed=i)}) + '\n' for i in range(20)))
    console = quiet()
    prepare(PrepareConfig(source=Jsonl(path=str(tmp_path)), tokenizer=SMALL), str(tmp_path / 'store'), console)
    assert 'on which lm train evaluates: add files for validation\n' in console.file.getvalue()


def test_empty_files_are_reported_in_one_line(tmp_path):
    (tmp_path / 'train.jsonl').write_text('')
    (tmp_path / 'validation.jsonl').write_text(json.dumps({'text': words(200, seed=0)}) + '\n')
    with pytest.raises(MismatchError, match="split 'train': its files hold no documents"):
        run(Jsonl(path=str(tmp_path)), tmp_path / 'store')
    (tmp_path / 'text').mkdir()
    (tmp_path / 'text' / 'a.txt').write_text('')
    with pytest.raises(MismatchError, match='no usable text'):
        run(TextFiles(path=str(tmp_path / 'text')), tmp_path / 'store')
    assert not (tmp_path / 'store').exists()


def test_folders_of_a_bucket_are_entered_and_its_documents_are_not_asked_about(tmp_path):
    asked = []

    class Counted(type(tmp_path)):
        def is_dir(self, **options):
            asked.append(self.name)
            return super().is_dir(**options)

    for name in ('a.txt', 'b/c.txt', 'b/d/e.txt', 'b/notes.md'):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    found = walk_bucket(Counted(tmp_path), '.txt')
    assert sorted(path.relative_to(tmp_path).as_posix() for path in found) == [
        'a.txt', 'b/c.txt', 'b/d/e.txt', 'b/notes.md',
    ]  # fmt: skip
    assert sorted(asked) == ['b', 'd', 'notes.md']


def test_a_source_without_usable_text_is_reported_in_one_line(tmp_path):
    (tmp_path / 'train.jsonl').write_bytes(b'caf\xe9\n\n{}\n')
    with pytest.raises(MismatchError, match='no usable text to train the tokenizer on'):
        run(Jsonl(path=str(tmp_path)), tmp_path / 'store')


@needs_corpora
@pytest.mark.smoke
def test_real_text_is_the_same_through_tfds_and_through_files(tmp_path):
    """Both ways give the same text: Wikipedia with its markers, and web text as TFDS has it."""
    write_real_tfds(tmp_path / 'tfds')
    tokenizer = TokenizerConfig(vocab_size=2000)
    stores = []
    for kind, source in (
        ('tfds', Tfds(name='wiki40b/en', data_dir=str(tmp_path / 'tfds'))),
        ('files', Jsonl(path=str(CORPORA / 'wiki40b_en'))),
    ):
        run(source, tmp_path / kind / 'store', cleaning='wiki40b_strip', tokenizer=tokenizer)
        stores.append(TokenStore.open(str(tmp_path / kind / 'store')))
    for split in stores[0].splits:  # TFDS has shuffled the documents
        assert stores[0].bytes(split) == stores[1].bytes(split)
        assert stores[0].words(split) == stores[1].words(split)
        assert stores[0].bytes(split) / stores[0].tokens(split) > 2.5
    text = stores[0].tokenizer().decode(stores[0].read('test', 0, stores[0].tokens('test')))
    assert '_START_' not in text
    info = run(Tfds(name='c4/en', data_dir=str(tmp_path / 'tfds')), tmp_path / 'c4', tokenizer=tokenizer)
    assert list(info['splits']) == ['train', 'validation']
    assert info['splits']['train']['documents'] == 856
    assert tokenizers.load(tmp_path / 'c4' / 'tokenizer.model').sha256 == info['tokenizer']['sha256']
