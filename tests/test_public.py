"""`import lm`: the names that it offers to notebooks, and how light the import is."""

import ast
import inspect
import json
import pathlib
import pydoc
import subprocess
import sys

import numpy as np
import pytest
import tiny

import lm


@pytest.fixture(scope='module')
def run(reference_run):
    return lm.load(str(reference_run[0]))


def test_every_public_name_is_there():
    for name in lm.PUBLIC:
        assert callable(getattr(lm, name)), name
        assert name in dir(lm)
    with pytest.raises(AttributeError, match='nonsense'):
        _ = lm.nonsense


def test_import_is_light():
    code = 'import sys, lm; print([m for m in ("jax", "numpy", "flax", "gin") if m in sys.modules])'
    done = subprocess.run([sys.executable, '-c', code], env=tiny.environment(), capture_output=True, text=True)
    assert done.stdout.strip() == '[]', done.stderr


def test_type_checkers_see_what_is_imported():
    """The imports under TYPE_CHECKING name the same objects as the table that is read at run time."""
    block = next(node for node in ast.parse(pathlib.Path(lm.__file__).read_text()).body if isinstance(node, ast.If))
    found: dict = {}
    exec(ast.unparse(ast.Module(block.body, [])), found)
    assert {name: found[name] for name in lm.PUBLIC} == {name: getattr(lm, name) for name in lm.PUBLIC}
    assert {name for name in found if not name.startswith('_')} == set(lm.PUBLIC)


def test_public_functions_show_their_parameters():
    assert list(inspect.signature(lm.train).parameters)[:3] == ['experiment', 'run_dir', 'rewind_to']
    shown = pydoc.plain(pydoc.render_doc(lm.train))
    assert 'train(\n' in shown or 'train(experiment: lm.experiment.Experiment, run_dir: str' in shown
    assert 'Trains, or continues the run' in shown


CALLS = """
import lm

experiment = lm.configure(['a.gin'], ['train.steps = 100'])
lm.train(experiment, 'runs/mine', rewind_to=3)
run = lm.load('runs/mine', step=3)
lm.evaluate(run, split='test')['perplexity']
lm.generate(run, ['def main('], max_tokens=8)
lm.train(experiment, 'runs/mine', rewind=3)  # wrong
lm.generate(run, 'def main(', tokens=8)  # wrong
lm.load(3)  # wrong
lm.nonsense  # wrong
"""


def test_a_type_checker_knows_the_functions(tmp_path):
    pytest.importorskip('pyright')
    path = tmp_path / 'calls.py'
    path.write_text(CALLS)
    command = [sys.executable, '-m', 'pyright', '--pythonpath', sys.executable, '--outputjson', str(path)]
    done = subprocess.run(command, env=tiny.environment(), capture_output=True, text=True, cwd=tiny.ROOT)
    found = {error['range']['start']['line'] for error in json.loads(done.stdout)['generalDiagnostics']}
    assert found == {i for i, line in enumerate(CALLS.splitlines()) if line.endswith('# wrong')}, done.stdout


def test_functions_stay_functions_after_their_modules_are_imported():
    from lm.inference.generation import generate
    from lm.session.train import train

    assert (lm.train, lm.generate) == (train, generate)


def test_scores_of_a_text_are_those_of_the_model(run):
    text = 'def main():\n    return é 42\n' * 5  # longer than the context of 32
    scores = run.score(text)
    assert run.tokenizer.decode(scores.tokens) == text
    assert scores.n_bytes == len(text.encode())
    stream = np.concatenate([[run.tokenizer.eod_id], scores.tokens])
    expected = []
    for start in range(0, len(stream) - 1, 32):
        window = stream[start : start + 33].astype(np.int32)
        logits = np.asarray(run.model(window[None, :-1])[0], np.float64)
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        expected += (-logits[np.arange(len(window) - 1), window[1:]]).tolist()
    np.testing.assert_allclose(scores.nats, expected, atol=1e-5)
    assert scores.bits_per_byte == pytest.approx(sum(expected) / np.log(2) / len(text.encode()), rel=1e-6)


def test_greedy_tokens_are_the_most_probable(run):
    row = np.concatenate([[run.tokenizer.eod_id], run.tokenizer.encode('import sys')]).astype(np.int32)
    best = np.asarray(run.model(row[None])[0]).argmax(-1)
    chosen = np.append(row, best[-1])
    expected = best == chosen[1:]
    assert expected[-1]
    short, long = run.scorer.score_rows([chosen[:3], chosen], accuracy=True)
    np.testing.assert_array_equal(long.correct, expected)
    np.testing.assert_array_equal(short.correct, expected[:2])
    np.testing.assert_allclose(long.nats, run.scorer.score_rows([chosen])[0].nats, atol=1e-6)


def test_a_split_of_one_document_scores_like_its_text(run):
    """Bits per byte of the harness, which asks for whole documents, must agree too."""
    text = run.tokenizer.decode(run.store.read('validation', 0, run.store.tokens('validation') - 1))
    ours, theirs = run.score(text), lm.evaluate(run)
    assert theirs['documents'] == 1
    assert len(ours.nats) == theirs['tokens']
    assert ours.bits_per_byte == pytest.approx(theirs['bits_per_byte'], rel=1e-6)


def test_evaluate_is_lm_evaluate(run, reference_run):
    result = lm.evaluate(run, context_length=16, batch_size=8)
    again = tiny.lm('evaluate', '--run_dir', str(reference_run[0]), '--context_length', '16', '--json')
    assert result['sum_nats'] == pytest.approx(json.loads(again.stdout)['sum_nats'], rel=1e-7)


def test_generate_stops_at_the_text_that_is_asked_for(run):
    whole = lm.generate(run, ['import ', 'def main('], max_tokens=24, temperature=0)
    assert len(whole) == 2
    assert all(whole)
    stop = whole[0][3:5]
    assert lm.generate(run, 'import ', max_tokens=24, temperature=0, until=[stop]) == whole[0][: whole[0].index(stop)]
    with pytest.raises(lm.errors.ConfigError, match='temperature'):
        lm.generate(run, 'x', temperature=-1.0)


def test_a_path_without_a_run(tmp_path):
    with pytest.raises(lm.errors.ConfigError, match=r'holds no config.gin'):
        lm.load(str(tmp_path / 'nothing'))


@pytest.mark.parametrize(
    ('arguments', 'named'),
    [
        (('configs/experiments/quickstart.gin',), 'gin_files'),
        ((pathlib.Path('configs/experiments/quickstart.gin'),), 'gin_files'),
        (((), 'train.steps = 3'), 'gin_params'),
    ],
)
def test_a_single_name_in_place_of_a_list_is_refused(arguments, named):
    with pytest.raises(lm.errors.ConfigError, match=f'{named} = .*must be a list'):
        lm.configure(*arguments)


EXPERIMENT = lm.Experiment()


@pytest.mark.parametrize(
    ('name', 'arguments', 'kind'),
    [
        ('evaluate', ('runs/x',), 'LoadedRun'),
        ('generate', ('runs/x', 'def main('), 'LoadedRun'),
        ('generate', (EXPERIMENT, 'def main('), 'LoadedRun'),
        ('prepare', ('data/quickstart.gin', 'data/x'), 'PrepareConfig'),
        ('prepare', (EXPERIMENT, 'data/x'), 'PrepareConfig'),
        ('train', ('configs/experiments/quickstart.gin', 'runs/x'), 'Experiment'),
        ('train', (EXPERIMENT.train, 'runs/x'), 'Experiment'),
        ('validate', ('configs/experiments/quickstart.gin',), 'Experiment'),
        ('dump', ('runs/x',), 'Experiment'),
        ('dump', (EXPERIMENT.model,), 'Experiment'),
    ],
)
def test_an_argument_of_the_wrong_class_is_refused(name, arguments, kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        lm.errors.ConfigError, match=rf'^(run|config|experiment) = .*must be an? .*{kind}, such as'
    ) as it:
        getattr(lm, name)(*arguments)
    assert len(str(it.value)) < 200
    assert not list(tmp_path.iterdir())


def test_wrong_types_of_sections_and_lists_are_refused(run):
    with pytest.raises(lm.errors.ConfigError, match=r"^model = 'small': must be a value of type ModelConfig, such as"):
        lm.Experiment(model='small')
    with pytest.raises(lm.errors.ConfigError, match=r"^until = 'END': must be a list, such as \['END'\]"):
        lm.generate(run, 'x', until='END')
    for name, wrong in (('seed', 1.5), ('seed', -1), ('max_tokens', 2.5), ('max_tokens', 0)):
        with pytest.raises(lm.errors.ConfigError, match=rf'^{name} = {wrong}: must be an int'):
            lm.generate(run, 'x', **{name: wrong})
    with pytest.raises(lm.errors.ConfigError, match=r'^--temperature inf: must be at least 0, and finite'):
        lm.generate(run, 'x', temperature=float('inf'))
    for ids in ([5, 400], [-1]):
        with pytest.raises(lm.errors.ConfigError, match=f'^prompts: token id {ids[-1]}: must be 0 to 399'):
            lm.generate(run, [np.array(ids)])
    with pytest.raises(lm.errors.ConfigError, match=r"^step = '30': must be an int"):
        lm.load(str(run.directory.path), step='30')
    assert lm.load(str(run.directory.path), step=np.int64(30)).step == 30
