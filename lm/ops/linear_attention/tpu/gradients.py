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
from lm.ops.linear_attention.tpu.decay import column, faded, last, pairs, times
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
    tiles,
    weights_and_slope,
    with_one,
)
from lm.ops.linear_attention.tpu.order import Piece, Total
from lm.ops.tpu import ROWS, dot


@dataclasses.dataclass(frozen=True)
class Refs:
    """What the backward kernel reads and writes, of all heads of a grid step; None or () where a plan has no use."""

    x: Any
    y: Any
    v: Any
    a: Any
    b: Any
    c: Any
    o: Any
    do: Any
    inverse: Any
    sums: Any
    dx: Any
    dy: Any
    dv: Any
    da_db: Any
    dc: Any
    dmaps: Any
    state: Any
    moment: Any


class HeadGradients:
    """One head: `inside` and `outside` are the pieces; they write the gradients as soon as they are complete."""

    def __init__(self, plan: TpuPlan, refs: Refs, head: int, made: tuple):
        """`made`: features of queries and keys, each with what makes gradients of theirs; () without a map."""
        self.plan, self.refs, self.head, self.made = plan, refs, head, made
        self.cut = [tile for tile, _ in tiles(plan, plan.tile)]
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
        self.features: tuple[list, list] = ([], [])
        self.done = [0.0] * count

    # What is read.

    @functools.cache
    def of(self, name: str, i: int) -> jax.Array:
        """Tile i of an array: x, y, v, a, b, or features where a map makes them."""
        at = self.cut[i]
        if self.made and (name in 'xy' or not self.plan.exact_local and name in 'ab'):
            return self.made['xyab'.index(name) % 2][0][:, at]
        return getattr(self.refs, name)[self.head, :, at]

    @functools.cache
    def gradient(self, i: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """g, e and ⟨do, o⟩ of queries i."""
        refs, head, at = self.refs, self.head, self.cut[i]
        do_DxQ, inverse_1xQ = refs.do[head, :, at].astype(jnp.float32), refs.inverse[head, :, at]
        row_1xQ = jnp.sum(do_DxQ * refs.o[head, :, at].astype(jnp.float32), axis=0, keepdims=True)
        e_1xQ = -inverse_1xQ * row_1xQ if self.plan.normalize else jnp.zeros_like(row_1xQ)
        return (do_DxQ * inverse_1xQ).astype(refs.v.dtype), e_1xQ, row_1xQ

    @functools.cached_property
    def fading(self) -> tuple[jax.Array, ...]:
        """Of decay: c as column and as row, and the factors of the block, of what a query reads, of what a key adds."""
        c_1xT = self.refs.c[self.head]
        return column(c_1xT), c_1xT, jnp.exp(last(c_1xT)), jnp.exp(c_1xT), jnp.exp(last(c_1xT) - c_1xT)

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
        if not self.made:
            ref[self.head, :, self.cut[i]] = gradient_FxT.astype(ref.dtype)
            return
        tiles_FxT = self.features[side]
        tiles_FxT.append((i, gradient_FxT))
        if len(tiles_FxT) < len(self.cut):
            return
        whole_FxT = jnp.concatenate([tile for _, tile in sorted(tiles_FxT, key=lambda each: each[0])], axis=1)
        gradient_ExT, dw_RxE = self.made[side][1](whole_FxT)
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

    @functools.cache
    def g_and_e(self, i: int) -> jax.Array:
        """g of queries i; where the product is to add e, below it e's parts, as many as keep its 24 bits."""
        g_DxQ, e_1xQ, _ = self.gradient(i)
        if not self.joined:
            return g_DxQ
        return jnp.concatenate([g_DxQ, in_rows(parts_of(e_1xQ, g_DxQ.dtype)).astype(g_DxQ.dtype)], axis=0)

    @functools.cache
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
        s_KxQ = dot(self.of('b', j), self.of('a', i), (0, 0))
        return s_KxQ, dot(self.v_and_ones(j), self.g_and_e(i), (0, 0))

    def _weights(self, i: int, j: int, products: tuple[jax.Array, jax.Array]) -> None:
        plan, dtype = self.plan, self.refs.v.dtype
        s_KxQ, dw_KxQ = products
        g_DxQ, e_1xQ, _ = self.gradient(i)
        if plan.normalize and not self.joined:
            dw_KxQ += e_1xQ
        w_KxQ, slope_KxQ = weights_and_slope(plan, s_KxQ)
        if plan.decay:
            factors_KxQ = pairs(*self.fading[:2], self.cut[i], self.cut[j])
            w_KxQ, dw_KxQ = w_KxQ * factors_KxQ, dw_KxQ * factors_KxQ
        ds_KxQ = dw_KxQ if slope_KxQ is None else dw_KxQ * slope_KxQ
        if i == j:
            w_KxQ, ds_KxQ = causal(w_KxQ), causal(ds_KxQ)
        w_KxQ, ds_KxQ = w_KxQ.astype(dtype), ds_KxQ.astype(dtype)
        self.da.add(i, dot(self.of('b', j), ds_KxQ, (1, 0)))
        self.db.add(j, dot(self.of('a', i), ds_KxQ, (1, 1)))
        # With decay Σ w e over a key's queries is asked for too.
        self.dv.add(j, dot(extended_by(plan, g_DxQ, e_1xQ), w_KxQ, (1, 1)))

    # Before and after the block.

    @functools.cached_property
    def sums_DxP(self) -> jax.Array:
        return self.refs.sums[0][self.head, 0]

    @functools.cached_property
    def state_DxP(self) -> jax.Array:
        """Of the queries after the block."""
        rows = self.made[1][0].shape[0] if self.made else self.refs.y.shape[1]
        return state_operand(self.plan, self.refs.state[self.head], rows, self.refs.v.dtype)

    @functools.cached_property
    def moment_FxE(self) -> jax.Array:
        """Likewise."""
        return moment_operand(self.plan, self.refs.moment[self.head], self.refs.v.dtype)

    @functools.cache
    def read(self, i: int) -> tuple[jax.Array, jax.Array]:
        """g and e of queries i, for what they read of the sums, which has faded since the block began."""
        g_DxQ, e_1xQ, _ = self.gradient(i)
        read_1xQ = self.fading[3][:, self.cut[i]] if self.plan.decay else None
        return times(g_DxQ, read_1xQ), times(e_1xQ, read_1xQ)

    def fade(self, i: int) -> jax.Array | None:
        """What later queries see of keys i, as of the block's end."""
        return self.fading[4][:, self.cut[i]] if self.plan.decay else None

    def outside(self) -> list[Piece]:
        pieces = (self._queries, self._keys, self._values, self._fold)
        return [functools.partial(piece, i) for i in range(len(self.cut)) for piece in pieces]

    def _queries(self, i: int) -> None:
        plan, sums = self.plan, self.refs.sums
        x_FxQ, (g_DxQ, e_1xQ) = self.of('x', i), self.read(i)
        dx_FxQ = dot(self.sums_DxP, extended(plan, g_DxQ, e_1xQ), (0, 0))
        if plan.squared:
            dx_FxQ = expand_gradient(plan, x_FxQ, dx_FxQ)
            if plan.normalize:
                of_queries_FxQ = moment_times(sums[1][self.head, 0], with_one(plan, x_FxQ))
                dx_FxQ += (2.0 * e_1xQ) * of_queries_FxQ[: x_FxQ.shape[0]]
        self.dx.add(i, dx_FxQ)

    def _keys(self, i: int) -> None:
        plan, y_FxK, fade_1xK = self.plan, self.of('y', i), self.fade(i)
        dy_FxK = dot(self.state_DxP, times(extended(plan, self.of('v', i), 1.0), fade_1xK), (0, 0))
        if plan.squared:
            dy_FxK = expand_gradient(plan, y_FxK, dy_FxK)
            if plan.normalize:
                y1_FxK = with_one(plan, y_FxK)
                of_keys_FxK = moment_times(self.moment_FxE, y1_FxK)
                dy_FxK += 2.0 * faded(of_keys_FxK[: y_FxK.shape[0]], fade_1xK)
                if plan.decay:
                    self.done[i] = jnp.sum(of_keys_FxK * y1_FxK.astype(jnp.float32), axis=0, keepdims=True) * fade_1xK
        self.dy.add(i, dy_FxK)

    def _values(self, i: int) -> None:
        plan, y_FxK = self.plan, self.of('y', i)
        if not plan.squared and not plan.decay:
            self.dv.add(i, dot(self.state_DxP[:-ROWS], y_FxK, (1, 0)))
            return
        y_PxK = expand(plan, y_FxK, weighted=True) if plan.squared else y_FxK
        dv_DxK = faded(dot(self.state_DxP, y_PxK, (1, 0)), self.fade(i))
        if plan.decay:
            size = self.refs.v.shape[1]
            done_1xK = self.done[i] if plan.squared else jnp.sum(dv_DxK[size:], axis=0, keepdims=True)
            done_RxK = jnp.broadcast_to(jnp.asarray(done_1xK, jnp.float32), (ROWS, dv_DxK.shape[1]))
            dv_DxK = jnp.concatenate([dv_DxK[:size], done_RxK], axis=0)
        self.dv.add(i, dv_DxK)

    def _fold(self, i: int) -> None:
        """Adds queries i to the sums."""
        plan, refs, head = self.plan, self.refs, self.head
        x_FxQ, (g_DxQ, e_1xQ) = self.of('x', i), self.read(i)
        kept = self.fading[2] if plan.decay and i == 0 else None
        x_PxQ = expand(plan, x_FxQ, weighted=False) if plan.squared else x_FxQ
        refs.state[head] = faded(refs.state[head], kept) + dot(extended(plan, g_DxQ, e_1xQ), x_PxQ, (1, 1))
        if plan.squared and plan.normalize:
            x1_FxQ = with_one(plan, x_FxQ)
            weighted_FxQ = (x1_FxQ.astype(jnp.float32) * e_1xQ).astype(x1_FxQ.dtype)
            refs.moment[head] = faded(refs.moment[head], kept) + dot(weighted_FxQ, x1_FxQ, (1, 1))


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
