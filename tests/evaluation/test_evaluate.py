"""Perplexity counts every token once and equals a plain numpy computation, for any batch size and devices."""

import json
import math
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import train_step

from lm import cli
from lm.commands.evaluate import check_together
from lm.data.store import TokenStore
from lm.errors import AbsentError, ConfigError
from lm.evaluation.perplexity import summarize
from lm.evaluation.windows import EvaluationWindows
from lm.experiment import Experiment
from lm.inference import evaluation
from lm.inference.loaded_run import open_run
from lm.pod.job import JobAddress
from lm.runs.run_dir import RunDir

FIGURES = ('sum_nats', 'perplexity', 'word_perplexity', 'bits_per_byte')


def evaluate(run, *flags, devices=1) -> dict:
    done = tiny.lm('evaluate', '--run_dir', str(run), '--json', *flags, devices=devices)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_relative_path_counts_from_the_folder_where_the_run_began(reference_run, tmp_path, monkeypatch, capsys):
    run = tmp_path / 'run'
    shutil.copytree(reference_run[0], run)
    info = json.loads((run / 'run.json').read_text())
    assert info['starts'][0]['folder'] == str(tiny.ROOT)
    (tmp_path / 'there' / 'store').mkdir(parents=True)
    info['starts'][-1]['folder'] = str(tmp_path / 'there')
    (run / 'run.json').write_text(json.dumps(info))
    monkeypatch.chdir(run)
    with pytest.raises(AbsentError) as error:
        open_run(str(run), ["data.path = 'store'"])
    assert f"data.path = '{tmp_path}/there/store': no finished token store" in str(error.value)
    assert open_run(str(run), ["data.path = 'nowhere'"])  # the run keeps its tokenizer: text can be written
    assert cli.main(['evaluate', str(run), '--set', 'data.path=nowhere']) == 44
    assert 'from the current folder' in capsys.readouterr().err


def test_a_text_without_words_has_no_figures_per_word_and_byte():
    counts = {'tokens': 3, 'bytes': 4, 'words': 0, 'documents': 2}
    store = types.SimpleNamespace(**{name: lambda split, n=n: n for name, n in counts.items()})
    store.info = {'tokenizer': {'sha256': 't'}}
    found = summarize(np.array([1.0, 2.0]), np.array([2, 1]), store, 'validation')
    assert found | counts == found
    assert found['perplexity'] == pytest.approx(math.e)
    assert found.keys().isdisjoint({'word_perplexity', 'bits_per_byte'})
    assert 'perplexity per word' not in evaluation.describe_figures(found)


@pytest.mark.parametrize('n', [1, 5, 31, 32, 33, 100, 257])
@pytest.mark.parametrize('window', ['disjoint', 'sliding:1', 'sliding:7', 'sliding:32'])
def test_each_token_is_scored_once_with_its_full_context(n, window):
    text = np.arange(1, n + 1)

    class Store:
        def read(self, split, start, stop):
            return text[start:stop]

        def read_many(self, split, starts, length):
            return np.stack([text[s : s + length] for s in starts])

    if n < 32:
        with pytest.raises(ConfigError, match=f'context_length = 32: the split has only {n} tokens'):
            EvaluationWindows.create(n, 32, window)
        return
    windows = EvaluationWindows.create(n, 32, window)
    seen = []
    for first in range(0, len(windows), 3):
        tokens, scored = windows.batch(Store(), 'test', 0, first, 3)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        seen += targets[scored].tolist()
        # Token i is i and follows token i-1; an end-of-document token (0) stands before the first token.
        assert (inputs[scored] == targets[scored] - 1).all()
        rows, columns = np.nonzero(scored)
        context = columns + 1
        assert (context >= np.minimum(targets[rows, columns], 32 - windows.stride + 1)).all()
    assert seen == text.tolist()


@pytest.fixture(scope='module')
def base(reference_run):
    return evaluate(reference_run[0])


@pytest.mark.parametrize(
    ('flags', 'devices'),
    [(['--batch_size', '1', '--chunk', '10'], 1), (['--batch_size', '4'], 2), (['--batch_size', '16'], 4)],
    ids=['batch 1, chunks', 'batch 4, 2 devices', 'batch 16, 4 devices'],
)
def test_batch_size_chunks_and_devices_do_not_matter(reference_run, base, flags, devices):
    other = evaluate(reference_run[0], *flags, devices=devices)
    for name in FIGURES:
        assert other[name] == pytest.approx(base[name], rel=1e-6)
    assert other['tokens'] == base['tokens']


def test_settings_of_the_training_job_do_not_bind_an_evaluation(reference_run, base, tmp_path):
    """A pod's fsdp, processes and slices do not count. The evaluation's own settings do."""
    run = shutil.copytree(reference_run[0], tmp_path / 'run')
    job = {'mesh.fsdp': 6, 'mesh.sequence': 4, 'mesh.processes': 4, 'mesh.slices': 2}
    (run / 'config.gin').write_text(
        ''.join(
            f'{line}\n' for line in (run / 'config.gin').read_text().splitlines() if line.partition(' =')[0] not in job
        )
        + ''.join(f'{name} = {value}\n' for name, value in job.items())
    )
    assert evaluate(run, devices=2)['sum_nats'] == pytest.approx(base['sum_nats'], rel=1e-6)
    mesh = open_run(str(run), ['mesh.slices = 4']).mesh
    assert mesh.shape == {'data': 4, 'fsdp': 2}, 'of 8 devices, 2 a slice'
    refused = tiny.lm('evaluate', '--run_dir', str(run), '--gin_param', 'mesh.processes = 4')
    assert refused.returncode == 2
    assert 'mesh.processes = 4: but 1 process' in refused.stderr


def test_agrees_with_numpy_on_the_logits_of_the_model(reference_run, base, tokens):
    from lm.checkpoint.checkpointer import Checkpointer
    from lm.experiment import load
    from lm.runs.run_dir import RunDir

    run, _ = reference_run
    experiment = load([str(run / 'config.gin')], [])
    step = train_step(experiment.model, experiment.optimizer, experiment.train.steps)
    abstract = jax.eval_shape(lambda: step.init(0))
    with Checkpointer(RunDir(run).checkpoints, experiment.checkpoint, {}) as saved:
        state, _, _ = saved.restore({name: abstract[name] for name in ('params', 'buffers')})
    model = step.functions.merge(state)
    logits_of = jax.jit(lambda window: model(window))
    store = TokenStore.open(str(tokens))
    n, L = store.tokens('validation'), 32
    stream = np.concatenate([[store.tokenizer().eod_id], store.read('validation', 0, n)])
    nats = 0.0
    for start in range(0, n, L):
        window = stream[start : start + L + 1]
        logits = np.asarray(logits_of(jnp.asarray(window[None, :-1])), np.float64)[0]
        nats += sum(np.log(np.exp(row).sum()) - row[target] for row, target in zip(logits, window[1:], strict=True))
    text = (tokens.parent / 'text' / 'validation' / 'shlex.txt').read_bytes()
    assert base['tokens'] == n
    assert base['bytes'] == len(text)
    assert base['words'] == len(text.decode().split())
    assert base['sum_nats'] == pytest.approx(nats, rel=1e-6)
    assert base['perplexity'] == pytest.approx(math.exp(nats / n), rel=1e-6)
    assert base['word_perplexity'] == pytest.approx(math.exp(nats / base['words']), rel=1e-6)
    assert base['bits_per_byte'] == pytest.approx(nats / math.log(2) / len(text), rel=1e-6)


def test_sliding_windows_see_more_and_positions_add_up(reference_run, base):
    sliding = evaluate(reference_run[0], '--window', 'sliding:8')
    assert sliding['tokens'] == base['tokens']
    assert sliding['perplexity'] != base['perplexity']
    assert sliding['perplexity'] == pytest.approx(base['perplexity'], rel=0.02)
    for result in (sliding, base):
        total = sum(b['loss'] * b['tokens'] for b in result['loss_by_position'])
        assert total == pytest.approx(result['sum_nats'], rel=1e-9)
        assert result['loss_by_position'][-1]['end'] == 32


def test_the_periodic_evaluation_is_the_same_computation(reference_run, base):
    assert tiny.losses(reference_run[0], 'eval')[40] == pytest.approx(base['loss'], rel=1e-6)
    earlier = evaluate(reference_run[0], '--step', '30')
    assert earlier['step'] == 30
    assert earlier['loss'] != base['loss']
    assert (reference_run[0] / 'evaluations' / 'step-30_validation_32_disjoint.json').exists()


def test_other_figures_go_to_another_file(reference_run, base):
    masked = evaluate(reference_run[0], '--gin_param', 'evaluate.mask_documents = True')
    assert masked['overrides'] == {'evaluate.mask_documents': 'True'}
    judged = evaluate(
        reference_run[0], '--gin_param', 'evaluate.accuracy = True', '--gin_param', 'evaluate.batch_size = 4'
    )
    assert judged['overrides'] == {'evaluate.accuracy': 'True'}
    own = json.loads((reference_run[0] / 'evaluations' / 'step-40_validation_32_disjoint.json').read_text())
    assert (own['loss'], own['overrides']) == (base['loss'], {})


def test_a_table_for_people(reference_run):
    done = tiny.lm('evaluate', '--run_dir', str(reference_run[0]), '--split', 'test', '--context_length', '64')
    assert done.returncode == 0, done.stderr
    for words in ('perplexity per word', 'bits per byte', 'test at step 40', '32–63', 'written to'):
        assert words in done.stdout


def test_json_can_hold_values_that_are_not_finite(tmp_path, monkeypatch, capsys):
    store = types.SimpleNamespace(fingerprints={'data': 'd'})
    run = types.SimpleNamespace(step=3, directory=RunDir(tmp_path), weights=None, store=store, changes={})
    result = {'split': 'test', 'context_length': 8, 'loss': math.nan, 'perplexity': math.inf}
    monkeypatch.setattr(evaluation, 'initialize_distributed', lambda *_: None)
    monkeypatch.setattr(evaluation, 'load_run', lambda *_: run)
    monkeypatch.setattr(evaluation, 'make_run_evaluator', lambda run: lambda weights, step: dict(result))
    evaluation.evaluate_split(Experiment(), 'unused', None, JobAddress(), as_json=True)
    (written,) = (tmp_path / 'evaluations').glob('*.json')
    for text in (capsys.readouterr().out, written.read_text()):
        found = json.loads(text, parse_constant=pytest.fail)
        assert (found['loss'], found['perplexity']) == ('NaN', 'Infinity')


def test_a_full_disk_leaves_no_half_written_file(reference_run, base, monkeypatch, capsys):
    folder = reference_run[0] / 'evaluations'
    before = {path: path.read_bytes() for path in folder.iterdir()}

    def fsync(_):
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr('os.fsync', fsync)
    assert cli.main(['evaluate', '--run_dir', str(reference_run[0])]) == 1
    printed = capsys.readouterr()
    path = folder / 'step-40_validation_32_disjoint.json'
    assert printed.err.startswith(f'lm evaluate: error: {path} cannot be written (No')
    assert 'Error:' not in printed.err
    assert f'{base["perplexity"]:.4f}' in printed.out, 'the figures are told all the same'
    assert 'written to' not in printed.out
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_a_context_longer_than_the_split_is_refused(reference_run):
    before = sorted(reference_run[0].rglob('*'))
    done = tiny.lm('evaluate', '--run_dir', str(reference_run[0]), '--context_length', '1000000')
    assert done.returncode == 2
    assert 'evaluate.context_length = 1000000: the split has only' in done.stderr
    assert "(split 'validation')" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert sorted(reference_run[0].rglob('*')) == before


@pytest.mark.parametrize(
    ('flags', 'said'),
    [
        (['--limit', '5'], '--limit 5: is of tasks; add --tasks'),
        (['--tasks', 'piqa', '--sample_seed', '5'], '--sample_seed 5: says which examples --limit takes; add --limit'),
        (['--num_fewshot', '0'], '--num_fewshot 0: is of tasks'),
        (['--task_data', 'data'], '--task_data data: is of tasks'),
        (['--tasks', 'piqa', '--split', 'test'], '--split test: is of a split, not of --tasks; leave out one'),
        (['--tasks', 'piqa', '--window', 'disjoint', '--limit', '5'], '--window disjoint: is of a split'),
    ],
)
def test_a_flag_without_effect_is_refused(flags, said):
    with pytest.raises(ConfigError, match=said):
        check_together(cli.parse(['evaluate', '--run_dir', 'runs/x', *flags]))
    check_together(cli.parse(['evaluate', '--run_dir', 'runs/x', '--tasks', 'piqa', '--limit', '5']))
    check_together(cli.parse(['evaluate', '--run_dir', 'runs/x', '--split', 'test', '--window', 'disjoint']))


def test_a_softmax_run_is_evaluated_under_hybrid_attention(reference_run, base):
    """Hybrid is exact if its window is as long as the context: it is then softmax. The run's own evaluation
    file stays."""
    folder = reference_run[0] / 'evaluations'
    before = set(folder.iterdir())
    hybrid = ['--gin_param', 'model.attention = @hybrid()', '--gin_param']
    exact = evaluate(reference_run[0], *hybrid, 'hybrid.window = 32')
    assert exact['loss'] == pytest.approx(base['loss'], rel=1e-5)
    assert exact['overrides']['model.attention'] == '@hybrid()'
    close = evaluate(reference_run[0], *hybrid, 'hybrid.window = 4')
    assert close['loss'] != exact['loss']
    assert close['loss'] == pytest.approx(base['loss'], rel=0.02)
    own = json.loads((folder / 'step-40_validation_32_disjoint.json').read_text())
    assert own['loss'] == base['loss']
    assert len(set(folder.glob('step-40_validation_32_disjoint_*.json')) - before) == 2


def test_a_softmax_run_starts_a_performer(reference_run, tiny_flags, tmp_path):
    bindings = {'train.init_from': str(reference_run[0]), 'model.attention': '@performer()', 'performer.n_features': 64}
    done = tiny.lm('train', '--run_dir', str(tmp_path / 'run'), *tiny_flags, *tiny.params(bindings))
    assert done.returncode == 0, done.stderr
    ours, theirs = tiny.losses(tmp_path / 'run'), tiny.losses(reference_run[0])
    assert ours[1] < theirs[1] - 1  # it starts from the trained softmax weights
