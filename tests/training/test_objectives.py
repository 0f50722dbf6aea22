"""Hidden tokens: fractions, determinism, and no trace of the answer in the model's input."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import train_step

from lm.attention.performer import Performer
from lm.attention.softmax import Softmax
from lm.config.configurable import REGISTRY
from lm.data.dataset import DataConfig
from lm.data.tokenizers.amino_acids import AminoAcids, AminoAcidsConfig
from lm.errors import ConfigError
from lm.experiment import Experiment, load
from lm.model import ModelConfig
from lm.ops.errors import OperationError
from lm.plan import plan_step
from lm.pod.mesh import MeshConfig, batch_sharding, make_mesh
from lm.tasks.induction_heads import InductionHeads
from lm.training.config import TrainConfig
from lm.training.objectives import Objective, check_objective
from lm.training.objectives.masked import Masked
from lm.training.objectives.next_token import NextToken
from lm.training.optimizer import OptimizerConfig

AMINO_ACIDS = AminoAcids(AminoAcidsConfig().contents())
STORE = types.SimpleNamespace(tokenizer=lambda: AMINO_ACIDS)
END, MASK, V = AMINO_ACIDS.eod_id, AMINO_ACIDS.mask_id, AMINO_ACIDS.vocab_size
MODEL = ModelConfig(vocab_size=V, n_layers=2, d_model=32, n_heads=2, head_dim=16, attention=Softmax(), causal=False)
HIDING = Masked().make_hiding(STORE, V, 'validation')


def residues(shape, seed=0, ends=0.02):
    rng = np.random.default_rng(seed)
    return jnp.asarray(np.where(rng.random(shape) < ends, END, rng.integers(2, V, shape)), jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def hidden(hiding, tokens, numbers):
    return hiding.hide(tokens, numbers)


def hide(tokens, numbers, hiding=HIDING):
    return tuple(map(np.asarray, hidden(hiding, tokens, jnp.asarray(numbers, jnp.uint32))))


def test_fractions_equal_bert():
    tokens = np.asarray(residues((400, 512)))
    inputs, chosen = hide(tokens, range(400))
    is_residue, changed = tokens != END, inputs != tokens
    n = chosen.sum()
    spread = 4 * np.sqrt(0.15 * 0.85 / is_residue.sum())
    assert abs(chosen.sum() / is_residue.sum() - 0.15) < spread
    assert not (chosen & ~is_residue).any()
    assert not (changed & ~chosen).any()
    masked = inputs == MASK
    assert not (masked & ~chosen).any()
    assert abs(masked.sum() / n - 0.8) < 4 * np.sqrt(0.16 / n)
    others = chosen & ~masked
    # 1 of 26 random tokens equals the token itself.
    assert abs((inputs[others] != tokens[others]).sum() / n - 0.1 * 25 / 26) < 4 * np.sqrt(0.09 / n)
    drawn = np.bincount(inputs[others & changed], minlength=V)
    assert drawn[[END, MASK]].sum() == 0
    assert drawn[2:].min() > 0.5 * drawn.sum() / 26
    # No position is favoured.
    assert np.abs(chosen.sum(0) / is_residue.sum(0) - 0.15).max() < 6 * np.sqrt(0.15 * 0.85 / 400)


def test_other_fractions_are_possible():
    tokens = np.asarray(residues((50, 300)))
    inputs, chosen = hide(
        tokens, range(50), Masked(share=0.5, mask_share=1.0, random_share=0.0).make_hiding(STORE, V, 'x')
    )
    assert (inputs[chosen] == MASK).all()
    assert 0.45 < chosen[tokens != END].mean() < 0.55
    inputs, chosen = hide(tokens, range(50), Masked(mask_share=0.0, random_share=0.0).make_hiding(STORE, V, 'x'))
    np.testing.assert_array_equal(inputs, tokens)
    with pytest.raises(ConfigError, match=r'^masked\.random_share = 0\.3: must be at most .* = 0\.2$'):
        Masked(random_share=0.3)


@settings(max_examples=25)
@given(st.permutations(range(12)), st.integers(1, 12), st.integers(0, 2**32 - 20))
def test_hidden_tokens_depend_on_the_number_of_the_window_alone(order, size, first):
    """The order of windows, their batch and the other windows do not matter."""
    tokens, numbers = np.asarray(residues((12, 40))), np.uint32(first) + np.arange(12, dtype=np.uint32)
    whole = hide(tokens, numbers)
    chosen = np.array(order[:size])
    part = hide(tokens[chosen], numbers[chosen])
    for a, b in zip(whole, part, strict=True):
        np.testing.assert_array_equal(a[chosen], b)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(1, 25))
def test_no_trace_of_a_hidden_token_reaches_the_model(number, shift):
    """Other tokens at hidden positions change no input, except where the token stays. The choice of positions depends
    on no token."""
    tokens = np.asarray(residues((1, 200), seed=number))
    inputs, chosen = hide(tokens, [number])
    other = np.where(tokens == END, END, 2 + (tokens - 2 + shift) % 26)
    stays = chosen & (inputs == tokens)
    changed = np.where(chosen & ~stays, other, tokens)
    again, same = hide(changed, [number])
    np.testing.assert_array_equal(chosen, same)
    np.testing.assert_array_equal(inputs, again)
    np.testing.assert_array_equal(hide(other, [number])[1], chosen)


def test_seeds_splits_and_windows_have_independent_draws():
    tokens = residues((1, 4000), ends=0)
    found = [
        hide(tokens, [number], Masked(seed=seed).make_hiding(STORE, V, split))[1]
        for seed, split, number in ((0, 'validation', 0), (1, 'validation', 0), (0, 'test', 0), (0, 'validation', 1))
    ]
    for i, a in enumerate(found):
        for b in found[:i]:
            assert abs((a & b).mean() - 0.15**2) < 0.015


def test_the_mask_token_has_an_id_of_its_own():
    pieces = types.SimpleNamespace(vocab_size=400, mask_id=None, special_ids=(0, 1, 2, 3))
    store = types.SimpleNamespace(tokenizer=lambda: pieces)
    assert Masked().make_hiding(store, 401, 'x').mask == 400
    assert Masked(mask_id=2).make_hiding(store, 400, 'x').mask == 2
    assert Masked().make_hiding(STORE, V, 'x').mask == MASK
    assert Masked().make_hiding(None, 28, 'x').mask == 27  # `lm check` opens no store
    with pytest.raises(ConfigError, match=r'^model\.vocab_size = 400: .* 400 pieces; set model\.vocab_size = 401$'):
        Masked().make_hiding(store, 400, 'x')
    inputs, chosen = hide(jnp.full((20, 100), 7), range(20), Masked(mask_id=2).make_hiding(store, 400, 'x'))
    assert set(np.unique(inputs[chosen])) & {0, 1, 3} == set()
    assert 2 in inputs
    pieces.special_ids = tuple(range(400))
    with pytest.raises(ConfigError, match='all special'):
        Masked(mask_id=2).make_hiding(store, 400, 'x')


def test_contradictions_between_objective_data_and_model_are_refused():
    text, task = DataConfig(path='x'), DataConfig(task=InductionHeads())
    causal = dataclasses.replace(MODEL, causal=True)
    check_objective(NextToken(), text, causal)
    check_objective(NextToken(), task, causal)
    check_objective(Masked(), text, MODEL)
    check_objective(NextToken(), task, MODEL)
    check_objective(Masked(), task, MODEL)
    old = dataclasses.replace(causal, attention=Performer(causal=False))
    check_objective(Masked(), text, old)
    wrong = [
        (Masked(), text, causal, r'^train\.objective = @masked\(\): .* set model\.causal = False$'),
        (NextToken(), text, MODEL, r'^train\.objective = @next_token\(\): model\.causal = False, .* @masked\(\)'),
        (NextToken(), text, old, r'^train\.objective = @next_token\(\): performer\.causal = False, '),
        (Masked(), task, causal, r'^train\.objective = @masked\(\): .* set model\.causal = False$'),
        (Masked(), DataConfig(path='x', mask_documents=True), MODEL, r'^data\.mask_documents = True: model\.causal'),
    ]
    for objective, data, model, message in wrong:
        with pytest.raises(ConfigError, match=message) as error:
            check_objective(objective, data, model)
        assert '\n' not in str(error.value)
        with pytest.raises(ConfigError, match=message):
            plan_step(Experiment(data=data, train=TrainConfig(objective=objective), model=model))


def test_objectives_are_found_and_named_in_gin():
    assert {'next_token', 'masked'} <= {name for name, cls in REGISTRY.items() if issubclass(cls, Objective)}
    assert load().train.objective == NextToken()
    bindings = ['train.objective = @masked()', 'masked.share = 0.2', 'model.causal = False']
    assert load((), bindings).train.objective == Masked(share=0.2)
    with pytest.raises(ConfigError, match=r'one of .*@masked\(\), .*@next_token\(\)'):
        TrainConfig(objective='masked')


def step_of(objective, model=MODEL, **options):
    return train_step(model, OptimizerConfig(warmup_steps=1), 10, objective.unpack(STORE, V), **options)


def test_the_next_token_is_predicted_by_default():
    """The program is the same with and without the name."""
    model = dataclasses.replace(MODEL, causal=True)
    batch = residues((2, 4, 17))
    texts = []
    for step in (train_step(model, OptimizerConfig(warmup_steps=1), 10), step_of(NextToken(), model)):
        texts.append(jax.jit(step.train).lower(step.abstract, batch).as_text())
    assert texts[0] == texts[1]
    assert 'threefry' not in texts[0]


def own_loss(step, state, batch, first):
    """Computes the mean nats of the chosen positions of a batch of windows, from the logits of the model."""
    hiding = Masked().unpack(STORE, V)
    tokens = np.asarray(batch).reshape(-1, batch.shape[-1])[:, :-1]
    inputs, chosen = hide(tokens, np.arange(first, first + len(tokens)), hiding)
    model = step.functions.merge(state)
    logits = np.asarray(model(jnp.asarray(inputs)), np.float64)
    nats = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, tokens[..., None], -1)[..., 0]
    return nats[chosen].mean(), nats, chosen


@pytest.mark.parametrize('microbatches', [1, 2, 4])
def test_the_loss_is_the_mean_over_the_chosen_positions(microbatches):
    """The cuts of the batch do not matter. The second step draws again."""
    batch = residues((microbatches, 8 // microbatches, 33))
    step = step_of(Masked(), by_window=True)
    state = step.init(0)
    train = jax.jit(step.train)
    for n in range(2):
        expected, nats, chosen = own_loss(step, state, batch, 8 * n)
        state, metrics = train(state, batch)
        np.testing.assert_allclose(metrics['loss'], expected, rtol=1e-5)
        windows = [row[of].mean() for row, of in zip(nats, chosen, strict=True)]
        np.testing.assert_allclose(np.ravel(metrics['window_loss']), windows, rtol=1e-4)
        assert np.ravel(metrics['window_targets']).tolist() == chosen.sum(axis=1).tolist()


def test_devices_and_microbatches_do_not_change_the_draw():
    """The cases: one device, eight, four microbatches, two devices per window. Equal losses to rounding mean equal
    positions."""
    batch, losses = residues((1, 8, 33)), []
    for devices, microbatches, sequence in ((1, 1, 1), (8, 1, 1), (1, 4, 1), (8, 1, 2)):
        mesh = make_mesh(MeshConfig(sequence=sequence), jax.devices()[:devices])
        with jax.set_mesh(mesh):
            step = step_of(Masked())
            tokens = jax.device_put(batch.reshape(microbatches, -1, 33), batch_sharding(mesh, axis=1))
            losses.append(float(jax.jit(step.train)(jax.jit(step.init)(0), tokens)[1]['loss']))
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
    with jax.set_mesh(make_mesh(MeshConfig(sequence=2))):
        step = step_of(Masked(), dataclasses.replace(MODEL, attention=Performer(n_features=8)))
        with pytest.raises(OperationError, match=r'mesh\.sequence: a window on many devices needs causal attention'):
            jax.eval_shape(step.train, step.abstract, batch)
