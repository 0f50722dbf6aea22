"""Products in the form that is fast in XLA's CPU backend: the same numbers and gradients, copies of the
smaller factor."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.ops import platform
from lm.ops.dots import dense, dot, product

FORMULAS = ('td,dn->tn', 'bcv,bcd->vd', 'bkcs,bkcgt->bksgt', 'bkds,bksgt->bkdgt', 'bkrt,bkdt->bkrd', 'bkf,bkfgt->bkgt')
FORMULAS += ('bkglm,bkgld->bkmd', 'bkgld,bkgld->bkgl', 'nted,nted->nt', 'bkef,bkfd->bked')


def letters_of(formula: str) -> list[str]:
    return formula.replace('->', ',').split(',')


def draw(formula: str, sizes: dict[str, int], dtype='float32') -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=[sizes[x] for x in names]), dtype) for names in letters_of(formula)]


@settings(max_examples=60)
@given(formula=st.sampled_from(FORMULAS), sizes=st.lists(st.integers(1, 6), min_size=26, max_size=26))
def test_products_and_gradients_equal_einsum(formula, sizes):
    a, b, d = draw(formula, dict(zip('abcdefghijklmnopqrstuvwxyz', sizes, strict=True)))
    (got, vjp), (want, expected) = (jax.vjp(lambda a, b, f=f: f(formula, a, b), a, b) for f in (dot, jnp.einsum))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), vjp(d), expected(d))


def copied(function, *arrays) -> int:
    """Returns the count of numbers that are transposed."""
    equations = jax.make_jaxpr(function)(*arrays).jaxpr.eqns

    def within(eqns):
        for e in eqns:
            yield e
            for inner in jax.core.jaxprs_in_params(e.params):
                yield from within(inner.eqns)

    moved = [e for e in within(equations) if e.primitive.name == 'transpose']
    return sum(e.invars[0].aval.size for e in moved if list(e.params['permutation']) != sorted(e.params['permutation']))


@pytest.mark.parametrize(
    ('formula', 'sizes', 'least'),
    [
        ('td,tn->dn', dict(t=64, d=4, n=32), 64 * 4),  # the gradient of a matrix with few inputs
        ('td,tn->dn', dict(t=64, d=32, n=4), 64 * 4 + 32 * 4),  # and with few outputs
        ('dt,st->ds', dict(d=4, s=64, t=64), 4 * 64 + 4 * 64),  # gradients of values: never copies the weights
        ('rt,dt->rd', dict(r=640, d=64, t=256), 64 * 256),  # sums: never copies the features
        ('td,dn->tn', dict(t=64, d=4, n=32), 0),
    ],
)
def test_the_larger_factor_stays_where_it_is(formula, sizes, least):
    a, b, _ = draw(formula, sizes)
    assert copied(lambda a, b: dot(formula, a, b), a, b) == least


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_results_are_float32_and_gradients_have_the_dtype_of_the_factors(dtype):
    a, b, _ = draw('td,dn->tn', dict(t=3, d=4, n=5), dtype)
    o, vjp = jax.vjp(lambda a, b: dot('td,dn->tn', a, b), a, b)
    assert o.dtype == jnp.float32
    assert {x.dtype for x in vjp(o)} == {jnp.dtype(dtype)}
    assert dense(a[:, None, None, None], b[None]).dtype == jnp.float32
    assert product(a[None], b).shape == (1, 3, 5)
    assert product(a, b).dtype == jnp.dtype(dtype)


def test_other_platforms_use_einsum(monkeypatch):
    monkeypatch.setattr(platform, 'target_platform', lambda: 'tpu')
    a, b, _ = draw('td,tn->dn', dict(t=64, d=4, n=32))
    assert copied(lambda a, b: dot('td,tn->dn', a, b), a, b) == 0


@pytest.mark.parametrize(('policy', 'products'), [('dots_with_no_batch_dims_saveable', 3), ('nothing_saveable', 4)])
def test_remat_keeps_products_with_matrices(policy, products):
    """A product with a matrix has no batch axis, so `model.remat = 'dots'` keeps it."""
    x, layers = jnp.ones((2, 3, 4)), jnp.ones((5, 4, 4))
    layer = jax.checkpoint(lambda x, w: (jnp.sin(product(x, w)), None), policy=getattr(jax.checkpoint_policies, policy))
    gradient = jax.jit(jax.grad(lambda layers: jax.lax.scan(layer, x, layers)[0].sum()))
    assert gradient.lower(layers).compile().as_text().count(' dot(') == products
