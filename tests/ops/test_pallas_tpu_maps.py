"""Series and feature maps in the TPU kernels of linear attention, interpreted on the CPU as in test_pallas_tpu.py."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from interpreter import interpret_kernels, interpret_plainly
from test_pallas_tpu import example, make_call

from lm.attention.base import HeadDims
from lm.attention.formulas.base import FORMULAS
from lm.attention.llops import Llops
from lm.attention.maps.random_features import FEATURES, SOFTMAX_FEATURES, Positive, Projection
from lm.attention.performer import Performer
from lm.attention.taylor import Taylor
from lm.hardware import LIBTPU_ENVIRONMENT
from lm.ops.linear_attention.tpu import attention as pallas_tpu
from lm.ops.linear_attention.tpu import fold
from lm.ops.linear_attention.tpu.plan import make_plan
from lm.ops.linear_attention.types import Options, PolynomialKernel

SERIES = (1.0, 1.0, 0.5)
LOCAL = {'local': PolynomialKernel(4), 'block': 128}


pytestmark = pytest.mark.usefixtures('no_races')


def definition(options, features, q, k, v, parameters, q_local=None, k_local=None):
    """Computes the formula in the arrays' own precision; `features` are (φ of queries, φ of keys), functions of
    parameters and x."""
    x, y = (f(p, a) for f, p, a in zip(features, parameters, (q, k), strict=True))
    groups = x.shape[2] // y.shape[2]
    s = jnp.einsum('blhf,bmhf->bhlm', x, jnp.repeat(y, groups, 2))
    w = sum(c * s**n for n, c in enumerate(options.powers) if c)
    i, j = np.arange(q.shape[1])[:, None], np.arange(q.shape[1])
    if options.local is not None:
        t = jnp.einsum('blhc,bmhc->bhlm', q_local, jnp.repeat(k_local, groups, 2))
        w = jnp.where(i // options.block == j // options.block, t**options.local.degree, w)
    w = jnp.where(j <= i, w, 0.0)
    o = jnp.einsum('bhlm,bmhd->bhld', w, jnp.repeat(v, groups, 2)) / (
        options.denominator_bias + w.sum(-1, keepdims=True)
    )
    return o.swapaxes(1, 2)


@functools.lru_cache(maxsize=4)
def defined(options, *features):
    def outputs_and_gradients(do, *inputs):
        o, vjp = jax.vjp(functools.partial(definition, options, features), *inputs)
        return (o, *vjp(do))

    return quick(outputs_and_gradients)


def by_definition(options, features, arrays, parameters=(None, None)):
    """Computes outputs and gradients in float64."""
    with jax.enable_x64(True):
        q, k, v, q_local, k_local, do = (jnp.asarray(np.asarray(a, np.float64)) for a in arrays)
        local = () if options.local is None else (q_local, k_local)
        parameters = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), parameters)
        return jax.tree.map(np.asarray, defined(options, *features)(do, q, k, v, parameters, *local))


@functools.lru_cache(maxsize=12)  # they take memory
def program(options, planner, sum_before):
    """Compiles once per shape of the arrays; the functions are the current ones, which some tests change."""

    def function(q, k, v, parameters, *local):
        call = make_call(options, q, k, v, *local, q_parameters=parameters[0], k_parameters=parameters[1])
        return pallas_tpu.linear_attention(call).o_BxLxHxD

    def outputs_and_gradients(do, *inputs):
        o, vjp = jax.vjp(function, *inputs)
        return (o, *vjp(do))

    return quick(outputs_and_gradients)


def by_kernels(options, arrays, parameters=(None, None)):
    *inputs, do = arrays
    local = () if options.local is None else tuple(inputs[3:])
    with interpret_kernels():
        run = program(options, pallas_tpu.make_plan, pallas_tpu.sum_before)
        return run(do, *inputs[:3], parameters, *local)


def quick(function):
    """Jits without optimisation: compilation takes most of the time here."""
    return jax.jit(function, compiler_options={'xla_backend_optimization_level': 0})


def errors(got, want):
    """Returns relative errors of outputs and gradients, in order."""
    result = []
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, scale = np.asarray(a, np.float64), np.linalg.norm(b)
        result.append(np.linalg.norm(a - b) / scale if scale else np.abs(a).max())
    return result


def plain(parameters, x):
    return x


SERIES_CASES = {
    'Taylor': (SERIES, {'denominator_bias': 0.0}, {'length': 300, 'heads': 2}, 'float32'),
    'Taylor, rounded': (SERIES, {'denominator_bias': 0.0}, {'length': 300, 'heads': 2}, 'bfloat16'),
    'Taylor, odd sizes': (
        SERIES,
        {'denominator_bias': 0.0},
        {'length': 131, 'features': 12, 'head_dim': 10},
        'float32',
    ),
    'one block': (SERIES, {}, {'length': 50}, 'float32'),
    'local': (SERIES, LOCAL, {'length': 200}, 'float32'),
    'one block, local': (SERIES, LOCAL, {'length': 100}, 'float32'),
    'no linear part': ((0.25, 0.0, 2.0), {}, {'length': 300, 'features': 24}, 'float32'),
    'grouped': (SERIES, {}, {'length': 280, 'batch': 2, 'heads': 4, 'kv_heads': 2}, 'float32'),
}


@pytest.mark.parametrize('case', SERIES_CASES)
def test_series(case):
    powers, settings, sizes, dtype = SERIES_CASES[case]
    options = Options(powers=powers, **settings)
    arrays = example(**sizes, dtype=dtype)
    found = errors(by_kernels(options, arrays), by_definition(options, (plain, plain), arrays))
    limit = 1e-5 if dtype == 'float32' else 2e-2
    assert max(found) <= limit, found


def formula_of(config, head_dim):
    """Returns the formula of a mechanism for JAX."""
    dims = HeadDims(4, 2, head_dim)
    return FORMULAS[config.gin_name](4, 2, head_dim, **config.portable(dims))


@functools.cache
def performer(n_features=64, head_dim=16, seed=1):
    """Returns a feature map, its parameters for queries and for keys, and the same map in float64."""
    projection = jnp.asarray(np.random.default_rng(seed).standard_normal((n_features, head_dim)), jnp.float32)
    feature_map = Positive(scale=head_dim**-0.5, epsilon=1e-6)
    formula = formula_of(Performer(n_features=n_features, stabilizer=1e-6), head_dim)
    exact = [
        lambda p, x, queries=queries: formula.bind(jnp, {'projection': p[0]}).map(x, queries)
        for queries in (True, False)
    ]
    return feature_map, (Projection(projection),) * 2, exact


@functools.cache
def llops(n_features=32, head_dim=16, rank=1, seed=1):
    config = Llops(n_features=n_features, rank=rank)
    rng = np.random.default_rng(seed)
    scale = (n_features * rank) ** (-0.5 / config.degree)
    factors = [jnp.asarray(scale * rng.standard_normal((2, rank, head_dim, n_features)), jnp.float32) for _ in range(2)]
    feature_map = config.sketch()
    formula = formula_of(config, head_dim).bind(jnp, {})
    return feature_map, tuple(factors), [lambda p, x: formula.multiply(x, p)] * 2


MAP_CASES = {
    'Performer': (performer(), {'denominator_bias': 0.0}, {'length': 300, 'heads': 2}, 'float32'),
    'Performer, rounded': (performer(), {'denominator_bias': 0.0}, {'length': 300, 'heads': 2}, 'bfloat16'),
    'Performer, one block': (performer(), {'denominator_bias': 0.0}, {'length': 60}, 'float32'),
    'Performer, odd sizes': (
        performer(head_dim=10),
        {'denominator_bias': 0.0},
        {'length': 131, 'head_dim': 10},
        'float32',
    ),
    'LLoPS': (llops(), {}, {'length': 300, 'heads': 2}, 'float32'),
    'LLoPS, rounded': (llops(), {}, {'length': 300, 'heads': 2}, 'bfloat16'),
    'LLoPS of rank 2, grouped': (llops(rank=2), {}, {'length': 280, 'batch': 2, 'heads': 2, 'kv_heads': 1}, 'float32'),
    'LLoPS, local': (llops(), LOCAL, {'length': 200}, 'float32'),
    'LLoPS, one block, local': (llops(), LOCAL, {'length': 70}, 'float32'),
}


@pytest.mark.parametrize('case', MAP_CASES)
def test_feature_maps(case):
    (feature_map, parameters, exact), settings, sizes, dtype = MAP_CASES[case]
    head_dim = sizes.get('head_dim', 16)
    arrays = example(**{'features': head_dim} | sizes, dtype=dtype)
    if dtype == 'bfloat16' and feature_map.learns:  # its layer passes normalised vectors, which are not rounded
        arrays[:2] = example(**{'features': head_dim} | sizes)[:2]
        feature_map = dataclasses.replace(feature_map, dtype=jnp.dtype(dtype))
    options = Options(feature_map=feature_map, **settings)
    call = make_call(options, *arrays[:5], q_parameters=parameters[0], k_parameters=parameters[1])
    assert pallas_tpu.unsupported(call) in (None, 'needs a TPU')
    got, want = by_kernels(options, arrays, parameters), by_definition(options, exact, arrays, parameters)
    if not feature_map.learns:
        assert not any(np.asarray(d).any() for d in jax.tree.leaves(got[4]))
        want = (*want[:4], jax.tree.map(np.zeros_like, want[4]), *want[5:])
    limit = 1e-5 if dtype == 'float32' else 2e-2
    found = errors(got, want)
    assert max(found) <= limit, found


@pytest.mark.parametrize('case', ['Performer', 'Performer, rounded', 'LLoPS of rank 2, grouped', 'LLoPS, local'])
def test_sums_that_the_backward_pass_computes_again_give_the_same_bits(case, monkeypatch):
    """With many features, the backward pass computes the sums again; its gradients must equal gradients by kept sums to
    the bit."""
    (feature_map, parameters, _), settings, sizes, dtype = MAP_CASES[case]
    arrays = example(**{'features': 16} | sizes, dtype=dtype)
    options = Options(feature_map=feature_map, **settings)
    kept = by_kernels(options, arrays, parameters)
    calls = []
    monkeypatch.setattr(pallas_tpu, 'sum_before', lambda *a: calls.append(a) or fold.sum_before(*a))
    monkeypatch.setattr(pallas_tpu, 'make_plan', lambda *a: dataclasses.replace(make_plan(*a), sums_again=True))
    again = by_kernels(options, arrays, parameters)
    assert len(calls) == 1
    jax.tree.map(np.testing.assert_array_equal, again, kept)


def test_batch_split_over_a_mesh():
    """The gradients of the parameters are summed over the devices."""
    feature_map, parameters, exact = llops()
    options = Options(feature_map=feature_map)
    arrays = example(130, batch=4)
    want = by_definition(options, exact, arrays, parameters)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ('data', 'fsdp'))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(('data', 'fsdp')))

    def loss(q, k, v, parameters, do):
        call = make_call(options, q, k, v, q_parameters=parameters[0], k_parameters=parameters[1])
        o, _ = pallas_tpu.linear_attention(call)
        return jnp.sum(o * do), o

    with jax.set_mesh(mesh), interpret_plainly():
        q, k, v, _, _, do = (jax.device_put(a, rows) for a in arrays)
        grads, o = quick(jax.grad(loss, argnums=range(4), has_aux=True))(q, k, v, parameters, do)
    assert o.sharding.is_equivalent_to(rows, o.ndim)
    found = errors([o, *grads], want)
    assert max(found) <= 1e-5, found


@pytest.mark.parametrize('queries', [True, False], ids=['queries', 'keys'])
@pytest.mark.parametrize('name', [name for name, kind in FEATURES.items() if not kind.has_phases])
def test_random_features_by_token(name, queries):
    """The form that the kernels compute equals the feature map."""
    rng = np.random.default_rng(0)
    feature_map = FEATURES[name](scale=0.25, epsilon=1e-3, kernel_epsilon=1e-3, rescale=name in SOFTMAX_FEATURES)
    projection, x_TxE = (jnp.asarray(rng.standard_normal((n, 16)), jnp.float32) for n in (24, 10))
    parameters = Projection(projection)
    want = feature_map(parameters, x_TxE[None, :, None], queries)[0, :, 0]
    got = feature_map.of_products(feature_map.matrix(parameters) @ x_TxE.T, x_TxE.T, queries)
    np.testing.assert_allclose(got.T, want, rtol=1e-4, atol=1e-6)


def refusals():
    performer_map, performer_parameters, _ = performer()
    llops_map, llops_parameters, _ = llops()
    wide = performer(4096)[:2]
    return {
        'lambda': (lambda parameters, x, queries: x, (None, None), {}),
        'powers': (llops_map, llops_parameters, {'powers': (0.0, 0.0, 1.0)}),
        'affine=True': (dataclasses.replace(llops_map, affine=True), llops_parameters, {}),
        'multiples of 16': (*performer(40)[:2], {}),
        'VMEM': (*wide, {}),
        'causal': (performer_map, performer_parameters, {'causal': False}),
        'normalised': (performer_map, performer_parameters, {'normalize': False}),
    }


@pytest.mark.parametrize('reason', refusals())
def test_unsupported_maps_say_why(reason, monkeypatch):
    monkeypatch.setattr(pallas_tpu.platform, 'target_platform', lambda: 'tpu')
    monkeypatch.setattr(pallas_tpu.platform, 'vmem', lambda: (16 * 2**20, None))
    feature_map, parameters, settings = refusals()[reason]
    q, k, v, *_ = example(300)
    options = Options(feature_map=feature_map, **settings)
    call = make_call(options, q, k, v, q_parameters=parameters[0], k_parameters=parameters[1])
    assert reason in pallas_tpu.unsupported(call)


LAYERS = {
    'performer': Performer(),
    'performer relu': Performer(features='relu', n_features=256),
    'llops': Llops(),
    'taylor': Taylor(),
}


@pytest.mark.slow
@pytest.mark.parametrize('layer', LAYERS)
@pytest.mark.parametrize('generation', ['v5e:2x2', 'v4:2x2x1'])
def test_layers_run_in_the_kernels(layer, generation, monkeypatch):
    """The test compiles forward and backward for a mesh of four chips: the platform chooses the kernels, and no
    features reach HBM."""
    if importlib.util.find_spec('libtpu') is None:
        pytest.skip('libtpu is not installed')
    for name, value in LIBTPU_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    from jax.experimental import topologies

    module = LAYERS[layer].build(HeadDims(4, 2, 64), nnx.Rngs(0))
    definition, state = nnx.split(module)
    chips = {'chip_config_name': 'megacore'} if generation.startswith('v4') else {}
    topology = topologies.get_topology_desc(platform='tpu', topology_name=generation, **chips)
    mesh = topologies.make_mesh(topology, (4,), ('data',))
    rows, all_of_it = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes)) for axes in (['data'], []))
    q, k = (jax.ShapeDtypeStruct((4, 4096, h, 64), jnp.bfloat16, sharding=rows) for h in (4, 2))
    state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=all_of_it), state)

    def gradients(state, q, k, v):
        return jax.grad(lambda state, *x: nnx.merge(definition, state)(*x).astype(jnp.float32).sum(), range(4))(
            state, q, k, v
        )

    with jax.set_mesh(mesh):
        compiled = jax.jit(gradients).trace(state, q, k, k).lower(lowering_platforms=('tpu',)).compile()
    text = compiled.as_text()
    assert all(f'linear_attention_{kernel}' in text for kernel in ('forward', 'backward'))
    features = 4096 * 4 * getattr(LAYERS[layer], 'n_features', 1024) * 2
    assert compiled.memory_analysis().temp_size_in_bytes < 2 * features
