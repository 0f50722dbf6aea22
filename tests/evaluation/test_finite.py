"""A figure that is not finite ends a command with an error that names the first array or layer."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import lm
from lm.attention.polysketch import Polysketch
from lm.attention.softmax import Softmax
from lm.checkpoint.checkpointer import Checkpointer
from lm.checkpoint.finite import find_not_finite
from lm.checkpoint.snapshot import Snapshot
from lm.cli import main
from lm.errors import Diverged, MismatchError
from lm.evaluation.finite import find_layer, name_places, refuse_not_finite
from lm.inference.decoding import Sampling, generate_tokens
from lm.model import ModelConfig, build
from lm.runs.initial import take_initial
from lm.runs.weights import SavedWeights

pytestmark = pytest.mark.usefixtures('kept_programs')
TEXT = 'def main(argv):\n    return 0\n'


def change(run, folder, **factors):
    """Returns a copy of a run whose newest checkpoint has the named arrays of `params` times a number."""
    shutil.copytree(run, folder)
    with Checkpointer(folder / 'checkpoints') as saved:
        step = saved.latest_step()
        record = saved.read_record(step)
    leaves = {
        name: jax.ShapeDtypeStruct(leaf['shape'], np.dtype(leaf['dtype'])) for name, leaf in record['leaves'].items()
    }
    arrays = Snapshot(saved.directory, step).read(leaves, record)
    for name, factor in factors.items():
        (path,) = [path for path in arrays if path.startswith('params.') and name in path]
        arrays[path] = arrays[path] * jnp.asarray(factor, arrays[path].dtype)
    with Checkpointer(folder / 'checkpoints', fingerprints=record['fingerprints']) as saved:
        saved.save(step + 1, arrays, metadata=record['metadata'])
    return folder


@pytest.fixture(scope='module')
def without_a_number(reference_run, tmp_path_factory):
    """Returns a run with a NaN in the gains of its last norm."""
    gains = np.ones(32, np.float32)
    gains[3] = np.nan
    return change(reference_run[0], tmp_path_factory.mktemp('nan') / 'run', **{'final_norm.scale': gains})


@pytest.fixture(scope='module')
def too_large(reference_run, tmp_path_factory):
    """Returns a run with finite weights, whose layer 0 overflows in its feed-forward layer."""
    factors = np.array([1e30, 1.0], np.float32)[:, None, None]
    return change(reference_run[0], tmp_path_factory.mktemp('large') / 'run', glu_in=factors, glu_out=factors)


def commands(run, tmp_path) -> dict[str, list[str]]:
    """Returns the commands that use weights; none of them may print or write anything."""
    name = str(run)
    return {
        'evaluate': ['evaluate', '--run_dir', name, '--json', '--context_length', '16'],
        'generate': ['generate', '--run_dir', name, '--json', '--prompt', 'x', '--max_tokens', '2'],
        'attention': ['inspect', name, '--attention', TEXT, '--out', str(tmp_path / 'picture')],
    }


def test_weights_that_are_not_finite_are_named(without_a_number, tmp_path, capsys):
    run, out = str(without_a_number), str(tmp_path / 'out')
    export = ['export', '--run_dir', run, '--format', 'safetensors', '--out', out]
    more = {'export': export, 'verify': ['inspect', run, '--verify']}
    for name, command in (commands(without_a_number, tmp_path) | more).items():
        assert main(command) == 44, name
        out, error = capsys.readouterr()
        assert 'the numbers of params.final_norm.scale are not all finite' in error, name
        assert not out or name in more
    assert not list(tmp_path.iterdir())
    with pytest.raises(MismatchError, match=r'step 41: the numbers of params\.final_norm\.scale'):
        lm.load(run)
    assert lm.load(run, step=40).step == 40


def test_layers_that_overflow_are_named(too_large, tmp_path, capsys):
    before = sorted(too_large.rglob('*'))
    for name, command in commands(too_large, tmp_path).items():
        assert main(command) == 43, name
        out, error = capsys.readouterr()
        assert 'is not finite, first in layer 0 (feed-forward)' in error, name
        assert not out, name
    assert not list(tmp_path.iterdir())
    assert sorted(too_large.rglob('*')) == before
    with pytest.raises(Diverged, match=r'first in layer 0 \(feed-forward\)'):
        lm.load(str(too_large)).score(TEXT)


def test_no_run_begins_with_weights_that_are_not_finite(without_a_number):
    abstract = lm.load(str(without_a_number), step=40).weights
    teacher, initial = (
        SavedWeights(setting, str(without_a_number), None, {}) for setting in ('distill.teacher', 'train.init_from')
    )
    for call, setting in (
        (lambda: teacher.read(abstract), 'distill.teacher'),
        (lambda: take_initial(initial, '', abstract, abstract), 'train.init_from'),
    ):
        with pytest.raises(MismatchError, match=rf'{setting} = .*, step 41: the numbers of params\.final_norm\.scale'):
            call()


@pytest.mark.parametrize('number', [np.nan, -np.inf])
def test_an_import_names_the_tensor(number, reference_run, tmp_path, capsys):
    run, out = str(reference_run[0]), tmp_path / 'out'
    assert main(['export', '--run_dir', run, '--format', 'safetensors', '--out', str(out)]) == 0
    tensors = load_file(out / 'model.safetensors')
    tensors['layers.1.qkv.weight'][2, 5] = number
    save_file(tensors, out / 'model.safetensors')
    assert main(['import', str(out), '--run_dir', str(tmp_path / 'run')]) == 44
    assert f'{out}: the numbers of layers.1.qkv.weight are not all finite' in capsys.readouterr().err
    assert not (tmp_path / 'run').exists()


def small(**changes):
    shape = {'vocab_size': 20, 'n_layers': 3, 'd_model': 8, 'n_heads': 2, 'head_dim': 4, 'hidden_dim': 8}
    return build(ModelConfig(**shape | {'attention': (Softmax(), Polysketch(sketch_size=4, block=4))} | changes), 0)


@pytest.mark.parametrize(
    ('part', 'layer', 'expected'),
    [('attention_out', 2, 'layer 2 (attention)'), ('glu_out', 1, 'layer 1 (feed-forward)'), ('', 0, 'the embedding')],
)
def test_the_first_place_is_found(part, layer, expected):
    model, tokens = small(), np.arange(6)
    if part:
        stack, place = model.config.find_layer(layer)
        kernel = getattr(model.blocks[stack], part).kernel
        kernel[...] = kernel[...].at[place].set(jnp.inf)
        assert find_layer(model, tokens) == expected
    else:
        rows = model.embedding.embedding
        rows[...] = rows[...].at[3].set(jnp.nan)
        assert find_layer(model, tokens[:3]) is None
        assert find_layer(model, tokens) == expected


def test_a_figure_without_a_layer_is_refused_all_the_same():
    model = small(attention=Softmax())
    with pytest.raises(Diverged, match=r'^it is not finite: all weights are finite'):
        refuse_not_finite(model, np.arange(4), 'it')
    assert len(name_places(model)) == 2 + 2 * 3


def test_a_token_is_never_drawn_from_logits_that_are_not_finite():
    model = small(attention=Softmax())
    rows = model.embedding.embedding
    rows[...] = rows[...].at[3].set(jnp.inf)
    with pytest.raises(Diverged, match='what predicts the next token is not finite'):
        list(generate_tokens(model, [np.array([1, 2])], 2, Sampling(0.0), 0, pieces=3))


def test_arrays_of_all_types():
    good = {'whole': np.arange(3), 'none': np.zeros((0, 2)), 'half': np.ones(2, jnp.bfloat16)}
    for convert in (np.asarray, jnp.asarray):
        arrays = {name: convert(array) for name, array in good.items()}
        assert find_not_finite(arrays) is None
        assert find_not_finite(arrays | {'last': convert(np.array([1.0, -np.inf]))}) == 'last'
        assert find_not_finite({'first': convert(np.array([np.nan, 1.0]))} | arrays) == 'first'
