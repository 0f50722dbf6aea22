"""Arrays have the shapes that the names of arguments, call fields and results state."""

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from shape_checks import ShapeError, checked, checked_calls

from lm.ops import (
    cross_entropy,
    delta_rule,
    exact_attention,
    gated_units,
    linear_attention,
    rotary,
    short_convolution,
    sketch_networks,
)
from lm.ops.exact_attention import cache
from lm.ops.linear_attention import LinearResult

B, L, H, K, D, E = 2, 12, 4, 2, 8, 6


def zeros(*shape: int, dtype=jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


QKV = {'q': zeros(B, L, H, D), 'k': zeros(B, L, K, D), 'v': zeros(B, L, K, D)}
LOG_DECAY, STARTS = -jnp.ones((B, L, K)), zeros(B, L, dtype=jnp.int32)


@pytest.mark.parametrize('implementation', ['xla', 'reference'])
@pytest.mark.parametrize(
    'options', [{}, {'log_decay_BxMxK': LOG_DECAY}, {'starts_BxL': STARTS, 'block': 8}], ids=['', 'decay', 'documents']
)
def test_exact_attention(options, implementation):
    with checked_calls(exact_attention.SOFTMAX) as softmax, checked_calls(exact_attention.POLYNOMIAL) as polynomial:
        options = {'implementation': implementation, **options}
        checked(exact_attention.softmax_attention)(*QKV.values(), window=5, **options)
        checked(exact_attention.polynomial_attention)(*QKV.values(), degree=2, **options)
    assert len(softmax) == len(polynomial) == 1


def test_the_cache_of_exact_attention():
    state = cache.empty(B, L, K, D, jnp.float32, decays=True)
    for store in (cache.append, cache.slide):
        checked(store)(state, zeros(B, 3, K, D), zeros(B, 3, K, D), zeros(B, 3, K))


@pytest.mark.parametrize('implementation', ['xla', 'reference'])
@pytest.mark.parametrize('rows', [(), (B,)], ids=['one for all rows', 'a row each'])
def test_rotary(rows, implementation):
    angles = rotary.Rotation(zeros(*rows, L, 1, D // 2), zeros(*rows, L, 1, D // 2))
    norms = rotary.HeadNorms(*(zeros(D) for _ in range(4)))
    roots = rotary.RootNorms(zeros(D), zeros(D), 1e-5)
    with checked_calls(rotary.IMPLEMENTATIONS) as calls:
        checked(rotary.rotate)(zeros(B, L, H + K, D), angles, H, norms, roots, implementation=implementation)
    assert len(calls) == 1


@pytest.mark.parametrize('implementation', ['xla', 'reference'])
def test_cross_entropy(implementation):
    arrays = (zeros(B, L, D), zeros(20, D), zeros(20), zeros(B, L, dtype=jnp.int32))
    with checked_calls(cross_entropy.IMPLEMENTATIONS) as calls:
        for normalizer in (False, True):
            loss = checked(cross_entropy.cross_entropy)
            loss(*arrays, normalizer=normalizer, implementation=implementation)
        loss = checked(cross_entropy.weighted_cross_entropy)
        loss(*arrays, zeros(B, L), z_loss=1e-4, implementation=implementation)
    assert len(calls) == 3


@pytest.mark.parametrize('implementation', ['xla', 'reference'])
@pytest.mark.parametrize('case', ['plain', 'state', 'decay', 'local'])
def test_linear_attention(case, implementation):
    options = {
        'plain': {},
        'state': {'return_state': True},
        'decay': {'log_decay_BxLxK': LOG_DECAY, 'return_state': True},
        'local': {
            'powers': linear_attention.SQUARE,
            'local': linear_attention.PolynomialKernel(2),
            'q_local_BxLxHxC': zeros(B, L, H, 3),
            'k_local_BxLxKxC': zeros(B, L, K, 3),
        },
    }[case]
    attend = checked(linear_attention.linear_attention, LinearResult)
    arrays = (zeros(B, L, H, E) + 0.1, zeros(B, L, K, E) + 0.1, zeros(B, L, K, D))
    with checked_calls(linear_attention.IMPLEMENTATIONS) as calls:
        found = attend(*arrays, **options, implementation=implementation)
        if case == 'state':
            attend(*arrays, initial_state=found[1], return_state=True, implementation=implementation)
    assert calls


@pytest.mark.parametrize('implementation', ['xla', 'reference'])
@pytest.mark.parametrize('decay', [None, LOG_DECAY], ids=['', 'decay'])
def test_delta_rule(decay, implementation):
    run = checked(delta_rule.delta_rule, delta_rule.DeltaResult)
    arrays = (zeros(B, L, H, E), zeros(B, L, K, E), zeros(B, L, K, D), zeros(B, L, K), decay)
    with checked_calls(delta_rule.IMPLEMENTATIONS) as calls:
        _, state = run(*arrays, return_state=True, implementation=implementation)
        run(*arrays, initial_state=state, query_length=1.0, implementation=implementation)
    assert len(calls) == 2


def test_short_convolution():
    with checked_calls(short_convolution.IMPLEMENTATIONS) as calls:
        convolve = checked(short_convolution.short_convolution)
        convolve(zeros(B, L, 7), zeros(4, 7), zeros(B, 3, 7), zeros(B, L, dtype=jnp.int32))
        convolve(zeros(B, L, 7), zeros(4, 7))
    assert len(calls) == 2


def test_gated_units():
    with checked_calls(gated_units.IMPLEMENTATIONS) as calls:
        units = checked(gated_units.gated_units)
        norm = gated_units.Norm(zeros(D), None, centred=False, epsilon=1e-5)
        for implementation in ('xla', 'reference'):
            units(zeros(L, D), zeros(D, 2 * E), zeros(E, D), norm=norm, implementation=implementation)
    assert len(calls) == 2


def networks(size: int, r: int = 5, n: int = 2, hidden: int = 3) -> sketch_networks.Node:
    def level(m: int) -> sketch_networks.LevelWeights:
        return sketch_networks.LevelWeights(zeros(n, 1, m), zeros(n, 1, m), zeros(n, m, hidden), zeros(n, hidden, r))

    network = sketch_networks.NetworkWeights(level(size), level(r))
    return sketch_networks.Node(network, network)


@pytest.mark.parametrize('implementation', ['xla', 'reference'])
def test_sketch_networks(implementation):
    """Queries and keys have different numbers of heads, in a tree of three nodes."""
    nodes = (networks(D), networks(D), networks(5))
    with checked_calls(sketch_networks.IMPLEMENTATIONS) as calls:
        sketch = checked(sketch_networks.sketch_networks)
        sketch(nodes, zeros(B, L, 2, 4, D), zeros(B, L, 2, 1, D), implementation=implementation)
    assert len(calls) == 1


def test_a_wrong_shape_raises():
    keys_of_other_heads = (QKV['q'], QKV['k'], zeros(B, L, H, D))
    with pytest.raises(ShapeError, match=r'v_BxMxKxD: float32\[2, 12, 4, 8\]'):
        checked(exact_attention.softmax_attention)(*keys_of_other_heads)
    call = exact_attention.SoftmaxCall(*keys_of_other_heads, scale=1.0)
    with checked_calls(exact_attention.SOFTMAX), pytest.raises(ShapeError, match='v_BxMxKxD'):
        exact_attention.SOFTMAX.choose(None, call)
    with pytest.raises(ShapeError, match='starts_BxL'):  # floats
        checked(exact_attention.softmax_attention)(*QKV.values(), starts_BxL=zeros(B, L))


def test_a_wrong_ending_raises():
    class Result(NamedTuple):
        y_BxM: jax.Array

    def named(x_BxL: jax.Array) -> Result:
        return Result(x_BxL)

    def mistaken(x_BxL: jax.Array) -> Result:
        return Result(x_BxL.T)

    def annotated(x_BxL: jax.Array) -> Annotated[jax.Array, 'LxB']:
        return x_BxL

    def longer(x_BxLx1: jax.Array) -> None:
        pass

    checked(named)(zeros(2, 3))
    for function in (mistaken, annotated, longer):
        with pytest.raises(ShapeError):
            checked(function)(zeros(2, 3))
