"""Attention: the operations and the mechanisms on them, values and gradients."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from ledger import compares, draw, values_and_gradients
from strangers import feature_maps, fla, head_first, mean, performer
from torch.nn import functional as F
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from lm.attention import HeadDims
from lm.attention.performer import Performer
from lm.attention.polynomial import Polynomial
from lm.attention.softmax import Softmax
from lm.attention.taylor import Taylor
from lm.ops.exact_attention import polynomial_attention, softmax_attention
from lm.ops.linear_attention import linear_attention

B, L, H, D = 2, 128, 4, 16
GROUPED = [(B, L, H, D), (B, L, 2, D), (B, L, 2, D)]
ALIKE = [(B, L, H, D)] * 3
DIMS = HeadDims(H, H, D)


def module(config, dims=DIMS, **arrays):
    """Returns the mechanism, with some of its arrays replaced, as a function of queries, keys and values."""

    def apply(q, k, v):
        made = config.build(dims, nnx.Rngs(params=0, projections=1))
        for name, array in arrays.items():
            holder, *rest = name.split('__')
            at = getattr(made, holder)
            at = getattr(at, rest[0]) if rest else at
            at.set_value(jnp.asarray(array, q.dtype))
        return made(q, k, v)

    return apply


def softmax_row(name, theirs, against, shapes=GROUPED, **options):
    @compares(f'softmax, {name}', against)
    def row(dtype):
        ours = functools.partial(softmax_attention, implementation='xla', **options)
        return values_and_gradients(ours, theirs, draw(0, *shapes), dtype)


def naive(**options):
    return lambda *qkv: fla('ops/attn/naive').naive_parallel_attn(*qkv, **options)[0]


FLA = 'fla-core naive_parallel_attn'
softmax_row('grouped heads', naive(), FLA)
softmax_row('window of 17', naive(window_size=17), FLA, window=17)
softmax_row('scale 0.7, both ways', naive(scale=0.7, causal=False), FLA, scale=0.7, causal=False)


@compares('softmax, the mechanism', 'torch scaled_dot_product_attention')
def _(dtype):
    sdpa = head_first(functools.partial(F.scaled_dot_product_attention, is_causal=True))
    return values_and_gradients(module(Softmax()), sdpa, draw(1, *ALIKE), dtype)


def eager(attend, *qkv, window, **options):
    """Runs an attention function of transformers, whose mask is added to the scores."""
    distance = torch.arange(L)[:, None] - torch.arange(L)
    hidden = torch.where((distance < 0) | (distance >= window), -torch.inf, 0.0).to(qkv[0])
    module = types.SimpleNamespace(num_key_value_groups=2, training=False, **options.pop('fields', {}))
    return attend(module, *(x.transpose(1, 2) for x in qkv), hidden[None, None], scaling=D**-0.5, **options)[0]


@compares('softmax, sinks in a window of 17', 'transformers gpt_oss')
def _(dtype):
    attend = modeling_gpt_oss.eager_attention_forward
    ours = lambda q, k, v, b: softmax_attention(q, k, v, sinks_H=b, window=17, implementation='xla')  # noqa: E731
    theirs = lambda q, k, v, b: eager(attend, q, k, v, window=17, fields={'sinks': b})  # noqa: E731
    return values_and_gradients(ours, theirs, draw(2, *GROUPED, (H,)), dtype)


@compares('softmax, a cap of the scores', 'transformers gemma2', bits=(32,))  # its softmax is float32
def _(dtype):
    attend = functools.partial(modeling_gemma2.eager_attention_forward, softcap=0.8)
    ours = functools.partial(softmax_attention, score_cap=0.8, implementation='xla')
    return values_and_gradients(ours, functools.partial(eager, attend, window=L), draw(3, *GROUPED), dtype)


def linear_row(name, normalize, block):
    @compares(f'linear attention, {name}', 'fla-core naive_chunk_linear_attn')
    def row(dtype):
        q, k, v = draw(4, *ALIKE)
        ours = functools.partial(linear_attention, denominator_bias=0.0, normalize=normalize, block=block)
        naive = functools.partial(fla('ops/linear_attn/naive').naive_chunk_linear_attn, scale=1.0)
        theirs = mean(naive) if normalize else naive
        return values_and_gradients(ours, theirs, [np.exp(0.5 * q), np.exp(0.5 * k), v], dtype)


linear_row('sums', normalize=False, block=16)
linear_row('means, blocks of 16', normalize=True, block=16)
linear_row('means, blocks of 48', normalize=True, block=48)


@compares('taylor, without compression', 'fla-core naive_parallel_based')
def _(dtype):
    naive = head_first(functools.partial(fla('ops/based/naive').naive_parallel_based, use_norm=False))
    return values_and_gradients(module(Taylor(feature_dim=None)), mean(naive), draw(5, *ALIKE), dtype)


@compares('taylor, compressed to 8', 'fla-core naive_parallel_based')
def _(dtype):
    q_weight, k_weight = draw(6, (H, D, 8), (H, D, 8))
    naive = mean(head_first(functools.partial(fla('ops/based/naive').naive_parallel_based, use_norm=False)))
    small = lambda x, w: torch.einsum('blnd,ndr->blnr', x, torch.tensor(w)) / 4  # noqa: E731
    theirs = lambda q, k, v: naive(small(q, q_weight), small(k, k_weight), v)  # noqa: E731
    ours = module(Taylor(feature_dim=8), q_weight=q_weight / 4, k_weight=k_weight / 4)
    return values_and_gradients(ours, theirs, draw(7, *ALIKE), dtype)


@compares('taylor, by its features', 'fla-core TaylorFeatureMap and naive_chunk_linear_attn')
def _(dtype):
    features = feature_maps().TaylorFeatureMap(D)
    naive = mean(functools.partial(fla('ops/linear_attn/naive').naive_chunk_linear_attn, scale=1.0))
    theirs = lambda q, k, v: naive(features(q), features(k), v)  # noqa: E731
    return values_and_gradients(module(Taylor(feature_dim=None)), theirs, draw(8, *ALIKE), dtype)


@compares('polynomial of degree 2', 'fla-core naive_parallel_rebased')
def _(dtype):
    naive = head_first(functools.partial(fla('ops/rebased/naive').naive_parallel_rebased, scale=1.0))
    ours = functools.partial(polynomial_attention, degree=2, denominator_bias=1e-6)
    return values_and_gradients(ours, naive, draw(9, *ALIKE), dtype)


@compares('polynomial of degree 2, by the block engine', 'fla-core naive_parallel_rebased')
def _(dtype):
    naive = head_first(functools.partial(fla('ops/rebased/naive').naive_parallel_rebased, scale=1.0))
    ours = functools.partial(linear_attention, powers=(0.0, 0.0, 1.0), denominator_bias=1e-6, block=32)
    return values_and_gradients(ours, naive, draw(10, *ALIKE), dtype)


@compares('polynomial of degree 2, the mechanism with its norms', 'fla-core RebasedFeatureMap and linear attention')
def _(dtype):
    gains = [1 + 0.3 * x for x in draw(11, (D,), (D,))]
    maps = feature_maps().RebasedFeatureMap(D).double()
    with torch.no_grad():
        maps.gamma.copy_(torch.tensor(gains[0]))
        maps.beta.copy_(torch.tensor(gains[1]))
    naive = functools.partial(fla('ops/linear_attn/naive').naive_chunk_linear_attn, scale=1.0)

    def theirs(q, k, v):  # their features come from a square divided by D; our denominator has 1
        ones = torch.ones((*v.shape[:-1], 1), dtype=v.dtype)
        both = D * naive(maps(q), maps(k), torch.cat([v, ones], dim=-1))
        return both[..., :-1] / (1 + both[..., -1:])

    names = ('q_norm__scale', 'q_norm__bias', 'k_norm__scale', 'k_norm__bias')
    ours = module(Polynomial(degree=2), **dict(zip(names, gains * 2, strict=True)))
    return values_and_gradients(ours, theirs, draw(12, *ALIKE), dtype)


def performer_row(name, against, config, features):
    """Registers a row; `features` takes vectors [B, H, L, C], whether they are queries, and the projection."""

    @compares(f'performer, {name}', against)
    def row(dtype):
        (projection,) = draw(13, (32, D))
        of = lambda x, queries: features(x.transpose(1, 2), queries, torch.tensor(projection)).transpose(1, 2)  # noqa: E731
        naive = mean(functools.partial(fla('ops/linear_attn/naive').naive_chunk_linear_attn, scale=1.0))
        theirs = lambda q, k, v: naive(of(q, True), of(k, False), v)  # noqa: E731
        return values_and_gradients(module(config, projection=projection), theirs, draw(14, *ALIKE), dtype)


performer_row(
    'relu features',
    'fla-core ReLUFeatureMap and naive_chunk_linear_attn',
    Performer(features='relu', n_features=32, block=16, scale=1.0, kernel_epsilon=1e-3),
    lambda x, queries, projection: feature_maps().ReLUFeatureMap()(x @ projection.T) + 1e-3,
)
performer_row(
    'relu features',
    'performer-pytorch generalized_kernel',
    Performer(features='relu', n_features=32, block=16, kernel_epsilon=1e-3),
    lambda x, queries, projection: performer().generalized_kernel(x, projection_matrix=projection),
)
performer_row(
    'positive features (FAVOR+)',
    'performer-pytorch softmax_kernel',
    Performer(n_features=32, block=16, stabilizer=1e-30),
    lambda x, queries, projection: performer().softmax_kernel(
        x, projection_matrix=projection, is_query=queries, eps=0.0
    ),
)


def jax_row(name, against, function, window=None, bits=(32, 64)):
    @compares(name, against, bits=bits)
    def row(dtype):
        arrays = [jnp.asarray(x, dtype) for x in draw(15, *GROUPED)]
        cotangent = jnp.cos(jnp.arange(B * L * H * D, dtype=dtype)).reshape(B, L, H, D)
        ours, pull = jax.vjp(functools.partial(softmax_attention, window=window, implementation='xla'), *arrays)
        theirs, their_pull = jax.vjp(function, *arrays)
        yield 'values', ours, theirs
        for i, (got, want) in enumerate(zip(pull(cotangent), their_pull(cotangent), strict=True)):
            yield f'gradient {i}', got, want


window = {'is_causal': True, 'local_window_size': (16, 0)}
jax_row('softmax, window of 17', 'jax.nn.dot_product_attention',
        functools.partial(jax.nn.dot_product_attention, **window), window=17, bits=(32,))  # fmt: skip
try:
    import tokamax
except ImportError:
    tokamax = None
else:
    causal = functools.partial(tokamax.dot_product_attention, is_causal=True, implementation='xla')
    jax_row('softmax, grouped heads', 'tokamax dot_product_attention, xla', causal, bits=(32,))
