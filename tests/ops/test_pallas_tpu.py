"""The TPU kernels of linear attention, interpreted on the CPU: uninitialised memory is NaN and races are detected."""

import definitions
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import interpret_kernels, interpret_plainly

from lm.ops import platform
from lm.ops.linear_attention.tpu import attention as pallas_tpu
from lm.ops.linear_attention.tpu.features import pack
from lm.ops.linear_attention.tpu.forward import forward
from lm.ops.linear_attention.tpu.plan import KernelInputs, Sizes, make_plan, packed_width
from lm.ops.linear_attention.types import ExpKernel, LinearCall, Options, PolynomialKernel

SQUARE, PLAIN = (0.0, 0.0, 1.0), (0.0, 1.0)
NAMES = ('o', 'dq', 'dk', 'dv', 'dq_local', 'dk_local')


pytestmark = pytest.mark.usefixtures('no_races')


def example(length, *, batch=1, heads=1, kv_heads=None, features=16, head_dim=16, local=16, dtype=jnp.float32, seed=0):
    """Returns q, k, v, q_local, k_local and a gradient of the output; features without squares are positive."""
    rng = np.random.default_rng(seed)
    kv_heads = kv_heads or heads
    shapes = [(heads, features), (kv_heads, features), (kv_heads, head_dim), (heads, local), (kv_heads, local)]
    scales = [features**-0.25] * 2 + [1.0] + [local**-0.25] * 2
    arrays = [s * rng.standard_normal((batch, length, *shape)) for s, shape in zip(scales, shapes, strict=True)]
    do = rng.standard_normal((batch, length, heads, head_dim))
    return [jnp.asarray(a, dtype) for a in (*arrays, do)]


def make_call(options, q, k, v, q_local=None, k_local=None, **more):
    return LinearCall(q, k, v, q_local_BxLxHxC=q_local, k_local_BxLxKxC=k_local, options=options, **more)


def by_definition(options, q, k, v, q_local, k_local, do):
    """Computes outputs and gradients in float64."""
    i, j = np.arange(q.shape[1])[:, None], np.arange(q.shape[1])
    seen, near = j <= i, np.zeros((i.size, i.size), bool)
    local = options.local or PolynomialKernel(1)
    if options.local is not None:
        near = i // options.block == j // options.block
    n, m = len(options.powers) - 1, local.degree

    def weigh(s, t):
        t = local.scale * t
        slopes = [seen * ~near * n * s ** (n - 1), seen * near * m * t ** (m - 1) * local.scale]
        return np.where(near, t**m, s**n) * seen, slopes, options.denominator_bias

    o, dv, _, dq, dk, *dlocal = definitions.attend([(q, k), (q_local, k_local)], v, do, weigh)
    return [o, dq, dk, dv, *dlocal]


def by_kernels(options, q, k, v, q_local, k_local, do):
    def function(*arrays):
        return pallas_tpu.linear_attention(make_call(options, *arrays)).o_BxLxHxD

    def outputs_and_gradients(*inputs, do):
        o, vjp = jax.vjp(function, *inputs)
        return [o, *vjp(do)]

    with interpret_kernels():
        return quick(outputs_and_gradients)(q, k, v, q_local, k_local, do=do)


def quick(function):
    """Jits without optimisation: compilation takes most of the time here."""
    return jax.jit(function, compiler_options={'xla_backend_optimization_level': 0})


def errors(got, want, names=NAMES):
    """Returns relative errors by name, except of arrays that are exactly 0."""
    result = {}
    for name, a, b in zip(names, got, want, strict=True):
        a, scale = np.asarray(a, np.float64), np.linalg.norm(b)
        result[name] = np.linalg.norm(a - b) / scale if scale else np.abs(a).max()
    return result


LOCAL = {'local': PolynomialKernel(4), 'block': 128}
CASES = {
    'local': (SQUARE, LOCAL, {'length': 300, 'heads': 2}),
    'without local': (SQUARE, {}, {'length': 300}),
    'degree 2': (SQUARE, LOCAL | {'local': PolynomialKernel(2)}, {'length': 200}),
    'degree 8, scaled': (SQUARE, LOCAL | {'local': PolynomialKernel(8, scale=0.75)}, {'length': 200}),
    'one short block': (SQUARE, {'local': PolynomialKernel(4), 'block': 1000}, {'length': 77}),
    'one block of an odd size': (SQUARE, {'local': PolynomialKernel(4), 'block': 200}, {'length': 190}),
    'one short block without local': (SQUARE, {}, {'length': 50}),
    'tiles': (SQUARE, {'local': PolynomialKernel(4), 'block': 512}, {'length': 700}),
    'grouped queries': (SQUARE, LOCAL, {'length': 200, 'batch': 2, 'heads': 4, 'kv_heads': 2}),
    'odd sizes': (SQUARE, LOCAL, {'length': 131, 'features': 12, 'head_dim': 10, 'local': 9}),
    'r = 32': (SQUARE, LOCAL, {'length': 257, 'features': 32, 'head_dim': 64, 'local': 64}),
    'no bias': (SQUARE, {'denominator_bias': 0.0}, {'length': 150}),
    'plain features': (PLAIN, {}, {'length': 300, 'features': 40}),
    'plain features, local': (PLAIN, LOCAL, {'length': 200, 'features': 40, 'heads': 3}),
}


ROUNDED = ('local', 'r = 32', 'without local', 'plain features, local')


EXAMPLES = [(name, 'float32') for name in CASES] + [(name, 'bfloat16') for name in ROUNDED]


@pytest.mark.parametrize('case', EXAMPLES, ids=[', '.join(example) for example in EXAMPLES])
def test_outputs_and_gradients(case):
    name, dtype = case
    powers, settings, sizes = CASES[name]
    options = Options(powers=powers, **settings)
    arrays = example(**sizes, dtype=dtype)
    if powers == PLAIN:
        arrays[:2] = [jnp.abs(a) for a in arrays[:2]]
    found = errors(by_kernels(options, *arrays), by_definition(options, *arrays))
    limit = 1e-5 if dtype == 'float32' else 2e-2
    assert all(error <= limit for error in found.values()), found


@pytest.mark.parametrize('side', [16, 256])
def test_outputs_and_gradients_with_other_matrix_units(side, monkeypatch):
    """At 16, a head fills the units and leaves no room for more rows. At 256, vector units multiply bfloat16
    numbers."""
    monkeypatch.setattr(platform, 'matrix_side', lambda: side)
    powers, settings, sizes = CASES['r = 32']
    options = Options(powers=powers, **settings)
    arrays = example(**sizes, dtype='bfloat16')
    found = errors(by_kernels(options, *arrays), by_definition(options, *arrays))
    assert all(error <= 2e-2 for error in found.values()), found


@pytest.mark.parametrize('weighted', [False, True])
def test_products_of_features_in_bfloat16_equal_float32(weighted):
    x_FxT = jnp.asarray(np.random.default_rng(0).standard_normal((48, 128)), jnp.bfloat16)
    packed = [np.asarray(pack(x_FxT, weighted, vectors), np.float32) for vectors in (False, True)]
    assert packed[0].shape == (packed_width(48), 128)
    np.testing.assert_array_equal(*packed)


def test_denominators_of_concentrated_keys_stay_positive():
    """If the keys' second moment is rounded to bfloat16, many of these denominators become negative."""
    rng = np.random.default_rng(0)
    features, length = 16, 512
    direction = rng.standard_normal(features)
    direction /= np.linalg.norm(direction)
    y = 4.0 * direction + 0.01 * rng.standard_normal((length, features))
    x = rng.standard_normal((length, features))
    x -= np.outer(x @ direction, direction)
    x, y = (jnp.asarray(a[None, :, None], jnp.bfloat16) for a in (x, y))
    v = jnp.ones((1, length, 1, 16), jnp.bfloat16)
    x64, y64 = (np.asarray(a[0, :, 0], np.float64) for a in (x, y))
    rounded = np.asarray(jnp.asarray(y64[:384].T @ y64[:384], jnp.bfloat16), np.float64)
    assert (np.einsum('ti,ij,tj->t', x64[384:], rounded, x64[384:]) < 0).any()

    options = Options(powers=SQUARE, denominator_bias=1e-3, block=128, local=PolynomialKernel(2))
    plan = make_plan(Sizes.of_call(make_call(options, x, y, v, x, y)))
    inputs = KernelInputs(*(a[0].transpose(1, 2, 0) for a in (x, y, v, x, y)))
    with interpret_kernels():
        inverse = quick(lambda inputs: forward(plan, False, inputs, None).inverse_Nx1xL)(inputs)
    den = 1 / np.asarray(inverse, np.float64)[0, 0]
    want = 1e-3 + np.tril((x64 @ y64.T) ** 2).sum(1)
    assert den.min() > 0
    np.testing.assert_allclose(den, want, rtol=2e-2)


@pytest.mark.parametrize(
    ('r', 'head_dim', 'block', 'dtype', 'fits'),
    [
        (64, 64, 1024, 'bfloat16', True),
        (96, 128, 512, 'bfloat16', False),
        (64, 64, 256, 'float32', True),
        (32, 64, 1024, 'float32', False),
    ],
)
def test_calls_that_small_chips_cannot_compile_stay_on_xla(r, head_dim, block, dtype, fits, monkeypatch):
    """The chip is a v4, without a gate: the second call takes 16.9 of the 16 MiB on chip, the last call 16.7."""
    monkeypatch.setattr(platform, 'target_platform', lambda: 'tpu')
    monkeypatch.setattr(platform, 'vmem', lambda: (16 * 2**20, None))
    x, v = (jax.ShapeDtypeStruct((1, 2048, 1, n), dtype) for n in (r, head_dim))
    options = Options(powers=SQUARE, local=PolynomialKernel(4), block=block)
    reason = pallas_tpu.unsupported(make_call(options, x, x, v, v, v))
    assert (reason is None) == fits
    assert fits or reason == f'would not fit its VMEM with {r} features and blocks of {block}'


def test_batch_split_over_a_mesh():
    options = Options(powers=SQUARE, **LOCAL)
    arrays = example(130, batch=4)
    want = by_definition(options, *arrays)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ('data', 'fsdp'))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(('data', 'fsdp')))

    def loss(*inputs):
        *inputs, do = inputs
        o, _ = pallas_tpu.linear_attention(make_call(options, *inputs))
        return jnp.sum(o * do), o

    with jax.set_mesh(mesh), interpret_plainly():
        split = [jax.device_put(a, rows) for a in arrays]
        grads, o = quick(jax.grad(loss, argnums=range(5), has_aux=True))(*split)
    assert o.sharding.is_equivalent_to(rows, o.ndim)
    found = errors([o, *grads], want)
    assert all(error <= 1e-5 for error in found.values()), found


REFUSED = {
    'window': {'local': PolynomialKernel(4), 'window': 64},
    'degree': {'local': PolynomialKernel(6)},
    'polynomial': {'local': ExpKernel()},
    'multiples of 128': {'local': PolynomialKernel(4), 'block': 96},
    'powers': {'powers': (1.0, -1.0, 0.5)},
    'causal': {'causal': False},
}


@pytest.mark.parametrize('reason', REFUSED)
def test_unsupported_calls_say_why(reason, monkeypatch):
    monkeypatch.setattr(pallas_tpu.platform, 'target_platform', lambda: 'tpu')
    *arrays, _ = example(300)
    assert pallas_tpu.unsupported(make_call(Options(powers=SQUARE, **LOCAL), *arrays)) is None
    options = Options(**{'powers': SQUARE} | REFUSED[reason])
    assert reason in pallas_tpu.unsupported(make_call(options, *arrays))


def test_unsupported_elsewhere():
    *arrays, _ = example(16)
    assert 'TPU' in pallas_tpu.unsupported(make_call(Options(powers=SQUARE), *arrays))
