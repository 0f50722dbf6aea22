"""The products of tokens with the matrices of chosen experts equal their formula, in outputs and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from experts_one_by_one import apply_experts_one_by_one

from lm.ops.experts import apply_experts

TOKENS, EXPERTS, WIDTH, HIDDEN = 17, 5, 12, 7


def draw(tokens: int, choices: int, dtype=jnp.float32):
    """Returns the arrays of a call; the last expert is never chosen."""
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    chosen = np.stack([rng.permutation(EXPERTS - 1)[:choices] for _ in range(tokens)])
    weights = jnp.asarray(rng.uniform(size=chosen.shape), jnp.float32)
    return normal(tokens, WIDTH), chosen, weights, normal(EXPERTS, WIDTH, 2 * HIDDEN), normal(EXPERTS, HIDDEN, WIDTH)


def activate(x):
    values, gates = jnp.split(x, 2, axis=-1)
    return values * jax.nn.silu(gates)


def outputs_and_gradients(function, x, chosen, weights, into, out):
    def loss(x, weights, into, out):
        y = function(x, chosen, weights, into, out, activate)
        return (y.astype(jnp.float32) * jnp.cos(jnp.arange(y.shape[-1]))).sum(), y

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(x, weights, into, out)


@pytest.mark.parametrize(('tokens', 'choices'), [(TOKENS, 1), (TOKENS, 3), (1, 2), (2, 2)])  # the last are few rows
def test_sorted_rows_give_outputs_and_gradients_of_the_formula(tokens, choices):
    call = draw(tokens, choices)
    found = outputs_and_gradients(apply_experts, *call)
    expected = outputs_and_gradients(apply_experts_one_by_one, *call)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5 * np.abs(theirs).max())
    assert not np.any(found[0][2][-1]), 'an expert without tokens has a gradient'


def test_bfloat16_is_summed_in_float32():
    call = draw(TOKENS, 2, jnp.bfloat16)
    found = apply_experts(*call, activate)
    assert found.dtype == jnp.bfloat16
    exact = apply_experts_one_by_one(*(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in call), activate)
    np.testing.assert_allclose(found.astype(jnp.float32), exact, rtol=0, atol=0.01 * np.abs(exact).max())


@pytest.mark.slow
def test_products_and_gradients_compile_for_tpus():
    from jax.experimental import topologies

    pytest.importorskip('libtpu')
    device = topologies.get_topology_desc('v5e:2x2', 'tpu').devices[0]
    with jax.set_mesh(jax.sharding.Mesh(np.array([device]), ('data',))):
        shapes = (256, 128), (256, 2), (256, 2), (8, 128, 256), (8, 128, 128)
        types = jnp.bfloat16, jnp.int32, jnp.float32, jnp.bfloat16, jnp.bfloat16
        call = [jax.ShapeDtypeStruct(*each) for each in zip(shapes, types, strict=True)]
        assert (
            'ragged-dot'
            in jax.jit(lambda *call: outputs_and_gradients(apply_experts, *call)).lower(*call).compile().as_text()
        )
