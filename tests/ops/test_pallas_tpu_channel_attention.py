"""The TPU kernels of linear attention with a factor per key channel, interpreted, against the recurrence by token."""

import functools

import grids
import interpreter
import jax
import jax.numpy as jnp
import nearness
import numpy as np
import pytest
from interpreter import interpret_kernels, interpret_plainly
from test_channel_decay import draw_channels

from lm.ops import platform, sequence
from lm.ops.linear_attention import LinearCall, Options, State, linear_attention, reference
from lm.ops.linear_attention.tpu import attention, part
from lm.ops.tpu import chunks

pytestmark = pytest.mark.usefixtures('no_races')
NAMES = ('o', 'state', 'dq', 'dk', 'dv', 'dg', 'dstate', 'dchannels')
assert_near = functools.partial(nearness.assert_near, NAMES)


def attend(implementation, q, k, v, decay, kv, logs):
    state, options = State(kv, (jnp.zeros(kv.shape[:3]),)), Options(normalize=False)
    tokens = dict(log_decay_BxLxK=decay, channel_log_decay_BxLxKxE=logs)
    call = LinearCall(q, k, v, initial_state=state, with_state=True, options=options, **tokens)
    found = implementation.linear_attention(call)
    return found.o_BxLxHxD, found.state.kv_BxKxRxD


def both(implementation, *arrays):
    """Returns outputs, the last state, and the gradients of all arrays."""
    (o, state), pull = jax.vjp(functools.partial(attend, implementation), *arrays)
    wanted = jnp.cos(jnp.arange(o.size)).reshape(o.shape).astype(o.dtype)
    return o, state, *pull((wanted, jnp.sin(jnp.arange(state.size)).reshape(state.shape)))


kernels = jax.jit(functools.partial(both, attention))
recurrence = jax.jit(functools.partial(both, reference))


def draw(length, dtype=jnp.float32):
    """Returns queries of four heads; keys of 8 and values of 12 numbers of two; log factors; the state."""
    q, k, v, _, *rest = draw_channels(length, seed=length, dtype=dtype)
    return q, k, v, *rest


def by_kernels(arrays):
    with interpret_kernels():
        return kernels(*arrays)


@pytest.mark.parametrize(('length', 'dtype', 'tolerance'), [(150, jnp.float32, 1e-5), (128, jnp.bfloat16, 1.5e-2)])
def test_kernels_agree_with_the_recurrence(length, dtype, tolerance):
    """Two queries per key head, values wider than keys, factors of 0 for heads and for channels, an initial state."""
    arrays = draw(length, dtype)
    assert_near(by_kernels(arrays), recurrence(*(a.astype(jnp.float32) for a in arrays)), tolerance)


def test_any_order_of_heads_on_two_cores(monkeypatch):
    """Each head is a grid step of its own; the interpreter shuffles them, and spreads them over two cores."""
    arrays = draw(130)
    monkeypatch.setattr(chunks, 'MOST_HEADS', 1)
    monkeypatch.setattr(interpreter, 'cores', 2)
    with interpret_kernels():
        got = jax.jit(functools.partial(both, attention))(*arrays)
    assert_near(got, recurrence(*arrays), 1e-5)


@pytest.mark.parametrize('log_factor', grids.draw([0.0, -1e-8, -104.0, -1e4], 2))
def test_factors_of_any_size(log_factor):
    *tokens, decay, state, logs = draw(150)
    logs = jnp.full_like(logs, log_factor).at[..., ::2].set(0.0)
    arrays = (*tokens, jnp.zeros_like(decay), state, logs)
    assert_near(by_kernels(arrays), recurrence(*arrays), 1e-5)


def test_later_and_forgotten_tokens_change_nothing():
    """Two documents, and a channel that forgets alone."""
    q, k, v, decay, state, logs = draw(150)
    logs = logs.at[:, 100].set(-jnp.inf).at[:, 120, :, 3].set(-jnp.inf)
    o = by_kernels((q, k, v, decay, state, logs))[0]
    k_wild = k.at[:, 90].mul(50).at[:, 110, :, 3].set(1e4)
    wild = by_kernels((q, k_wild, v.at[:, 90].set(1e4), decay, state, logs))[0]
    np.testing.assert_array_equal(o[:, :90], wild[:, :90])
    np.testing.assert_array_equal(o[:, 100:110], wild[:, 100:110])
    np.testing.assert_array_equal(o[:, 120:], wild[:, 120:])
    assert (o[:, 110:120] != wild[:, 110:120]).any()


def test_parts_of_a_window():
    q, k, v, decay, _, logs = draw(260)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), (platform.SEQUENCE_AXIS,))

    def run(implementation, q, k, v, decay, logs):
        options, tokens = Options(normalize=False), dict(log_decay_BxLxK=decay, channel_log_decay_BxLxKxE=logs)
        return implementation.linear_attention(LinearCall(q, k, v, options=options, **tokens)).o_BxLxHxD

    def on_parts(*tokens):
        return sequence.over_tokens(functools.partial(run, part), (1,) * 5)(*tokens)

    def outputs_and_gradients(function, *tokens):
        o, pull = jax.vjp(function, *tokens)
        return o, *pull(jnp.cos(jnp.arange(o.size)).reshape(o.shape))

    tokens = (q, k, v, decay, logs)
    with jax.set_mesh(mesh), interpret_plainly():
        got = jax.jit(functools.partial(outputs_and_gradients, on_parts))(*tokens)
    expected = jax.jit(functools.partial(outputs_and_gradients, functools.partial(run, reference)))(*tokens)
    for a, e in zip(got, expected, strict=True):
        assert np.linalg.norm(a - e) <= 1e-5 * np.linalg.norm(e)


def test_tpus_compute_long_calls_by_kernels_and_decode_by_xla(monkeypatch):
    """A state continues a window: the token after it is the last token of a longer window."""
    q, k, v, decay, _, logs = draw(129)
    options = dict(normalize=False, return_state=True)
    monkeypatch.setattr(platform, 'target_platform', lambda: 'tpu')

    def tokens(part):
        return [x[:, part] for x in (q, k, v)], {
            'log_decay_BxLxK': decay[:, part],
            'channel_log_decay_BxLxKxE': logs[:, part],
        }

    with platform.choices() as chosen, interpret_plainly():
        arrays, gates = tokens(slice(0, 128))
        _, state = linear_attention(*arrays, **gates, **options)
        assert chosen == {'linear attention': 'pallas_tpu'}
        arrays, gates = tokens(slice(128, 129))
        last, _ = linear_attention(*arrays, **gates, **options, initial_state=state)
        assert chosen == {'linear attention': 'xla'}
    arrays, gates = tokens(slice(0, 129))
    whole, _ = linear_attention(*arrays, **gates, **options, implementation='reference')
    np.testing.assert_allclose(last, whole[:, 128:], rtol=1e-4, atol=1e-5)
