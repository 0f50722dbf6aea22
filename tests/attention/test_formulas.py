"""Every mechanism against its formula in float64: values, gradients, decoding, no leak."""

import dataclasses
import itertools

import grids
import jax.numpy as jnp
import mechanisms
import numpy as np
import pytest
from mechanisms_list import MECHANISMS

from lm.attention import HeadDims
from lm.attention import mechanisms as all_mechanisms
from lm.attention.hedgehog import Hedgehog
from lm.attention.hybrid import Hybrid
from lm.attention.llops import Llops
from lm.attention.performer import Performer
from lm.attention.polynomial import Polynomial
from lm.attention.polysketch import Polysketch
from lm.attention.recurrent.delta import Delta
from lm.attention.recurrent.gated_linear import GatedLinear
from lm.attention.softmax import Softmax
from lm.attention.taylor import Taylor
from lm.attention.window_linear import WindowLinear

PLAIN = {name: form for name, form in MECHANISMS.items() if not isinstance(form, tuple)}
MORE = {
    'softmax scale': Softmax(scale=0.5, window=7),
    'softmax long window': Softmax(window=100),
    'softmax cap': Softmax(window=7, score_cap=2.0, log_base=100.0),
    'polynomial bias': Polynomial(degree=2, denominator_bias=0.1),
    'polynomial tied': Polynomial(score_norm='tied'),
    'polynomial without bias': Polynomial(denominator_bias=0.0),
    'polysketch draft': Polysketch(sketch='srht', sketch_size=8, local=False, per_head=True, denominator_bias=0.0),
    'polysketch narrow networks': Polysketch(sketch_size=8, block=16, network_width=3),
    'polysketch gaussian': Polysketch(sketch='gaussian', sketch_size=8, local=False),
    'polysketch srht local': Polysketch(sketch='srht', sketch_size=8, block=16, per_head=True, denominator_bias=2.0),
    'polysketch 2': Polysketch(degree=2, block=16),
    'polysketch published': Polysketch(
        sketch='gaussian', sketch_size=8, block=16, far_factor='published', sketch_norm='tied'
    ),
    'polysketch far factor': Polysketch(sketch='gaussian', sketch_size=8, local=False, far_factor='published'),
    'polysketch learned factor': Polysketch(
        sketch='gaussian', sketch_size=8, block=16, far_factor='mean', learn_far_factor=True, sketch_norm='separate'
    ),
    'polysketch mean': Polysketch(sketch='gaussian', sketch_size=4, block=16, sketches=3, far_factor=0.3),
    'polysketch learned mean': Polysketch(sketch_size=4, block=16, sketches=2, sketch_norm='tied', far_factor=0.5),
    'polysketch exact': Polysketch(degree=2, block=16, sketch_norm='separate', sketches=2, far_factor=0.5),
    'performer stabilized': Performer(n_features=32, block=16, causal=False, stabilizer=0.3),
    'performer hyperbolic': Performer(n_features=32, block=16, features='hyperbolic', scale=0.7, causal=False),
    'performer trigonometric': Performer(n_features=32, block=16, features='trigonometric'),
    'performer random_phases': Performer(n_features=32, block=16, features='random_phases'),
    'performer identity': Performer(n_features=32, block=16, features='identity'),
    'performer sums': Performer(n_features=32, block=16, features='relu', renormalize=False),
    'performer signed sums': Performer(
        n_features=32, block=16, features='trigonometric', renormalize=False, causal=False
    ),
    'llops rank': Llops(n_features=24, degree=2, rank=3, layer_norm=False),
    'llops signed': Llops(n_features=40, degree=2, nonnegative=False, affine=True, denominator_bias=300.0),
    'llops sums': Llops(n_features=24, degree=3, nonnegative=False, renormalize=False),
    'taylor shared': Taylor(feature_dim=5, per_head=False),
    'taylor whole': Taylor(feature_dim=None),
    'hedgehog shared': Hedgehog(per_head=False),
    'hybrid minimax': Hybrid(window=5, degree=1, approximation='minimax', radius=0.7),
    'hybrid parts': Hybrid(window=8, degree=1, parts=2, approximation='chebyshev'),
    'hybrid scale': Hybrid(window=3, degree=2, parts=2, scale=0.3),
    'gated_linear power': GatedLinear(degree=2),
    'delta negative': Delta(negative=True),
    'window_linear scale': WindowLinear(window=5, scale=0.7, mix=0.5),
}
FORMS = PLAIN | MORE
INPUTS = {
    'performer trigonometric': dict(size=0.3, shift=0.5),
    'performer random_phases': dict(size=0.3, shift=0.5),
    'performer identity': dict(size=0.3, shift=0.5),
    'performer signed sums': dict(size=0.3, shift=0.5),
    **{name: dict(shift=0.3) for name in FORMS if name.startswith('llops')},
    **{name: dict(size=0.5) for name in FORMS if name.startswith('hybrid')},
}
"""Inputs whose weights do not cancel in a denominator, and whose scores stay where polynomials are positive."""
TOLERANCE = {name: 2e-5 for name in FORMS if name.startswith(('gated_linear', 'delta', 'retention', 'llops signed'))}
HALF = {name: 4e-2 for name in FORMS if name.startswith(('gated_linear', 'delta', 'retention'))}
"""Without a denominator normalized outputs stay near the values, so they lose more in bfloat16. Denominators of signed
features cancel, so the order of a machine's sums shows."""
BOTH_WAYS = ('softmax', 'performer', 'performer relu', 'performer sums', 'taylor', 'polynomial 4', 'hedgehog')


def prepare(name, **options):
    """Returns the module of a form and inputs for it."""
    return mechanisms.build(FORMS[name]), mechanisms.draw_inputs(FORMS[name], **INPUTS.get(name, {}) | options)


@pytest.mark.parametrize('name', FORMS)
def test_values(name):
    module, inputs = prepare(name)
    mechanisms.check_values(module, inputs, TOLERANCE.get(name, 1e-5), HALF.get(name, 2e-2))


@pytest.mark.parametrize('name', grids.draw(FORMS, 24))
def test_gradients(name):
    module, inputs = prepare(name, batch=1, length=33)
    mechanisms.check_gradients(module, inputs, 3e-5)


@pytest.mark.parametrize('name', BOTH_WAYS)
def test_values_and_gradients_of_tokens_that_see_later_ones(name):
    module = mechanisms.build(FORMS[name], dataclasses.replace(mechanisms.DIMS, causal=False))
    mechanisms.check_values(module, mechanisms.draw())
    mechanisms.check_gradients(module, mechanisms.draw(), 2e-5)


@pytest.mark.parametrize('length', [1, 8, 300])
@pytest.mark.parametrize('name', ['taylor', 'hybrid', 'llops rank', 'softmax window', 'delta gate'])
def test_lengths(name, length):
    """The operation's own block is 256 tokens on the CPU."""
    dims = HeadDims(2, 1, 8)
    module = mechanisms.build(FORMS[name], dims)
    inputs = mechanisms.draw_inputs(FORMS[name], dims, batch=1, length=length, **INPUTS.get(name, {}))
    mechanisms.check_values(module, inputs, TOLERANCE.get(name, 1e-5), HALF.get(name, 2e-2))


@pytest.mark.parametrize('name', grids.draw(FORMS, 16))
def test_decoding(name):
    """No state grows, and no token sees a later one."""
    if FORMS[name].causal:
        mechanisms.check_steps(*prepare(name), TOLERANCE.get(name, 1e-5))
        mechanisms.check_no_leak(*prepare(name))


@pytest.mark.parametrize('name', grids.draw(PLAIN, 10))
def test_a_formula_is_one_program_for_numpy_and_jax(name):
    module, inputs = prepare(name)
    values = {path: np.float32(x) for path, x in mechanisms.arrays(module).items()}
    formula = mechanisms.make_formula(module.config, module.dims, jnp, values)
    found = mechanisms.run_formula(formula, module, inputs)
    assert found.dtype == jnp.float32
    expected = mechanisms.compute(module, mechanisms.arrays(module), *inputs)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize('name', PLAIN)
def test_a_formula_reads_a_text_in_pieces(name):
    """The tokens that it keeps give the same as whole texts, and padding on the left of a row changes nothing."""
    module, inputs = prepare(name)
    inputs = [np.asarray(x, np.float64) for x in inputs]
    whole = mechanisms.compute(module, mechanisms.arrays(module), *inputs)
    formula = mechanisms.make_formula(module.config, module.dims, np, mechanisms.arrays(module))
    padding, cuts = 7, [0, 9, 10, 11, 30, 45]
    mask = np.ones((2, 45), bool)
    mask[1, :padding] = False
    shifted = [np.stack([x[0], np.roll(x[1], padding, axis=0)]) for x in inputs]
    memory, parts = {}, []
    for start, end in itertools.pairwise(cuts):
        pieces = [x[:, start:end] for x in shifted]
        parts.append(mechanisms.run_formula(formula, module, pieces, mask[:, :end], memory, start))
    found = np.concatenate(parts, 1)
    np.testing.assert_allclose(found[0], whole[0], rtol=0, atol=1e-9 * np.abs(whole).max())
    np.testing.assert_allclose(found[1, padding:], whole[1, :-padding], rtol=0, atol=1e-9 * np.abs(whole).max())


def test_every_mechanism_is_compared():
    assert {type(form) for form in FORMS.values()} == set(all_mechanisms().values())
