"""The TPU kernels on windows that are split over devices, interpreted on the CPU: values and gradients of the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import interpret_plainly
from test_pallas_tpu import make_call
from test_pallas_tpu_maps import llops, quick

from lm.ops import platform, sequence
from lm.ops.linear_attention import PLAIN, SQUARE, linear_attention, reference
from lm.ops.linear_attention.tpu import part
from lm.ops.linear_attention.tpu.fold import fold
from lm.ops.linear_attention.types import Options, PolynomialKernel

SERIES = (0.5, 0.0, 2.0)
LOCAL = {'local': PolynomialKernel(4), 'block': 128}

CASES = {
    'exact blocks': (2, 512, Options(SQUARE, **LOCAL), True),
    'one exact block a part': (4, 512, Options(SQUARE, **LOCAL), False),
    'odd parts': (2, 300, Options(SQUARE), False),
    'series, odd parts, decay': (2, 300, Options(SERIES, denominator_bias=0.1), True),
    'features': (2, 300, Options(PLAIN, denominator_bias=4.0), False),
    'features, sums alone': (2, 300, Options(PLAIN, normalize=False), False),
    'features, sums alone, decay': (4, 260, Options(PLAIN, normalize=False), True),
    'a learned map, odd parts': (2, 300, Options(PLAIN, feature_map=llops()[0]), False),
}


def draw(length, decay, dtype=jnp.float32, batch=1, groups=1):
    """Returns q, k, v, log factors or None, q_local, k_local; the features keep denominators away from 0.

    The first of two key heads is reset now and then; the sums of the second head pass through all parts.
    """
    rng = np.random.default_rng(length)
    shapes = [(2 * groups, 16), (2, 16), (2, 32), (2 * groups, 32), (2, 32)]
    q, k, v, *local = (0.4 * rng.normal(size=(batch, length, *shape)) for shape in shapes)
    q, k, v, *local = (jnp.asarray(a, dtype) for a in (np.abs(q), np.abs(k), v, *local))
    g = -rng.exponential(size=(batch, length, 2)) * rng.choice([1e-3, 0.02], size=(batch, length, 2))
    g[:, [0, 40, 41, length // 2 - 1, length - 1], 0] = -np.inf
    return [q, k, v, jnp.asarray(g, jnp.float32) if decay else None, *local]


def outputs_and_gradients(function, arrays, parameters):
    def both(arrays, parameters):
        o, pull = jax.vjp(function, arrays, parameters)
        return o, *pull(jnp.cos(jnp.arange(o.size)).reshape(o.shape).astype(o.dtype))

    return quick(both)(arrays, parameters)


def call_of(options, q, k, v, g, q_local, k_local, parameters):
    more = dict(zip(('q_parameters', 'k_parameters'), parameters, strict=True))
    return make_call(options, q, k, v, q_local, k_local, log_decay_BxLxK=g, **more)


def whole(options, arrays, parameters):
    def function(arrays, parameters):
        return reference.linear_attention(call_of(options, *arrays, parameters)).o_BxLxHxD

    return outputs_and_gradients(function, arrays, parameters)


def on_parts(function, arrays, parameters, devices, fsdp=1):
    """Runs `function` on each device's part of the tokens."""
    axes = tuple(None if a is None else 1 for a in arrays)

    def both(arrays, parameters):
        return sequence.over_tokens(function, (*axes, None))(*arrays, parameters)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[: fsdp * devices]).reshape(fsdp, devices), ('fsdp', 'sequence'))
    with jax.set_mesh(mesh), interpret_plainly():
        return outputs_and_gradients(both, arrays, parameters)


def by_kernels(options):
    return lambda *arrays: part.linear_attention(call_of(options, *arrays)).o_BxLxHxD


def assert_near(got, expected, tolerance):
    got, expected = (jax.tree_util.tree_leaves_with_path(each) for each in (got, expected))
    found = {}
    for (path, a), (_, e) in zip(got, expected, strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        found[jax.tree_util.keystr(path)] = np.linalg.norm(a - e) / (np.linalg.norm(e) or 1.0)
    assert all(error <= tolerance for error in found.values()), found


QUICK = ('exact blocks', 'a learned map, odd parts')


@pytest.mark.parametrize(
    'name', [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_parts_equal_the_whole(name):
    devices, length, options, decay = CASES[name]
    parameters = llops()[1] if options.feature_map else (None, None)
    arrays = draw(length, decay)
    assert_near(on_parts(by_kernels(options), arrays, parameters, devices), whole(options, arrays, parameters), 1e-5)


@pytest.mark.slow
def test_parts_in_bfloat16_are_close():
    devices, length, options, _ = CASES['exact blocks']
    arrays = draw(length, False, jnp.bfloat16)
    exact = whole(options, [None if a is None else a.astype(jnp.float32) for a in arrays], (None, None))
    assert_near(on_parts(by_kernels(options), arrays, (None, None), devices), exact, 2e-2)


def test_tpus_take_the_kernels_with_any_other_axis_split(monkeypatch):
    """The operation itself runs, with the batch over another axis of the mesh and queries that share keys."""
    monkeypatch.setattr(platform, 'target_platform', lambda: 'tpu')
    folds = []
    monkeypatch.setattr(part, 'fold', lambda *args: folds.append(args) or fold(*args))
    devices, _, options, _ = CASES['exact blocks']

    def function(q, k, v, g, q_local, k_local, parameters):
        local = dict(local=options.local, block=options.block, q_local_BxLxHxC=q_local, k_local_BxLxKxC=k_local)
        return linear_attention(q, k, v, powers=options.powers, log_decay_BxLxK=g, **local)

    arrays = draw(256, True, batch=2, groups=2)
    assert_near(on_parts(function, arrays, (None, None), devices, fsdp=2), whole(options, arrays, (None, None)), 1e-5)
    assert {y.shape[0] for _, _, y, *_ in folds} == {2, 4}  # one row: key heads, query heads


def test_calls_that_stay_on_xla_have_a_reason(monkeypatch):
    monkeypatch.setattr(platform, 'target_platform', lambda: 'tpu')
    arrays = draw(256, False)

    def refusal(**settings):
        return part.unsupported(call_of(Options(SQUARE, **settings), *arrays, (None, None)))

    assert refusal(**LOCAL) is None
    assert 'not a window' in refusal(local=PolynomialKernel(4), window=64)
    assert 'multiples of 128, not 64' in refusal(local=PolynomialKernel(4), block=64)
