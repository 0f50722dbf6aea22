"""Tests that need an NVIDIA GPU: `scripts/test.sh -m gpu`. They compare each path that only GPUs take with the
formulas."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_pallas_gpu_channel_delta as channel_delta
import test_pallas_gpu_channels as channels
import test_pallas_gpu_delta as delta
import test_pallas_gpu_recurrent as recurrent
import test_sketch_networks as sketches
from test_pallas_gpu import CASES, FULL, SQUARE, attend
from test_pallas_gpu_networks import CASES as NETWORKS
from test_pallas_tpu import by_definition, errors, example, make_call

from lm.ops import exact_attention
from lm.ops.linear_attention import linear_attention
from lm.ops.linear_attention.gpu import attention as pallas_gpu
from lm.ops.linear_attention.types import Options, PolynomialKernel
from lm.ops.sketch_networks import SketchCall
from lm.ops.sketch_networks.gpu import networks as gpu_networks

pytestmark = pytest.mark.gpu

LONG = {
    f'block {block}, r = {features}': (
        {'local': PolynomialKernel(4), 'block': block},
        {'length': 2500, 'heads': 2, 'features': features, **FULL},
    )
    for block in (256, 512, 1024)
    for features in (32, 64)
}
KERNELS = CASES | LONG | {'long, without local': ({}, {'length': 2500, 'features': 32, **FULL})}


@pytest.mark.parametrize('case', KERNELS)
def test_kernels_of_polysketch(case):
    settings, sizes = KERNELS[case]
    options = Options(powers=SQUARE, **settings)
    *inputs, do = example(**sizes, dtype=jnp.bfloat16)
    if reason := pallas_gpu.unsupported(make_call(options, *inputs)):
        pytest.skip(reason)

    def outputs_and_gradients(*inputs, do):
        o, vjp = jax.vjp(attend(options), *inputs)
        return [o, *vjp(do)]

    found = errors(jax.jit(outputs_and_gradients)(*inputs, do=do), by_definition(options, *inputs, do))
    assert all(error <= 2e-2 for error in found.values()), found


RECURRENT = {
    name: dataclasses.replace(case, length=2500, heads=(4, 2), segment=None) for name, case in recurrent.CASES.items()
} | {
    'Performer, 2048 features': dataclasses.replace(recurrent.CASES['Performer'], length=1500, rows=2048),
    'many heads': dataclasses.replace(recurrent.CASES['two chunks'], length=300, heads=(70, 70)),
}


@pytest.mark.parametrize('name', RECURRENT)
def test_recurrent_kernels(name):
    case = RECURRENT[name]
    arrays, do = recurrent.example(case)
    got = jax.jit(recurrent.outputs_and_gradients(case, 'pallas_gpu_recurrent'))(arrays, do)
    with jax.default_matmul_precision('highest'):
        want = jax.jit(recurrent.outputs_and_gradients(case, 'xla', jnp.float32))(arrays, do)
    found = recurrent.errors(got, want)
    assert all(error <= 2e-2 for error in found.values()), found


def check_agreement(kernels, results, case, implementation):
    """Compares an implementation with the reference on an example of `kernels`, a module of tests."""
    arrays, cotangents = kernels.example(**case)
    got = jax.jit(results(implementation))(arrays, cotangents)
    with jax.default_matmul_precision('highest'):
        want = jax.jit(results('reference', jnp.float32))(arrays, cotangents)
    found = kernels.errors(got, want)
    assert all(error <= 2e-2 for error in found.values()), found


DELTA = {name: settings | {'length': 2500} for name, settings in delta.CASES.items()}


@pytest.mark.parametrize('name', DELTA)
def test_kernels_of_the_delta_rule(name):
    check_agreement(delta, delta.results, DELTA[name], 'pallas_gpu')


CHANNELS = {f'{name}, a factor per channel': case | {'length': 2500} for name, case in channels.CASES.items()}


@pytest.mark.parametrize('name', CHANNELS)
def test_kernels_with_a_factor_per_channel(name):
    check_agreement(channels, channels.results, CHANNELS[name], 'pallas_gpu_channels')


CHANNEL_DELTA = {
    f'delta rule, {name}, a factor per channel': case | {'length': 2500} for name, case in channel_delta.CASES.items()
}


@pytest.mark.parametrize('name', CHANNEL_DELTA)
def test_kernels_of_the_rule_with_a_factor_per_channel(name):
    check_agreement(channel_delta, delta.results, CHANNEL_DELTA[name], 'pallas_gpu_channels')


LONG_NETWORKS = {
    f'long, r = {r}': {'length': 1501, 'batch': 2, 'heads': (4, 2), 'size': 64, 'r': r, 'hidden': 8 * r}
    for r in (32, 64)
}
NODES = NETWORKS | LONG_NETWORKS


@pytest.mark.parametrize('case', NODES)
def test_kernels_of_sketch_networks(case):
    arrays = sketches.example(**NODES[case], dtype=jnp.bfloat16)
    if reason := gpu_networks.unsupported(SketchCall(*arrays[:2])):
        pytest.skip(reason)
    got = sketches.outputs_and_gradients(gpu_networks.sketch_networks, *arrays)
    found = sketches.errors(got, sketches.by_definition(*arrays))
    assert all(error <= (2e-2 if NODES[case].get('power', 2) == 2 else 3e-2) for error in found.values()), found


EXACT = {
    'softmax': (exact_attention.softmax_attention, {}),
    'softmax in a window': (exact_attention.softmax_attention, {'window': 100}),
    'polynomial': (exact_attention.polynomial_attention, {'degree': 4}),
}


@pytest.mark.parametrize('length', [1024, 1003, 4501])
@pytest.mark.parametrize('case', EXACT)
def test_exact_attention(case, length):
    """The platform's own choice (cuDNN for softmax) is compared with the reference in float32."""
    function, options = EXACT[case]
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, do = (jax.random.normal(key, (2, length, n, 64)) for key, n in zip(keys, (4, 2, 2, 4), strict=True))
    q, k = q / 8**0.5, k / 8**0.5

    def run(dtype, **choice):
        o, vjp = jax.vjp(lambda *a: function(*a, **options, **choice), *(x.astype(dtype) for x in (q, k, v)))
        return o, *vjp(do.astype(dtype))

    with jax.default_matmul_precision('highest'):
        want = run(jnp.float32, implementation='reference')
    for got, right in zip(run(jnp.bfloat16), want, strict=True):
        error = np.linalg.norm(np.asarray(got, np.float64) - right) / np.linalg.norm(right)
        assert error <= 2e-2


def test_linear_attention_in_float32():
    """The platform's choice is compared with the formulas: TensorFloat-32 must not round products where it matters."""
    options = Options(powers=SQUARE, local=PolynomialKernel(4), block=256)
    *inputs, do = example(1000, heads=2, features=32, head_dim=64, local=64)

    def function(q, k, v, q_local, k_local):
        near = {'local': options.local, 'block': options.block, 'q_local_BxLxHxC': q_local, 'k_local_BxLxKxC': k_local}
        return linear_attention(q, k, v, powers=SQUARE, **near)

    def outputs_and_gradients(*inputs, do):
        o, vjp = jax.vjp(function, *inputs)
        return [o, *vjp(do)]

    with jax.default_matmul_precision('highest'):
        found = errors(jax.jit(outputs_and_gradients)(*inputs, do=do), by_definition(options, *inputs, do))
    assert all(error <= 1e-5 for error in found.values()), found


CALLS = 20


def arguments_of(name: str):
    """Returns a compiled function and its arguments."""
    if name == 'polysketch':
        options = Options(powers=SQUARE, local=PolynomialKernel(4), block=256)
        *inputs, do = example(length=2500, heads=2, features=32, **FULL, dtype=jnp.bfloat16)

        def outputs_and_gradients(*inputs, do):
            o, vjp = jax.vjp(attend(options), *inputs)
            return [o, *vjp(do)]

        return jax.jit(functools.partial(outputs_and_gradients, do=do)), inputs
    if name == 'sketch networks':
        arrays = sketches.example(**next(iter(LONG_NETWORKS.values())), dtype=jnp.bfloat16)
        return functools.partial(sketches.outputs_and_gradients, gpu_networks.sketch_networks), arrays
    if name in EXACT:
        function, options = EXACT[name]
        shapes = ((2, 4501, n, 64) for n in (4, 2, 2))
        arrays = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes)]
        return jax.jit(lambda *a: jax.vjp(functools.partial(function, **options), *a)[1](a[0])), arrays
    if name in RECURRENT:
        return jax.jit(recurrent.outputs_and_gradients(RECURRENT[name], 'pallas_gpu_recurrent')), recurrent.example(
            RECURRENT[name]
        )
    if name in CHANNELS:
        return jax.jit(channels.results('pallas_gpu_channels')), channels.example(**CHANNELS[name])
    if name in CHANNEL_DELTA:
        return jax.jit(delta.results('pallas_gpu_channels')), channel_delta.example(**CHANNEL_DELTA[name])
    return jax.jit(delta.results('pallas_gpu')), delta.example(**DELTA[name])


@pytest.mark.parametrize(
    'name', ['polysketch', 'sketch networks', *EXACT, *RECURRENT, *DELTA, *CHANNELS, *CHANNEL_DELTA]
)
def test_kernels_give_the_same_bits(name):
    function, arguments = arguments_of(name)
    first = jax.device_get(jax.tree.leaves(function(*arguments)))
    for _ in range(CALLS - 1):
        for a, b in zip(first, jax.device_get(jax.tree.leaves(function(*arguments))), strict=True):
            np.testing.assert_array_equal(a, b)
