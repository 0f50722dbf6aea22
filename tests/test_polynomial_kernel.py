"""The TPU kernels of polynomial attention, interpreted on the CPU: uninitialised memory is NaN, races are detected."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from lm.ops import exact_attention, platform
from lm.ops.exact_attention import polynomial_tpu

NAMES = ('o', 'dq', 'dk', 'dv')


@pytest.fixture(autouse=True)
def no_races(capfd):
    yield
    assert 'RACE DETECTED' not in ''.join(capfd.readouterr())


def interpreted():
    return pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(uninitialized_memory='nan', detect_races=True))


def example(length, *, batch=1, heads=1, kv_heads=None, size=16, value_size=None, dtype=jnp.float32, seed=0):
    """Layer-normalized q and k, v, and a gradient of the output."""
    rng = np.random.default_rng(seed)
    kv_heads, value_size = kv_heads or heads, value_size or size
    shapes = [(heads, size), (kv_heads, size), (kv_heads, value_size), (heads, value_size)]
    q, k, v, do = (rng.standard_normal((batch, length, *shape)) for shape in shapes)
    q, k = ((x - x.mean(-1, keepdims=True)) / x.std(-1, keepdims=True) for x in (q, k))
    return [jnp.asarray(a, dtype) for a in (q, k, v, do)]


def by_definition(degree, bias, scale, q, k, v, do):
    """Outputs and gradients in float64, all weights at once, with the gradients written out."""
    group = q.shape[2] // k.shape[2]
    q, k, v, do = (np.asarray(a, np.float64).transpose(0, 2, 1, 3) for a in (q, k, v, do))
    k, v = (np.repeat(a, group, axis=1) for a in (k, v))
    seen = np.tri(q.shape[2])
    s = scale * (q @ k.swapaxes(2, 3))
    w, slope = s**degree * seen, degree * scale * s ** (degree - 1) * seen
    total = bias + w.sum(-1, keepdims=True)
    o = w @ v / total
    ds = slope * (do @ v.swapaxes(2, 3) - (do * o).sum(-1, keepdims=True)) / total
    dk, dv = ds.swapaxes(2, 3) @ q, (w / total).swapaxes(2, 3) @ do
    dk, dv = (a.reshape(a.shape[0], -1, group, *a.shape[2:]).sum(2) for a in (dk, dv))
    return [a.transpose(0, 2, 1, 3) for a in (o, ds @ k, dk, dv)]


def quick(function):
    """Jitted without optimisation: compiling is what takes the time here."""
    return jax.jit(function, compiler_options={'xla_backend_optimization_level': 0})


def by_kernels(q, k, v, do, **options):
    def outputs_and_gradients(q, k, v, do):
        o, vjp = jax.vjp(functools.partial(polynomial_tpu.polynomial_attention, **options), q, k, v)
        return [o, *vjp(do)]

    with interpreted():
        return quick(outputs_and_gradients)(q, k, v, do)


def errors(got, want):
    """Relative errors by name."""
    return {
        name: np.linalg.norm(np.asarray(a, np.float64) - b) / np.linalg.norm(b)
        for name, a, b in zip(NAMES, got, want, strict=True)
    }


CASES = {
    'degree 2': ({'degree': 2, 'block': 128}, {'length': 200}),
    'degree 4, odd length': ({'degree': 4, 'block': 128}, {'length': 301, 'heads': 2, 'size': 64}),
    'degree 6, scaled': ({'degree': 6, 'block': 128, 'bias': 3.0, 'scale': 0.25}, {'length': 150}),
    'degree 8': ({'degree': 8, 'block': 128}, {'length': 257, 'size': 64}),
    'degree 16': ({'degree': 16, 'block': 128}, {'length': 140, 'size': 64}),
    'no bias': ({'degree': 4, 'block': 128, 'bias': 0.0}, {'length': 150}),
    'one short block': ({'degree': 4}, {'length': 77}),
    'grouped queries': ({'degree': 4, 'block': 128}, {'length': 200, 'batch': 2, 'heads': 4, 'kv_heads': 2}),
    'odd head sizes': ({'degree': 4, 'block': 128}, {'length': 131, 'size': 10, 'value_size': 20}),
    'heads of 128': ({'degree': 4, 'block': 128}, {'length': 131, 'size': 128}),
    'tiles': ({'degree': 4, 'block': 512}, {'length': 600}),
}
ROUNDED = ('degree 4, odd length', 'degree 8', 'degree 16', 'grouped queries')
EXAMPLES = [(name, 'float32') for name in CASES] + [(name, 'bfloat16') for name in ROUNDED]


@pytest.mark.parametrize('case', EXAMPLES, ids=[', '.join(example) for example in EXAMPLES])
def test_outputs_and_gradients(case):
    name, dtype = case
    options, sizes = CASES[name]
    arrays = example(**sizes, dtype=dtype)
    got = by_kernels(*arrays, **options)
    assert all(a.dtype == dtype for a in got)
    want = by_definition(options['degree'], options.get('bias', 1.0), options.get('scale', 1.0), *arrays)
    found = errors(got, want)
    print(name, dtype, {k: f'{v:.1e}' for k, v in found.items()})
    limit = 1e-5 if dtype == 'float32' else 2e-2
    assert all(error <= limit for error in found.values()), found
