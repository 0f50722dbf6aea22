"""Rotation and layer normalization on TPUs: one pass over queries and keys in each direction, in Pallas kernels.

XLA takes two for a rotation, for it writes halves and then joins them, and two more for the gradient of a
normalization. Arrays in HBM are [B, N, C, L], feature by token, as the attention kernels want them.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops import platform
from lm.ops.rotary.types import EPSILON, HeadNorms, Rotation
from lm.ops.tpu import LANES, ROWS

BLOCK = 512
"""Tokens of a grid step, at most."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the kernels are cut into steps.

    Attributes:
        n_heads: how many heads are queries.
        block: tokens a grid step.
        dtype: of queries and keys that come out.
    """

    n_heads: int
    block: int
    dtype: jnp.dtype


def rotate(
    qk_BxLxNxC: jax.Array, rotation: Rotation | None, n_heads: int, norms: HeadNorms | None = None
) -> tuple[jax.Array, jax.Array]:
    """Arguments as in `lm.ops.rotary`; calls that `unsupported` refuses are wrong here."""
    by_row = rotation is not None and rotation[0].ndim == 4
    run = platform.per_device(functools.partial(_rotate, n_heads), split=(True, by_row, False))
    return run(qk_BxLxNxC, rotation, norms)


def unsupported(qk: jax.Array, rotation: Rotation | None, norms: HeadNorms | None) -> str | None:
    """Why the kernels cannot compute this call, or None."""
    if platform.target_platform() != 'tpu':
        return 'needs a TPU'
    batch, length, heads, size = qk.shape
    if size % (2 * ROWS):
        return f'takes heads whose size is a multiple of {2 * ROWS}, not {size}'
    if length % LANES:
        return f'takes a multiple of {LANES} tokens, not {length}'
    if qk.dtype not in (jnp.bfloat16, jnp.float32):
        return f'takes arrays that are bfloat16 or float32, not {qk.dtype}'
    if not _fits(LANES, heads, size):
        return f'would not fit its VMEM with {heads} heads of {size}'
    return platform.uneven_batch(batch)


def block_size(length: int, heads: int, size: int) -> int:
    """Tokens of a grid step."""
    return next(n for n in range(BLOCK, 0, -LANES) if length % n == 0 and _fits(n, heads, size))


def _fits(block, heads, size):
    """Whether a grid step may take so many tokens: the three arrays of a backward one as if they were float32, with the
    angles, gains and sums that are so in any case, twice each."""
    arrays, constants = 3 * heads * size * block, size * (block + 2 * 4 * LANES)
    return 2 * 4 * (arrays + constants) <= platform.vmem()[0]


def _rotate(n_heads, qk_BxLxNxC, rotation, norms):
    _, length, heads, size = qk_BxLxNxC.shape
    dtype = qk_BxLxNxC.dtype if norms is None or norms.dtype is None else norms.dtype
    plan = Plan(n_heads, block_size(length, heads, size), jnp.dtype(dtype))
    angles = None
    if rotation is not None:  # [1 or B, C, L]: cosines above sines
        angles = jnp.concatenate(rotation, axis=-1).reshape(-1, length, size).swapaxes(1, 2)
    gains = None
    if norms is not None:
        gains = jnp.stack([norms.q_scale, norms.q_bias, norms.k_scale, norms.k_bias]).astype(jnp.float32)
    outputs = _run(plan, qk_BxLxNxC.transpose(0, 2, 3, 1), angles, gains)
    return tuple(x_BxHxCxL.transpose(0, 3, 1, 2) for x_BxHxCxL in outputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(plan, qk_BxNxCxL, angles, gains_4xC):
    """Queries and keys, [B, H, C, L] and [B, K, C, L]. `gains_4xC`: scale and bias of queries, then of keys."""
    return _forward(plan, qk_BxNxCxL, angles, gains_4xC)


def _run_forward(plan, qk_BxNxCxL, angles, gains_4xC):
    # Without a normalization the gradient does not depend on what was rotated.
    given = None if gains_4xC is None else qk_BxNxCxL
    return _forward(plan, qk_BxNxCxL, angles, gains_4xC), (given, angles, gains_4xC)


def _run_backward(plan, residuals, cotangents):
    given, angles, gains_4xC = residuals
    dqk, dgains = _backward(plan, given, angles, gains_4xC, *cotangents)
    return dqk, None, dgains


_run.defvjp(_run_forward, _run_backward)


def _forward(plan, qk_BxNxCxL, angles, gains_4xC):
    batch, heads, size, length = qk_BxNxCxL.shape
    outputs = [jax.ShapeDtypeStruct((batch, n, size, length), plan.dtype) for n in (plan.n_heads, heads - plan.n_heads)]
    return pl.pallas_call(
        functools.partial(_forward_kernel, angles is not None, gains_4xC is not None),
        name='rotary_forward',
        grid=(batch, length // plan.block),
        in_specs=[_tokens(plan, qk_BxNxCxL), *_constants(plan, angles, gains_4xC)],
        out_specs=[_tokens(plan, a) for a in outputs],
        out_shape=outputs,
        compiler_params=_params(),
        cost_estimate=_cost(qk_BxNxCxL, *outputs),
    )(qk_BxNxCxL, *_given(angles, gains_4xC))


def _backward(plan, given, angles, gains_4xC, dq_BxHxCxL, dk_BxKxCxL):
    batch, _, size, length = dq_BxHxCxL.shape
    heads = dq_BxHxCxL.shape[1] + dk_BxKxCxL.shape[1]
    read = [dq_BxHxCxL, dk_BxKxCxL] if given is None else [given, dq_BxHxCxL, dk_BxKxCxL]
    steps = length // plan.block
    outputs = [jax.ShapeDtypeStruct((batch, heads, size, length), read[0].dtype)]
    out_specs = [_tokens(plan, outputs[0])]
    if gains_4xC is not None:
        outputs.append(jax.ShapeDtypeStruct((batch, steps, 4, size, LANES), jnp.float32))
        out_specs.append(pl.BlockSpec((None, None, 4, size, LANES), lambda b, j: (b, j, 0, 0, 0)))
    found = pl.pallas_call(
        functools.partial(_backward_kernel, plan.n_heads, angles is not None, gains_4xC is not None),
        name='rotary_backward',
        grid=(batch, steps),
        in_specs=[*(_tokens(plan, a) for a in read), *_constants(plan, angles, gains_4xC)],
        out_specs=out_specs,
        out_shape=outputs,
        compiler_params=_params(),
        cost_estimate=_cost(*read, *outputs),
    )(*read, *_given(angles, gains_4xC))
    return found[0], None if gains_4xC is None else found[1].sum((0, 1, 4))


def _forward_kernel(rotated, normed, qk_ref, *refs):
    refs = list(refs)
    angles_ref, gains_ref = (refs.pop(0) if there else None for there in (rotated, normed))
    start = 0
    for kind, out_ref in enumerate(refs):

        def compute(n, tokens, kind=kind, out_ref=out_ref, start=start):
            x = _turned(qk_ref[start + n, :, tokens].astype(jnp.float32), angles_ref, tokens)
            if gains_ref is not None:
                x = _standard(x)[0] * gains_ref[2 * kind] + gains_ref[2 * kind + 1]
            out_ref[n, :, tokens] = x.astype(out_ref.dtype)

        _each(out_ref.shape, compute)
        start += out_ref.shape[0]


def _backward_kernel(n_heads, rotated, normed, *refs):
    refs = list(refs)
    x_ref = refs.pop(0) if normed else None
    cotangents = [refs.pop(0), refs.pop(0)]
    angles_ref, gains_ref = (refs.pop(0) if there else None for there in (rotated, normed))
    dqk_ref, *sums = refs
    if normed:
        sums[0][...] = jnp.zeros_like(sums[0])
    for kind, d_ref in enumerate(cotangents):

        def compute(n, tokens, kind=kind, d_ref=d_ref):
            at = kind * n_heads + n
            d = d_ref[n, :, tokens].astype(jnp.float32)
            if normed:
                standard, rate = _standard(_turned(x_ref[at, :, tokens].astype(jnp.float32), angles_ref, tokens))
                sums[0][2 * kind] += d * standard
                sums[0][2 * kind + 1] += d
                d = d * gains_ref[2 * kind]
                along = jnp.mean(d * standard, axis=0, keepdims=True)
                d = rate * (d - jnp.mean(d, axis=0, keepdims=True) - standard * along)
            dqk_ref[at, :, tokens] = _turned(d, angles_ref, tokens, back=True).astype(dqk_ref.dtype)

        _each(d_ref.shape, compute)


def _each(shape, compute):
    """compute(head, slice of tokens) of all heads, a register's width of tokens at a time."""
    heads, _, block = shape
    for start in range(0, block, LANES):
        for head in range(heads):
            compute(head, slice(start, start + LANES))


def _turned(x_CxT, angles_ref, tokens, back=False):
    """x rotated; `back`: by the negative angles, which is also its gradient."""
    if angles_ref is None:
        return x_CxT
    half = x_CxT.shape[0] // 2
    a, b = x_CxT[:half], x_CxT[half:]
    cos, sin = angles_ref[:half, tokens], angles_ref[half:, tokens]
    turned = (a * cos + b * sin, b * cos - a * sin) if back else (a * cos - b * sin, b * cos + a * sin)
    return jnp.concatenate(turned, axis=0)


def _standard(x_CxT):
    """x of mean 0 and variance 1, and what it was multiplied by."""
    centred = x_CxT - jnp.mean(x_CxT, axis=0, keepdims=True)
    rate_1xT = lax.rsqrt(jnp.mean(centred * centred, axis=0, keepdims=True) + EPSILON)
    return centred * rate_1xT, rate_1xT


def _given(angles, gains_4xC):
    found = [] if angles is None else [angles]
    if gains_4xC is not None:
        found.append(jnp.broadcast_to(gains_4xC[..., None], (*gains_4xC.shape, LANES)))
    return found


def _constants(plan, angles, gains_4xC):
    specs = []
    if angles is not None:
        own = angles.shape[0] > 1
        specs.append(pl.BlockSpec((None, angles.shape[1], plan.block), lambda b, j: (b if own else 0, 0, j)))
    if gains_4xC is not None:
        specs.append(pl.BlockSpec((*gains_4xC.shape, LANES), lambda b, j: (0, 0, 0)))
    return specs


def _tokens(plan, a_BxNxCxL):
    return pl.BlockSpec((None, *a_BxNxCxL.shape[1:3], plan.block), lambda b, j: (b, 0, 0, j))


def _params():
    return pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel'), vmem_limit_bytes=platform.vmem()[1])


def _cost(*arrays):
    moved = sum(a.size * a.dtype.itemsize for a in arrays)
    return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved)
