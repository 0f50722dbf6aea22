"""Exact attention on TPUs: flash-style Pallas kernels, forward and backward, in memory linear in the length.

A `WeightRule` turns scores into weights; softmax and polynomial attention have one each. Inside the kernels everything
is feature by token ([N, D, L], N = batch · heads, tokens on the 128 lanes): a head of 64 would leave half of the lanes
idle, and half of a matrix unit in all products. The grid visits the pairs (block of queries, block of keys) on and
below the diagonal from a table, with a window the pairs inside it; all other pairs cost nothing. With documents, a pair
whose queries see none of its keys computes nothing. Only pairs in which a document begins, or whose queries belong to
several, are masked.

Static cycles per token and head are measured by `scripts.kernels.cycles`.
"""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops import platform, sequence
from lm.ops.custom_vjp import custom_vjp
from lm.ops.exact_attention.tpu.pairs import (
    Piece,
    cut,
    document_arrays,
    pair_of,
    split_documents,
    step_of,
    visit,
    walk_by_keys,
    walk_by_queries,
)
from lm.ops.exact_attention.tpu.plan import FlashPlan
from lm.ops.exact_attention.types import ExactCall
from lm.ops.residuals import save_residual
from lm.ops.tpu import SUBLANES, by_head, by_token, dot


class FlashOperands(NamedTuple):
    """The arrays that the kernels read, feature by token: N = K · plan.group, D multiples of 16, L of plan.block.

    Attributes:
        q_NxDxL: queries; in a window in parts, the queries of two halves of parts (`lm.ops.sequence.balanced`).
        k_KxDxM: keys, M = L · plan.parts.
        v_KxDxM: values.
        starts_BxL: the first key that each query sees, int32, ascending; None where plan.documents is None.
        part: which part of the window the queries are; None where plan.parts is 1.
        sinks_N: a logit in base 2 per query head, float32; None: there are no sinks.
    """

    q_NxDxL: jax.Array
    k_KxDxM: jax.Array
    v_KxDxM: jax.Array
    starts_BxL: jax.Array | None = None
    part: jax.Array | None = None
    sinks_N: jax.Array | None = None


def attention(plan: FlashPlan, call: ExactCall, sinks_H: jax.Array | None = None) -> jax.Array:
    """Returns [B, L, H, D] of a call that `plan.unsupported` does not refuse.

    `sinks_H` are logits in base 2, float32.

    Of a window in parts, each device computes two halves of parts, one early and one late: in order, the last device
    would see nearly twice as many keys as the mean, and all others would wait for it.
    """
    q_BxLxHxD, starts, part = call.q_BxLxHxD, call.starts_BxL, None
    beyond = -q_BxLxHxD.shape[1] % plan.block
    if plan.parts > 1:
        q_BxLxHxD, starts = jax.tree.map(sequence.balanced, (q_BxLxHxD, starts))
        part = sequence.index()
    if plan.documents is not None and starts is None:
        starts = jnp.zeros(q_BxLxHxD.shape[:2], jnp.int32)
    if not call.is_whole and plan.parts == 1 and starts is not None:
        starts = jnp.maximum(starts, call.k_start) + (plan.ahead * plan.block - plan.before)

    def function(q_BxLxHxD, k_BxMxKxD, v_BxMxKxD, starts_BxL, part, sinks_H):
        if starts_BxL is not None:
            starts_BxL = jnp.pad(starts_BxL.astype(jnp.int32), ((0, 0), (0, beyond)), mode='edge')
        if front := plan.ahead * plan.block - plan.before:  # keys that are out of every query's window
            k_BxMxKxD, v_BxMxKxD = (jnp.pad(a, ((0, 0), (front, 0), (0, 0), (0, 0))) for a in (k_BxMxKxD, v_BxMxKxD))
        sinks_N = None if sinks_H is None else jnp.tile(sinks_H, q_BxLxHxD.shape[0])
        # Keys after the last token are in every query's future; queries after it have no gradient.
        q, k, v = (by_token(a, a.shape[1] + beyond, a.shape[2]) for a in (q_BxLxHxD, k_BxMxKxD, v_BxMxKxD))
        o_NxDxL = attend(plan, FlashOperands(q, k, v, starts_BxL, part, sinks_N))
        return by_head(o_NxDxL, q_BxLxHxD, v_BxMxKxD.shape[-1])

    run = platform.per_device(function, split=(True, True, True, True, False, False))
    o_BxLxHxD = run(q_BxLxHxD, call.k_BxMxKxD, call.v_BxMxKxD, starts, part, sinks_H)
    return o_BxLxHxD if part is None else sequence.in_order(o_BxLxHxD)


@custom_vjp(0)
def attend(plan: FlashPlan, operands: FlashOperands) -> jax.Array:
    """Returns the outputs, [N, D, L]."""
    return forward(plan, operands)[0]


def _attend_forward(plan: FlashPlan, operands: FlashOperands):
    o_NxDxL, kept_Nx1xL = map(save_residual, forward(plan, operands))
    return o_NxDxL, (operands, o_NxDxL, kept_Nx1xL)


def _attend_backward(plan: FlashPlan, residuals, do_NxDxL: jax.Array) -> tuple[FlashOperands]:
    operands, o_NxDxL, kept_Nx1xL = residuals
    return (backward(plan, operands, o_NxDxL, kept_Nx1xL, do_NxDxL),)


attend.defvjp(_attend_forward, _attend_backward)


def forward(plan: FlashPlan, operands: FlashOperands) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs [N, D, L], and what the rule keeps of each query, [N, 1, L] in float32."""
    q_NxDxL, k_KxDxM, v_KxDxM, starts_BxL, part, sinks_N = operands
    n, _, length = q_NxDxL.shape
    size, block = v_KxDxM.shape[1], plan.block
    walk = walk_by_queries(plan.diagonals(length // block), plan.window)
    outputs = [
        jax.ShapeDtypeStruct((n, rows, length), dtype) for rows, dtype in ((size, v_KxDxM.dtype), (1, jnp.float32))
    ]
    queries, keys, rows = _specs(plan)
    sinks = [] if sinks_N is None else [sinks_N]
    sinks_specs = [pl.BlockSpec(memory_space=pltpu.SMEM) for _ in sinks]
    ends, starts = document_arrays(starts_BxL, plan.block)
    tables = walk.tables(part) + ends
    o_NxDxL, kept_Nx1xL = pl.pallas_call(
        functools.partial(_forward_kernel, plan),
        name='flash_attention_forward',
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=(n, walk.steps),
            in_specs=[*rows, *sinks_specs, queries(q_NxDxL), keys(k_KxDxM), keys(v_KxDxM)],
            out_specs=[queries(a) for a in outputs],
            scratch_shapes=[
                *(pltpu.VMEM((rows, block), jnp.float32) for rows in (size, SUBLANES, 1)),
                *([pltpu.VMEM((2 * q_NxDxL.shape[1], block), q_NxDxL.dtype)] if plan.fills_products else []),
            ],
        ),
        out_shape=outputs,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=plan.vmem_limit_bytes
        ),
        cost_estimate=_cost(plan, q_NxDxL, v_KxDxM, walk.steps, products=(1, 1), arrays=4),
    )(*tables, *starts, *sinks, q_NxDxL, k_KxDxM, v_KxDxM)
    return o_NxDxL, kept_Nx1xL


def backward(
    plan: FlashPlan, operands: FlashOperands, o_NxDxL: jax.Array, kept_Nx1xL: jax.Array, do_NxDxL: jax.Array
) -> FlashOperands:
    """Returns the gradients of q, k, v and sinks from the gradient of the outputs; starts and part have none.

    One kernel computes all three: five products per pair of blocks, where separate kernels would need seven. The
    gradient of the queries waits in VMEM until the keys up to their diagonal block are done; where it does not fit, the
    queries are taken in chunks.
    """
    q_NxDxL, k_KxDxM, v_KxDxM, _, part, sinks_N = operands
    # Σ_j w_ij ⟨do_i, v_j⟩ = ⟨do_i, o_i⟩: the denominator's part of the gradient, one number per query.
    row_Nx1xL = jnp.sum(do_NxDxL.astype(jnp.float32) * o_NxDxL.astype(jnp.float32), axis=1, keepdims=True)
    by_query = (do_NxDxL, row_Nx1xL, plan.rule.kept_for_gradients(kept_Nx1xL))
    blocks, tokens = q_NxDxL.shape[2] // plan.block, k_KxDxM.shape[2]
    dqs, sums, diagonal_PxI = [], [], plan.diagonals(blocks)
    if blocks > plan.chunk:
        sums = [jnp.zeros((q_NxDxL.shape[0], a.shape[1], tokens), jnp.float32) for a in (k_KxDxM, v_KxDxM)]
    for start in range(0, blocks, plan.chunk):
        stop = min(start + plan.chunk, blocks)
        dq, *sums = _sweep(plan, operands, by_query, range(start, stop), diagonal_PxI, sums)
        dqs.append(dq)
    if part is not None:  # Gradients of later keys, which none of these queries sees, were not written.
        seen_M = jnp.arange(tokens) < jnp.asarray((diagonal_PxI.max(1) + 1) * plan.block)[part]
        sums = [jnp.where(seen_M, a, 0.0) for a in sums]
    shared = (a.reshape(-1, plan.group, *a.shape[1:]).sum(1) for a in sums)
    gradients = FlashOperands(jnp.concatenate(dqs, axis=2), *(a.astype(k_KxDxM.dtype) for a in shared))
    if sinks_N is None:
        return gradients
    # A sink is a key of every query whose value is zero; its logit is in base 2.
    w_NxL = jnp.exp2(sinks_N[:, None] - kept_Nx1xL[:, 0])
    return gradients._replace(sinks_N=-math.log(2.0) * jnp.sum(w_NxL * row_Nx1xL[:, 0], axis=1))


def _sweep(
    plan: FlashPlan,
    operands: FlashOperands,
    by_query: tuple[jax.Array, jax.Array, jax.Array],
    swept: range,
    diagonal_PxI: np.ndarray,
    added: list[jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the gradient of some query blocks, and of keys and values by query head.

    Args:
        plan: how the kernel is cut.
        operands: the arrays of the call.
        by_query: the gradient of the outputs, Σ_j w_ij ⟨do_i, v_j⟩, and what the rule keeps for gradients.
        swept: the query blocks.
        diagonal_PxI: of the whole walk.
        added: gradients of keys and values [N, D, M], to which the ones of these blocks are added; or none.
    """
    q_NxDxL, k_KxDxM, v_KxDxM, starts_BxL, part, _ = operands
    n, compared, _ = q_NxDxL.shape
    size, tokens, block = *v_KxDxM.shape[1:], plan.block
    walk = walk_by_keys(diagonal_PxI, swept.start, swept.stop, plan.window)
    waiting = len(swept) if plan.window is None else min(len(swept), plan.window.back + 1)
    sums_dtype = jnp.float32 if plan.group > 1 or added else v_KxDxM.dtype
    outputs = [jax.ShapeDtypeStruct((n, compared, len(swept) * block), q_NxDxL.dtype)]
    outputs += [jax.ShapeDtypeStruct((n, rows, tokens), sums_dtype) for rows in (compared, size)]
    queries, keys, rows = _specs(plan)
    ends, starts = document_arrays(starts_BxL, plan.block)
    tables = walk.tables(part) + ends
    # The gradient of a block of queries is complete at its diagonal block of keys.
    column = pl.BlockSpec(
        (1, compared, block), lambda h, t, pairs, diagonals, following, *_: (h, 0, following[pair_of(pairs, t)[1]])
    )
    by_key = [
        pl.BlockSpec((1, a.shape[1], block), lambda h, t, pairs, *_: (h, 0, pair_of(pairs, t)[1])) for a in outputs[1:]
    ]
    in_specs = [*rows, queries(q_NxDxL), keys(k_KxDxM), keys(v_KxDxM), *map(queries, by_query)]
    before = len(tables) + len(in_specs)
    dq, dk, dv = pl.pallas_call(
        functools.partial(_backward_kernel, plan, swept.start, bool(added)),
        name='flash_attention_backward',
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=(n, walk.steps),
            in_specs=in_specs + (by_key if added else []),
            out_specs=[column, *by_key],
            scratch_shapes=[
                pltpu.VMEM(shape, jnp.float32)
                for shape in ((waiting, compared, block), (compared, block), (size, block))
            ],
        ),
        out_shape=outputs,
        input_output_aliases={before: 1, before + 1: 2} if added else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=plan.vmem_limit_bytes
        ),
        cost_estimate=_cost(plan, q_NxDxL, v_KxDxM, walk.steps, products=(3, 2), arrays=7),
    )(*tables, *starts, q_NxDxL, k_KxDxM, v_KxDxM, *by_query, *added)
    return dq, dk, dv


def _forward_kernel(plan: FlashPlan, pairs, diagonals, *refs):
    documents, refs = split_documents(plan.documents, refs)
    sinks, refs = (refs[0], refs[1:]) if plan.sinks else (None, refs)
    q, k, v, o, kept, acc_DxQ, sums_8xQ, level_1xQ, *halves = refs
    step, rule = step_of(pairs, diagonals, pl.program_id(1), plan.window), plan.rule

    @pl.when(step.j == step.first_keys)
    def _():
        acc_DxQ[...] = jnp.zeros_like(acc_DxQ)
        if halves:
            halves[0][...] = _split(q[0].astype(jnp.float32) * rule.factor, q.dtype)
        if sinks is None:
            sums_8xQ[...] = jnp.zeros_like(sums_8xQ)
            level_1xQ[...] = jnp.full_like(level_1xQ, rule.lowest)
        else:  # the first weight of each query, relative to the sink
            sums_8xQ[...] = jnp.full_like(sums_8xQ, 1.0 / SUBLANES)
            level_1xQ[...] = jnp.full_like(level_1xQ, sinks[pl.program_id(0)])

    def score(piece: Piece) -> jax.Array:
        k_CxK = k[0, :, piece.keys]
        if not halves:
            return rule.score(dot(k_CxK, q[0, :, piece.queries], (0, 0)) * rule.factor, piece.seen)
        return rule.score(dot(jnp.concatenate([k_CxK, k_CxK]), halves[0][:, piece.queries], (0, 0)), piece.seen)

    def add(pieces: list[Piece]):
        # Matrix units take instructions in order. Products of later groups stand between products that wait for this
        # group's weights, so the level of the next group is ready in time. A group has few keys: if the exponentials of
        # many wait for one level, they follow each other and hold products up.
        pieces = sorted(pieces, key=lambda piece: (piece.keys.start // plan.leveled, piece.queries.start))
        groups = [
            list(group) for _, group in itertools.groupby(pieces, lambda p: (p.keys.start // plan.leveled, p.queries))
        ]
        scores = [[score(piece) for piece in group] for group in groups[: plan.early]]
        levels: list[tuple[jax.Array, jax.Array | None]] = []

        def find_level(n: int) -> None:
            queries = groups[n][0].queries
            # The level of the group before is stored later.
            stays = n > 0 and groups[n - 1][0].queries == queries
            levels.append(rule.level(scores[n], levels[n - 1][0] if stays else level_1xQ[:, queries]))

        find_level(0)
        for n, group in enumerate(groups):
            queries = group[0].queries
            if n + 1 < len(groups):
                find_level(n + 1)
            now_1xQ, shrink_1xQ = levels[n]
            sums, acc = sums_8xQ[:, queries], acc_DxQ[:, queries]
            if shrink_1xQ is not None:
                sums, acc = sums * shrink_1xQ, acc * shrink_1xQ
            later = iter(groups[n + plan.early] if n + plan.early < len(groups) else ())
            scores.append([])
            for piece, s_KxQ in zip(group, scores[n], strict=True):
                scores[-1] += [score(other) for other in itertools.islice(later, 1)]
                w_KxQ = rule.weigh(s_KxQ, now_1xQ, piece.seen)
                added = _sum_up(v[0, :, piece.keys], w_KxQ, by_product=bool(halves))
                sums, acc = sums + added[0], acc + added[1]
            scores[-1] += map(score, later)
            sums_8xQ[:, queries], acc_DxQ[:, queries], level_1xQ[:, queries] = sums, acc, now_1xQ

    parts = cut(plan.block, plan.piece)
    fine = list(itertools.product(cut(plan.block, plan.forward_diagonal), parts))
    visit(list(itertools.product(parts, parts)), fine, plan.block, documents, step, add, plan.window)

    @pl.when(step.j == step.last_keys)
    def _():
        factor_1xQ, kept_1xQ = rule.finish(jnp.sum(sums_8xQ[...], axis=0, keepdims=True), level_1xQ[...])
        o[0] = (acc_DxQ[...] * factor_1xQ).astype(o.dtype)
        kept[0] = kept_1xQ


def _sum_up(v_DxK: jax.Array, w_KxQ: jax.Array, by_product: bool) -> tuple[jax.Array, jax.Array]:
    """Returns eight sums of weights per query, which are still to be added, and the sums of weighted values.

    By a product, the first of the eight is the whole sum.
    """
    rounded_KxQ = w_KxQ.astype(v_DxK.dtype)
    if not by_product:
        return w_KxQ.reshape(-1, SUBLANES, w_KxQ.shape[1]).sum(0), dot(v_DxK, rounded_KxQ, (1, 0))
    first_16xK = (lax.broadcasted_iota(jnp.int32, (2 * SUBLANES, v_DxK.shape[1]), 0) == 0).astype(v_DxK.dtype)
    both = dot(jnp.concatenate([v_DxK, first_16xK]), rounded_KxQ, (1, 0))
    return both[len(v_DxK) :][:SUBLANES], both[: len(v_DxK)]


def _split(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns [2 D, Q] of x [D, Q]: rounded, and what rounding took away."""
    rounded = x.astype(dtype)
    return jnp.concatenate([rounded, (x - rounded.astype(x.dtype)).astype(dtype)])


def _backward_kernel(plan: FlashPlan, start: int, adds: bool, pairs, diagonals, following, *refs):
    documents, (q, k, v, do, row, kept, *refs) = split_documents(plan.documents, refs)
    dk_before, dv_before = refs[:2] if adds else (None, None)
    dq, dk, dv, dq_IxCxQ, dk_CxK, dv_DxK = refs[2:] if adds else refs
    step = step_of(pairs, diagonals, pl.program_id(1), plan.window)
    mine, scale = step.i - start, plan.rule.gradient_scale
    if plan.window is not None:
        mine = lax.rem(mine, jnp.int32(dq_IxCxQ.shape[0]))

    @pl.when(step.j == step.first_keys)
    def _():
        dq_IxCxQ[mine] = jnp.zeros(dq_IxCxQ.shape[1:], jnp.float32)

    @pl.when(step.opens)
    def _():
        dk_CxK[...] = jnp.zeros_like(dk_CxK) if dk_before is None else dk_before[0] / scale
        dv_DxK[...] = jnp.zeros_like(dv_DxK) if dv_before is None else dv_before[0]

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
    fine = [(queries, slice(0, plan.block)) for queries in cut(plan.block, plan.backward_diagonal)]
    visit(below, fine, plan.block, documents, step, add, plan.window)

    @pl.when(step.j == step.last_keys)
    def _():
        dq[0] = (scale * dq_IxCxQ[mine]).astype(dq.dtype)

    @pl.when(step.closes)
    def _():
        dk[0] = (scale * dk_CxK[...]).astype(dk.dtype)
        dv[0] = dv_DxK[...].astype(dv.dtype)


def _specs(plan: FlashPlan):
    """Returns block specs of arrays by query head, by key head, and of documents' starts, if there are documents.

    `plan.group` query heads share a key head.
    """

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


def _cost(plan: FlashPlan, q, v, pairs: int, products: tuple[int, int], arrays: int) -> pl.CostEstimate:
    n, compared, length = q.shape
    weights = n * pairs * plan.block**2
    if plan.window is not None:  # many pairs are visited in part
        first = plan.window.tokens - 1 - plan.before  # the first queries, which see fewer keys
        weights = n * (length * plan.window.tokens - first * (first + 1) // 2)
    width = products[0] * compared + products[1] * v.shape[1]
    block = plan.block * max(compared, v.shape[1]) * q.dtype.itemsize
    return pl.CostEstimate(flops=2 * weights * width, transcendentals=0, bytes_accessed=n * pairs * arrays * block)
