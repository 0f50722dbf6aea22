"""The forward kernel of causal linear attention on TPUs.

N heads of all sequences, T tokens of a block, F features x of queries and y of keys, C size of what the exact kernel
compares, D head size, P rows of the packed expansion. Arrays in HBM are [N, rows, tokens]. The grid walks over groups
of heads and, for each, over the blocks in order, with the sums over earlier keys in VMEM.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from lm.ops.linear_attention.tpu.features import (
    TpuPlan,
    causal,
    expand,
    extended,
    moment_operand,
    moment_times,
    state_operand,
    weights_and_slope,
    with_one,
)
from lm.ops.linear_attention.tpu.head import Head, Refs, inputs_of
from lm.ops.linear_attention.tpu.maps import features, of_heads
from lm.ops.tpu import dot
from lm.ops.tpu.decay import faded, pairs, times
from lm.ops.tpu.order import Piece, Total, ahead, in_turn


def forward(plan: TpuPlan, save: bool, x, y, v, maps, *local, before=()) -> list[jax.Array]:
    """Outputs [N, D, L] and inverse denominators [N, 1, L]; with `save` also the sums before each block.

    Args:
        plan: L is a multiple of its block, N of its heads.
        save: also return the state's and the moment's operands before each block, [N, L / block, rows, columns].
        x: [N, F, L], or with plan.feature_map its inputs [N, E, L].
        y: as x.
        v: [N, D, L].
        maps: the map's operands for x and for y, [R, C] each, where plan.feature_map.
        local: a, b, each [N, C, L], where plan.exact_local; c [N, 1, L] float32, where plan.decay.
        before: the sums over keys before the first, of plan.sums_shapes, [N, rows, columns] float32; (): no keys.
    """
    n, head_dim, length = v.shape
    features = plan.features or x.shape[1]
    state, moment = plan.state_shape(features, head_dim), plan.moment_shape(features)
    steps = length // plan.block
    inputs = (x, y, v, *local)
    outputs = [jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct((n, 1, length), jnp.float32)]
    tokens = [pl.BlockSpec((plan.heads, a.shape[1], plan.block), lambda i, j: (i, 0, j)) for a in (*inputs, *outputs)]
    whole = [pl.BlockSpec(w.shape, lambda i, j: (0, 0)) for w in maps]
    sums = []
    if save and not plan.single_block:
        wide = moment[1] if v.dtype == jnp.float32 else 3 * moment[1]
        shapes = [state, (moment[0], wide)] if plan.squared and plan.normalize else [state]
        outputs += [jax.ShapeDtypeStruct((n, steps, *shape), v.dtype) for shape in shapes]
        sums = [pl.BlockSpec((plan.heads, 1, *shape), lambda i, j: (i, j, 0, 0)) for shape in shapes]
    return pl.pallas_call(
        functools.partial(_kernel, plan, save and not plan.single_block, len(before)),
        name='linear_attention_forward',
        grid=(n // plan.heads, steps),
        in_specs=whole
        + tokens[: len(inputs)]
        + [pl.BlockSpec((plan.heads, *a.shape[1:]), lambda i, j: (i, 0, 0)) for a in before],
        out_specs=tokens[len(inputs) :] + sums,
        out_shape=outputs,
        scratch_shapes=[pltpu.VMEM((plan.heads, *shape), jnp.float32) for shape in (state, moment)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=('parallel', 'arbitrary'), vmem_limit_bytes=plan.vmem_limit_bytes
        ),
        cost_estimate=_cost(plan, inputs, outputs),
    )(*maps, *inputs, *before)


def _cost(plan: TpuPlan, inputs, outputs) -> pl.CostEstimate:
    n, head_dim, length = inputs[2].shape
    features = plan.features or inputs[0].shape[1]
    compared = inputs[3].shape[1] if plan.exact_local else features
    rows, columns = plan.state_shape(features, head_dim)
    moment = 8 * features**2 if plan.squared and plan.normalize else 0
    before = 0 if plan.single_block else 4 * rows * columns + moment
    inside = (compared + head_dim) * (plan.block + plan.tile) + 4 * plan.projection_rows * inputs[0].shape[1]
    return pl.CostEstimate(
        flops=n * length * (before + inside),
        transcendentals=n * length * (plan.block + plan.tile) // 2 if plan.decay else 0,
        bytes_accessed=sum(a.size * a.dtype.itemsize for a in (*inputs, *outputs)),
    )


def _kernel(plan: TpuPlan, save: bool, given: int, *refs):
    maps, inputs, refs = inputs_of(plan, refs)
    before, refs = refs[:given], refs[given:]
    o, inverse, *saved, state, moment = refs

    @pl.when(pl.program_id(1) == 0)
    def _():
        state[...] = before[0][...] if before else jnp.zeros_like(state)
        moment[...] = before[1][...] if len(before) > 1 else jnp.zeros_like(moment)

    refs = _Refs(**inputs, o=o, inverse=inverse, saved=saved if save else None, state=state, moment=moment)
    made = of_heads(features, plan, maps, refs.x, refs.y, refs.v.dtype)
    heads = [_HeadOutputs(plan, refs, head, made[head]) for head in range(plan.heads)]
    inside = ahead([pair for head in heads for pair in head.inside()], 1)
    in_turn(inside, [piece for head in heads for piece in head.outside()])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Refs(Refs):
    """What the forward kernel writes."""

    o: Any
    inverse: Any
    saved: Any


class _HeadOutputs(Head):
    """One head in one block: `inside` and `outside` are the pieces; an output is written as soon as it is complete."""

    def __init__(self, plan: TpuPlan, refs: _Refs, head: int, made: tuple):
        """`made`: features of queries and keys; () without a map."""
        super().__init__(plan, refs, head, made)
        terms = [i + 1 + (not plan.single_block) for i in range(len(self.cut))]
        self.dens: dict[int, jax.Array] = {}
        self.den = Total(terms, self.dens.__setitem__)
        self.num = Total(terms, self._write)

    def _write(self, i: int, num_DxQ: jax.Array) -> None:
        refs, head, at = self.refs, self.head, self.cut[i]
        if not self.plan.normalize:
            refs.inverse[head, :, at] = jnp.ones((1, num_DxQ.shape[1]), jnp.float32)
            refs.o[head, :, at] = num_DxQ.astype(refs.o.dtype)
            return
        total_1xQ = self.plan.denominator_bias + self.dens.pop(i)
        # Padding after the last token has no keys and, with denominator_bias 0, no denominator either.
        inverse_1xQ = jnp.where(total_1xQ == 0.0, 0.0, 1.0 / total_1xQ)
        refs.inverse[head, :, at] = inverse_1xQ
        refs.o[head, :, at] = (num_DxQ * inverse_1xQ).astype(refs.o.dtype)

    def inside(self) -> list[tuple[Callable, Callable]]:
        """(start, finish) of each pair of tiles inside the block."""
        numbers = range(len(self.cut))
        return [
            (functools.partial(self._product, i, j), functools.partial(self._weights, i, j))
            for i in numbers
            for j in numbers[: i + 1]
        ]

    def _product(self, i: int, j: int) -> jax.Array:
        return dot(self.of('b', j), self.of('a', i), (0, 0))

    def _weights(self, i: int, j: int, s_KxQ: jax.Array) -> None:
        plan = self.plan
        w_KxQ, _ = weights_and_slope(plan, s_KxQ)
        if plan.decay:
            c_Tx1, c_1xT = self.fading[:2]
            w_KxQ *= pairs(c_1xT[:, self.cut[i]], c_Tx1[self.cut[j]])
        if i == j:
            w_KxQ = causal(w_KxQ)
        if plan.normalize:
            self.den.add(i, jnp.sum(w_KxQ, axis=0, keepdims=True))
        self.num.add(i, dot(self.of('v', j), w_KxQ.astype(self.refs.v.dtype), (1, 0)))

    @functools.cached_property
    def state_DxP(self) -> jax.Array:
        """Of the keys before the block."""
        return state_operand(self.plan, self.refs.state[self.head], self.features, self.refs.v.dtype)

    @functools.cached_property
    def moment_FxE(self) -> jax.Array:
        """Likewise."""
        return moment_operand(self.plan, self.refs.moment[self.head], self.refs.v.dtype)

    def outside(self) -> list[Piece]:
        if self.plan.single_block:
            return []
        pieces = [self._save]
        for i in range(len(self.cut)):
            pieces += [functools.partial(piece, i) for piece in (self._before, self._fold)]
        return pieces

    def _save(self) -> None:
        if self.refs.saved is not None:
            self.refs.saved[0][self.head, 0] = self.state_DxP
            if self.plan.squared and self.plan.normalize:
                self.refs.saved[1][self.head, 0] = self.moment_FxE

    def _before(self, i: int) -> None:
        """What queries i read of the keys before the block."""
        plan, x_FxQ = self.plan, self.of('x', i)
        den_1xQ, size = None, self.refs.v.shape[1]
        if plan.squared:
            if plan.normalize:
                x1_FxQ = with_one(plan, x_FxQ)
                of_queries_FxQ = moment_times(self.moment_FxE, x1_FxQ)
                den_1xQ = jnp.sum(of_queries_FxQ * x1_FxQ.astype(jnp.float32), axis=0, keepdims=True)
                den_1xQ = den_1xQ if plan.series else jnp.maximum(den_1xQ, 0.0)
            num_DxQ = dot(self.state_DxP, expand(plan, x_FxQ, weighted=True), (1, 0))
        else:
            num_DxQ = dot(self.state_DxP, x_FxQ, (1, 0))
            den_1xQ = jnp.sum(num_DxQ[size:], axis=0, keepdims=True)
            num_DxQ = num_DxQ[:size]
        if plan.normalize:
            self.den.add(i, faded(den_1xQ, self.reads(i)))
        self.num.add(i, faded(num_DxQ, self.reads(i)))

    def _fold(self, i: int) -> None:
        """Adds keys i to the sums, as queries after the block see them."""
        plan, refs, head = self.plan, self.refs, self.head
        y_FxK, v_DxK = self.of('y', i), self.of('v', i)
        y_PxK = expand(plan, y_FxK, weighted=False) if plan.squared else y_FxK
        added_DxK = times(extended(plan, v_DxK, 1.0), self.adds(i))
        refs.state[head] = faded(refs.state[head], self.kept(i)) + dot(added_DxK, y_PxK, (1, 1))
        if plan.squared and plan.normalize:
            y1_FxK = with_one(plan, y_FxK)
            refs.moment[head] = faded(refs.moment[head], self.kept(i)) + dot(
                y1_FxK, times(y1_FxK, self.adds(i)), (1, 1)
            )
