"""A run keeps good checkpoints when steps are not finite, a save fails, or a setting was wrong at first."""

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tiny

from lm import cli
from lm.data.batches import Windows
from lm.data.store import TokenStore
from lm.model.functions import ModelFunctions
from lm.training.step import TrainStep

pytestmark = pytest.mark.usefixtures('kept_programs')
STEPS = 16


@pytest.fixture
def flags(tokens):
    """Returns a run of 16 steps on one window of 32 tokens per device, saved after each step."""
    changes = {'train.steps': STEPS, 'train.eval_every': None, 'checkpoint.save_every_steps': 1}
    return tiny.params(tiny.MODEL | changes | {'data.path': str(tokens), 'train.max_nonfinite_steps': 3})


def train(run, flags, **bindings) -> int:
    names = {name.replace('__', '.'): value for name, value in bindings.items()}
    return cli.main(['train', '--run_dir', str(run), *flags, *tiny.params(names)])


def saved(run) -> list[int]:
    return sorted(int(path.name) for path in (run / 'checkpoints').iterdir() if path.name.isdigit())


@pytest.fixture
def poisoned(monkeypatch, tokens):
    """Returns a function that makes the losses of the named batches of that run not finite."""

    def poison(*batches: int) -> None:
        store, plain = TokenStore.open(str(tokens)), TrainStep.weighted_loss
        starts = [Windows(store.tokens('train'), 32, 8, seed=0).starts(batch)[0] for batch in batches]
        bad_NxL = jnp.asarray(store.read_many('train', starts, 33)[:, :-1].astype(np.int32))

        def weighted_loss(self, weights, tokens_BxL, *rest):
            is_bad = (tokens_BxL[:, None] == bad_NxL[None]).all(-1).any()
            return jax.tree.map(lambda x: x * jnp.where(is_bad, jnp.nan, 1.0), plain(self, weights, tokens_BxL, *rest))

        monkeypatch.setattr(TrainStep, 'weighted_loss', weighted_loss)

    return poison


def test_divergence_keeps_the_good_checkpoints_and_its_remedy_works_in_the_same_directory(
    flags, poisoned, tmp_path, capsys
):
    poisoned(9, 10, 11)
    assert train(tmp_path / 'run', flags) == 43
    message = capsys.readouterr().err.splitlines()[-1]
    assert 'not finite for 3 steps in a row, up to step 12, there first: loss' in message
    assert 'the newest checkpoint is step 9' in message
    assert saved(tmp_path / 'run') == [8, 9]
    remedy = message.partition("--gin_param '")[2].partition("'")[0]
    assert remedy == 'train.skip_batches = [(9, 12)]'
    assert cli.main(['train', '--run_dir', str(tmp_path / 'run'), *flags, '--gin_param', remedy]) == 0
    assert saved(tmp_path / 'run') == [STEPS - 1, STEPS]


def test_a_remedy_names_batches_and_keeps_those_left_out_before(flags, poisoned, tmp_path, capsys):
    poisoned(9, 12, 13)
    assert train(tmp_path / 'run', flags, train__skip_batches=[(2, 3), (10, 12)]) == 43
    assert "'train.skip_batches = [(2, 3), (9, 14)]'" in capsys.readouterr().err.splitlines()[-1]


def test_a_save_due_during_steps_that_are_not_finite_follows_the_next_good_step(flags, poisoned, tmp_path):
    poisoned(4, 5)
    assert train(tmp_path / 'run', flags, checkpoint__save_every_steps=6, checkpoint__keep_last=9) == 0
    assert saved(tmp_path / 'run') == [7, 12, STEPS]


@pytest.mark.parametrize('policy', ['stop', 'continue'])
def test_a_run_whose_last_save_failed_is_never_called_done(flags, tmp_path, monkeypatch, capsys, policy):
    plain = ocp.CheckpointManager.save

    def save(self, step, *arguments, **options):
        if step == STEPS:
            raise OSError(28, 'No space left on device')
        return plain(self, step, *arguments, **options)

    monkeypatch.setattr(ocp.CheckpointManager, 'save', save)
    assert train(tmp_path / 'run', flags, checkpoint__on_failed_save=policy) == 1
    out, error = capsys.readouterr()
    assert f'step {STEPS} could not be' in error.splitlines()[-1]
    assert 'done' not in out
    monkeypatch.undo()
    assert train(tmp_path / 'run', flags, checkpoint__on_failed_save=policy) == 0


@pytest.mark.parametrize(
    ('name', 'value', 'code'),
    [('train__profile', (5, 3), 2), ('train__init_from', '/nowhere/at/all', 44), ('train__seed', 2**63, 2)],
)
def test_a_wrong_setting_leaves_the_directory_as_it_was(flags, tmp_path, capsys, name, value, code):
    assert train(tmp_path / 'run', flags, **{name: value}) == code
    assert f'{name.replace("__", ".")} = {value!r}' in capsys.readouterr().err
    assert not (tmp_path / 'run').exists()
    assert train(tmp_path / 'run', flags) == 0


def test_ctrl_c_saves_and_the_same_command_goes_on(flags, tmp_path, monkeypatch, capsys):
    plain = ModelFunctions.choose_redrawn

    def redraws(self, steps_done):
        if steps_done == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(self, steps_done)

    monkeypatch.setattr(ModelFunctions, 'choose_redrawn', redraws)
    assert train(tmp_path / 'run', flags, checkpoint__save_every_steps=None) == 42
    assert 'stopped at step 6 of 16, which is saved' in capsys.readouterr().err.splitlines()[-1]
    assert saved(tmp_path / 'run') == [6]
    monkeypatch.undo()
    assert train(tmp_path / 'run', flags, checkpoint__save_every_steps=None) == 0


def test_a_step_that_does_not_fit_in_memory_is_not_repeated(flags, tmp_path, monkeypatch, capsys):
    def compile(self, *_, **__):
        raise jax.errors.JaxRuntimeError(
            'RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 54.10G of 30.75G hbm.'
        )

    monkeypatch.setattr(jax.stages.Lowered, 'compile', compile)
    assert train(tmp_path / 'run', flags) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert 'needs 54.10 GiB of HBM' in error
    assert 'lm check --topology' in error
    assert not (tmp_path / 'run').exists()


def test_a_run_at_a_constant_rate_may_be_made_longer(flags, tmp_path, capsys):
    constant = {'optimizer__schedule': '@constant()'}
    assert train(tmp_path / 'run', flags, **constant) == 0
    assert train(tmp_path / 'run', flags, **constant, train__steps=STEPS - 2) == 44
    assert f'train.steps was {STEPS}, now {STEPS - 2}' in capsys.readouterr().err
    assert train(tmp_path / 'run', flags, **constant, train__steps=STEPS + 2) == 0
    assert train(tmp_path / 'whole', flags, **constant, train__steps=STEPS + 2) == 0
    assert tiny.losses(tmp_path / 'run') == tiny.losses(tmp_path / 'whole')
    assert tiny.checksums(tmp_path / 'run', STEPS + 2) == tiny.checksums(tmp_path / 'whole', STEPS + 2)


def test_a_run_whose_rate_depends_on_its_end_keeps_it(flags, tmp_path, capsys):
    assert train(tmp_path / 'run', flags) == 0
    assert train(tmp_path / 'run', flags, train__steps=STEPS + 2) == 44
    assert f'train.steps was {STEPS}, now {STEPS + 2}' in capsys.readouterr().err
