"""Gated units: XLA and the TPU kernels, interpreted on the CPU, against the formula."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from interpreter import interpret_kernels
from jax.ad_checkpoint import print_saved_residuals

from lm.model import REMAT
from lm.model.parts.branch import read_norm
from lm.ops import platform
from lm.ops.errors import OperationError
from lm.ops.gated_units import Norm, UnitsCall, gated_units, reference, tpu, xla
from lm.ops.norms import normalize

pytestmark = pytest.mark.usefixtures('no_races')
NAMES = ('y', 'dx', 'dinto', 'dout', 'dgain', 'dbias')
NORMS = {'none': None, 'layer': (True, True), 'layer without bias': (True, False), 'rms': (False, False)}
"""Name → whether the mean is subtracted, and whether there is a bias."""


def draw(tokens, norm=None, width=16, units=40, dtype=jnp.float32):
    """Returns x, which is far from 0, the matrices, and a norm."""
    rng = np.random.default_rng(units)
    shapes = (*tokens, width), (width, 2 * units), (units, width)
    x, *matrices = (jnp.asarray(rng.normal(size=shape) * shape[-2] ** -0.2, dtype) for shape in shapes)
    if NORMS[norm or 'none'] is None:
        return [x, *matrices, None]
    (centred, biased), (gain, bias) = NORMS[norm], jnp.asarray(rng.normal(size=(2, width)), jnp.float32)
    return [x + 0.5, *matrices, Norm(gain, bias if biased else None, centred, 1e-5)]


def both(function, activation, *arrays):
    """Returns outputs and the gradients of all arrays."""
    y, pull = jax.vjp(lambda x, into, out, norm: function(UnitsCall(x, into, out, activation, norm)), *arrays)
    return [y, *jax.tree.leaves(pull(jnp.cos(jnp.arange(y.size)).reshape(y.shape).astype(y.dtype)))]


def compare(found, expected, error):
    for name, a, e in zip(NAMES, found, expected, strict=False):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        assert a.shape == e.shape
        assert np.linalg.norm(a - e) <= error * np.linalg.norm(e), name
    assert len(found) == len(expected)


@pytest.mark.parametrize('module', [xla, tpu])
def test_levels_that_keep_products_keep_values_and_gates(module, monkeypatch, capfd):
    """No other level does: it would need the memory of a level above."""
    monkeypatch.setattr(tpu, 'find_tile', lambda *sizes: (256, 32))
    x, into, out, _ = draw((256,), units=32)
    kept = {}

    def compute(x):
        return jnp.sin(module.gated_units(UnitsCall(x, into, out, 'silu', None)))

    for level, policy in REMAT.items():
        print_saved_residuals(jax.checkpoint(compute, policy=policy), x)
        lines = (line for line in capfd.readouterr().out.splitlines() if 'argument' not in line)
        sizes = [math.prod(map(int, re.search(r'\[([\d,]+)\]', line)[1].split(','))) for line in lines]
        kept[level] = sum(size for size in sizes if size % x.size == 0) // x.size
    assert all(kept[level] >= 4 for level in ('none', 'dots', 'dense'))
    assert [kept[level] for level in ('attention', 'full')] == [0, 0]


@pytest.mark.parametrize(
    ('tokens', 'activation', 'norm', 'step', 'cores'),
    [
        ((2, 512), 'silu', 'layer', 16, 1),
        ((512,), 'gelu', 'none', 16, 2),
        ((1, 768), 'gelu', 'rms', 64, 2),
        ((3, 2, 256), 'silu', 'layer without bias', 40, 1),
    ],
)
def test_kernels_agree_with_the_formula(tokens, activation, norm, step, cores, monkeypatch):
    """Steps whose units are all used, or not, over one core or two, with odd numbers of tiles."""
    monkeypatch.setattr(tpu, 'find_tile', lambda *sizes: (256, step))
    monkeypatch.setattr(tpu, 'count_cores', lambda: cores)
    arrays = draw(tokens, norm)
    expected = jax.jit(functools.partial(both, reference.gated_units, activation))(*arrays)
    with interpret_kernels():
        compare(jax.jit(functools.partial(both, tpu.gated_units, activation))(*arrays), expected, 1e-6)
    compare(both(xla.gated_units, activation, *arrays), expected, 1e-6)


def test_bfloat16(monkeypatch):
    """Units are rounded once before the last product, and gradients once at the end."""
    monkeypatch.setattr(tpu, 'find_tile', lambda *sizes: (128, 32))
    arrays = draw((2, 256), 'layer', units=64, dtype=jnp.bfloat16)
    wide = jax.tree.map(lambda array: array.astype(jnp.float32), arrays)
    expected = jax.jit(functools.partial(both, reference.gated_units, 'silu'))(*wide)
    with interpret_kernels():
        found = jax.jit(functools.partial(both, tpu.gated_units, 'silu'))(*arrays)
    assert {array.dtype for array in found[:4]} == {jnp.dtype('bfloat16')}
    compare(found, expected, 6e-3)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16], ids=['float32', 'bfloat16'])
@pytest.mark.parametrize('kind', [nnx.LayerNorm, nnx.RMSNorm])
def test_norms_of_xla_are_those_of_flax_to_the_bit(kind, dtype):
    rng = np.random.default_rng(0)
    theirs = kind(40, epsilon=1e-5, dtype=dtype, rngs=nnx.Rngs(0))
    theirs.scale[...] = jnp.asarray(rng.normal(size=40), jnp.float32)
    if kind is nnx.LayerNorm:
        theirs.bias[...] = jnp.asarray(rng.normal(size=40), jnp.float32)
    x = jnp.asarray(rng.normal(size=(3, 5, 40)) + 1, dtype)
    np.testing.assert_array_equal(jax.jit(normalize)(x, read_norm(theirs)), jax.jit(lambda x: theirs(x))(x))


@pytest.mark.parametrize(
    ('kind', 'tokens', 'width', 'units', 'reason'),
    [
        ('TPU v5 lite', (1, 32768), 768, 2048, None),
        ('TPU v6 lite', (32768,), 1280, 3408, None),
        ('TPU v5p', (8, 1024), 768, 2048, None),
        ('TPU v4', (1, 32768), 768, 2048, 'would not fit its VMEM with 2048 units of a model of width 768'),
        ('TPU v5 lite', (1, 32768), 2048, 8192, 'would not fit its VMEM'),
        ('TPU v5 lite', (1, 1100), 768, 2048, 'takes a multiple of 256 tokens, not 1100'),
        ('TPU v6 lite', (1, 768), 768, 2048, None),
        ('TPU v6 lite', (1, 256), 768, 2048, 'takes a multiple of 512 tokens, not 256'),
        ('TPU v5 lite', (1, 512), 700, 2048, 'takes a model whose width is a multiple of 128, not 700'),
    ],
)
def test_a_chip_takes_what_fits(kind, tokens, width, units, reason, monkeypatch):
    monkeypatch.setattr(platform, 'target_platform', lambda: 'tpu')
    monkeypatch.setattr(platform, 'device_kind', lambda: kind)
    shapes = (*tokens, width), (width, 2 * units), (units, width)
    call = UnitsCall(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes), 'silu')
    found = tpu.unsupported(call)
    assert found is None if reason is None else found.startswith(reason)


def test_a_kernel_is_refused_by_name_without_a_tpu():
    with pytest.raises(OperationError, match="implementation = 'pallas_tpu': gated units needs a TPU"):
        gated_units(*draw((128,))[:3], implementation='pallas_tpu')


def test_few_tokens_are_left_to_xla_without_a_warning(monkeypatch, caplog):
    monkeypatch.setattr(platform, 'target_platform', lambda: 'tpu')
    for tokens in ((3, 1), (5,)):
        gated_units(*draw(tokens)[:3])
    assert not caplog.messages
