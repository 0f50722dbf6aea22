"""Loops over an axis in blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from lm.ops import blocks, platform


def walk(x):
    """Sums squares, four entries per step."""

    def body(i, total):
        return total + blocks.call_in_branch(4 * i, lambda part: (part**2).sum(), lax.dynamic_slice_in_dim(x, 4 * i, 4))

    return lax.fori_loop(0, 3, body, jnp.float32(0.0))


@pytest.mark.parametrize('target', ['cpu', 'tpu'])
def test_computing_apart_changes_no_result(target, monkeypatch):
    monkeypatch.setattr(platform, 'target_platform', lambda: target)
    x = jnp.arange(12.0)
    assert float(jax.jit(lambda x: walk(x))(x)) == float((x**2).sum())
    assert ('cond[' in str(jax.make_jaxpr(lambda x: walk(x))(x))) == (target == 'cpu')


def test_nothing_is_computed_apart_at_a_known_index():
    assert 'cond' not in str(jax.make_jaxpr(lambda x: blocks.call_in_branch(0, jnp.sin, x))(jnp.ones(3)))


@pytest.mark.parametrize(('length', 'most'), [(1, 8), (7, 8), (17, 8), (100, 64), (1003, 256)])
def test_every_entry_is_fresh_once(length, most):
    block = blocks.even_block(length, most)
    assert block <= most
    seen = np.zeros(length, int)
    for i in range(-(-length // block)):
        at = int(blocks.start(i, block, length))
        seen[at : at + block] += np.asarray(blocks.find_new(i, block, length))
    assert (seen == 1).all()
