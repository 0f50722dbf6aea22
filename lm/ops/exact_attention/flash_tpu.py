"""Exact attention on TPUs: flash-style Pallas kernels, forward and backward, in memory linear in the length.

What a score weighs is for a `WeightRule` to say; softmax and polynomial attention have one each. Inside the kernels
everything is feature by token ([N, D, L], N = batch · heads, tokens on the 128 lanes): a head of 64 would leave half of
the lanes idle, and half of a matrix unit in all products. The grid visits the pairs (block of queries, block of keys)
on and below the diagonal from a table; pairs above it cost nothing. Where documents are told apart, a pair whose
queries see none of its keys computes nothing, and only pairs in which a document begins, or whose queries belong to
several, are masked.

Static cycles per token and head are measured by `lm bench kernels`.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops import platform
from lm.ops.exact_attention.masks import beyond_causal
from lm.ops.exact_attention.pairs import Piece, cut, pair_of, table_of, tables_of, told_apart, visit
from lm.ops.exact_attention.weight_rule import WeightRule
from lm.ops.residuals import saved
from lm.ops.tpu import LANES, MIB, SUBLANES, by_head, by_token, dot, padded_rows

AHEAD = 2
"""By how many groups of queries the forward kernel forms scores before it needs them."""
MAX_BLOCK = 1024
MAX_PAIRS = 2**17
"""Pairs of blocks whose table (4 bytes each) fits the scalar memory."""


@dataclasses.dataclass(frozen=True)
class FlashPlan:
    """What the kernels compute, and how they cut it into steps.

    Attributes:
        rule: how scores become weights.
        block: tokens a block, of queries and of keys.
        piece: queries, and keys, at a time in the forward kernel.
        forward_diagonal: queries at a time in it, in a block on the diagonal.
        tile: keys at a time in the backward kernel.
        backward_diagonal: queries at a time in it, in a block on the diagonal.
        chunk: blocks of queries whose gradient stays in VMEM during one backward sweep over the keys.
        group: query heads that share a key head.
        documents: query heads of each row of the batch, whose documents are told apart; None: a window is one text.
        vmem_limit_bytes: what the compiler may use; None: its default.
    """

    rule: WeightRule
    block: int
    piece: int
    forward_diagonal: int
    tile: int
    backward_diagonal: int
    chunk: int
    group: int
    documents: int | None = None
    vmem_limit_bytes: int | None = None


def attention(plan: FlashPlan, q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, starts=None) -> jax.Array:
    """[B, L, H, D] of arrays as in `lm.ops.exact_attention`; calls that `unsupported` refuses are wrong here."""
    length, heads = q_BxLxHxD.shape[1:3]
    padded = -(-length // plan.block) * plan.block
    if starts is not None:
        plan = dataclasses.replace(plan, documents=heads)

    def function(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, starts_BxL):
        # Keys after the last token are in every query's future; queries after it have no gradient.
        arrays = (by_token(a, padded, a.shape[2]) for a in (q_BxLxHxD, k_BxLxKxD, v_BxLxKxD))
        if starts_BxL is not None:
            starts_BxL = jnp.pad(starts_BxL.astype(jnp.int32), ((0, 0), (0, padded - length)), mode='edge')
        return by_head(attend(plan, *arrays, starts_BxL), q_BxLxHxD, v_BxLxKxD.shape[-1])

    return platform.per_device(function, split=(True,) * 4)(q_BxLxHxD, k_BxLxKxD, v_BxLxKxD, starts)


def unsupported(q, k, v, *, block=None, **options) -> str | None:
    """Why the kernels cannot compute this call, or None."""
    if platform.target_platform() != 'tpu':
        return 'needs a TPU'
    if reason := beyond_causal(q, k, **options):
        return reason
    if block is not None and (block % LANES or block > MAX_BLOCK):
        return f'takes blocks that are multiples of {LANES} up to {MAX_BLOCK}, not {block}'
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (jnp.bfloat16, jnp.float32):
        return f'takes arrays that are all bfloat16 or all float32, not {q.dtype}, {k.dtype}, {v.dtype}'
    if max(q.shape[-1], v.shape[-1]) > LANES:
        return f'takes head sizes up to {LANES}, not {max(q.shape[-1], v.shape[-1])}'
    blocks = -(-q.shape[1] // (block or block_size(q.shape[1])))
    if blocks * (blocks + 1) // 2 > MAX_PAIRS:
        return f'takes fewer than {blocks} blocks of tokens'
    return platform.uneven_batch(q.shape[0])


def block_size(length: int, most: int = MAX_BLOCK) -> int:
    """The block that wastes least padding, of at most `most` tokens."""
    parts = -(-length // most)
    return -(-length // parts // LANES) * LANES


def plan_for(rule: WeightRule, q_BxLxHxD: jax.Array, k_BxLxKxD: jax.Array, block: int | None = None) -> FlashPlan:
    """How such queries and keys are computed; the block does not change the result."""
    length, heads, size = q_BxLxHxD.shape[1:]
    width = padded_rows(size) * q_BxLxHxD.dtype.itemsize
    small = platform.vmem()[0] < 32 * MIB
    block = min(block or block_size(length), 512 if small and width > 256 else MAX_BLOCK)
    # Static cycles on v5e and v6e: long tiles pay, and so does less waste above the diagonal. Where levels are kept,
    # pieces of the size of a matrix unit wait for them one after the other.
    long, short = (next(side for side in (most, 256, LANES) if block % side == 0) for most in (512, 256))
    piece = LANES if small else block
    if rule.keeps_levels:
        piece = short if platform.matrix_side() > LANES else LANES
    gradient = (4 if small else 16) * MIB
    return FlashPlan(
        rule=rule,
        block=block,
        piece=piece,
        forward_diagonal=min(piece, long),
        tile=short if small else block,
        backward_diagonal=short,
        chunk=max(1, gradient // (2 * width * block)),
        group=heads // k_BxLxKxD.shape[2],
        vmem_limit_bytes=None if small else 56 * MIB,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    plan: FlashPlan,
    q_NxDxL: jax.Array,
    k_MxDxL: jax.Array,
    v_MxDxL: jax.Array,
    starts_BxL: jax.Array | None = None,
) -> jax.Array:
    """The kernels on arrays that lie feature by token: N = M · plan.group, D multiples of 16, L of plan.block.

    `starts_BxL` has the first key that each query sees, int32, ascending; it is there where plan.documents is."""
    return forward(plan, q_NxDxL, k_MxDxL, v_MxDxL, starts_BxL)[0]


def _attend_forward(plan, q, k, v, starts):
    o, kept = map(saved, forward(plan, q, k, v, starts))
    return o, (q, k, v, o, kept, starts)


def _attend_backward(plan, residuals, do):
    *arrays, starts = residuals
    return *backward(plan, *arrays, do, starts), None


attend.defvjp(_attend_forward, _attend_backward)


def forward(plan: FlashPlan, q_NxDxL, k_MxDxL, v_MxDxL, starts_BxL=None) -> tuple[jax.Array, jax.Array]:
    """Outputs [N, D, L], and what the rule keeps of each query, [N, 1, L] in float32."""
    n, _, length = q_NxDxL.shape
    size, block = v_MxDxL.shape[1], plan.block
    blocks = length // block
    pairs = [(i, j) for i in range(blocks) for j in range(i + 1)]
    outputs = [
        jax.ShapeDtypeStruct((n, rows, length), dtype) for rows, dtype in ((size, v_MxDxL.dtype), (1, jnp.float32))
    ]
    queries, keys, rows = _specs(plan)
    tables, starts = tables_of(starts_BxL, plan.block)
    return pl.pallas_call(
        functools.partial(_forward_kernel, plan),
        name='flash_attention_forward',
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(tables),
            grid=(n, len(pairs)),
            in_specs=[*rows, queries(q_NxDxL), keys(k_MxDxL), keys(v_MxDxL)],
            out_specs=[queries(a) for a in outputs],
            scratch_shapes=[pltpu.VMEM((rows, block), jnp.float32) for rows in (size, SUBLANES, 1)],
        ),
        out_shape=outputs,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=plan.vmem_limit_bytes
        ),
        cost_estimate=_cost(plan, q_NxDxL, v_MxDxL, pairs, products=(1, 1), arrays=4),
    )(table_of(pairs), *tables, *starts, q_NxDxL, k_MxDxL, v_MxDxL)


def backward(
    plan: FlashPlan, q_NxDxL, k_MxDxL, v_MxDxL, o_NxDxL, kept_Nx1xL, do_NxDxL, starts_BxL=None
) -> tuple[jax.Array, ...]:
    """The gradients of q, k and v from what `forward` took and gave and the gradient of its output.

    One kernel computes all three: five products a pair of blocks, where kernels apart would need seven. The gradient of
    the queries waits in VMEM until the keys up to their own block are through; where it does not fit, the queries are
    taken a chunk at a time.
    """
    # Σ_j w_ij ⟨do_i, v_j⟩ = ⟨do_i, o_i⟩: the denominator's part of the gradient, one number a query.
    row_Nx1xL = jnp.sum(do_NxDxL.astype(jnp.float32) * o_NxDxL.astype(jnp.float32), axis=1, keepdims=True)
    arrays = (q_NxDxL, k_MxDxL, v_MxDxL, do_NxDxL, row_Nx1xL, plan.rule.kept_for_gradients(kept_Nx1xL))
    blocks = q_NxDxL.shape[2] // plan.block
    dqs, sums = [], []
    if blocks > plan.chunk:
        heads, _, length = q_NxDxL.shape
        sums = [jnp.zeros((heads, a.shape[1], length), jnp.float32) for a in (k_MxDxL, v_MxDxL)]
    for start in range(0, blocks, plan.chunk):
        stop = min(start + plan.chunk, blocks)
        dq, *sums = _sweep(plan, start, stop, arrays, sums, starts_BxL)
        dqs.append(dq)
    shared = (a.reshape(-1, plan.group, *a.shape[1:]).sum(1) for a in sums)
    return jnp.concatenate(dqs, axis=2), *(a.astype(k_MxDxL.dtype) for a in shared)


def _sweep(plan: FlashPlan, start: int, stop: int, arrays, sums, starts_BxL) -> list[jax.Array]:
    """The gradient of the query blocks start … stop - 1, and what they add to those of keys and values in `sums`."""
    q, _, v = arrays[:3]
    n, compared, length = q.shape
    size, block = v.shape[1], plan.block
    pairs = [(i, j) for j in range(stop) for i in range(max(j, start), stop)]
    sums_dtype = jnp.float32 if plan.group > 1 or sums else v.dtype
    outputs = [jax.ShapeDtypeStruct((n, compared, (stop - start) * block), q.dtype)]
    outputs += [jax.ShapeDtypeStruct((n, rows, length), sums_dtype) for rows in (compared, size)]
    queries, keys, rows = _specs(plan)
    tables, starts = tables_of(starts_BxL, plan.block)
    column = pl.BlockSpec(
        (1, compared, block), lambda h, t, pairs, *_: (h, 0, jnp.maximum(pair_of(pairs, t)[1], start) - start)
    )
    by_key = [
        pl.BlockSpec((1, a.shape[1], block), lambda h, t, pairs, *_: (h, 0, pair_of(pairs, t)[1])) for a in outputs[1:]
    ]
    in_specs = [*rows, queries(q), keys(arrays[1]), keys(v), *(queries(a) for a in arrays[3:])]
    before = 1 + len(tables) + len(in_specs)
    return pl.pallas_call(
        functools.partial(_backward_kernel, plan, start, stop, bool(sums)),
        name='flash_attention_backward',
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1 + len(tables),
            grid=(n, len(pairs)),
            in_specs=in_specs + (by_key if sums else []),
            out_specs=[column, *by_key],
            scratch_shapes=[
                pltpu.VMEM(shape, jnp.float32)
                for shape in ((stop - start, compared, block), (compared, block), (size, block))
            ],
        ),
        out_shape=outputs,
        input_output_aliases={before: 1, before + 1: 2} if sums else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=plan.vmem_limit_bytes
        ),
        cost_estimate=_cost(plan, q, v, pairs, products=(3, 2), arrays=7),
    )(table_of(pairs), *tables, *starts, *arrays, *sums)


def _forward_kernel(plan: FlashPlan, pairs, *refs):
    documents, (q, k, v, o, kept, acc_DxQ, sums_8xQ, level_1xQ) = told_apart(plan.documents, refs)
    i, j = pair_of(pairs, pl.program_id(1))
    rule = plan.rule

    @pl.when(j == 0)
    def _():
        acc_DxQ[...] = jnp.zeros_like(acc_DxQ)
        sums_8xQ[...] = jnp.zeros_like(sums_8xQ)
        level_1xQ[...] = jnp.full_like(level_1xQ, rule.lowest)

    def score(piece: Piece) -> jax.Array:
        return rule.score(dot(k[0, :, piece.keys], q[0, :, piece.queries], (0, 0)), piece.seen)

    def level(pieces: list[Piece], scores: list[jax.Array]) -> tuple[jax.Array, jax.Array | None]:
        return rule.level(scores, level_1xQ[:, pieces[0].queries])

    def add(pieces: list[Piece]):
        # The matrix units take instructions in their order: products of the queries after the next ones stand between
        # those that wait for the weights of these, and the level of the next ones is there in time.
        groups = [list(group) for _, group in itertools.groupby(pieces, lambda piece: piece.queries.start)]
        scores = [[score(piece) for piece in group] for group in groups[:AHEAD]]
        levels = [level(groups[0], scores[0])]
        for n, group in enumerate(groups):
            queries = group[0].queries
            if n + 1 < len(groups):
                levels.append(level(groups[n + 1], scores[n + 1]))
            now_1xQ, shrink_1xQ = levels[n]
            sums, acc = sums_8xQ[:, queries], acc_DxQ[:, queries]
            if shrink_1xQ is not None:
                sums, acc = sums * shrink_1xQ, acc * shrink_1xQ
            later = iter(groups[n + AHEAD] if n + AHEAD < len(groups) else ())
            scores.append([])
            for piece, s_KxQ in zip(group, scores[n], strict=True):
                scores[-1] += [score(other) for other in itertools.islice(later, 1)]
                w_KxQ = rule.weigh(s_KxQ, now_1xQ, piece.seen)
                sums += w_KxQ.reshape(-1, SUBLANES, w_KxQ.shape[1]).sum(0)
                acc += dot(v[0, :, piece.keys], w_KxQ.astype(v.dtype), (1, 0))
            scores[-1] += map(score, later)
            sums_8xQ[:, queries], acc_DxQ[:, queries], level_1xQ[:, queries] = sums, acc, now_1xQ

    parts = cut(plan.block, plan.piece)
    diagonal = [
        (queries, slice(keys.start, min(keys.stop, queries.stop)))
        for queries, keys in itertools.product(cut(plan.block, plan.forward_diagonal), parts)
        if keys.start < queries.stop
    ]
    visit(list(itertools.product(parts, parts)), diagonal, plan.block, documents, i, j, add)

    @pl.when(j == i)
    def _():
        factor_1xQ, kept_1xQ = rule.finish(jnp.sum(sums_8xQ[...], axis=0, keepdims=True), level_1xQ[...])
        o[0] = (acc_DxQ[...] * factor_1xQ).astype(o.dtype)
        kept[0] = kept_1xQ


def _backward_kernel(plan: FlashPlan, start: int, stop: int, adds: bool, pairs, *refs):
    documents, (q, k, v, do, row, kept, *refs) = told_apart(plan.documents, refs)
    dk_before, dv_before = refs[:2] if adds else (None, None)
    dq, dk, dv, dq_IxCxQ, dk_CxK, dv_DxK = refs[2:] if adds else refs
    i, j = pair_of(pairs, pl.program_id(1))
    mine, scale = i - start, plan.rule.gradient_scale

    @pl.when(j == 0)
    def _():
        dq_IxCxQ[mine] = jnp.zeros(dq_IxCxQ.shape[1:], jnp.float32)

    @pl.when(i == jnp.maximum(j, start))
    def _():
        dk_CxK[...] = dk_before[0] / scale if adds else jnp.zeros_like(dk_CxK)
        dv_DxK[...] = dv_before[0] if adds else jnp.zeros_like(dv_DxK)

    def add(pieces: list[Piece]):
        for queries, keys, seen in pieces:
            q_CxQ, do_DxQ = q[0, :, queries], do[0, :, queries]
            k_CxK = k[0, :, keys]
            s_KxQ = dot(k_CxK, q_CxQ, (0, 0))
            dw_KxQ = dot(v[0, :, keys], do_DxQ, (0, 0)) - row[0, :, queries]
            w_KxQ, ds_KxQ = plan.rule.gradients(s_KxQ, dw_KxQ, kept[0, :, queries])
            w_KxQ, ds_KxQ = seen(w_KxQ).astype(do.dtype), seen(ds_KxQ).astype(q.dtype)
            dq_IxCxQ[mine, :, queries] += dot(k_CxK, ds_KxQ, (1, 0))
            dk_CxK[:, keys] += dot(q_CxQ, ds_KxQ, (1, 1))
            dv_DxK[:, keys] += dot(do_DxQ, w_KxQ, (1, 1))

    below = [(slice(0, plan.block), keys) for keys in cut(plan.block, plan.tile)]
    diagonal = [(queries, slice(0, queries.stop)) for queries in cut(plan.block, plan.backward_diagonal)]
    visit(below, diagonal, plan.block, documents, i, j, add)

    @pl.when(j == i)
    def _():
        dq[0] = (scale * dq_IxCxQ[mine]).astype(dq.dtype)

    @pl.when(i == stop - 1)
    def _():
        dk[0] = (scale * dk_CxK[...]).astype(dk.dtype)
        dv[0] = dv_DxK[...].astype(dv.dtype)


def _specs(plan: FlashPlan):
    """Block specs of arrays by query head, and by key head, which `plan.group` query heads share; and of documents'
    starts, if these are told apart."""

    def queries(a):
        return pl.BlockSpec((1, a.shape[1], plan.block), lambda h, t, pairs, *_: (h, 0, pair_of(pairs, t)[0]))

    def keys(a):
        group = plan.group
        return pl.BlockSpec(
            (1, a.shape[1], plan.block),
            lambda h, t, pairs, *_: (h if group == 1 else lax.div(h, jnp.int32(group)), 0, pair_of(pairs, t)[1]),
        )

    def starts(h, t, pairs, *_):
        return lax.div(h, jnp.int32(plan.documents)), 0, pair_of(pairs, t)[0]

    return queries, keys, [pl.BlockSpec((1, 1, plan.block), starts)] if plan.documents else []


def _cost(plan: FlashPlan, q, v, pairs, products: tuple[int, int], arrays: int) -> pl.CostEstimate:
    n, compared, _ = q.shape
    weights = n * len(pairs) * plan.block**2
    width = products[0] * compared + products[1] * v.shape[1]
    block = plan.block * max(compared, v.shape[1]) * q.dtype.itemsize
    return pl.CostEstimate(flops=2 * weights * width, transcendentals=0, bytes_accessed=n * len(pairs) * arrays * block)
