"""Mechanisms with decay or the delta rule: the operations, and retention with its norm."""

from unittest import mock

import jax.numpy as jnp
import numpy as np
import torch
from attention import ALIKE, GROUPED, B, D, H, L, module
from ledger import compares, draw, values_and_gradients
from strangers import fla, head_first
from torch.nn import functional as F

from lm.attention.recurrent.retention import Retention
from lm.ops.delta_rule import delta_rule
from lm.ops.exact_attention import softmax_attention
from lm.ops.linear_attention import linear_attention


def double(function):
    """Runs a function of fla in float64; it would convert its arguments to float32."""

    def run(*arrays, **options):
        wide = dict.fromkeys(('float32', 'float'), torch.float64)
        with mock.patch.multiple(torch, **wide), mock.patch.object(torch.Tensor, 'float', torch.Tensor.double):
            return function(*arrays, **options)

    return run


def factors(seed: int, heads: int) -> np.ndarray:
    """Returns logs of factors of at most 0.9."""
    (x,) = draw(seed, (B, L, heads))
    return -np.logaddexp(0, x - 2)


@compares('retention, the mechanism', 'fla-core naive_retention, torch rms_norm')
def _(dtype):
    naive = head_first(double(fla('ops/retention/naive').naive_retention))
    theirs = lambda *qkv: F.rms_norm(naive(*qkv), (D,), eps=1e-5)  # noqa: E731
    return values_and_gradients(module(Retention()), theirs, draw(30, *ALIKE), dtype)


def faded_row(name, against, **options):
    @compares(f'linear attention with factors, {name}', f'fla-core {against}')
    def row(dtype):
        ours = lambda q, k, v, g: linear_attention(q, k, v, log_decay_BxLxK=g, normalize=False, **options)  # noqa: E731
        naive = double(getattr(fla('ops/simple_gla/naive'), against))
        theirs = lambda *arrays: naive(*arrays, scale=1.0)[0]  # noqa: E731
        return values_and_gradients(ours, theirs, [*draw(31, *ALIKE), factors(32, H)], dtype)


faded_row('blocks of 16', 'naive_chunk_simple_gla', block=16)
faded_row('token by token', 'naive_recurrent_simple_gla', implementation='reference')


@compares('softmax with factors, grouped heads', 'fla-core naive_forgetting_attn')
def _(dtype):
    ours = lambda q, k, v, g: softmax_attention(q, k, v, log_decay_BxMxK=g, implementation='xla')  # noqa: E731
    naive = double(fla('ops/forgetting_attn/naive').naive_forgetting_attn)
    theirs = lambda q, k, v, g: naive(q, k, v, g.repeat_interleave(2, dim=2))  # noqa: E731
    return values_and_gradients(ours, theirs, [*draw(33, *GROUPED), factors(34, 2)], dtype)


def delta_row(name, against, theirs, with_factors, implementation):
    @compares(f'delta rule, {name}', f'fla-core {against}')
    def row(dtype):
        q, k, v = draw(35, *ALIKE)
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        (x,) = draw(36, (B, L, H))
        arrays = [q, k, v, 2 / (1 + np.exp(-x)), *([factors(37, H)] if with_factors else [])]
        ours = lambda q, *rest: delta_rule(q * D**-0.5, *rest, implementation=implementation)  # noqa: E731
        return values_and_gradients(ours, theirs, arrays, dtype)


def recurrence(*arrays):
    heads_first = (x.transpose(1, 2) for x in arrays)
    return double(fla('ops/delta_rule/naive').delta_rule_recurrence)(*heads_first)[0].transpose(1, 2)


def gated(name):
    def run(q, k, v, beta, g):
        naive = double(getattr(fla('ops/gated_delta_rule/naive'), name))
        return naive(q, k, v, beta=beta, g=g)[0]

    return run


delta_row('in chunks', 'delta_rule_recurrence', recurrence, False, 'xla')
delta_row('token by token', 'delta_rule_recurrence', recurrence, False, 'reference')
for against in ('naive_recurrent_gated_delta_rule', 'naive_chunk_gated_delta_rule'):
    delta_row('with factors, in chunks', against, gated(against), True, 'xla')


def by_channel(name):
    def run(q, k, v, beta, g):
        return double(getattr(fla('ops/kda/naive'), name))(q, k, v, g, beta, scale=1.0)[0]

    return run


def channel_row(against, implementation):
    @compares(f'delta rule, with a factor per channel, {implementation}', f'fla-core {against}')
    def row(dtype):
        q, k, v = draw(38, *ALIKE)
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        x, logits = draw(39, (B, L, H), k.shape)
        ours = lambda q, k, v, beta, g: delta_rule(  # noqa: E731
            q, k, v, beta, channel_log_decay_BxLxKxE=g, implementation=implementation
        )
        arrays = [q * D**-0.5, k, v, 2 / (1 + np.exp(-x)), -np.logaddexp(0, logits - 2)]
        return values_and_gradients(ours, by_channel(against), arrays, dtype)


channel_row('naive_recurrent_kda', 'xla')
channel_row('naive_chunk_kda', 'xla')
channel_row('naive_recurrent_kda', 'reference')


GATED_DELTA = [(B, L, 2, D), (B, L, 2, D), (B, L, H, 2 * D)]
"""Sizes of Gated DeltaNet, made small: half as many keys as values, which are twice as wide."""
MAMBA = [(B, L, 1, 2 * D), (B, L, 1, 2 * D), (B, L, H, D)]
"""Sizes of Mamba-2, made small: all heads share a key, which is twice as wide as a value."""


def repeat(x):
    """Repeats key heads for all value heads, as a layer with `n_value_heads` does."""
    return x.repeat_interleave(H // x.shape[2], 2) if torch.is_tensor(x) else jnp.repeat(x, H // x.shape[2], 2)


def unequal_delta_row(against, implementation, theirs, per_channel):
    what = f'delta rule, sizes of Gated DeltaNet{", a factor per channel" if per_channel else ""}'

    @compares(f'{what}, {implementation}', f'fla-core {against}')
    def row(dtype):
        q, k, v = draw(42, *GATED_DELTA)
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        x, logits = draw(43, (B, L, H), (B, L, H, D) if per_channel else (B, L, H))
        name = 'channel_log_decay_BxLxKxE' if per_channel else 'log_decay_BxLxK'
        ours = lambda q, k, v, beta, g: delta_rule(  # noqa: E731
            repeat(q), repeat(k), v, beta, **{name: g}, implementation=implementation
        )
        arrays = [q, k, v, 2 / (1 + np.exp(-x)), -np.logaddexp(0, logits - 2)]
        return values_and_gradients(ours, theirs, arrays, dtype)


def repeated(name):
    return lambda q, k, *rest: gated(name)(repeat(q) * D**0.5, repeat(k), *rest)


for implementation, form in (('xla', 'recurrent'), ('xla', 'chunk'), ('reference', 'recurrent')):
    name = f'naive_{form}_gated_delta_rule'
    unequal_delta_row(name, implementation, repeated(name), False)
    unequal_delta_row(f'naive_{form}_kda', implementation, by_channel(f'naive_{form}_kda'), True)


def mamba_row(against, **options):
    form = options.get('implementation', 'blocks of 16')

    @compares(f'linear attention with factors, sizes of Mamba-2, {form}', f'fla-core {against}')
    def row(dtype):
        ours = lambda q, k, v, g: linear_attention(  # noqa: E731
            repeat(q), repeat(k), v, log_decay_BxLxK=g, normalize=False, **options
        )
        naive = double(getattr(fla('ops/simple_gla/naive'), against))
        theirs = lambda q, k, v, g: naive(repeat(q), repeat(k), v, g, scale=1.0)[0]  # noqa: E731
        return values_and_gradients(ours, theirs, [*draw(45, *MAMBA), factors(46, H)], dtype)


mamba_row('naive_chunk_simple_gla', block=16)
mamba_row('naive_recurrent_simple_gla', implementation='reference')


def channel_attention_row(sizes, implementation, shapes):
    @compares(f'linear attention with a factor per channel, {sizes}, {implementation}', 'fla-core naive_recurrent_gla')
    def row(dtype):
        naive = double(fla('ops/gla/naive').naive_recurrent_gla)
        size = shapes[1][-1]
        theirs = lambda q, k, v, g: naive(repeat(q) * size**0.5, repeat(k), v, g)[0]  # noqa: E731
        ours = lambda q, k, v, g: linear_attention(  # noqa: E731
            repeat(q), repeat(k), v, channel_log_decay_BxLxKxE=g, normalize=False, implementation=implementation
        )
        arrays = [*draw(47, *shapes), -np.logaddexp(0, draw(48, (B, L, H, size))[0] - 2)]
        return values_and_gradients(ours, theirs, arrays, dtype)


for implementation in ('xla', 'reference'):
    channel_attention_row('values twice as wide', implementation, GATED_DELTA)
    channel_attention_row('sizes of Mamba-2', implementation, MAMBA)


@compares('linear attention with a factor per channel', 'fla-core naive_recurrent_gla')
def _(dtype):
    naive = lambda *arrays: double(fla('ops/gla/naive').naive_recurrent_gla)(*arrays)[0]  # noqa: E731
    ours = lambda q, k, v, g: linear_attention(  # noqa: E731
        q * D**-0.5, k, v, channel_log_decay_BxLxKxE=g, normalize=False, implementation='xla'
    )
    arrays = [*draw(40, *ALIKE), -np.logaddexp(0, draw(41, ALIKE[1])[0] - 2)]
    return values_and_gradients(ours, naive, arrays, dtype)
