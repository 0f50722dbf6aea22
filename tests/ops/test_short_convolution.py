"""The TPU kernels of short convolutions, interpreted on the CPU, against the sum that defines them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import interpret_kernels

from lm.ops.errors import OperationError
from lm.ops.short_convolution import ConvolutionCall, short_convolution, tpu, xla

pytestmark = pytest.mark.usefixtures('no_races')
NAMES = ('y', 'dx', 'dkernel', 'dbefore')


def draw(length, channels, width, before, reach, dtype=jnp.float32):
    rng = np.random.default_rng(length)
    x = jnp.asarray(rng.normal(size=(2, length, channels)), dtype)
    kernel = jnp.asarray(rng.normal(size=(width, channels)), jnp.float32)
    start = jnp.asarray(rng.normal(size=(2, width - 1, channels)), dtype) if before else None
    document = jnp.asarray(rng.integers(0, 2 * width, size=(2, length)), jnp.int32) if reach else None
    return x, kernel, start, document


def both(function, x, kernel, before, reach):
    y, pull = jax.vjp(lambda *given: function(ConvolutionCall(*given, reach)), x, kernel, before)
    return [y, *(d for d in pull(jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype)) if d is not None)]


@pytest.mark.parametrize(
    ('length', 'channels', 'width', 'before', 'reach'),
    [(384, 48, 4, False, False), (2048, 16, 4, True, True), (256, 160, 2, True, False), (128, 16, 16, False, True)],
)
def test_kernels_agree_with_the_sum(length, channels, width, before, reach, monkeypatch):
    monkeypatch.setattr(tpu, 'TOKENS', 256)
    arrays = draw(length, channels, width, before, reach)
    expected = jax.jit(functools.partial(both, xla.short_convolution))(*arrays)
    with interpret_kernels():
        got = jax.jit(functools.partial(both, tpu.short_convolution))(*arrays)
    for name, a, e in zip(NAMES, got, expected, strict=False):
        np.testing.assert_allclose(a, e, rtol=0, atol=2e-6 * float(jnp.abs(e).max()), err_msg=name)
    assert len(got) == len(expected) == 3 + before


def test_bfloat16():
    arrays = draw(384, 32, 4, True, True, jnp.bfloat16)
    with interpret_kernels():
        got = jax.jit(functools.partial(both, tpu.short_convolution))(*arrays)
    wide = (a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in arrays)
    for a, e in zip(got, both(xla.short_convolution, *wide), strict=True):
        assert np.linalg.norm(np.asarray(a, np.float32) - e) <= 5e-3 * np.linalg.norm(e)


def test_a_kernel_is_refused_by_name_without_a_tpu():
    with pytest.raises(OperationError, match="implementation = 'pallas_tpu': short convolution needs a TPU"):
        short_convolution(*draw(128, 16, 4, False, False), implementation='pallas_tpu')
