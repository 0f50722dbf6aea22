"""The TPU kernels of the delta rule with a factor per key channel, interpreted, against the recurrence by token."""

import functools
import itertools

import grids
import interpreter
import jax
import jax.numpy as jnp
import nearness
import numpy as np
import pytest
from interpreter import interpret_kernels, interpret_plainly
from test_channel_decay import draw_channels
from test_pallas_tpu_delta import both, of_arrays, outputs_and_gradients

from lm.ops import platform, sequence
from lm.ops.delta_rule import DeltaCall, reference
from lm.ops.delta_rule.tpu import parts, rule
from lm.ops.tpu import channel_pairs, chunks

LENGTH = 150  # of all that runs in float32: the kernels take half a minute to compile
NAMES = ('o', 'state', 'dq', 'dk', 'dv', 'dbeta', 'dg', 'dstate', 'dchannels')
assert_near = functools.partial(nearness.assert_near, NAMES)
kernels = {by_products: jax.jit(functools.partial(both, of_arrays(rule))) for by_products in (False, True)}
"""The kernels; True: products sum logs in blocks of 8 tokens, as on a v4."""
recurrence = jax.jit(functools.partial(both, of_arrays(reference)))


def by_kernels(arrays, by_products=False):
    with pytest.MonkeyPatch.context() as patch, interpret_kernels():
        patch.setattr(platform, 'rotates_by_steps', lambda: by_products)
        return kernels[by_products](*arrays)


@pytest.mark.parametrize(
    ('length', 'dtype', 'tolerance', 'by_products'),
    [
        *grids.draw([(128, jnp.bfloat16, 2e-2, False), (128, jnp.bfloat16, 2e-2, True)], 1),
        *grids.draw([(LENGTH, jnp.float32, 3e-5, False), (LENGTH, jnp.float32, 3e-5, True)], 1),
    ],
)
def test_kernels_agree_with_the_recurrence(length, dtype, tolerance, by_products):
    """Two queries per key head, factors of 0 for heads and for channels, β from 0 to 2, an initial state."""
    q, k, v, beta, *rest = draw_channels(length, seed=length, dtype=dtype)
    arrays = (q, k, v, beta.at[:, 5:9].set(0.0), *rest)
    assert_near(by_kernels(arrays, by_products), recurrence(*(a.astype(jnp.float32) for a in arrays)), tolerance)


@pytest.mark.usefixtures('no_races')
def test_any_order_of_heads_on_two_cores(monkeypatch):
    """Each head is a grid step of its own; the interpreter shuffles them, and spreads them over two cores."""
    arrays = draw_channels(130)
    monkeypatch.setattr(chunks, 'MOST_HEADS', 1)
    monkeypatch.setattr(interpreter, 'cores', 2)
    with interpret_kernels():
        got = jax.jit(functools.partial(both, of_arrays(rule)))(*arrays)
    assert_near(got, recurrence(*arrays), 3e-5)


@pytest.mark.parametrize(('log_factor', 'by_products'), grids.draw(itertools.product([0.0, -1e4], [False, True]), 2))
def test_equal_keys_with_factors_of_any_size(log_factor, by_products):
    q, k, v, *_ = draw_channels(LENGTH)
    k = jnp.broadcast_to(k[:, :1], k.shape)
    logs = jnp.full(k.shape, log_factor, jnp.float32).at[..., ::2].set(0.0)
    none = jnp.zeros(k.shape[:3])
    arrays = (q, k, v, jnp.full(k.shape[:3], 2.0, jnp.float32), none, jnp.zeros((2, 2, 8, 12)), logs)
    assert_near(by_kernels(arrays, by_products), recurrence(*arrays), 1e-3)


@pytest.mark.parametrize('by_products', [False, True])
def test_later_and_forgotten_tokens_change_nothing(by_products):
    *arrays, logs = draw_channels(LENGTH)
    q, k, v, *rest = arrays
    logs = logs.at[:, 140].set(-jnp.inf)
    o = by_kernels((*arrays, logs), by_products)[0]
    wild = by_kernels((q, k.at[:, 130].mul(50), v.at[:, 130].set(1e4), *rest, logs), by_products)[0]
    np.testing.assert_array_equal(o[:, :130], wild[:, :130])
    np.testing.assert_array_equal(o[:, 140:], wild[:, 140:])


@pytest.mark.parametrize('by_products', [False, True])
def test_gradients_of_sums_of_logs(monkeypatch, by_products):
    monkeypatch.setattr(channel_pairs, '_roll', lambda x, by: jnp.roll(x, by, 0))
    log = -jax.random.gamma(jax.random.key(0), 0.5, (32, 8))

    def sum_logs(log):
        return channel_pairs.sum_levels(log.T, jnp.float32, by_products)

    sums, pull = jax.vjp(sum_logs, log)
    np.testing.assert_allclose(sums.since, np.cumsum(log, axis=0), rtol=1e-5)
    np.testing.assert_allclose(sums.until, np.cumsum(log[::-1], axis=0)[::-1] - log, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sums.total, np.tile(log.sum(0), (8, 1)), rtol=1e-5)
    gradients = jax.tree.map(lambda x: jnp.sin(jnp.arange(x.size, dtype=jnp.float32)).reshape(x.shape), sums)
    gradients = gradients._replace(lasts=[jnp.zeros_like(x) for x in sums.lasts])
    got = channel_pairs.SumGradients(gradients.since, gradients.until, gradients.total)
    for m, of in reversed(list(zip((8, 16), gradients.levels[1:], strict=True))):
        got.add(m, channel_pairs.Parted.of_rows(of, m))
    dlog = got.finish(gradients.levels[0], jnp.float32, by_products)
    np.testing.assert_allclose(dlog, pull(gradients)[0], rtol=1e-4, atol=1e-5)


def test_parts_of_a_window():
    *arrays, logs = draw_channels(300)
    tokens = (*arrays[:5], logs)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), (platform.SEQUENCE_AXIS,))

    def run(implementation, *tokens):
        *others, logs = tokens
        return implementation.delta_rule(DeltaCall(*others, channel_log_decay_BxLxKxE=logs)).o_BxLxHxD

    def on_parts(*tokens):
        return sequence.over_tokens(functools.partial(run, parts), (1,) * len(tokens))(*tokens)

    with jax.set_mesh(mesh), interpret_plainly():
        got = jax.jit(functools.partial(outputs_and_gradients, on_parts))(*tokens)
    expected = jax.jit(functools.partial(outputs_and_gradients, functools.partial(run, reference)))(*tokens)
    for a, e in zip(got, expected, strict=True):
        assert np.linalg.norm(a - e) <= 1e-4 * np.linalg.norm(e)
