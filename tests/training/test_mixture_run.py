"""A run on a mixture with several evaluation sets: its log, and resumes that change nothing."""

import contextlib
import io
import json
import shutil
import subprocess
import sys
import zlib

import jax
import numpy as np
import pytest
import tiny
from tiny import train_step

from lm import cli
from lm.data.store import TokenStore
from lm.data.tokenizers import TokenizerConfig
from lm.data.tokenizers.sentencepiece import SentencePiece, train
from lm.experiment import load
from lm.model.functions import select_weights
from lm.training.inputs import make_windows

pytestmark = pytest.mark.usefixtures('kept_programs')
STEPS = 8


@pytest.fixture(scope='module')
def flags(tokens, tmp_path_factory):
    """Returns the flags of the tiny experiment on two stores, with two more sets."""
    folder = tmp_path_factory.mktemp('mixture')
    tokenizer = TokenStore.open(str(tokens)).tokenizer()
    text = (tokens.parent / 'text' / 'train' / 'typing.txt').read_text()
    tiny.write_store(folder / 'typing', {'train': [text], 'validation': [text[:3000]]}, tokenizer)
    changes = {
        'data.path': str(folder),
        'data.mixture': {str(tokens): 0.75, 'typing': 0.25},
        'evaluate.sets': {'tests': f'{tokens}@test', 'seen': str(folder / 'typing')},
        'train.steps': STEPS,
        'train.microbatches': 2,
        'train.tokens_per_step': 512,
        'train.eval_every': 4,
        'checkpoint.save_every_steps': 4,
    }
    return tiny.params(tiny.MODEL | changes)


@pytest.fixture(scope='module')
def run(kept_programs, flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp('mixed') / 'run'
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert cli.main(['train', '--run_dir', str(folder), *flags]) == 0
    assert ' epochs of tokens (75 %), ' in printed.getvalue()
    assert ' epochs of typing (25 %))' in printed.getvalue()
    return folder


def records(run, kind: str) -> list[dict]:
    """Returns the records of metrics.jsonl without times."""
    found = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
    clocks = ('seconds', 'tokens_per_second', 'mfu', 'data_wait_seconds')
    return [{k: v for k, v in r.items() if k not in clocks} for r in found if r['kind'] == kind]


def test_losses_and_epochs_of_each_source_are_logged(run):
    experiment = load([str(run / 'config.gin')])
    store = experiment.data.open(32)
    windows = make_windows(experiment.data, experiment.train, store)
    assert windows.names == ['tokens', 'typing']
    typing = (store.stores['typing'].tokens('train') - 1) // 32  # windows per epoch
    found = records(run, 'train')
    for record in found:
        counts = np.bincount(windows.sources(record['step'] - 1))
        assert counts.tolist() == [12, 4]
        mean = (counts * [record['loss/tokens'], record['loss/typing']]).sum() / 16
        assert mean == pytest.approx(record['loss'], rel=1e-6)
        assert record['epochs/typing'] == 4 * record['step'] / typing
    # This computes the loss of the first step independently.
    step = train_step(experiment.model, experiment.optimizer, STEPS)
    batch = store.read_many('train', windows.starts(0), 33).astype(np.int32)
    losses = jax.jit(
        lambda: step.functions.score_targets(select_weights(step.init(0)), batch[:, :-1], batch[:, 1:])
    )().nats
    own = np.asarray(losses).mean(axis=1)[windows.sources(0) == 1]
    assert found[0]['loss/typing'] == pytest.approx(own.mean(), rel=1e-5)
    assert found[0]['loss/typing'] != pytest.approx(found[0]['loss/tokens'], rel=1e-5)


def test_each_set_has_its_perplexity(run, tokens, capsys):
    found = records(run, 'eval')
    assert [record['step'] for record in found] == [4, 8]
    names = {name for name in found[0] if '/' in name}
    figures = ('loss', 'perplexity', 'word_perplexity', 'bits_per_byte')
    assert names == {f'{f}/{s}' for f in figures for s in ('tokens', 'typing', 'tests', 'seen')}
    last = found[-1]
    assert last['loss/typing'] == last['loss/seen']  # the same text
    assert 'sets' not in last
    # `lm evaluate` on each store alone gives the same figures.
    sums, alone = {}, {'data.mixture': [], 'evaluate.sets': []}
    folder = load([str(run / 'config.gin')]).data.path
    for name, changes in {
        'tokens': {'data.path': str(tokens)},
        'typing': {'data.path': f'{folder}/typing'},
        'tests': {'data.path': str(tokens), 'evaluate.split': 'test'},
    }.items():
        capsys.readouterr()
        assert cli.main(['evaluate', '--run_dir', str(run), '--json', *tiny.params(alone | changes)]) == 0
        sums[name] = found = json.loads(capsys.readouterr().out)
        for figure in figures:
            assert last[f'{figure}/{name}'] == pytest.approx(found[figure], rel=1e-6), (figure, name)
    # The whole is the sum over the parts of the mixture, without the other sets.
    for name in ('sum_nats', 'tokens', 'bytes', 'words', 'documents'):
        assert last[name] == pytest.approx(sums['tokens'][name] + sums['typing'][name], rel=1e-6)
    assert last['loss'] == pytest.approx(last['sum_nats'] / last['tokens'])
    assert cli.main(['evaluate', '--run_dir', str(run)]) == 0
    printed = capsys.readouterr().out
    assert 'by set' in printed
    assert f'{last["perplexity/tests"]:.4f}' in printed


def test_inspect_and_report_show_the_sets(run, tmp_path, capsys):
    perplexity = records(run, 'eval')[-1]['perplexity/tests']
    assert cli.main(['inspect', str(run)]) == 0
    assert f'perplexity of tests {perplexity:.4f}' in ' '.join(capsys.readouterr().out.split())
    assert cli.main(['report', str(run), '--out', str(tmp_path / 'report')]) == 0
    assert 'perplexity of tests' in (tmp_path / 'report' / 'report.md').read_text()
    assert f'{perplexity:.3f}' in (tmp_path / 'report' / 'report.md').read_text()


def test_a_resume_changes_nothing_and_mixture_weights_may_not_change(run, flags, tokens, tmp_path, capsys):
    again = shutil.copytree(run, tmp_path / 'run')
    shutil.rmtree(again / 'checkpoints' / '8')
    told = json.loads((again / 'run.json').read_text()) | {'saved_step': 4}
    (again / 'run.json').write_text(json.dumps(told))
    other = tiny.params({'data.mixture': {str(tokens): 0.5, 'typing': 0.5}})
    assert cli.main(['train', '--run_dir', str(again), *flags, *other]) == 44
    assert 'data.mixture' in capsys.readouterr().err
    assert cli.main(['train', '--run_dir', str(again), *flags, '--gin_param', 'evaluate.batch_size = 8']) == 0
    assert records(again, 'train') == records(run, 'train')
    for a, b in zip(records(again, 'eval'), records(run, 'eval'), strict=True):
        assert a['step'] == b['step']
        assert a['perplexity/tests'] == pytest.approx(b['perplexity/tests'], rel=1e-6)
    assert tiny.checksums(again, 8) == tiny.checksums(run, 8)


def test_check_refuses_what_training_refuses(flags, tokens, tmp_path, capsys):
    other = tmp_path / 'other'
    text = (tokens.parent / 'text' / 'train' / 'typing.txt').read_text()
    tiny.write_store(other, {'validation': [text]}, SentencePiece(train(TokenizerConfig(vocab_size=399), [text])))
    for changes, code, words in (
        ({'data.mixture': {str(tokens): 1, 'nowhere': 1}}, 0, 'nowhere'),
        ({'data.mixture': {str(tokens): 1, str(other): 1}}, 44, 'data.mixture: the tokenizer of'),
        ({'evaluate.sets': {'x': str(other)}}, 44, "evaluate.sets, 'x': the tokenizer of"),
        ({'evaluate.sets': {'x': str(tmp_path / 'nowhere')}}, 0, 'nowhere'),
        ({'evaluate.sets': {'typing': str(tokens)}}, 2, "evaluate.sets: 'typing' is a store of data.mixture"),
        ({'evaluate.sets': {'x': f'{tokens}@nope'}}, 2, "split 'nope'"),
        ({'evaluate.context_length': 3000}, 2, "(the set '"),
        ({'data.task': '@associative_recall()', 'data.path': ''}, 2, 'data.mixture'),
    ):
        params = [*flags, *tiny.params(changes)]
        assert cli.main(['check', *params]) == code, changes
        assert words in capsys.readouterr().err
        assert cli.main(['train', '--run_dir', str(tmp_path / 'run'), *params]) == (code or 44), changes
        assert words in capsys.readouterr().err
        assert not (tmp_path / 'run').exists()


READS_AND_TRAINS = """
import json, sys, zlib
from lm.data.batches import Batches

plain, told = Batches.__call__, open(sys.argv[1], 'w')

def read(self, step):
    batch = plain(self, step)
    for shard in batch.addressable_shards:
        first = shard.index[1].start or 0
        for i, row in enumerate(shard.data):
            sums = [zlib.crc32(window.tobytes()) for window in row.__array__()]
            told.write(json.dumps([step, i, first, sums]) + chr(10))
    told.flush()
    return batch

Batches.__call__ = read
from lm.cli import main
sys.exit(main(sys.argv[2:]))
"""


def test_two_processes_learn_the_same_as_one(run, flags, tmp_path):
    """Each process has half of the rows of the same batches. Losses agree to rounding, per source and per set too."""
    two = tmp_path / 'run'
    command = [sys.executable, '-c', READS_AND_TRAINS]
    options = ['train', '--run_dir', str(two), *flags, '--coordinator_address', f'localhost:{tiny.free_port()}']
    jobs = [
        subprocess.Popen(
            [*command, str(tmp_path / str(i)), *options, '--process_count', '2', '--process_id', str(i)],
            env=tiny.environment(), cwd=tiny.ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for i in range(2)
    ]  # fmt: skip
    said = [job.communicate(timeout=500)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], '\n'.join(said)
    assert '[Gloo]' not in ''.join(said)
    experiment = load([str(run / 'config.gin')])
    store = experiment.data.open(32)
    windows = make_windows(experiment.data, experiment.train, store)
    for step in range(STEPS):
        batch_ABxL = store.read_many('train', windows.starts(step), 33)
        expected = [zlib.crc32(row.tobytes()) for row in batch_ABxL]
        found, seen = {}, []
        for i in range(2):
            told = [json.loads(line) for line in (tmp_path / str(i)).read_text().splitlines()]
            own = [(microbatch, first, sums) for at, microbatch, first, sums in told if at == step]
            found |= {8 * microbatch + first + k: sum for microbatch, first, sums in own for k, sum in enumerate(sums)}
            seen.append(sum(len(sums) for _, _, sums in own))
        assert seen == [8, 8]
        assert [found[row] for row in range(16)] == expected
    for kind in ('train', 'eval'):
        ours, theirs = records(two, kind), records(run, kind)
        assert [r['step'] for r in ours] == [r['step'] for r in theirs]
        for one, other in zip(ours, theirs, strict=True):
            figures = {name for name, value in other.items() if isinstance(value, float)}
            assert figures <= one.keys()
            assert {'loss/tokens', 'loss/typing'} <= figures
            for name in figures:
                assert one[name] == pytest.approx(other[name], rel=1e-4), (kind, other['step'], name)
