"""Values of another size than keys, in every mechanism."""

import dataclasses

import grids
import jax
import jax.numpy as jnp
import mechanisms
import numpy as np
import pytest
from flax import nnx
from mechanisms_list import QUICK_FIRST

WIDE = dataclasses.replace(mechanisms.DIMS, value_dim=24)
NARROW = dataclasses.replace(mechanisms.DIMS, value_dim=8)


def inputs_of(config, dims, dtype=jnp.float32):
    """Returns queries, keys, values and the further inputs of the mechanism."""
    widths = config.projections(dims).values()
    shapes = [(2, mechanisms.LENGTH, width) for width in widths]
    keys = jax.random.split(jax.random.key(11), len(shapes))
    drawn = [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]
    return [*mechanisms.draw(dims=dims, dtype=dtype), *drawn]


def mix(module, q, k, v, *others):
    """Returns the mixed values, and the gradients of a sum of them by every input."""
    graph, state = nnx.split(module)
    cotangent = jax.random.normal(jax.random.key(5), (2, mechanisms.LENGTH, 4, 24))
    cotangent = cotangent[..., 16:] if v.shape[-1] == 8 else cotangent[..., : v.shape[-1]]

    @jax.jit
    def run(state, q, *inputs):
        module = nnx.merge(graph, state)
        o, pull = jax.vjp(lambda q, k, *rest: module.mix(*module.normalize(q, k), *rest), q, *inputs)
        return o, pull(cotangent)

    return run(state, q, k, v, *others)


CONFIGS = grids.draw((one for one in QUICK_FIRST if not isinstance(one.values[0], tuple)), 4)


@pytest.mark.parametrize('config', CONFIGS)
def test_each_channel_of_a_value_is_mixed_alone(config):
    """A mechanism computes wide values as their parts, side by side, which have the size of keys or half of it.

    The gradients of other inputs are sums over the parts.
    """
    wide, plain, narrow = (mechanisms.build(config, dims) for dims in (WIDE, mechanisms.DIMS, NARROW))
    q, k, v, *others = inputs_of(config, WIDE)
    found, gradients = mix(wide, q, k, v, *others)
    parts, by_part = zip(
        *(mix(one, q, k, x, *others) for one, x in zip((plain, narrow), jnp.split(v, [16], axis=-1), strict=True)),
        strict=True,
    )
    assert found.shape == (2, mechanisms.LENGTH, 4, 24)
    np.testing.assert_allclose(found, jnp.concatenate(parts, axis=-1), rtol=0, atol=1e-5 * np.abs(found).max())
    for i, (gradient, *both) in enumerate(zip(gradients, *by_part, strict=True)):
        expected = jnp.concatenate(both, axis=-1) if i == 2 else sum(both)
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize('config', CONFIGS)
def test_wide_values_are_decoded_and_do_not_leak(config):
    module, inputs = mechanisms.build(config, WIDE), inputs_of(config, WIDE)
    mechanisms.check_steps(module, inputs, 2e-5)
    mechanisms.check_no_leak(module, inputs)
    whole = mechanisms.apply(module, *inputs)
    half = mechanisms.apply(module, *(x.astype(jnp.bfloat16) for x in inputs))
    assert (half.dtype, half.shape) == (jnp.bfloat16, whole.shape)
    assert np.linalg.norm(half.astype(jnp.float32) - whole) < 5e-2 * np.linalg.norm(whole)
