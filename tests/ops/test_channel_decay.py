"""A factor per key channel: chunks against the recurrence token by token, at extremes, and failures of other code."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_delta_rule import check, draw

from lm.ops import channel_decay, platform, sequence
from lm.ops.delta_rule import delta_rule, xla
from lm.ops.errors import OperationError
from lm.ops.linear_attention import State, channels, linear_attention


def draw_channels(length, seed=0, dtype=jnp.float32):
    """Returns the arrays of `draw`, and logs of factors [B, L, K, E]: moderate ones, -1e4 and -inf."""
    arrays = draw(length, seed, dtype)
    keys = jax.random.split(jax.random.key(seed + 20), 2)
    shape = arrays[1].shape
    channels = -jax.nn.softplus(2 * jax.random.normal(keys[0], shape) - 1)
    drawn = jax.random.uniform(keys[1], shape)
    return *arrays, jnp.where(drawn < 0.03, -1e4, jnp.where(drawn > 0.97, -jnp.inf, channels))


def results(arrays, implementation):
    """Returns outputs, the last state, and the gradients of a function of both by all arrays."""

    def loss(*arrays):
        *tokens, state, channels = arrays
        o, state = delta_rule(
            *tokens,
            channel_log_decay_BxLxKxE=channels,
            initial_state=state,
            return_state=True,
            implementation=implementation,
        )
        return jnp.sin(o.astype(jnp.float32)).sum() + (state**2).sum(), (o, state)

    (_, outputs), gradients = jax.jit(jax.value_and_grad(loss, range(len(arrays)), has_aux=True))(*arrays)
    return [*outputs, *gradients]


@pytest.mark.parametrize('length', [1, 65, 130])
def test_chunks_agree_with_the_recurrence(length, monkeypatch):
    monkeypatch.setattr(xla, 'SEGMENT', 128)
    arrays = draw_channels(length)
    check(results(arrays, 'xla'), results(arrays, 'reference'), 2e-6)


def test_bfloat16():
    arrays = draw_channels(130, dtype=jnp.bfloat16)
    check(results(arrays, 'xla')[:2], results(arrays, 'reference')[:2], 1e-2)


@pytest.mark.parametrize('log_factor', [0.0, -1e-8, -1.0, -104.0, -1e4])
def test_equal_keys_with_factors_of_any_size(log_factor):
    """Each token turns around what its key held, β = 2; half of the channels fade."""
    q, k, v, *_ = draw(128)
    k = jnp.broadcast_to(k[:, :1], k.shape)
    channels = jnp.full(k.shape, log_factor).at[..., ::2].set(0.0)
    no_decay = jnp.zeros(k.shape[:3])
    arrays = (q, k, v, jnp.full(k.shape[:3], 2.0), no_decay, jnp.zeros((2, 2, 8, 12)), channels)
    check(results(arrays, 'xla'), results(arrays, 'reference'), 1e-3)


def test_equal_channels_are_one_factor_per_head():
    q, k, v, beta, decay, _ = draw(100)
    channels = jnp.broadcast_to(decay[..., None], k.shape)
    found = delta_rule(q, k, v, beta, channel_log_decay_BxLxKxE=channels)
    np.testing.assert_allclose(found, delta_rule(q, k, v, beta, decay), atol=2e-6)


def test_forgotten_channels_and_later_tokens_change_nothing():
    q, k, v, beta, decay, state, channels = draw_channels(100)
    channels = channels.at[:, 70].set(-jnp.inf)

    def outputs(k, v):
        return delta_rule(q, k, v, beta, decay, channel_log_decay_BxLxKxE=channels, initial_state=state)

    whole, wild = outputs(k, v), outputs(k.at[:, 30].mul(50), v.at[:, 30].set(1e4))
    np.testing.assert_array_equal(whole[:, 70:], wild[:, 70:])
    np.testing.assert_array_equal(whole[:, :30], wild[:, :30])


def test_weights_agree_with_sums_of_logs_in_float64():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(3, 32, 5)), rng.normal(size=(32, 5))
    log = -rng.gamma(0.3, 4.0, size=(32, 5))
    sums = np.cumsum(log, axis=0)
    factors = np.exp(np.minimum(sums[:, None] - sums[None], 0.0))
    expected = np.tril(np.einsum('gie,je,ije->gij', q, k, factors), -1)
    pairs, since, until, _ = channel_decay.weigh(*(jnp.asarray(x, jnp.float32) for x in (q, k, log)))
    np.testing.assert_allclose(pairs, expected, atol=2e-6)
    np.testing.assert_allclose(since, np.exp(sums), rtol=1e-5)
    np.testing.assert_allclose(until, np.exp(sums[-1] - sums), rtol=1e-5, atol=1e-12)


def linear_results(arrays, implementation):
    """Returns outputs, the last state, and the gradients of linear attention."""

    def loss(*arrays):
        q, k, v, _, decay, kv, logs = arrays
        o, state = linear_attention(
            q,
            k,
            v,
            log_decay_BxLxK=decay,
            channel_log_decay_BxLxKxE=logs,
            normalize=False,
            initial_state=State(kv, (jnp.zeros(kv.shape[:3]),)),
            return_state=True,
            implementation=implementation,
        )
        return jnp.sin(o.astype(jnp.float32)).sum() + (state.kv_BxKxRxD**2).sum(), (o, state.kv_BxKxRxD)

    wanted = (0, 1, 2, 4, 5, 6)
    (_, outputs), gradients = jax.jit(jax.value_and_grad(loss, wanted, has_aux=True))(*arrays)
    return [*outputs, *gradients]


@pytest.mark.parametrize('length', [1, 130])
def test_linear_attention_agrees_with_the_recurrence(length, monkeypatch):
    monkeypatch.setattr(channels, 'SEGMENT', 64)
    arrays = draw_channels(length)
    check(linear_results(arrays, 'xla'), linear_results(arrays, 'reference'), 2e-6)


@pytest.mark.parametrize('log_factor', [0.0, -1e-8, -104.0, -1e4])
def test_linear_attention_takes_factors_of_any_size(log_factor):
    q, k, v, beta, decay, state, logs = draw_channels(70)
    arrays = (q, k, v, beta, jnp.zeros_like(decay), state, jnp.full_like(logs, log_factor))
    # Outputs reach 30, where the sine of the loss has lost four bits.
    check(linear_results(arrays, 'xla'), linear_results(arrays, 'reference'), 2e-5)


def test_parts_of_a_window():
    q, k, v, _, decay, _, logs = draw_channels(120)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), (platform.SEQUENCE_AXIS,))

    def attend(q, k, v, decay, logs):
        return linear_attention(
            q, k, v, log_decay_BxLxK=decay, channel_log_decay_BxLxKxE=logs, normalize=False, implementation='xla'
        )

    def outputs_and_gradients(function):
        o, pull = jax.vjp(function, q, k, v, decay, logs)
        return o, *pull(jnp.cos(jnp.arange(o.size)).reshape(o.shape))

    with jax.set_mesh(mesh):
        found = jax.jit(lambda: outputs_and_gradients(sequence.over_tokens(attend, (1,) * 5)))()
    check(found, jax.jit(lambda: outputs_and_gradients(attend))(), 2e-6)


def test_other_weights_have_no_factors_per_channel():
    q, k, v, *_, logs = draw_channels(4)
    with pytest.raises(OperationError, match='channel_log_decay: has no denominator and is causal; set normalize'):
        linear_attention(q, k, v, channel_log_decay_BxLxKxE=logs)
    with pytest.raises(OperationError, match='channel_log_decay: takes plain features alone; leave powers'):
        linear_attention(q, k, v, channel_log_decay_BxLxKxE=logs, powers=(0.0, 0.0, 1.0), normalize=False)


# Failures that users of flash-linear-attention (fla) reported. The numbers are its issues.


def test_fla_77_sums_without_the_own_factor_do_not_overflow():
    """The first token of a block forgets all; the sums of that code left its own factor out, and exp overflowed."""
    q, k, v, beta, _, state, channels = draw_channels(130)
    channels = channels.at[:, ::16].set(-1e4)
    arrays = (q, k, v, beta, jnp.zeros(k.shape[:3]), state, channels)
    check(results(arrays, 'xla'), results(arrays, 'reference'), 2e-6)


def test_fla_99_strong_decay_leaves_no_nan_in_the_systems():
    """The logs of one chunk add up to -5,000, for each head and for each channel."""
    q, k, v, beta, _, state = draw(130)
    arrays = (q, k, v, beta, jnp.full(k.shape[:3], -40.0), state, jnp.full(k.shape, -40.0))
    check(results(arrays, 'xla'), results(arrays, 'reference'), 2e-6)


def test_fla_122_long_sequences_of_gated_linear_attention_stay_finite():
    """One head, 43,884 tokens: the length of the report."""
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, logits = (jax.random.normal(key, (1, 43_884, 1, 4)) for key in keys)
    logs = jax.nn.log_sigmoid(10 * logits)
    found, expected = (
        linear_attention(q, k, v, channel_log_decay_BxLxKxE=logs, normalize=False, implementation=name)
        for name in ('xla', 'reference')
    )
    check([found], [expected], 2e-6)


@pytest.mark.parametrize('by_channel', [False, True])
def test_fla_736_long_keys_are_scaled_before_the_systems(by_channel):
    """Normally distributed keys of size 64: with keys of length 8 each token would multiply the state by up to -63."""
    q, k, v, beta = (jax.random.normal(key, (1, 64, 1, 64)) for key in jax.random.split(jax.random.key(42), 4))
    decay = {'channel_log_decay_BxLxKxE': jnp.zeros(k.shape)} if by_channel else {}
    arrays = *(x.astype(jnp.bfloat16) for x in (q, k, v)), jax.nn.sigmoid(beta[..., 0])
    found, expected = (
        delta_rule(*arrays, **decay, query_length=1.0, implementation=name) for name in ('xla', 'reference')
    )
    check([found], [expected], 2e-2)


@pytest.mark.parametrize('by_channel', [False, True])
def test_fla_1187_states_hold_values_beyond_half_precision(by_channel):
    q, k, v, beta, _, _, logs = draw_channels(130, dtype=jnp.bfloat16)
    decay = {'channel_log_decay_BxLxKxE': logs} if by_channel else {}
    found, expected = (
        delta_rule(q, k, 1e5 * v, beta, **decay, return_state=True, implementation=name)
        for name in ('xla', 'reference')
    )
    assert found[1].dtype == jnp.float32
    check(found, expected, 1e-2)
