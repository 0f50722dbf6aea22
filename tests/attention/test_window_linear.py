"""Window and recurrence in one layer, with several feature maps."""

import copy

import jax
import jax.numpy as jnp
import mechanisms
import numpy as np
import pytest
from flax import nnx

from lm.attention import HeadDims
from lm.attention import mechanisms as attention_mechanisms
from lm.attention.hedgehog import Hedgehog
from lm.attention.linear import LinearAttention
from lm.attention.llops import Llops
from lm.attention.maps.random_features import FEATURES
from lm.attention.maps.sketches import SKETCHES
from lm.attention.performer import Performer
from lm.attention.polysketch import Polysketch
from lm.attention.softmax import Softmax
from lm.attention.taylor import Taylor
from lm.attention.window_linear import WindowLinear
from lm.errors import ConfigError
from lm.ops.linear_attention import LinearCall, compute

DIMS = HeadDims(n_heads=2, n_kv_heads=1, head_dim=8)


def change(formula, **attributes):
    """Returns a formula with other attributes."""
    changed = copy.copy(formula)
    vars(changed).update(attributes)
    return changed


def weigh_randomly(formula, q, k):
    """Computes Performer's weights of queries that are not rescaled; keys alone are raised by the stabilizer."""
    return mechanisms.scores(change(formula, stabilizer=0.0).map(q, False), formula.map(k, False))


def weigh_by_sketches(formula, q, k):
    return change(formula, scale=1.0).weights(q, k)


MAPS = {
    'performer': (Performer(n_features=16, stabilizer=1e-2), weigh_randomly, False),
    'polysketch': (
        Polysketch(sketch_size=4, sketch='gaussian', degree=16, offset=0.5, local=False),
        weigh_by_sketches,
        True,
    ),
    'hedgehog': (Hedgehog(), lambda formula, q, k: formula.weights(q, k), True),
}
"""Maps, their weights by their formula without what cancels in the map alone, and whether they have a unit of their
own."""


@pytest.mark.parametrize('name', MAPS)
def test_a_window_beside_other_maps_is_their_formula(name):
    """Factors that cancel in a map alone, of its queries or of its scores, stay in the weights and in the gradients."""
    inner, weigh, relative = MAPS[name]

    def compute(module, values, *inputs):
        """Computes the formula of the window with the weights of the map's formula for older keys."""
        of_map = {path.removeprefix('map/'): x for path, x in values.items() if path.startswith('map/')}
        older = mechanisms.make_formula(inner, module.dims, np, of_map)
        far = np.exp(values.get('log_far_factor', np.zeros(2)))[:, None, None]
        formula = mechanisms.base.FORMULAS['window_linear'](2, 1, 8, window=6, scale=None).bind(np, values)
        formula.relative, formula.weights = relative, lambda q, k: far * weigh(older, q, k)
        return mechanisms.run_formula(formula, module, [np.asarray(x, np.float64) for x in inputs])

    module, inputs = mechanisms.build(WindowLinear(map=inner, window=6), DIMS), mechanisms.draw(dims=DIMS, length=19)
    mechanisms.check_values(module, inputs, half_tolerance=0.1, compute=compute)
    mechanisms.check_gradients(module, inputs, tolerance=3e-5, compute=compute)


CONFIGS = [WindowLinear(window=8), WindowLinear(window=5, scale=0.7, mix=0.5), WindowLinear(map=Hedgehog(), window=3)]


def test_steps_equal_the_whole():
    shapes = mechanisms.check_steps(mechanisms.build(CONFIGS[0], DIMS), mechanisms.draw(dims=DIMS))
    assert shapes.recent.k_BxSxKxE == (2, 8, 1, 8)


@pytest.mark.parametrize(
    'inner', [Performer(n_features=16), Polysketch(sketch_size=8, sketch='gaussian', local=False)], ids=str
)
def test_other_maps_decode_and_agree_with_the_operation_as_its_formulas_read(inner):
    module, arrays = mechanisms.build(WindowLinear(map=inner, window=6), DIMS), mechanisms.draw(dims=DIMS)
    mechanisms.check_steps(module, arrays)
    call = module.make_call(*arrays)
    assert isinstance(call, LinearCall)
    np.testing.assert_allclose(mechanisms.apply(module, *arrays), compute(call, 'reference').o_BxLxHxD, atol=1e-5)


UNSIGNED = [name for name, features in FEATURES.items() if not features.signed]
ALL_MAPS = [
    *(Performer(n_features=32, features=name) for name in UNSIGNED),
    *(Polysketch(sketch_size=8, sketch=name, local=False) for name in SKETCHES),
    *(Polysketch(sketch_size=8, degree=degree, local=False) for degree in (2, 16)),
    Polysketch(sketch_size=8, sketch='gaussian', degree=16, local=False),
    Hedgehog(per_head=False),
    Taylor(feature_dim=4),
    Llops(n_features=16),
]


def window_share(config):
    """Returns the share of the weights that the window has at the first parameters, of random vectors."""
    module, dims = config.build(START_DIMS, nnx.Rngs(params=0, projections=1)), START_DIMS
    q, k, _ = mechanisms.draw(length=96, dims=dims)
    w_BxHxLxM = np.asarray(weigh(module, q, k))
    i, j = np.arange(96)[:, None], np.arange(96)
    return (w_BxHxLxM * (j > i - config.window))[:, :, 64:].sum(-1).mean()


@nnx.jit
def weigh(module, q, k):
    return module.weigh(q, k)


START_DIMS = HeadDims(n_heads=2, n_kv_heads=2, head_dim=16)


@pytest.mark.parametrize('inner', [None, *ALL_MAPS], ids=str)
def test_window_and_older_keys_begin_balanced(inner):
    """The window has 16 of 64 to 96 keys, a fifth. Hedgehog begins as published, with a smaller share.

    Weights of the 16th power have few large ones, which make their mean: most queries have smaller weights.
    """
    published, steep = inner is None or isinstance(inner, Hedgehog), getattr(inner, 'degree', 0) == 16
    least, most = (0.02, 0.98) if published or steep else (0.1, 0.45)
    assert least < window_share(WindowLinear(window=16, map=inner)) < most


def test_every_mechanism_that_fits_is_among_the_balanced_maps():
    fitting = set()
    for mechanism in attention_mechanisms().values():
        options = {'local': False} if mechanism is Polysketch else {}
        try:
            if issubclass(mechanism, LinearAttention):
                jax.eval_shape(lambda m=mechanism, o=options: nnx.split(make(WindowLinear(map=m(**o))))[1])
                fitting.add(mechanism)
        except ConfigError:
            continue
    assert fitting == {type(inner) for inner in ALL_MAPS}


def make(config):
    return config.build(START_DIMS, nnx.Rngs(params=0, projections=1))


def test_a_number_in_place_of_the_mean():
    """It multiplies the weights of older keys, and no array keeps it."""
    one, two = (make(WindowLinear(window=16, map=Performer(n_features=32), far_factor=factor)) for factor in (1.0, 2.0))
    q, k, _ = mechanisms.draw(length=20, dims=START_DIMS)
    ratios = [w[..., 19, 0] / w[..., 19, 19] for w in (weigh(module, q, k) for module in (one, two))]
    np.testing.assert_allclose(ratios[1], 2 * ratios[0], rtol=1e-5)
    assert 'log_far_factor' not in mechanisms.arrays(one)
    with pytest.raises(ConfigError, match=r'window_linear.far_factor = 0.0: must be above 0'):
        WindowLinear(far_factor=0.0)
    with pytest.raises(ConfigError, match=r"window_linear.far_factor = 'median': must be a number above 0, 'mean'"):
        WindowLinear(far_factor='median')


def test_the_factor_multiplies_the_weights_of_the_window_for_every_power():
    """With sketches, whose features are squared, γ → 0 leaves the older keys alone."""
    inner = Polysketch(sketch_size=8, sketch='gaussian', local=False)
    module, (q, k, v) = mechanisms.build(WindowLinear(map=inner, window=1), DIMS), mechanisms.draw(dims=DIMS)
    found = []
    for logit in (0.0, 20.0):
        module.mix_logit[...] = jnp.full(2, logit)
        found.append(mechanisms.apply(module, q, k, v)[:, 1])
    # The second token weighs its own value by γ and the first value by a: o = (γ v_1 + a v_0) / (γ + a).
    first, own = (np.repeat(np.asarray(v[:, i], np.float64), 2, axis=1) for i in (0, 1))
    half, whole = (np.asarray(o, np.float64) for o in found)
    ratios = [np.sum((own - o) * (own - first), -1) / np.sum((o - first) * (own - first), -1) for o in (half, whole)]
    np.testing.assert_allclose(ratios[0], 2 * ratios[1], rtol=1e-3)


def test_a_window_over_all_keys_is_softmax():
    q, k, v = mechanisms.draw(dims=DIMS, size=3.0)
    exact = mechanisms.apply(Softmax().build(DIMS, nnx.Rngs(0)), q, k, v)
    found = mechanisms.apply(mechanisms.build(WindowLinear(window=45), DIMS), q, k, v)
    np.testing.assert_allclose(found, exact, atol=1e-5)


@pytest.mark.parametrize('size', [1e-3, 30.0])
def test_large_and_small_scores_stay_finite(size):
    module, arrays = mechanisms.build(CONFIGS[0], DIMS), mechanisms.draw(dims=DIMS, size=size)
    o, gradients = jax.jit(jax.value_and_grad(lambda *x: jnp.sum(module(*x) ** 2), (0, 1, 2)))(*arrays)
    assert np.isfinite(o)
    assert all(np.isfinite(g).all() for g in gradients)


def test_it_starts_with_the_factor_of_the_authors():
    module = WindowLinear().build(DIMS, nnx.Rngs(0))
    np.testing.assert_allclose(module.mix_logit[...], [-2.1972246] * 2, rtol=1e-6)


def test_other_maps_are_not_exported_to_transformers():
    assert WindowLinear().portable(DIMS).keys() == {'map', 'window', 'mix', 'scale', 'far_factor'}
    with pytest.raises(ConfigError, match=r'window_linear.map = @hedgehog\(\).*--format safetensors'):
        WindowLinear(map=Hedgehog()).portable(DIMS)


@pytest.mark.parametrize(
    ('inner', 'message'),
    [
        (Polysketch(sketch_size=8), 'polysketch.*local = False'),
        (Hedgehog(qk_norm=True), 'hedgehog.*set window_linear.qk_norm'),
        (Performer(n_features=16, causal=False), 'performer.*causal = True'),
        (Polysketch(sketch_size=8, local=False, gate=True), 'polysketch.*gate = False'),
    ],
)
def test_maps_that_do_not_fit_are_named(inner, message):
    with pytest.raises(ConfigError, match=message):
        WindowLinear(map=inner).build(DIMS, nnx.Rngs(0))
