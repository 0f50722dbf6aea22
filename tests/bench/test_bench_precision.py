"""`lm bench precision`: right kernels pass; a wrong kernel is named, and the command exits with 1."""

import dataclasses
import json

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import interpret_kernels

from lm.bench import precision
from lm.bench.candidates import candidates
from lm.cli import main
from lm.ops import exact_attention, linear_attention, platform
from lm.ops.exact_attention import reference as exact_reference

MODEL = ['model.vocab_size = 64', 'model.n_layers = 2', 'model.d_model = 32', 'model.n_heads = 2']
MODEL += ['model.head_dim = 16', 'optimizer.warmup_steps = 1', "model.dtype = 'bfloat16'"]
FLAGS = [word for binding in MODEL for word in ('--gin_param', binding)]
MECHANISMS = 'softmax,gated_linear'


@pytest.fixture
def kernels(monkeypatch):
    """Puts the reference formulas in the place of kernels: the program differs, the numbers are the same."""
    for implementations in (exact_attention.SOFTMAX, linear_attention.IMPLEMENTATIONS):
        monkeypatch.setitem(implementations._preferred, 'cpu', ('reference',))
    return monkeypatch


def test_right_kernels_pass(kernels, capsys, tmp_path):
    flags = ['--mechanisms', MECHANISMS, '--contexts', '40', '--json', str(tmp_path / 'found.json'), *FLAGS]
    assert main(['bench', 'precision', *flags]) == 0
    softmax, linear = json.loads((tmp_path / 'found.json').read_text())['rows']
    assert softmax['kernels'].endswith(': reference')
    assert linear['kernels'] == 'linear attention: reference'
    for row in (softmax, linear):
        assert row['right']
        assert row['repeats']
        assert 0 < row['gradients'] < 0.05
        assert row['gradients'] != row['portable_gradients'] == pytest.approx(row['gradients'], rel=0.5)
    printed = capsys.readouterr()
    assert 'reference' in printed.out
    assert printed.err.count('\n') <= 1


def test_a_wrong_kernel_is_named(kernels, capsys):
    right = exact_reference.softmax_attention
    kernels.setattr(exact_reference, 'softmax_attention', lambda *arrays, **rest: 1.1 * right(*arrays, **rest))
    assert main(['bench', 'precision', '--mechanisms', MECHANISMS, '--contexts', '40', *FLAGS]) == 1
    (line,) = (line for line in capsys.readouterr().err.splitlines() if 'wrong' in line)
    assert line.startswith('softmax, 40 tokens: the gradient of blocks/0/')
    assert "set the mechanism's implementation = 'xla'" in line


def test_a_value_that_is_not_finite_fails(kernels):
    right = exact_reference.softmax_attention
    kernels.setattr(exact_reference, 'softmax_attention', lambda *arrays, **rest: right(*arrays, **rest) * jnp.nan)
    ((name, experiment),) = candidates(['softmax'], [], MODEL).items()
    row = precision.compared(name, experiment, 40)
    assert not row.right
    assert np.isnan(row.worst_error)


def test_runs_that_differ_are_reported(kernels):
    ((name, experiment),) = candidates(['softmax'], [], MODEL).items()
    row = dataclasses.replace(precision.compared(name, experiment, 40), repeats=False)
    assert precision.failure(row) == 'softmax, 40 tokens: two runs differ; report it, with the table above'
    in_xla_too = dataclasses.replace(row, portable_repeats=False)
    assert (row.is_good, in_xla_too.is_good, in_xla_too.repetition) == (False, True, 'no, as XLA')


def test_models_that_are_not_causal_are_refused(capsys):
    flags = ['--gin_param', 'model.causal = False', '--mechanisms', 'softmax', *FLAGS]
    assert main(['bench', 'precision', *flags]) == 2
    assert 'is for causal models' in capsys.readouterr().err


@pytest.mark.parametrize(
    ('mechanism', 'bindings'),
    grids.draw(
        [
            ('softmax', []),
            ('polysketch', ['polysketch.sketch_size = 16', 'polysketch.block = 128']),
            ('gated_linear', []),
            ('delta', []),
        ],
        2,
    ),
)
def test_interpreted_tpu_kernels_pass(mechanism, bindings, monkeypatch):
    """One model has all kernels; its gradients must equal the gradients by XLA."""
    monkeypatch.setattr(platform, 'target_platform', lambda: 'tpu')
    ((name, experiment),) = candidates([mechanism], [], [*MODEL, 'model.head_dim = 32', *bindings]).items()
    with interpret_kernels():
        row = precision.compared(name, experiment, 256)
    assert row.right
    assert row.repeats
    assert 'rotary: pallas_tpu' in row.kernels
    assert row.kernels.count('pallas_tpu') >= 2


def test_choices_are_noted_and_can_be_portable(monkeypatch):
    arrays = [jnp.ones((1, 4, 1, 8))] * 3
    with platform.choices() as found:
        jax.eval_shape(lambda *arrays: exact_attention.softmax_attention(*arrays, implementation='reference'), *arrays)
    with platform.choices(portable=True) as portable:
        jax.eval_shape(lambda *arrays: exact_attention.softmax_attention(*arrays, implementation='reference'), *arrays)
    assert [set(names.values()) for names in (found, portable)] == [{'reference'}, {'xla'}]
