"""Feature maps of the form f(W x + b, x): XLA takes one W per head and b; kernels refuse them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.attention.maps.products import ProductFeatures
from lm.ops.linear_attention import linear_attention
from lm.ops.linear_attention.tpu import attention as pallas_tpu
from lm.ops.linear_attention.types import LinearCall, Options


@dataclasses.dataclass(frozen=True)
class Shifted(ProductFeatures):
    """A map: |W x + b| of keys and twice that value of queries, raised by the square of x."""

    def products(self, parameters):
        return parameters

    def of_products(self, wx_RxT, x_ExT, queries):
        return (1 + queries) * jnp.abs(wx_RxT) + jnp.sum(jnp.square(x_ExT), 0, keepdims=True)


def by_hand(weight, shift, x, queries):
    """Computes the features in float64, head by head: [B, L, N, M]."""
    heads = []
    for n in range(x.shape[2]):
        w, b = (a if a is None or a.ndim == wide else a[n] for a, wide in ((weight, 2), (shift, 1)))
        wx = x[:, :, n] @ w.T + (0 if b is None else b)
        heads.append((1 + queries) * np.abs(wx) + (x[:, :, n] ** 2).sum(-1, keepdims=True))
    return np.stack(heads, 2)


@pytest.mark.parametrize('per_head', [False, True])
@pytest.mark.parametrize('shifted', [False, True])
def test_xla_computes_matrices_of_each_head_and_shifts(per_head, shifted):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 21, n, 5)) for n in (4, 2, 2))
    parameters = []
    for heads in (4, 2):
        lead = (heads,) if per_head else ()
        parameters.append((rng.normal(size=(*lead, 7, 5)), rng.normal(size=(*lead, 7)) if shifted else None))
    x, y = (by_hand(*p, a, is_q) for p, a, is_q in zip(parameters, (q, k), (True, False), strict=True))
    as_jax = jax.tree.map(jnp.float32, [q, k, v, parameters])
    q, k, v, (q_parameters, k_parameters) = as_jax
    call = dict(feature_map=Shifted(), q_parameters=q_parameters, k_parameters=k_parameters, block=8)
    plain = linear_attention(jnp.float32(x), jnp.float32(y), v, implementation='reference')
    for implementation in ('reference', 'xla'):
        o = linear_attention(q, k, v, **call, implementation=implementation)
        np.testing.assert_allclose(o, plain, rtol=2e-4, atol=2e-5)
    has_form = Shifted().matrix(q_parameters) is not None
    assert has_form == (not per_head and not shifted)


def test_kernels_refuse_matrices_of_each_head(monkeypatch):
    monkeypatch.setattr(pallas_tpu.platform, 'target_platform', lambda: 'tpu')
    monkeypatch.setattr(pallas_tpu.platform, 'vmem', lambda: (16 * 2**20, None))
    q = jnp.zeros((1, 256, 2, 16))
    for lead, reason in (((), None), ((2,), 'does not compute the feature map Shifted')):
        parameters = (jnp.zeros((*lead, 32, 16)), None)
        call = LinearCall(q, q, q, parameters, parameters, options=Options(feature_map=Shifted()))
        found = pallas_tpu.unsupported(call)
        assert (found is None) if reason is None else reason in found
