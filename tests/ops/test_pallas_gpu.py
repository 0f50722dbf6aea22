"""The GPU kernels of linear attention, without a GPU.

They are interpreted on the CPU, with NaN in uninitialised memory and race detection. They are also compiled ahead of
time if JAX's CUDA plugin is installed.
"""

import functools
import importlib.metadata
import shutil

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_pallas_tpu import by_definition, errors, example, make_call, quick

from lm.ops import exact_attention, platform
from lm.ops.linear_attention import IMPLEMENTATIONS
from lm.ops.linear_attention.gpu import attention as pallas_gpu
from lm.ops.linear_attention.gpu.plan import FarTokens, NearTokens, list_squares
from lm.ops.linear_attention.types import ExpKernel, Options, PolynomialKernel

SQUARE = (0.0, 0.0, 1.0)

interpreter = pytest.mark.skipif(
    jax.__version_info__ < (0, 12),
    reason=f'the interpreter of JAX {jax.__version__} lacks what the kernels use; 0.12 has it',
)


def interpreted():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory='nan'))


def attend(options):
    return lambda *arrays: pallas_gpu.linear_attention(make_call(options, *arrays)).o_BxLxHxD


def by_kernels(options, *inputs, do):
    def outputs_and_gradients(*inputs, do):
        o, vjp = jax.vjp(attend(options), *inputs)
        return [o, *vjp(do)]

    with interpreted():
        return quick(outputs_and_gradients)(*inputs, do=do)


FULL = {'head_dim': 64, 'local': 64}
CASES = {
    'local': ({'local': PolynomialKernel(4), 'block': 64}, {'length': 150, 'features': 32, **FULL}),
    'two tiles a block': ({'local': PolynomialKernel(4), 'block': 128}, {'length': 131, 'features': 32, **FULL}),
    'without local': ({'block': 64}, {'length': 100, 'features': 32, **FULL}),
    'r = 64': ({'local': PolynomialKernel(4), 'block': 64}, {'length': 101, 'features': 64, **FULL}),
    'odd sizes, grouped, degree 2': (
        {'local': PolynomialKernel(2), 'block': 64},
        {'length': 70, 'features': 24, 'head_dim': 10, 'local': 40, 'heads': 2, 'kv_heads': 1},
    ),
    'one block, degree 8, scaled': (
        {'local': PolynomialKernel(8, scale=0.75), 'block': 512},
        {'length': 270, 'features': 32, **FULL},
    ),
    'one block of no whole tiles': (
        {'local': PolynomialKernel(4), 'block': 100},
        {'length': 90, 'features': 32, **FULL},
    ),
    'one block without local, no bias': ({'denominator_bias': 0.0}, {'length': 50, 'features': 32, **FULL}),
}


@pytest.mark.smoke  # on Python 3.12 pip has a JAX that can interpret them
@interpreter
@pytest.mark.parametrize('case', grids.draw(CASES, 4))
def test_outputs_and_gradients(case):
    settings, sizes = CASES[case]
    options = Options(powers=SQUARE, **settings)
    *inputs, do = example(**sizes, dtype=jnp.bfloat16)
    found = errors(by_kernels(options, *inputs, do=do), by_definition(options, *inputs, do))
    assert all(error <= 2e-2 for error in found.values()), found


@pytest.mark.smoke
@interpreter
def test_repeated_calls_give_the_same_bits():
    """On a GPU `test_gpu.py` calls each kernel twenty times."""
    settings, sizes = CASES['local']
    *inputs, do = example(**sizes, dtype=jnp.bfloat16)
    first, second = (by_kernels(Options(powers=SQUARE, **settings), *inputs, do=do) for _ in range(2))
    assert [np.asarray(x).tobytes() for x in first] == [np.asarray(x).tobytes() for x in second]


@interpreter
def test_sums_of_a_long_block():
    """Six tiles of tokens pass through four places in shared memory."""
    from lm.ops.linear_attention.gpu.forward import sum_blocks

    length, features = 384, 32
    _, y, v, *_ = (a[:, :, 0] for a in example(length, features=features, head_dim=64, dtype=jnp.bfloat16))
    options = Options(powers=SQUARE, block=length, local=PolynomialKernel(4))
    plan = pallas_gpu.make_plan(options, 2 * length, exact_local=True)
    with interpreted():
        sums = quick(lambda y, v: sum_blocks(plan, y, y.swapaxes(1, 2), v))(y, v)
    y, v = (np.asarray(a, np.float64)[0] for a in (y, v))
    groups = y.reshape(length, features // 16, 16)
    want = [
        np.einsum('ti,tj,tv->vij', groups[:, g], groups[:, h], v).reshape(64, 256) for g, h in list_squares(features)
    ]
    error = np.linalg.norm(sums[0, 0] - np.stack(want)) / np.linalg.norm(want)
    assert error <= 5e-3


@interpreter
def test_denominators_of_concentrated_keys_stay_positive():
    """If the keys' second moment is rounded to bfloat16, many of these denominators become negative."""
    from lm.ops.linear_attention.gpu.forward import outputs

    rng = np.random.default_rng(0)
    features, before, length = 32, 448, 64
    direction = rng.standard_normal(features)
    direction /= np.linalg.norm(direction)
    y = 4.0 * direction + 0.01 * rng.standard_normal((before + length, features))
    x = rng.standard_normal((before + length, features))
    x -= np.outer(x @ direction, direction)
    x, y = (jnp.asarray(a[None], jnp.bfloat16) for a in (x, y))
    x64, y64 = (np.asarray(a[0], np.float64) for a in (x, y))
    rounded = np.asarray(jnp.asarray(y64[:before].T @ y64[:before], jnp.bfloat16), np.float64)
    assert (np.einsum('ti,ij,tj->t', x64[before:], rounded, x64[before:]) < 0).any()

    # The last tile is a block of its own: its sums cover all earlier tokens.
    options = Options(powers=SQUARE, denominator_bias=1e-3, block=64, local=PolynomialKernel(2))
    plan = pallas_gpu.make_plan(options, before + length, exact_local=True)
    x, y_in = x[:, before:], y[:, before:]
    moment = pallas_gpu.make_moment_operand(jnp.asarray(y64[:before].T @ y64[:before], jnp.float32)[None, None])
    state = jnp.zeros((1, 1, 6, 128, 64), jnp.bfloat16)
    v = jnp.ones((1, length, 64), jnp.bfloat16)
    with interpreted():
        far = FarTokens(x, x.swapaxes(1, 2), moment, state)
        _, inverse = quick(lambda near, far: outputs(plan, near, far))(NearTokens(x, y_in, v), far)
    den = 1 / np.asarray(inverse, np.float64)[0]
    want = 1e-3 + np.tril((x64 @ y64.T) ** 2).sum(1)[before:]
    assert den.min() > 0
    np.testing.assert_allclose(den, want, rtol=2e-2)


REFUSED = {
    'window': {'local': PolynomialKernel(4), 'window': 64},
    'degree': {'local': PolynomialKernel(6)},
    'polynomial': {'local': ExpKernel()},
    'multiples of 64': {'local': PolynomialKernel(4), 'block': 96},
    'powers': {'powers': (0.0, 1.0)},
    'normalised': {'normalize': False},
}


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(platform, 'target_platform', lambda: 'gpu')
    monkeypatch.setattr(platform, 'device_kind', lambda: 'NVIDIA H200')
    monkeypatch.setattr(platform, 'MOSAIC_GPU_JAX', (0, 1))


def refusal(options, dtype=jnp.bfloat16, **sizes):
    *arrays, _ = example(300, dtype=dtype, **sizes)
    return pallas_gpu.unsupported(make_call(options, *arrays))


@pytest.mark.parametrize('reason', REFUSED)
def test_unsupported_calls_say_why(reason, hopper):
    assert refusal(Options(powers=SQUARE, local=PolynomialKernel(4), block=128)) is None
    assert reason in refusal(Options(**{'powers': SQUARE} | REFUSED[reason]))


def test_unsupported_arrays_say_why(hopper):
    assert 'float32' in refusal(Options(powers=SQUARE), dtype=jnp.float32)
    assert 'not 80' in refusal(Options(powers=SQUARE), features=80)


def test_unsupported_elsewhere(monkeypatch):
    assert 'needs a GPU' in refusal(Options(powers=SQUARE))
    monkeypatch.setattr(platform, 'target_platform', lambda: 'gpu')
    kinds = {'NVIDIA H200': True, 'NVIDIA GH200 480GB': True, 'NVIDIA A100-SXM4-80GB': False, 'NVIDIA B200': False}
    for kind, works in kinds.items():
        monkeypatch.setattr(platform, 'device_kind', lambda kind=kind: kind)
        assert ('needs a GPU' not in str(refusal(Options(powers=SQUARE)))) == works


def test_hoppers_get_their_kernels(hopper, monkeypatch):
    *arrays, _ = example(300, dtype=jnp.bfloat16)
    q, k, v, *_ = arrays
    call = make_call(Options(powers=SQUARE, local=PolynomialKernel(4), block=128), *arrays)
    for kind, name in (('NVIDIA H100 80GB HBM3', 'pallas_gpu'), ('NVIDIA A100-SXM4-80GB', 'xla')):
        monkeypatch.setattr(platform, 'device_kind', lambda kind=kind: kind)
        chosen = IMPLEMENTATIONS.choose(None, call)
        assert chosen is IMPLEMENTATIONS[name]
        exact = exact_attention.PolynomialCall(q, k, v, degree=4)
        assert exact_attention.POLYNOMIAL.choose(None, exact) is exact_attention.POLYNOMIAL[name]


def test_unsupported_calls_of_polynomial_attention_say_why(hopper):
    q, k, v = example(300, dtype=jnp.bfloat16)[:3]

    def reason(degree, **options):
        call = exact_attention.PolynomialCall(q, k, v, degree=degree, **options)
        return exact_attention.POLYNOMIAL['pallas_gpu'].unsupported(call)

    assert reason(4) is None
    assert 'degree' in reason(6)
    assert 'documents' in reason(4, starts_BxL=jnp.zeros((1, 300), jnp.int32))
    assert 'causal' in reason(4, causal=False)
    assert 'decay' in reason(4, log_decay_BxMxK=jnp.zeros(k.shape[:3]))


@pytest.mark.smoke
@interpreter
def test_polynomial_attention():
    """Three tiles of queries and fewer key heads are compared with the formulas in float32."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, do = (jax.random.normal(key, (1, 150, n, 64)) for key, n in zip(keys, (2, 1, 1, 2), strict=True))
    options = {'degree': 4, 'scale': 0.5, 'denominator_bias': 0.25}

    def run(implementation, *inputs):
        q, k, v, do = (x.astype(jnp.bfloat16) for x in inputs)
        if implementation == 'reference':
            q, k, v, do = (x.astype(jnp.float32) for x in (q, k, v, do))
        attend = exact_attention.POLYNOMIAL[implementation].polynomial_attention
        o, vjp = jax.vjp(lambda *qkv: attend(exact_attention.PolynomialCall(*qkv, **options)), q, k, v)
        return [o, *vjp(do)]

    with interpreted():
        got = quick(functools.partial(run, 'pallas_gpu'))(q / 8, k, v, do)
    for g, w in zip(got, run('reference', q / 8, k, v, do), strict=True):
        assert np.linalg.norm(np.asarray(g, np.float64) - w) <= 2e-2 * np.linalg.norm(w)


# An H200 as XLA describes it: the facts that a compiler needs about an absent GPU.
H200 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000
l2_cache_size: 62914560 clock_rate_ghz: 1.98 device_memory_size: 150000000000 shared_memory_per_block_optin: 232448
cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 patch: 0 } device_description_str: "NVIDIA H200"
"""


def can_compile() -> bool:
    names = {d.metadata['Name'] for d in importlib.metadata.distributions()}
    return any(n.startswith('jax-cuda') and n.endswith('plugin') for n in names) and shutil.which('ptxas') is not None


@pytest.mark.skipif(not can_compile(), reason="needs JAX's CUDA plugin and ptxas")
@pytest.mark.parametrize('features', [32, 64])
@pytest.mark.parametrize('local', [True, False])
def test_compiles_for_an_h200(features, local):
    from jax.experimental import topologies

    from lm.ops.linear_attention import linear_attention

    topology = topologies.get_topology_desc(topology_name='h200', platform='cuda', target_config=H200, topology='1x1x1')
    mesh = jax.sharding.Mesh(np.array(topology.devices), ('data',))
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    sizes = [features, features, 64, 64, 64]
    arrays = [jax.ShapeDtypeStruct((1, 2000, 2, s), jnp.bfloat16, sharding=replicated) for s in sizes]

    def loss(q, k, v, q_local, k_local):
        near = {'local': PolynomialKernel(4), 'q_local_BxLxHxC': q_local, 'k_local_BxLxKxC': k_local} if local else {}
        o = linear_attention(q, k, v, powers=SQUARE, implementation='pallas_gpu', **near)
        return jnp.sum(o.astype(jnp.float32))

    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss, argnums=range(5))).trace(*arrays).lower().compile()
    assert compiled.memory_analysis().output_size_in_bytes > 0
