"""Random whole models agree with their formulas, and the search finds the faults that are put into them."""

import dataclasses
import subprocess
import sys

import drawer
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from cases import Case, Devices
from comparison import compare
from drawer import DRAWERS, LEFT_OUT, NOT_COMPARED, Draw, draw_case, draw_mechanism, list_fields
from formulas import FORMULAS
from jax import lax
from model_formulas import list_all
from shrinking import describe, shrink

from lm.attention import mechanisms
from lm.attention.maps import random_features
from lm.attention.performer import Performer
from lm.attention.polynomial import Polynomial
from lm.attention.softmax import Softmax
from lm.attention.window_linear import WindowLinear
from lm.errors import ConfigError
from lm.model import ModelConfig, attention_branch
from lm.model.feed_forward.experts import Experts
from lm.model.parts.key_offset import offset_keys, select_channels
from lm.ops import sequence

SLOW = range(1000, 1200)
PLAIN = {'d_model': 6, 'n_heads': 1, 'head_dim': 4, 'n_layers': 1, 'vocab_size': 7, 'hidden_dim': 7}


def tell(case: Case, *checks: str) -> str:
    """Returns what is wrong with a case; an empty text: nothing."""
    failures = compare(case, checks or None)
    return '\n'.join(f'{failure.check}: {failure.found}' for failure in failures) and f'{failures}\n{describe(case)}'


def draw_from(number: int) -> Draw:
    return Draw(np.random.default_rng(number))


def draw_model(number: int) -> ModelConfig | None:
    """Returns a model; None: the product refuses it."""
    try:
        return drawer.draw_model(draw_from(number), small=False)
    except ConfigError:
        return None


@pytest.mark.parametrize('number', range(20))
def test_a_random_model_agrees_with_its_formulas(number):
    assert not tell(draw_case(number, small=True))


@pytest.mark.slow
@pytest.mark.parametrize('number', SLOW)
def test_many_random_models_agree_with_their_formulas(number):
    assert not tell(draw_case(number))


def run_script(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(tiny.ROOT / 'scripts' / 'random_models.py'), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_the_script_runs_models_by_number():
    done = run_script('1', '1', '--small')
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith('1 of 1 models agree\n')


def test_the_script_refuses_impossible_numbers():
    done = run_script('3', '0')
    assert done.returncode == 2
    assert '3 0: FIRST must be at least 0, and COUNT at least 1' in done.stderr


def test_every_mechanism_has_a_formula_and_is_drawn():
    # Tests may have registered mechanisms of their own.
    names = {name for name, mechanism in mechanisms().items() if mechanism.__module__.startswith('lm.')}
    assert names - set(FORMULAS) == set(), 'write the formula into tests/random_models/weighted_formulas.py'
    assert names - set(DRAWERS) == set(), 'write what is drawn into tests/random_models/drawer.py'


def test_every_field_is_drawn_or_named():
    layers = [draw_mechanism(draw_from(number), name) for number in range(80) for name in DRAWERS]
    models = [drawn for number in range(100) if (drawn := draw_model(number)) is not None]
    kinds = [kind for model in models for kind in list_all(model.feed_forward) if isinstance(kind, Experts)]
    scalings = [one.rotary_scaling for one in (*(model.layer for model in models), *layers)]
    turned = [scaling for scaling in scalings if scaling not in ('model', None)]
    inside = [one.map for one in layers if getattr(one, 'map', None)]
    configs = [*models, *layers, *kinds, *turned, *inside]
    found = list_fields(configs)
    same = {name for name, values in found.items() if len(values) < 2 and not name.endswith('.branch')}
    same -= set(NOT_COMPARED)
    assert same == set(), 'always drawn alike; draw them, or say why not in NOT_COMPARED'
    assert set(NOT_COMPARED) - set(found) == set(), 'no such fields'


@pytest.mark.parametrize('name', DRAWERS)
def test_a_number_always_draws_the_same_mechanism(name):
    for number in range(20):
        first, second = (draw_mechanism(draw_from(number), name) for _ in range(2))
        assert first == second
        assert type(first) is mechanisms()[name]


def test_a_number_always_draws_the_same_case():
    assert draw_case(5) == draw_case(5)
    assert draw_case(5) != draw_case(6)
    assert all(LEFT_OUT.values())


# Faults that are put into the product.

OFFSET = Case(
    model=ModelConfig(**PLAIN, attention=Softmax(), key_offset=0.5),
    seed=1,
    length=8,
    rows=2,
    eod=3,
    pieces=(2,),
    devices=Devices(2, 1, 2),
)


def test_the_case_that_the_faults_are_put_into_agrees():
    assert not tell(OFFSET)


def put(monkeypatch, keys):
    """Replaces the function that offsets keys by `keys`, of the same arguments."""
    monkeypatch.setattr(attention_branch, 'offset_keys', keys)


def test_a_look_ahead_is_found(monkeypatch):
    def look_ahead(k, share, *_):
        return jnp.where(select_channels(k.shape[-1], share), jnp.roll(k, -1, axis=1), k), k[:, -1:]

    put(monkeypatch, look_ahead)
    assert {failure.check for failure in compare(OFFSET, ('logits', 'causality'))} == {'logits', 'causality'}


def test_a_leak_between_documents_is_found(monkeypatch):
    put(monkeypatch, lambda k, share, before=None, starts=None: offset_keys(k, share, before))
    assert [failure.check for failure in compare(OFFSET, ('documents',))] == ['documents']


def test_a_piece_that_forgets_the_piece_before_is_found(monkeypatch):
    put(monkeypatch, lambda k, share, before=None, starts=None: offset_keys(k, share, None, starts))
    assert [failure.check for failure in compare(OFFSET, ('logits', 'decoding'))] == ['decoding']


def test_a_device_that_forgets_the_device_before_is_found(monkeypatch):
    monkeypatch.setattr(sequence, 'tokens_before', lambda x, count: jnp.zeros_like(x[:, :count]))
    assert {failure.check for failure in compare(OFFSET, ('logits', 'loss', 'gradient'))} == {'loss', 'gradient'}


def test_an_error_of_the_product_is_a_failure(monkeypatch):
    put(monkeypatch, lambda *arguments: 1 / 0)
    (failure,) = compare(OFFSET, ('logits',))
    assert failure.found.startswith('ZeroDivisionError')


def test_a_balance_loss_of_too_few_tokens_is_found(monkeypatch):
    experts = Experts(n_experts=6, top_k=2, hidden_dim=3, balance=0.5)
    case = Case(
        model=ModelConfig(**PLAIN, feed_forward=experts), seed=1, length=5, rows=2, microbatches=2, devices=Devices(2)
    )
    assert not tell(case, 'gradient')
    monkeypatch.setattr(lax, 'pmean', lambda x, axes: x)
    assert tell(case, 'gradient')


def test_a_gradient_that_a_factor_of_queries_stops_is_found(monkeypatch):
    """The divisor of a query's features stands beside a window of softmax; without a window it cancels."""
    monkeypatch.setattr(
        random_features.Positive, 'log_divisor', lambda self, wx, half: lax.stop_gradient(wx.max(0) - half)
    )
    beside = WindowLinear(map=Performer(n_features=6), window=3)
    alone = Performer(n_features=6)
    cases = [Case(model=ModelConfig(**PLAIN, attention=one), seed=1, length=9) for one in (beside, alone)]
    assert 'gradient' in {failure.check for failure in compare(cases[0], ('gradient',))}
    assert not tell(cases[1], 'gradient')


def test_a_failure_names_the_arrays_whose_gradient_is_wrong(monkeypatch):
    put(monkeypatch, lambda k, share, *rest: offset_keys(lax.stop_gradient(k), share, *rest))
    (failure,) = compare(dataclasses.replace(OFFSET, devices=None), ('gradient',))
    assert 'blocks/0/qkv/kernel' in failure.found
    assert 'embedding' in failure.found
    assert 'glu_out' not in failure.found


def test_a_failure_shrinks_to_what_it_needs():
    attention = (Softmax(window=5, sinks=True), Polynomial(degree=8, gate=True, convolution=3), Softmax())
    options = PLAIN | {'n_layers': 5, 'n_heads': 4, 'norm': 'layer', 'feed_forward': Experts(n_experts=4)}
    case = Case(
        model=ModelConfig(**options, attention=attention, output_gate=True, key_offset=0.5),
        seed=3,
        length=24,
        rows=8,
        microbatches=2,
        eod=3,
        restart=True,
        pieces=(5, 1),
        z_loss=0.1,
        devices=Devices(8),
    )

    def fails(case: Case) -> bool:
        gated = any(getattr(one, 'gate', False) for one in case.model.layers)
        return gated and case.length > 4 and case.model.layer.key_offset > 0

    small = shrink(case, fails)
    assert fails(small)
    assert small.model.n_layers == 1
    assert small.model.layers == (dataclasses.replace(Polynomial(degree=4, gate=True)),)
    assert (small.length, small.rows, small.devices, small.eod, small.microbatches) == (5, 1, None, None, 1)
    assert not small.model.layer.output_gate
    assert small.model.feed_forward is None
    text = describe(small)
    assert text.startswith('Case(model=ModelConfig(')
    assert eval(text) == small
