"""The gradients of one head in one block, in pieces: what the backward kernel does at each step of its grid.

Letters as in the forward kernel; Q queries and K keys of one tile.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops.dots import in_three
from lm.ops.linear_attention.tpu.features import (
    TpuPlan,
    causal,
    expand,
    expand_gradient,
    extended,
    moment_operand,
    moment_times,
    slope_factor,
    state_operand,
    weights_and_slope,
    with_one,
)
from lm.ops.linear_attention.tpu.head import Head, Refs, once
from lm.ops.tpu import ROWS, dot
from lm.ops.tpu.decay import column, faded, pairs, times
from lm.ops.tpu.order import Piece, Total


@dataclasses.dataclass(frozen=True, kw_only=True)
class GradientRefs(Refs):
    """What the backward kernel reads besides, and writes; None or () where a plan has no use."""

    o: Any
    do: Any
    inverse: Any
    sums: Any
    dx: Any
    dy: Any
    dv: Any
    da_db: Any
    dc: Any
    crossing: Any
    dmaps: Any


class HeadGradients(Head):
    """One head: `inside` and `outside` are the pieces; they write the gradients as soon as they are complete."""

    def __init__(self, plan: TpuPlan, refs: GradientRefs, head: int, made: tuple):
        """`made`: features of queries and keys, each with what makes gradients of theirs; () without a map."""
        super().__init__(plan, refs, head, tuple(features for features, _ in made))
        self.pulls = [pull for _, pull in made]
        count = len(self.cut)
        outside = not plan.single_block
        up, down = range(1, count + 1), range(count, 0, -1)
        separate = plan.exact_local
        # Terms of each tile's gradients: one for each tile of keys or queries inside the block, one for those outside.
        self.da = Total(up, functools.partial(self._factored, 0))
        self.db = Total(down, functools.partial(self._factored, 1))
        self.dx = Total([outside + (not separate)] * count, functools.partial(self._through, 0))
        self.dy = Total([outside + (not separate)] * count, functools.partial(self._through, 1))
        self.dv = Total([n + outside for n in down], self._dv)
        self.through: tuple[list, list] = ([], [])
        self.done = [0.0] * count

    @once
    def gradient(self, i: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """g, e and ⟨do, o⟩ of queries i."""
        refs, head, at = self.refs, self.head, self.cut[i]
        do_DxQ, inverse_1xQ = refs.do[head, :, at].astype(jnp.float32), refs.inverse[head, :, at]
        row_1xQ = jnp.sum(do_DxQ * refs.o[head, :, at].astype(jnp.float32), axis=0, keepdims=True)
        e_1xQ = -inverse_1xQ * row_1xQ if self.plan.normalize else jnp.zeros_like(row_1xQ)
        return (do_DxQ * inverse_1xQ).astype(refs.v.dtype), e_1xQ, row_1xQ

    # What is written.

    def _factored(self, side: int, i: int, gradient_CxT: jax.Array) -> None:
        gradient_CxT = slope_factor(self.plan) * gradient_CxT
        if self.plan.exact_local:
            ref = self.refs.da_db[side]
            ref[self.head, :, self.cut[i]] = gradient_CxT.astype(ref.dtype)
        else:
            (self.dx, self.dy)[side].add(i, gradient_CxT)

    def _through(self, side: int, i: int, gradient_FxT: jax.Array) -> None:
        """Writes a gradient of x or y; with a map that of its inputs, when all tiles are there."""
        ref = (self.refs.dx, self.refs.dy)[side]
        if not self.pulls:
            ref[self.head, :, self.cut[i]] = gradient_FxT.astype(ref.dtype)
            return
        tiles_FxT = self.through[side]
        tiles_FxT.append((i, gradient_FxT))
        if len(tiles_FxT) < len(self.cut):
            return
        whole_FxT = jnp.concatenate([tile for _, tile in sorted(tiles_FxT, key=lambda each: each[0])], axis=1)
        gradient_ExT, dw_RxE = self.pulls[side](whole_FxT)
        ref[self.head] = gradient_ExT.astype(ref.dtype)
        if self.refs.dmaps:
            self.refs.dmaps[side][0] += dw_RxE

    def _dv(self, i: int, dv_DxK: jax.Array) -> None:
        """Writes dv and, with decay, the gradient of a token's running sum.

        That is what its weights as a query would gain, less what they would as a key: Σ_j w_ij dw_ij of query i is
        ⟨do, o⟩, with a denominator only denominator_bias / denominator of it, and Σ_i w_ij dw_ij of key j is ⟨v, dv⟩ +
        Σ_i w_ij e_i: no pair has to be looked at.
        """
        refs, head, at = self.refs, self.head, self.cut[i]
        size = refs.dv.shape[1]
        if self.plan.decay:
            _, e_1xT, row_1xT = self.gradient(i)
            as_query_1xT = -self.plan.denominator_bias * e_1xT if self.plan.normalize else row_1xT
            as_key_1xT = jnp.sum(self.of('v', i).astype(jnp.float32) * dv_DxK[:size], axis=0, keepdims=True)
            refs.dc[head, :, at] = as_query_1xT - as_key_1xT - dv_DxK[size : size + 1]
        refs.dv[head, :, at] = dv_DxK[:size].astype(refs.dv.dtype)

    # Inside the block.

    @property
    def joined(self) -> bool:
        """Whether the product of values and g adds e as well."""
        return self.plan.joined and self.plan.normalize

    @once
    def g_and_e(self, i: int) -> jax.Array:
        """g of queries i; where the product is to add e, below it e's parts, as many as keep its 24 bits."""
        g_DxQ, e_1xQ, _ = self.gradient(i)
        if not self.joined:
            return g_DxQ
        return jnp.concatenate([g_DxQ, in_rows(parts_of(e_1xQ, g_DxQ.dtype)).astype(g_DxQ.dtype)], axis=0)

    @once
    def v_and_ones(self, i: int) -> jax.Array:
        """Values i; ones below, for the parts of e."""
        v_DxK = self.of('v', i)
        if not self.joined:
            return v_DxK
        ones = [jnp.ones((1, v_DxK.shape[1]), jnp.float32)] * (1 if v_DxK.dtype == jnp.float32 else 3)
        return jnp.concatenate([v_DxK, in_rows(ones).astype(v_DxK.dtype)], axis=0)

    def inside(self) -> list[tuple[Callable, Callable]]:
        """(start, finish) of each pair of tiles."""
        numbers = range(len(self.cut))
        return [
            (functools.partial(self._products, i, j), functools.partial(self._weights, i, j))
            for i in numbers
            for j in numbers[: i + 1]
        ]

    def _products(self, i: int, j: int) -> tuple[jax.Array, jax.Array]:
        s_QxK = dot(self.of('a', i), self.of('b', j), (0, 0))
        return s_QxK, dot(self.g_and_e(i), self.v_and_ones(j), (0, 0))

    def _weights(self, i: int, j: int, products: tuple[jax.Array, jax.Array]) -> None:
        """Queries are rows: of the three products with weights only one then needs them the other way round."""
        plan, dtype = self.plan, self.refs.v.dtype
        s_QxK, dw_QxK = products
        g_DxQ, e_1xQ, _ = self.gradient(i)
        if plan.normalize and not self.joined:
            dw_QxK += column(e_1xQ)
        w_QxK, slope_QxK = weights_and_slope(plan, s_QxK)
        if plan.decay:
            c_Tx1, c_1xT = self.fading[:2]
            factors_QxK = pairs(c_Tx1[self.cut[i]], c_1xT[:, self.cut[j]])
            w_QxK, dw_QxK = w_QxK * factors_QxK, dw_QxK * factors_QxK
        ds_QxK = dw_QxK if slope_QxK is None else dw_QxK * slope_QxK
        if i == j:
            w_QxK, ds_QxK = causal(w_QxK, 1), causal(ds_QxK, 1)
        w_QxK, ds_QxK = w_QxK.astype(dtype), ds_QxK.astype(dtype)
        self.da.add(i, dot(self.of('b', j), ds_QxK, (1, 1)))
        self.db.add(j, dot(self.of('a', i), ds_QxK, (1, 0)))
        # With decay Σ w e over a key's queries is asked for too.
        self.dv.add(j, dot(extended_by(plan, g_DxQ, e_1xQ), w_QxK, (1, 0)))

    # Before and after the block.

    @once
    def read(self, i: int) -> tuple[jax.Array, jax.Array]:
        """g and e of queries i, for what they read of the sums, which has faded since the block began."""
        g_DxQ, e_1xQ, _ = self.gradient(i)
        return times(g_DxQ, self.reads(i)), times(e_1xQ, self.reads(i))

    def outside(self) -> list[Piece]:
        """With plan.columns products with much to load and little to multiply alternate with the opposite kind."""
        width = self.refs.state.shape[2]
        size = self.plan.columns or width
        parts = [slice(at, min(at + size, width)) for at in range(0, width, size)]
        pieces: list[Piece] = [self._read_sums]
        for i in range(len(self.cut)):
            queries, keys, values = [], [], []
            of_queries = [functools.partial(self._queries, i, part, queries) for part in parts]
            of_keys = [functools.partial(self._keys, i, part, keys) for part in parts]
            of_values = [functools.partial(self._values, i, part, values) for part in parts]
            fold = [functools.partial(self._fold, i, part) for part in parts]
            if not self.plan.columns:
                pieces += of_queries + of_keys + of_values + fold
                continue
            for first, second in ((of_queries, fold), (of_keys, of_values)):
                pieces += [piece for both in zip(first, second, strict=True) for piece in both]
        return [*pieces, self._crossing] if self.plan.decay else pieces

    def _read_sums(self) -> None:
        """Those over the keys before the block and over the queries after it, before this block is added."""
        plan, refs, head, dtype = self.plan, self.refs, self.head, self.refs.v.dtype
        self.before_DxP = refs.sums[0][head, 0]
        self.after_DxP = state_operand(plan, refs.state[head], self.features, dtype)
        if plan.squared and plan.normalize:
            self.moment_after_FxE = moment_operand(plan, refs.moment[head], dtype)

    def _queries(self, i: int, part: slice, found: list[jax.Array]) -> None:
        """What queries i get from the keys before the block: a part of the features' gradients, with the last all."""
        plan, refs = self.plan, self.refs
        x_FxQ, (g_DxQ, e_1xQ) = self.of('x', i), self.read(i)
        found.append(dot(self.before_DxP[:, part], extended(plan, g_DxQ, e_1xQ), (0, 0)))
        if part.stop < refs.state.shape[2]:
            return
        dx_FxQ = jnp.concatenate(found, axis=0)
        if plan.squared:
            dx_FxQ = expand_gradient(plan, x_FxQ, dx_FxQ)
            if plan.normalize:
                of_queries_FxQ = moment_times(refs.sums[1][self.head, 0], with_one(plan, x_FxQ))
                dx_FxQ += (2.0 * e_1xQ) * of_queries_FxQ[: x_FxQ.shape[0]]
        self.dx.add(i, dx_FxQ)

    def _keys(self, i: int, part: slice, found: list[jax.Array]) -> None:
        """What keys i get from the queries after the block, likewise."""
        plan, y_FxK, fade_1xK = self.plan, self.of('y', i), self.adds(i)
        v_DxK = times(extended(plan, self.of('v', i), 1.0), fade_1xK)
        found.append(dot(self.after_DxP[:, part], v_DxK, (0, 0)))
        if part.stop < self.refs.state.shape[2]:
            return
        dy_FxK = jnp.concatenate(found, axis=0)
        if plan.squared:
            dy_FxK = expand_gradient(plan, y_FxK, dy_FxK)
            if plan.normalize:
                y1_FxK = with_one(plan, y_FxK)
                of_keys_FxK = moment_times(self.moment_after_FxE, y1_FxK)
                dy_FxK += 2.0 * faded(of_keys_FxK[: y_FxK.shape[0]], fade_1xK)
                if plan.decay:
                    self.done[i] = jnp.sum(of_keys_FxK * y1_FxK.astype(jnp.float32), axis=0, keepdims=True) * fade_1xK
        self.dy.add(i, dy_FxK)

    @once
    def expanded(self, name: str, i: int) -> jax.Array:
        """What queries (x) add to the sums, or what of keys (y) meets them."""
        a_FxT = self.of(name, i)
        return expand(self.plan, a_FxT, weighted=name == 'y') if self.plan.squared else a_FxT

    def _values(self, i: int, part: slice, found: list[jax.Array]) -> None:
        """What values i get from the queries after the block, likewise."""
        plan, width, size = self.plan, self.refs.state.shape[2], self.refs.v.shape[1]
        # The rows below are for decay alone.
        after_DxP = self.after_DxP if plan.decay else self.after_DxP[:size]
        found.append(dot(after_DxP[:, part], self.expanded('y', i)[part], (1, 0)))
        if part.stop < width:
            return
        dv_DxK = faded(sum(found), self.adds(i))
        if plan.decay:
            done_1xK = self.done[i] if plan.squared else jnp.sum(dv_DxK[size:], axis=0, keepdims=True)
            done_RxK = jnp.broadcast_to(jnp.asarray(done_1xK, jnp.float32), (ROWS, dv_DxK.shape[1]))
            dv_DxK = jnp.concatenate([dv_DxK[:size], done_RxK], axis=0)
        self.dv.add(i, dv_DxK)

    def _fold(self, i: int, part: slice) -> None:
        """Adds a part of the features of queries i to the sums."""
        plan, refs, head = self.plan, self.refs, self.head
        g_DxQ, e_1xQ = self.read(i)
        added_DxP = dot(extended(plan, g_DxQ, e_1xQ), self.expanded('x', i)[part], (1, 1))
        refs.state[head, :, part] = faded(refs.state[head, :, part], self.kept(i)) + added_DxP
        if plan.squared and plan.normalize and part.start == 0:
            x1_FxQ = with_one(plan, self.of('x', i))
            added_FxE = dot((x1_FxQ.astype(jnp.float32) * e_1xQ).astype(x1_FxQ.dtype), x1_FxQ, (1, 1))
            refs.moment[head] = faded(refs.moment[head], self.kept(i)) + added_FxE

    def _crossing(self) -> None:
        """Writes Σ w dw over all pairs of a key before the block and a query from its first on, in the sums by
        now: each column of the state apart, with all of the moment in the first, which counts once."""
        plan, refs, head = self.plan, self.refs, self.head
        sums_RxP = 0.0
        for at in range(0, refs.state.shape[1], ROWS):  # a float32 copy of all would need memory
            rows = slice(at, at + ROWS)
            sums_RxP += refs.sums[0][head, 0, rows].astype(jnp.float32) * refs.state[head, rows]
        row_1xP = jnp.sum(sums_RxP, axis=0, keepdims=True)
        if plan.squared and plan.normalize:
            before_FxE, after_FxF = refs.sums[1][head, 0].astype(jnp.float32), refs.moment[head]
            copies = before_FxE.shape[1] // after_FxF.shape[1]
            both_FxE = before_FxE * jnp.concatenate([after_FxF] * copies, axis=1)
            at = lax.broadcasted_iota(jnp.int32, row_1xP.shape, 1)
            row_1xP += jnp.where(at == 0, jnp.sum(both_FxE, keepdims=True), 0.0)
        refs.crossing[head, 0] = row_1xP


def parts_of(x: jax.Array, dtype: jnp.dtype) -> list[jax.Array]:
    """What of a float32 array goes into rows of the given type: itself, or its three bfloat16 parts."""
    return [x] if dtype == jnp.float32 else [part.astype(jnp.float32) for part in in_three(x)]


def in_rows(parts_1xT: list[jax.Array]) -> jax.Array:
    """`ROWS` rows [R, T], of which the first are the given ones and the others 0."""
    row = lax.broadcasted_iota(jnp.int32, (ROWS, parts_1xT[0].shape[1]), 0)
    return sum(jnp.where(row == i, part, 0.0) for i, part in enumerate(parts_1xT))


def extended_by(plan: TpuPlan, g_DxQ: jax.Array, e_1xQ: jax.Array) -> jax.Array:
    """g; with decay e below it, all rows the same."""
    if not plan.decay:
        return g_DxQ
    rows_RxQ = jnp.broadcast_to(e_1xQ, (ROWS, e_1xQ.shape[1]))
    return jnp.concatenate([g_DxQ, rows_RxQ.astype(g_DxQ.dtype)], axis=0)
