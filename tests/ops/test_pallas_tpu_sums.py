"""The TPU kernels of linear attention with neither denominators nor decay, interpreted on the CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import interpret_kernels
from test_pallas_tpu import errors, example, make_call, quick

from lm.ops import linear_attention as operation
from lm.ops.linear_attention import PLAIN, SQUARE, reference
from lm.ops.linear_attention.tpu import attention as pallas_tpu
from lm.ops.linear_attention.types import Options, PolynomialKernel

pytestmark = pytest.mark.usefixtures('no_races')

PLAIN_CASES = {
    'odd length': ({'length': 301, 'heads': 2}, 'float32'),
    'odd length, rounded': ({'length': 301, 'heads': 2}, 'bfloat16'),
    'one block': ({'length': 77}, 'float32'),
    'grouped': ({'length': 280, 'batch': 2, 'heads': 4, 'kv_heads': 2, 'features': 24}, 'float32'),
    'odd sizes': ({'length': 131, 'features': 12, 'head_dim': 10}, 'float32'),
    'heads of 128, rounded': ({'length': 259, 'features': 128, 'head_dim': 128}, 'bfloat16'),
}
OTHER_CASES = {
    'self products': Options(SQUARE, normalize=False),
    'exact blocks': Options(SQUARE, local=PolynomialKernel(4), block=128, normalize=False),
}


def run(implementation, options, arrays):
    """Returns outputs and gradients."""
    *inputs, do = arrays

    def both(inputs, do):
        def function(*inputs):
            return implementation.linear_attention(make_call(options, *inputs)).o_BxLxHxD

        o, pull = jax.vjp(function, *inputs)
        return [o, *pull(do)]

    return quick(both)(inputs, do)


def sum_by_definition(q, k, v, do):
    """Returns Σ_{j ≤ i} ⟨q_i, k_j⟩ v_j and its gradients in float64; several query heads may share a key head."""
    q, k, v, do = (np.asarray(a, np.float64) for a in (q, k, v, do))
    groups = q.shape[2] // k.shape[2]
    k, v = (np.repeat(a, groups, axis=2) for a in (k, v))
    seen = np.tril(np.ones((q.shape[1],) * 2))
    w, dw = (np.einsum('blhe,bmhe->bhlm', a, b) * seen for a, b in ((q, k), (do, v)))
    o, dq = np.einsum('bhlm,bmhd->blhd', w, v), np.einsum('bhlm,bmhe->blhe', dw, k)
    dk, dv = (np.einsum('bhlm,blhe->bmhe', a, b) for a, b in ((dw, q), (w, do)))
    return [o, dq, *(a.reshape(*a.shape[:2], -1, groups, a.shape[-1]).sum(3) for a in (dk, dv))]


@pytest.mark.parametrize('case', PLAIN_CASES)
def test_plain_sums(case):
    sizes, dtype = PLAIN_CASES[case]
    q, k, v, _, _, do = example(**sizes, dtype=dtype)
    with interpret_kernels():
        got = run(pallas_tpu, Options(PLAIN, normalize=False), (q, k, v, do))
    found = errors(got, [*sum_by_definition(q, k, v, do)], ('o', 'dq', 'dk', 'dv'))
    assert all(error <= (1e-5 if dtype == 'float32' else 2e-2) for error in found.values()), found


@pytest.mark.parametrize('case', OTHER_CASES)
def test_other_weights(case):
    options = OTHER_CASES[case]
    *arrays, do = example(300)
    arrays = arrays if options.local else arrays[:3]
    expected = run(reference, options, (*arrays, do))
    with interpret_kernels():
        got = run(pallas_tpu, options, (*arrays, do))
    found = errors(got, expected, ('o', 'dq', 'dk', 'dv', 'dq_local', 'dk_local')[: len(got)])
    assert all(error <= 1e-5 for error in found.values()), found


def test_tpus_take_the_kernels(monkeypatch):
    monkeypatch.setattr(pallas_tpu.platform, 'target_platform', lambda: 'tpu')
    q, k, v, *_ = example(300)
    call = make_call(Options(PLAIN, normalize=False), q, k, v)
    assert operation.IMPLEMENTATIONS.choose(None, call) is pallas_tpu
    assert operation.PARTS.choose(None, call).unsupported(call) is None
    causal = make_call(Options(PLAIN, normalize=False, causal=False), q, k, jnp.zeros_like(v))
    assert operation.IMPLEMENTATIONS.choose(None, causal) is operation.IMPLEMENTATIONS['xla']
