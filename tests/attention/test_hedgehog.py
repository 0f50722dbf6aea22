"""Hedgehog: its range, its first parameters, and what kernels take."""

import jax
import jax.numpy as jnp
import mechanisms
import numpy as np
import pytest
from flax import nnx

from lm.attention import HeadDims
from lm.attention.hedgehog import TWO_SIDED, Hedgehog
from lm.ops.linear_attention.tpu import attention as pallas_tpu
from lm.ops.linear_attention.types import LinearCall, Options


def test_long_vectors_leave_values_and_gradients_finite():
    """Long vectors leave one feature in each softmax, so two vectors may share no feature."""
    module = mechanisms.build(Hedgehog())
    graph, state = nnx.split(module)

    def loss(state, *inputs):
        o = nnx.merge(graph, state)(*inputs)
        return (o**2).sum(), o

    gradients, o = jax.jit(jax.grad(loss, range(4), has_aux=True))(state, *mechanisms.draw(size=300.0))
    assert np.abs(o).max() <= 300 * 6
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((gradients, o)))


def test_it_starts_at_the_identity_and_counts_two_features_per_number():
    dims = HeadDims(4, 2, 16)
    module = Hedgehog().build(dims, nnx.Rngs(0))
    assert module.q_weight.shape == (4, 16, 16)
    np.testing.assert_array_equal(module.k_weight[...][1], np.eye(16))
    x = jnp.ones((1, 3, 2, 16))
    assert TWO_SIDED(module.k_weight[...], x, False).shape == (1, 3, 2, 32)


@pytest.mark.parametrize('per_head', [True, False])
def test_the_forms_that_tpu_kernels_take(per_head, monkeypatch):
    monkeypatch.setattr(pallas_tpu.platform, 'target_platform', lambda: 'tpu')
    monkeypatch.setattr(pallas_tpu.platform, 'vmem', lambda: (32 * 2**20, None))
    module = Hedgehog(per_head=per_head).build(HeadDims(2, 2, 64), nnx.Rngs(0))
    q = jax.ShapeDtypeStruct((1, 512, 2, 64), jnp.float32)
    options = Options(feature_map=TWO_SIDED, denominator_bias=0.0)
    call = LinearCall(q, q, q, module.q_weight[...], module.k_weight[...], options=options)
    reason = pallas_tpu.unsupported(call)
    assert (reason is None) == (not per_head)
