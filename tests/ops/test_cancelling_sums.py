"""Gradients of TPU kernels in bfloat16 where sums cancel, compared with float32.

The values are alike: nearly a constant. A normalised output is then nearly constant too. The gradient of a weight is
the small difference of two large sums, v_j · do − o · do. What a kernel rounds before this difference, it rounds at the
size of the sums.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreter import interpret_kernels
from test_pallas_tpu import SQUARE, quick

from lm.ops import delta_rule, exact_attention, linear_attention, platform
from lm.ops.delta_rule import DeltaCall
from lm.ops.linear_attention.types import LinearCall, Options, PolynomialKernel

pytestmark = pytest.mark.usefixtures('no_races')

LENGTH, HEAD_DIM, OFFSET, SPREAD = 192, 64, 8.0, 0.25
ALLOWED, ROUNDING = 3.0, 0.01
"""A gradient is wrong if its error exceeds this multiple of XLA's error in the same type, plus one percent.

`lm bench precision` has the same bound. XLA rounds operands of products and sums in float32 as the kernels do, in
another order."""


def linear(implementation, **options):
    def call(q, k, v):
        near = {'q_local_BxLxHxC': q, 'k_local_BxLxKxC': k} if 'local' in options else {}
        given = LinearCall(q, k, v, options=Options(powers=SQUARE, **options), **near)
        return linear_attention.compute(given, implementation).o_BxLxHxD

    return call


def delta(implementation):
    def call(q, k, v):
        gate = jnp.full(k.shape[:3], 0.5, jnp.float32)
        return delta_rule.compute(DeltaCall(q, k, v, gate, query_length=HEAD_DIM**-0.5), implementation).o_BxLxHxD

    return call


FAMILIES = {
    'softmax': lambda name: lambda q, k, v: exact_attention.softmax_attention(q, k, v, implementation=name),
    'polynomial': lambda name: (
        lambda q, k, v: exact_attention.polynomial_attention(q, k, v, degree=4, implementation=name)
    ),
    'linear': linear,
    'linear with exact blocks': lambda name: linear(name, local=PolynomialKernel(4), block=128),
    'delta rule': delta,
}


def outputs_and_gradients(function, arrays, dtype):
    *inputs, do = (x.astype(dtype) for x in arrays)

    def compute(*inputs):
        o, pull = jax.vjp(function, *inputs)
        return [o, *pull(do.astype(o.dtype))]

    return [np.asarray(x, np.float64) for x in quick(compute)(*inputs)]


@pytest.mark.parametrize('family', FAMILIES)
def test_gradients_of_cancelling_sums_are_as_exact_as_xlas(family, monkeypatch):
    draw, shape = np.random.default_rng(0), (1, LENGTH, 1, HEAD_DIM)
    q, k = (HEAD_DIM**-0.25 * draw.standard_normal(shape) for _ in range(2))
    v, do = OFFSET + SPREAD * draw.standard_normal(shape), draw.standard_normal(shape)
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, do)]
    with jax.default_matmul_precision('highest'):
        right = outputs_and_gradients(FAMILIES[family]('xla'), arrays, jnp.float32)
    portable = outputs_and_gradients(FAMILIES[family]('xla'), arrays, jnp.bfloat16)
    monkeypatch.setattr(platform, 'target_platform', lambda: 'tpu')
    with interpret_kernels():
        ours = outputs_and_gradients(FAMILIES[family]('pallas_tpu'), arrays, jnp.bfloat16)
    for name, found, plain, want in zip(('o', 'dq', 'dk', 'dv'), ours, portable, right, strict=True):
        errors = [np.linalg.norm(x - want) / np.linalg.norm(want) for x in (found, plain)]
        assert errors[0] <= ALLOWED * errors[1] + ROUNDING, f'{name}: {errors[0]:.2%}, XLA {errors[1]:.2%}'
