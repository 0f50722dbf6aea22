"""The forward kernel of causal linear attention on TPUs.

Letters: N heads of all sequences, T tokens of a block, F features x of queries and y of keys. C is the size of the
vectors that the exact kernel compares, D the head size, and P the rows of the packed expansion. Arrays in HBM are [N,
rows, tokens]. The grid walks over groups of heads and, for each, over the blocks in order, with the sums over earlier
keys in VMEM.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Generic, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops.linear_attention.tpu.features import (
    append_one,
    expand,
    extend,
    make_moment_operand,
    make_state_operand,
    mask,
    multiply_moment,
    weigh,
)
from lm.ops.linear_attention.tpu.head import Head
from lm.ops.linear_attention.tpu.maps import MapFeatures, make_features, make_of_heads
from lm.ops.linear_attention.tpu.plan import A, KernelInputs, KernelSums, Ref, TpuPlan
from lm.ops.linear_attention.types import Sides
from lm.ops.tpu import dot
from lm.ops.tpu.decay import decay_sums, multiply_tokens, pairs
from lm.ops.tpu.order import Piece, Total, ahead, in_turn


class ForwardResults(NamedTuple, Generic[A]):
    """The results of the forward kernel.

    Attributes:
        o_NxDxL: outputs.
        inverse_Nx1xL: inverse denominators, float32.
        sums: operands of the sums before each block, [N, L / block, rows, columns]; None where they are not saved.
    """

    o_NxDxL: A
    inverse_Nx1xL: A
    sums: KernelSums[A] | None


def forward(
    plan: TpuPlan,
    save: bool,
    inputs: KernelInputs,
    maps: Sides[jax.Array] | None,
    before: KernelSums[jax.Array] | None = None,
) -> ForwardResults[jax.Array]:
    """Computes outputs and inverse denominators; with `save` also the sums before each block.

    Args:
        plan: the plan; L is a multiple of its block, and N of its heads.
        save: also return the sums' operands.
        inputs: L tokens of N heads.
        maps: the operands of the map, where plan.feature_map.
        before: the sums over keys before the first one; None: no keys.
    """
    v = inputs.v_NxDxL
    n, head_dim, length = v.shape
    features = plan.features or inputs.x_NxFxL.shape[1]
    state, moment = plan.state_shape(features, head_dim), plan.moment_shape(features)
    steps = length // plan.block
    results = ForwardResults(
        jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct((n, 1, length), jnp.float32), None
    )

    if save and not plan.single_block:

        def per_block(rows: int, columns: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((n, steps, rows, columns), v.dtype)

        columns = moment[1] if v.dtype == jnp.float32 else 3 * moment[1]
        saved = KernelSums(per_block(*state), per_block(moment[0], columns) if plan.has_moment else None)
        results = results._replace(sums=saved)

    def of_tokens(a):
        return pl.BlockSpec((plan.heads, a.shape[1], plan.block), lambda i, j: (i, 0, j))

    def of_block(a):
        return pl.BlockSpec((plan.heads, 1, *a.shape[2:]), lambda i, j: (i, j, 0, 0))

    specs = jax.tree.map(of_tokens, results._replace(sums=None))._replace(sums=jax.tree.map(of_block, results.sums))
    (results,) = pl.pallas_call(
        functools.partial(_kernel, plan),
        name='linear_attention_forward',
        grid=(n // plan.heads, steps),
        in_specs=[
            jax.tree.map(lambda w: pl.BlockSpec(w.shape, lambda i, j: (0, 0)), maps),
            jax.tree.map(of_tokens, inputs),
            jax.tree.map(lambda a: pl.BlockSpec((plan.heads, *a.shape[1:]), lambda i, j: (i, 0, 0)), before),
        ],
        out_specs=(specs,),
        out_shape=(results,),
        scratch_shapes=[pltpu.VMEM((plan.heads, *shape), jnp.float32) for shape in (state, moment)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=plan.vmem_limit_bytes
        ),
        cost_estimate=_estimate_cost(plan, inputs, results),
    )(maps, inputs, before)
    return results


def _estimate_cost(plan: TpuPlan, inputs: KernelInputs, results: ForwardResults) -> pl.CostEstimate:
    n, head_dim, length = inputs.v_NxDxL.shape
    features = plan.features or inputs.x_NxFxL.shape[1]
    compared = features if inputs.a_NxCxL is None else inputs.a_NxCxL.shape[1]
    rows, columns = plan.state_shape(features, head_dim)
    moment = 8 * features**2 if plan.has_moment else 0
    before = 0 if plan.single_block else 4 * rows * columns + moment
    inside = (compared + head_dim) * (plan.block + plan.tile) + 4 * plan.projection_rows * inputs.x_NxFxL.shape[1]
    return pl.CostEstimate(
        flops=n * length * (before + inside),
        transcendentals=n * length * (plan.block + plan.tile) // 2 if plan.decay else 0,
        bytes_accessed=sum(a.size * a.dtype.itemsize for a in jax.tree.leaves((inputs, results))),
    )


def start_sums(state: Ref, moment: Ref, first: KernelSums[Ref] | None, others: Iterable[Ref] = ()) -> None:
    """Sets the sums at a sequence's first step, to zeros where `first` has none; sets `others` to zeros."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        state[...] = jnp.zeros_like(state) if first is None else first.state[...]
        before = None if first is None else first.moment
        moment[...] = jnp.zeros_like(moment) if before is None else before[...]
        for ref in others:
            ref[...] = jnp.zeros_like(ref)


def _kernel(
    plan: TpuPlan,
    maps: Sides[Ref] | None,
    inputs: KernelInputs,
    before: KernelSums[Ref] | None,
    results: ForwardResults[Ref],
    state: Ref,
    moment: Ref,
) -> None:
    start_sums(state, moment, before)
    made = make_of_heads(make_features, plan, maps, inputs)
    heads = [_HeadOutputs(plan, inputs, (state, moment), head, made[head], results) for head in range(plan.heads)]
    inside = ahead([pair for head in heads for pair in head.inside()], 1)
    in_turn(inside, [piece for head in heads for piece in head.outside()])


class _HeadOutputs(Head):
    """One head in one block: `inside` and `outside` are the pieces; an output is written as soon as it is complete."""

    def __init__(
        self,
        plan: TpuPlan,
        inputs: KernelInputs,
        sums: tuple[Ref, Ref],
        head: int,
        made: Sides[MapFeatures] | None,
        results: ForwardResults[Ref],
    ):
        super().__init__(plan, inputs, sums, head, made)
        self.results = results
        terms = [i + 1 + (not plan.single_block) for i in range(len(self.tiles))]
        self.dens: dict[int, jax.Array] = {}
        self.den = Total(terms, self.dens.__setitem__)
        self.num = Total(terms, self._write)

    def _write(self, i: int, num_DxQ: jax.Array) -> None:
        results, head, at = self.results, self.head, self.tiles[i]
        if not self.plan.normalize:
            results.inverse_Nx1xL[head, :, at] = jnp.ones((1, num_DxQ.shape[1]), jnp.float32)
            results.o_NxDxL[head, :, at] = num_DxQ.astype(self.dtype)
            return
        total_1xQ = self.plan.denominator_bias + self.dens.pop(i)
        # Padding after the last token has no keys and, with denominator_bias 0, no denominator either.
        inverse_1xQ = jnp.where(total_1xQ == 0.0, 0.0, 1.0 / total_1xQ)
        results.inverse_Nx1xL[head, :, at] = inverse_1xQ
        results.o_NxDxL[head, :, at] = (num_DxQ * inverse_1xQ).astype(self.dtype)

    def inside(self) -> list[tuple[Callable, Callable]]:
        """Returns (start, finish) of each pair of tiles inside the block."""
        numbers = range(len(self.tiles))
        return [
            (functools.partial(self._multiply, i, j), functools.partial(self._add_pair, i, j))
            for i in numbers
            for j in numbers[: i + 1]
        ]

    def _multiply(self, i: int, j: int) -> jax.Array:
        return dot(self.b(j), self.a(i), (0, 0))

    def _add_pair(self, i: int, j: int, s_KxQ: jax.Array) -> None:
        """Adds the part of queries i from keys j."""
        w_KxQ, _ = weigh(self.plan, s_KxQ)
        if self.factors is not None:
            w_KxQ *= pairs(self.factors.row(self.tiles[i]), self.factors.column(self.tiles[j]))
        if i == j:
            w_KxQ = mask(w_KxQ)
        if self.plan.normalize:
            self.den.add(i, jnp.sum(w_KxQ, axis=0, keepdims=True))
        self.num.add(i, dot(self.v(j), w_KxQ.astype(self.dtype), (1, 0)))

    @functools.cached_property
    def state_DxP(self) -> jax.Array:
        """The state of the keys before the block, as an operand."""
        return make_state_operand(self.plan, self.state[self.head], self.features, self.dtype)

    @functools.cached_property
    def moment_FxE(self) -> jax.Array:
        """The moment of the keys before the block, as an operand."""
        return make_moment_operand(self.plan, self.moment[self.head], self.dtype)

    def outside(self) -> list[Piece]:
        """Returns the pieces for tokens before and after the block."""
        if self.plan.single_block:
            return []
        pieces = [self._save]
        for i in range(len(self.tiles)):
            pieces += [functools.partial(piece, i) for piece in (self._read_sums, self._fold)]
        return pieces

    def _save(self) -> None:
        saved = self.results.sums
        if saved is None:
            return
        saved.state[self.head, 0] = self.state_DxP
        if saved.moment is not None:
            saved.moment[self.head, 0] = self.moment_FxE

    def _read_sums(self, i: int) -> None:
        """Adds the part of queries i from the keys before the block."""
        plan, x_FxQ, den_1xQ = self.plan, self.x(i), None
        if plan.squared:
            if plan.normalize:
                x1_FxQ = append_one(plan, x_FxQ)
                of_queries_FxQ = multiply_moment(self.moment_FxE, x1_FxQ)
                den_1xQ = jnp.sum(of_queries_FxQ * x1_FxQ.astype(jnp.float32), axis=0, keepdims=True)
                den_1xQ = den_1xQ if plan.series else jnp.maximum(den_1xQ, 0.0)
            num_DxQ = dot(self.state_DxP, expand(plan, x_FxQ, weighted=True), (1, 0))
        else:
            num_DxQ = dot(self.state_DxP, x_FxQ, (1, 0))
            den_1xQ = jnp.sum(num_DxQ[self.head_dim :], axis=0, keepdims=True)
            num_DxQ = num_DxQ[: self.head_dim]
        if plan.normalize and den_1xQ is not None:
            self.den.add(i, decay_sums(den_1xQ, self.reads(i)))
        self.num.add(i, decay_sums(num_DxQ, self.reads(i)))

    def _fold(self, i: int) -> None:
        """Adds keys i to the sums, as queries after the block see them."""
        plan, head = self.plan, self.head
        y_FxK, v_DxK = self.y(i), self.v(i)
        y_PxK = expand(plan, y_FxK, weighted=False) if plan.squared else y_FxK
        added_DxK = multiply_tokens(extend(plan, v_DxK, 1.0), self.adds(i))
        self.state[head] = decay_sums(self.state[head], self.kept(i)) + dot(added_DxK, y_PxK, (1, 1))
        if plan.has_moment:
            y1_FxK = append_one(plan, y_FxK)
            self.moment[head] = decay_sums(self.moment[head], self.kept(i)) + dot(
                y1_FxK, multiply_tokens(y1_FxK, self.adds(i)), (1, 1)
            )
