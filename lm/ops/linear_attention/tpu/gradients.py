"""The gradients of one head in one block, in pieces: the work of the backward kernel at each step of its grid.

Q are the queries and K the keys of one tile; other letters are explained in the forward kernel.
"""

import functools
from collections.abc import Callable
from typing import Generic, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops.linear_attention.tpu.features import (
    append_one,
    expand,
    expand_gradient,
    extend,
    fill_rows,
    make_moment_operand,
    make_state_operand,
    mask,
    multiply_moment,
    number_rows,
    slope_factor,
    split_float32,
    weigh,
)
from lm.ops.linear_attention.tpu.forward import ForwardResults
from lm.ops.linear_attention.tpu.head import Head, once
from lm.ops.linear_attention.tpu.maps import MapFeatures
from lm.ops.linear_attention.tpu.plan import A, KernelInputs, KernelSums, Ref, TpuPlan
from lm.ops.linear_attention.types import Sides
from lm.ops.tpu import ROWS, dot
from lm.ops.tpu.decay import column, decay_sums, multiply_tokens, pairs
from lm.ops.tpu.order import Piece, Total


class KernelGradients(NamedTuple, Generic[A]):
    """The results of the backward kernel.

    Attributes:
        inputs: the gradients of the inputs.
        crossing: the part of the gradient of a block's first running sum, [N, L / block, 1, P], from pairs of a key
            before the block and a query from its first on; None where there are no such pairs, or no decay.
        maps: the gradients of the matrices of each step's heads, [N / heads, R, E] float32, to be summed; None unless
            the map learns.
    """

    inputs: KernelInputs
    crossing: A | None
    maps: Sides[A] | None


class _Side:
    """Writes the gradients of a head's queries, or of its keys: tile by tile, or with a map all at once."""

    def __init__(self, made: MapFeatures | None, features: Ref, compared: Ref | None, matrix: Ref | None):
        """Stores references for the gradients of x (or y), of a (or b), and of the map's matrix, or None."""
        self.pull = None if made is None else made.pull
        self.features, self.compared, self.matrix = features, compared, matrix
        self.tiles: list[tuple[int, jax.Array]] = []


class HeadGradients(Head):
    """One head: `inside` and `outside` are the pieces; they write the gradients as soon as they are complete."""

    def __init__(
        self,
        plan: TpuPlan,
        inputs: KernelInputs,
        sums: tuple[Ref, Ref],
        head: int,
        made: Sides[MapFeatures] | None,
        results: ForwardResults[Ref],
        do: Ref,
        gradients: KernelGradients[Ref],
    ):
        """Stores the arguments: `results` of the forward kernel, and `do`, the gradient of its outputs."""
        super().__init__(plan, inputs, sums, head, made)
        self.results, self.do, self.gradients = results, do, gradients
        written, maps = gradients.inputs, gradients.maps
        queries = _Side(made and made.queries, written.x_NxFxL, written.a_NxCxL, maps and maps.queries)
        keys = _Side(made and made.keys, written.y_NxFxL, written.b_NxCxL, maps and maps.keys)
        count, outside = len(self.tiles), not plan.single_block
        up, down = list(range(1, count + 1)), list(range(count, 0, -1))
        # Terms of each tile's gradients: one per tile of keys or queries inside the block, and one for tokens outside.
        self.dx = Total([outside + (not plan.exact_local)] * count, functools.partial(self._write_features, queries))
        self.dy = Total([outside + (not plan.exact_local)] * count, functools.partial(self._write_features, keys))
        self.da = Total(up, functools.partial(self._finish_compared, queries, self.dx))
        self.db = Total(down, functools.partial(self._finish_compared, keys, self.dy))
        self.dv = Total([n + outside for n in down], self._write_values)
        self.moment_terms: list[jax.Array | float] = [0.0] * count
        """Σ w dw of keys i and all later queries, through the moment."""

    @once
    def gradient(self, i: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Computes g and e, the gradients of the numerators and denominators of queries i, and ⟨do, o⟩."""
        results, head, at = self.results, self.head, self.tiles[i]
        do_DxQ, inverse_1xQ = self.do[head, :, at].astype(jnp.float32), results.inverse_Nx1xL[head, :, at]
        row_1xQ = jnp.sum(do_DxQ * results.o_NxDxL[head, :, at].astype(jnp.float32), axis=0, keepdims=True)
        e_1xQ = -inverse_1xQ * row_1xQ if self.plan.normalize else jnp.zeros_like(row_1xQ)
        return (do_DxQ * inverse_1xQ).astype(self.dtype), e_1xQ, row_1xQ

    # Writing.

    def _finish_compared(self, side: _Side, features: Total, i: int, gradient_CxT: jax.Array) -> None:
        """Writes a gradient of a or b; where these are x and y, adds it to the gradient of x or y."""
        gradient_CxT = slope_factor(self.plan) * gradient_CxT
        if side.compared is None:
            features.add(i, gradient_CxT)
        else:
            side.compared[self.head, :, self.tiles[i]] = gradient_CxT.astype(side.compared.dtype)

    def _write_features(self, side: _Side, i: int, gradient_FxT: jax.Array) -> None:
        """Writes a gradient of x or y; with a map the gradient of its inputs, when all tiles are there."""
        if side.pull is None:
            side.features[self.head, :, self.tiles[i]] = gradient_FxT.astype(side.features.dtype)
            return
        side.tiles.append((i, gradient_FxT))
        if len(side.tiles) < len(self.tiles):
            return
        whole_FxT = jnp.concatenate([tile for _, tile in sorted(side.tiles, key=lambda each: each[0])], axis=1)
        dx_ExT, dw_RxE = side.pull(whole_FxT)
        side.features[self.head] = dx_ExT.astype(side.features.dtype)
        if side.matrix is not None:
            side.matrix[0] += dw_RxE

    def _write_values(self, i: int, dv_DxK: jax.Array) -> None:
        """Writes dv and, with decay, the gradient of a token's running sum.

        That gradient is Σ w dw of the token as a query, minus Σ w dw of the token as a key. For query i, Σ_j w_ij dw_ij
        is ⟨do, o⟩, with a denominator only denominator_bias / denominator of it. For key j, Σ_i w_ij dw_ij is
        ⟨v, dv⟩ + Σ_i w_ij e_i. No single pair is computed.
        """
        written, at, size = self.gradients.inputs, self.tiles[i], self.head_dim
        if written.c_Nx1xL is not None:
            _, e_1xT, row_1xT = self.gradient(i)
            as_query_1xT = -self.plan.denominator_bias * e_1xT if self.plan.normalize else row_1xT
            as_key_1xT = jnp.sum(self.v(i).astype(jnp.float32) * dv_DxK[:size], axis=0, keepdims=True)
            self._write(written.c_Nx1xL, at, as_query_1xT - as_key_1xT - dv_DxK[size : size + 1])
        self._write(written.v_NxDxL, at, dv_DxK[:size].astype(self.dtype))

    def _write(self, ref: Ref, at: slice, value: jax.Array) -> None:
        ref[self.head, :, at] = value

    # Inside the block.

    @property
    def joined(self) -> bool:
        """True where the product of values and g adds e as well."""
        return self.plan.joined and self.plan.normalize

    @once
    def g_and_e(self, i: int) -> jax.Array:
        """Returns g of queries i; where the product adds e, the parts of e's 24 bits lie below."""
        g_DxQ, e_1xQ, _ = self.gradient(i)
        if not self.joined:
            return g_DxQ
        rows = fill_rows(split_float32(e_1xQ, g_DxQ.dtype), number_rows(e_1xQ.shape[1]))
        return jnp.concatenate([g_DxQ, rows.astype(g_DxQ.dtype)], axis=0)

    @once
    def v_and_ones(self, i: int) -> jax.Array:
        """Returns values i, with ones below for the parts of e."""
        v_DxK = self.v(i)
        if not self.joined:
            return v_DxK
        ones = [jnp.ones((1, v_DxK.shape[1]), jnp.float32)] * (1 if v_DxK.dtype == jnp.float32 else 3)
        return jnp.concatenate([v_DxK, fill_rows(ones, number_rows(v_DxK.shape[1])).astype(v_DxK.dtype)], axis=0)

    def inside(self) -> list[tuple[Callable, Callable]]:
        """Returns (start, finish) of each pair of tiles."""
        numbers = range(len(self.tiles))
        return [
            (functools.partial(self._multiply, i, j), functools.partial(self._add_pair, i, j))
            for i in numbers
            for j in numbers[: i + 1]
        ]

    def _multiply(self, i: int, j: int) -> tuple[jax.Array, jax.Array]:
        s_QxK = dot(self.a(i), self.b(j), (0, 0))
        return s_QxK, dot(self.g_and_e(i), self.v_and_ones(j), (0, 0))

    def _add_pair(self, i: int, j: int, products: tuple[jax.Array, jax.Array]) -> None:
        """Adds the gradients of queries i and keys j.

        Queries are rows: only one of the three products with weights then needs them transposed.
        """
        plan = self.plan
        s_QxK, dw_QxK = products
        g_DxQ, e_1xQ, _ = self.gradient(i)
        if plan.normalize and not self.joined:
            dw_QxK += column(e_1xQ)
        w_QxK, slope_QxK = weigh(plan, s_QxK)
        if self.factors is not None:
            factors_QxK = pairs(self.factors.column(self.tiles[i]), self.factors.row(self.tiles[j]))
            w_QxK, dw_QxK = w_QxK * factors_QxK, dw_QxK * factors_QxK
        ds_QxK = dw_QxK if slope_QxK is None else dw_QxK * slope_QxK
        if i == j:
            w_QxK, ds_QxK = mask(w_QxK, 1), mask(ds_QxK, 1)
        w_QxK, ds_QxK = w_QxK.astype(self.dtype), ds_QxK.astype(self.dtype)
        self.da.add(i, dot(self.b(j), ds_QxK, (1, 1)))
        self.db.add(j, dot(self.a(i), ds_QxK, (1, 0)))
        # With decay Σ w e over a key's queries is needed too.
        self.dv.add(j, dot(self._extend_by(g_DxQ, e_1xQ), w_QxK, (1, 0)))

    def _extend_by(self, g_DxQ: jax.Array, e_1xQ: jax.Array) -> jax.Array:
        """Returns g; with decay e below it, all rows the same."""
        if not self.plan.decay:
            return g_DxQ
        rows_RxQ = jnp.broadcast_to(e_1xQ, (ROWS, e_1xQ.shape[1]))
        return jnp.concatenate([g_DxQ, rows_RxQ.astype(g_DxQ.dtype)], axis=0)

    # Before and after the block.

    @once
    def read(self, i: int) -> tuple[jax.Array, jax.Array]:
        """Returns g and e of queries i for their reads of the sums, which have decayed since the block began."""
        g_DxQ, e_1xQ, _ = self.gradient(i)
        return multiply_tokens(g_DxQ, self.reads(i)), multiply_tokens(e_1xQ, self.reads(i))

    def outside(self) -> list[Piece]:
        """Returns the pieces for tokens before and after the block.

        With plan.columns products with much to load and little to multiply alternate with the opposite kind.
        """
        width = self.width
        size = self.plan.columns or width
        parts = [slice(at, min(at + size, width)) for at in range(0, width, size)]
        pieces: list[Piece] = [self._load_sums]
        for i in range(len(self.tiles)):
            queries, keys, values = [], [], []
            of_queries = [functools.partial(self._add_queries, i, part, queries) for part in parts]
            of_keys = [functools.partial(self._add_keys, i, part, keys) for part in parts]
            of_values = [functools.partial(self._add_values, i, part, values) for part in parts]
            fold = [functools.partial(self._fold, i, part) for part in parts]
            if not self.plan.columns:
                pieces += of_queries + of_keys + of_values + fold
                continue
            for first, second in ((of_queries, fold), (of_keys, of_values)):
                pieces += [piece for both in zip(first, second, strict=True) for piece in both]
        return [*pieces, self._write_crossing] if self.plan.decay else pieces

    @property
    def width(self) -> int:
        """The number of columns of the state."""
        return self.state.shape[2]

    @property
    def before(self) -> KernelSums[Ref]:
        """The sums over the keys before each block, as operands."""
        return cast(KernelSums, self.results.sums)  # they are there wherever there is anything outside of the block

    def _load_sums(self) -> None:
        """Loads the sums over tokens outside of the block, as operands.

        The gradients of queries need the sums over the keys before the block, which the forward kernel has saved. The
        gradients of keys and values need the sums over the queries after the block, which this kernel carries from
        block to block. `_fold` then adds the block's own queries to them, so they are copied before.
        """
        plan, head = self.plan, self.head
        self.before_DxP = self.before.state[head, 0]
        self.after_DxP = make_state_operand(plan, self.state[head], self.features, self.dtype)
        if plan.has_moment:
            self.moment_after_FxE = make_moment_operand(plan, self.moment[head], self.dtype)

    def _add_queries(self, i: int, part: slice, found: list[jax.Array]) -> None:
        """Computes the gradients of queries i from the keys before the block.

        The keys are summed up in the state, and `part` is some of its columns: a call computes some rows of the
        features' gradients. They are collected in `found`, and added up after the last part.
        """
        plan = self.plan
        x_FxQ, (g_DxQ, e_1xQ) = self.x(i), self.read(i)
        found.append(dot(self.before_DxP[:, part], extend(plan, g_DxQ, e_1xQ), (0, 0)))
        if part.stop < self.width:
            return
        dx_FxQ = jnp.concatenate(found, axis=0)
        if plan.squared:
            dx_FxQ = expand_gradient(plan, x_FxQ, dx_FxQ)
            if plan.normalize:
                moment = cast(Ref, self.before.moment)[self.head, 0]
                of_queries_FxQ = multiply_moment(moment, append_one(plan, x_FxQ))
                dx_FxQ += (2.0 * e_1xQ) * of_queries_FxQ[: x_FxQ.shape[0]]
        self.dx.add(i, dx_FxQ)

    def _add_keys(self, i: int, part: slice, found: list[jax.Array]) -> None:
        """Computes the gradients of keys i from the queries after the block, likewise."""
        plan, y_FxK, factors_1xK = self.plan, self.y(i), self.adds(i)
        v_DxK = multiply_tokens(extend(plan, self.v(i), 1.0), factors_1xK)
        found.append(dot(self.after_DxP[:, part], v_DxK, (0, 0)))
        if part.stop < self.width:
            return
        dy_FxK = jnp.concatenate(found, axis=0)
        if plan.squared:
            dy_FxK = expand_gradient(plan, y_FxK, dy_FxK)
            if plan.normalize:
                y1_FxK = append_one(plan, y_FxK)
                of_keys_FxK = multiply_moment(self.moment_after_FxE, y1_FxK)
                dy_FxK += 2.0 * decay_sums(of_keys_FxK[: y_FxK.shape[0]], factors_1xK)
                if factors_1xK is not None:
                    products_FxK = of_keys_FxK * y1_FxK.astype(jnp.float32)
                    self.moment_terms[i] = jnp.sum(products_FxK, axis=0, keepdims=True) * factors_1xK
        self.dy.add(i, dy_FxK)

    @once
    def expanded_x(self, i: int) -> jax.Array:
        """Returns the terms of queries i in the sums."""
        return expand(self.plan, self.x(i), weighted=False) if self.plan.squared else self.x(i)

    @once
    def expanded_y(self, i: int) -> jax.Array:
        """Returns the vectors of keys i that meet the sums."""
        return expand(self.plan, self.y(i), weighted=True) if self.plan.squared else self.y(i)

    def _add_values(self, i: int, part: slice, found: list[jax.Array]) -> None:
        """Computes the gradients of values i from the queries after the block, likewise."""
        plan, size = self.plan, self.head_dim
        # The rows below are for decay alone.
        after_DxP = self.after_DxP if plan.decay else self.after_DxP[:size]
        found.append(dot(after_DxP[:, part], self.expanded_y(i)[part], (1, 0)))
        if part.stop < self.width:
            return
        dv_DxK = decay_sums(cast(jax.Array, sum(found)), self.adds(i))
        if plan.decay:
            term_1xK = self.moment_terms[i] if plan.squared else jnp.sum(dv_DxK[size:], axis=0, keepdims=True)
            term_RxK = jnp.broadcast_to(jnp.asarray(term_1xK, jnp.float32), (ROWS, dv_DxK.shape[1]))
            dv_DxK = jnp.concatenate([dv_DxK[:size], term_RxK], axis=0)
        self.dv.add(i, dv_DxK)

    def _fold(self, i: int, part: slice) -> None:
        """Adds a part of the features of queries i to the sums."""
        plan, head = self.plan, self.head
        g_DxQ, e_1xQ = self.read(i)
        added_DxP = dot(extend(plan, g_DxQ, e_1xQ), self.expanded_x(i)[part], (1, 1))
        self.state[head, :, part] = decay_sums(self.state[head, :, part], self.kept(i)) + added_DxP
        if plan.has_moment and part.start == 0:
            x1_FxQ = append_one(plan, self.x(i))
            added_FxE = dot((x1_FxQ.astype(jnp.float32) * e_1xQ).astype(x1_FxQ.dtype), x1_FxQ, (1, 1))
            self.moment[head] = decay_sums(self.moment[head], self.kept(i)) + added_FxE

    def _write_crossing(self) -> None:
        """Writes Σ w dw over all pairs of a key before the block and a query from its first on.

        These queries are in the sums by now. Each column of the state stands by itself, with all of the moment in the
        first one, which counts once.
        """
        before, head = self.before, self.head
        sums_RxP: jax.Array | float = 0.0
        for at in range(0, self.state.shape[1], ROWS):  # a float32 copy of all would need more memory
            rows = slice(at, at + ROWS)
            sums_RxP += before.state[head, 0, rows].astype(jnp.float32) * self.state[head, rows]
        row_1xP = jnp.sum(sums_RxP, axis=0, keepdims=True)
        if before.moment is not None:
            before_FxE, after_FxF = before.moment[head, 0].astype(jnp.float32), self.moment[head]
            copies = before_FxE.shape[1] // after_FxF.shape[1]
            both_FxE = before_FxE * jnp.concatenate([after_FxF] * copies, axis=1)
            at = lax.broadcasted_iota(jnp.int32, row_1xP.shape, 1)
            row_1xP += jnp.where(at == 0, jnp.sum(both_FxE, keepdims=True), 0.0)
        cast(Ref, self.gradients.crossing)[head, 0] = row_1xP
