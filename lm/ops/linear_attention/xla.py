"""Linear attention in blocks, in plain XLA: time and memory linear in the length.

The forward pass is one walk over the blocks. A query reads the sums over the keys of earlier blocks and adds the keys
of its block directly; then the block's keys are folded into the sums. The backward pass is two walks, and neither keeps
features or sums of more than one block. The walk forwards computes the sums again, for the gradients of queries and of
what they compared directly. The walk backwards carries the gradient of the sums, for the gradients of the keys and
values that were folded. Only inputs, outputs and one denominator per query are kept.

Numerator and denominator are differentiated as one linear operation: with o = num / den the cotangents are do / den and
-⟨do, o⟩ / den. Where the block does not divide the length, the last block is shorter: nothing is padded. Recovering the
sums by subtraction in a single backward walk would save a third of it, and loses four digits.

With decay the sums are always decayed up to the last key folded. The result does not depend on that choice. Running
sums of log factors therefore have gradients only as a query's and as a key's sum, and as the last one of returned sums.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops import decay as decays
from lm.ops import platform
from lm.ops.blocks import call_in_branch
from lm.ops.decay import Decay
from lm.ops.linear_attention import channels
from lm.ops.linear_attention.block import (
    BlockInputs,
    BlockKeys,
    BlockQueries,
    Bounds,
    FoldedKeys,
    Fraction,
    Shape,
    Sums,
    advance,
    fold,
    group,
    join,
    last_entry,
    make_empty,
    move_tokens_last,
    read,
    split,
    ungroup,
)
from lm.ops.linear_attention.plan import BlockPlan
from lm.ops.linear_attention.types import (
    LOCAL_BLOCK,
    ExpKernel,
    Keys,
    LinearCall,
    LinearResult,
    Options,
    Parameters,
    State,
    decay_state,
)
from lm.ops.residuals import save_residual

BLOCK = {'cpu': 64}
"""Tokens per block by platform, elsewhere 512, where the result does not depend on the block."""

TILE = {'cpu': 256}
"""Queries per tile by platform, elsewhere 512."""

Tree = TypeVar('Tree')


def linear_attention(call: LinearCall) -> LinearResult:
    """Computes the call."""
    options, length, window = call.options, call.q_BxLxHxE.shape[1], call.options.window
    keys, bounds = call.keys, None
    older = jnp.int32(0 if call.initial_state is not None else window or options.block or LOCAL_BLOCK)
    if window is not None:
        keys = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (window, 0), *[(0, 0)] * (x.ndim - 2))), keys)
        bounds = Bounds(jnp.int32(window), jnp.int32(window + length), older)
    elif isinstance(options.local, ExpKernel):
        bounds = Bounds(jnp.int32(0), jnp.int32(length), older)
    o_BxLxHxD, state = attend(call.replace_keys(keys), bounds)
    if state is not None and window is not None:
        # The keys in the window are not folded yet.
        rest = jax.tree.map(lambda x: x[:, length:], keys)
        inside = Bounds(jnp.int32(max(window - length, 0)), jnp.int32(window), older)
        state = add_keys(options, call.k_parameters, rest, state, inside)
    return LinearResult(o_BxLxHxD, state)


def unsupported(call: LinearCall) -> None:
    """Everything is supported."""


def attend(call: LinearCall, bounds: Bounds | None) -> LinearResult:
    """Computes outputs, and the sums over the keys inside the bounds that stand beside a query.

    Args:
        call: L queries and L keys, with a window N + L keys. The initial state is decayed up to the token before the
            first key, and the returned state up to the last key that stands beside a query.
        bounds: bounds on the indices of keys; None: no bounds.
    """
    if call.channel_log_decay_BxLxKxE is not None:
        return channels.attend(call)
    options, length, target = call.options, call.q_BxLxHxE.shape[1], platform.target_platform()
    block = options.exact_block or options.block or BLOCK.get(target, 512)
    plan = BlockPlan(
        options,
        length,
        block=min(block, length),
        tile=TILE.get(target, 512),
        heads=call.v_BxLxKxD.shape[2],
        features=count_features(options, call.k_parameters, call.k_BxLxKxE),
        values=call.v_BxLxKxD.shape[3],
        dtype=call.v_BxLxKxD.dtype,
        before=call.initial_state is not None,
        after=call.with_state,
    )
    inputs = WalkInputs(
        call.q_BxLxHxE,
        None if call.local is None else call.local.q_BxLxHxC,
        call.k_BxLxKxE,
        call.v_BxLxKxD,
        call.keys.k_local_BxSxKxC,
        call.parameters,
        call.initial_state,
        bounds,
        None if call.log_decay_BxLxK is None else decays.accumulate(call.log_decay_BxLxK),
    )

    def function(*fields) -> tuple[jax.Array, State | None]:
        return _attend(plan, WalkInputs(*fields))

    if jax.tree.leaves(call.parameters) and call.q_BxLxHxE.shape[0] % platform.batch_shards() == 0:
        function = platform.per_device(
            function, tuple(name not in ('parameters', 'bounds') for name in inputs._asdict())
        )
    return LinearResult(*function(*inputs))


def add_keys(options: Options, parameters: Any, keys: Keys, state: State, bounds: Bounds | None = None) -> State:
    """Folds these keys into the state, without keys outside the bounds."""
    shape = Shape(options, tile=0, reads=False, dtype=keys.v_BxSxKxD.dtype)
    folded = FoldedKeys(move_tokens_last(keys.k_BxSxKxE), move_tokens_last(keys.v_BxSxKxD))
    sums = split(options, state, count_features(options, parameters, keys.k_BxSxKxE))
    decay = None if keys.log_decay_BxSxK is None else decays.accumulate(keys.log_decay_BxSxK)
    return join(advance(shape, sums, folded, parameters, bounds, 0, decay))


def count_features(options: Options, parameters: Any, k_BxLxKxE: jax.Array) -> int:
    """Returns F."""
    batch, _, heads, size = k_BxLxKxE.shape
    one = jax.ShapeDtypeStruct((batch, 1, heads, size), k_BxLxKxE.dtype)
    features = jax.eval_shape(lambda parameters, k: options.compute_features(parameters, k, False), parameters, one)
    return features.shape[-1]


def make_empty_state(options: Options, batch: int, heads: int, features: int, values: int) -> State:
    """Makes the sums over no keys, for F = features and D = values."""
    return join(make_empty(options, batch, heads, features, values))


class WalkInputs(NamedTuple):
    """The arrays of a walk over blocks, before they are cut; S keys, which are L without a window.

    The gradients of the backward pass have the same layout.
    """

    q_BxLxHxE: jax.Array
    q_local_BxLxHxC: jax.Array | None
    k_BxSxKxE: jax.Array
    v_BxSxKxD: jax.Array
    k_local_BxSxKxC: jax.Array | None
    parameters: Parameters
    initial_state: State | None
    bounds: Bounds | None
    decay: Decay | None


class WalkResiduals(NamedTuple):
    """The residuals of the backward pass; None where the plan has no use for them."""

    inputs: WalkInputs
    final_sums: Sums | None
    o_BxLxHxD: jax.Array | None
    inverse_BxKxGxL: jax.Array | None


class Slices(NamedTuple):
    """The tokens of one block, cut from the arrays of a walk."""

    queries: BlockQueries
    keys: BlockKeys
    decay: Decay | None


@dataclasses.dataclass(frozen=True)
class BlockWalk:
    """The arrays of a walk with tokens last, where the plan needs them.

    Attributes:
        sums: the sums before the first block; None where the plan needs none.
    """

    plan: BlockPlan
    queries: BlockQueries
    keys: BlockKeys
    parameters: Parameters
    sums: Sums | None
    bounds: Bounds | None
    decay: Decay | None

    @classmethod
    def arrange(cls, plan: BlockPlan, inputs: WalkInputs) -> 'BlockWalk':
        shape, q, k, sums = plan.shape, None, None, None
        if shape.reads or shape.compares:
            q = group(inputs.q_BxLxHxE, plan.heads)
        if plan.folds or shape.compares:
            k = move_tokens_last(inputs.k_BxSxKxE)
        q_local, k_local = inputs.q_local_BxLxHxC, inputs.k_local_BxSxKxC
        queries = BlockQueries(q, None if q_local is None else group(q_local, plan.heads))
        v = move_tokens_last(inputs.v_BxSxKxD)
        keys = BlockKeys(k, v, None if k_local is None else move_tokens_last(k_local))
        if inputs.initial_state is None:
            sums = plan.make_empty(v.shape[0])
        else:
            sums = split(plan.options, inputs.initial_state, plan.features)
        return cls(plan, queries, keys, inputs.parameters, sums, inputs.bounds, inputs.decay)

    def cut(self, start: jax.Array | int, size: int) -> Slices:
        """Cuts the queries of a block, the keys that they see, and the decay of these keys."""
        seen = size + self.plan.lag
        return Slices(_cut(self.queries, start, size), _cut(self.keys, start, seen), _cut(self.decay, start, seen + 1))

    def block(self, slices: Slices, sums: Sums | None, start: jax.Array | int) -> BlockInputs:
        return BlockInputs(slices.queries, slices.keys, self.parameters, sums, self.bounds, start, slices.decay)

    def advance(self, start: jax.Array | int, size: int, sums: Tree) -> Tree:
        """Computes the sums after a block."""

        def compute(sums, keys, decay):
            return advance(self.plan.shape, sums, keys.folded, self.parameters.keys, self.bounds, start, decay)

        return call_in_branch(start, compute, sums, _cut(self.keys, start, size), _cut(self.decay, start, size + 1))

    def advance_beside(self, slices: Slices, start: jax.Array | int, size: int, sums: Sums | None) -> Sums | None:
        """Computes the sums after a block where its features serve its queries too; else None."""
        if not self.plan.reuses:
            return None
        keys, decay = _cut(slices.keys, 0, size), _cut(slices.decay, 0, size + 1)
        return advance(self.plan.shape, cast(Sums, sums), keys.folded, self.parameters.keys, self.bounds, start, decay)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: BlockPlan, inputs: WalkInputs) -> tuple[jax.Array, State | None]:
    o, _, sums = _forward(plan, inputs)
    return o, join(sums) if plan.after and sums is not None else None


def _forward(plan: BlockPlan, inputs: WalkInputs) -> tuple[jax.Array, jax.Array | None, Sums | None]:
    """Computes outputs, inverse denominators and the sums after all blocks."""
    walk = BlockWalk.arrange(plan, inputs)
    batch, _, total, _ = inputs.q_BxLxHxE.shape
    groups, sums = total // plan.heads, walk.sums
    if not plan.options.causal:
        sums = plan.walk(walk.advance, sums)

    def body(start, size, carry):
        o, inverse, sums = carry

        def compute(slices, sums):
            fraction = read(plan.shape, walk.block(slices, sums, start))
            return fraction, walk.advance_beside(slices, start, size, sums)

        (num, den), after = call_in_branch(start, compute, walk.cut(start, size), sums)
        if plan.options.normalize:
            inverse = _put(inverse, 1.0 / den, start)
            num *= (1.0 / den)[:, :, None]
        if plan.options.causal and plan.folds:
            sums = after if plan.reuses else walk.advance(start, size, sums)
        return _put(o, num, start), inverse, sums

    inverse = jnp.zeros((batch, plan.heads, groups, plan.length), jnp.float32) if plan.options.normalize else None
    o = jnp.zeros((batch, plan.heads, plan.values, groups, plan.length), plan.dtype)
    o, inverse, sums = plan.walk(body, (o, inverse, sums))
    return ungroup(o), inverse, sums


def _attend_forward(plan: BlockPlan, inputs: WalkInputs):
    o, inverse, sums = _forward(plan, inputs)
    o, final = save_residual(o), None if plan.options.causal else sums
    residuals = WalkResiduals(inputs, final, None, None)
    if inverse is not None:
        residuals = residuals._replace(o_BxLxHxD=o, inverse_BxKxGxL=save_residual(inverse))
    return (o, join(sums) if plan.after and sums is not None else None), residuals


class MetKeys(NamedTuple):
    """Gradients of keys, laid out as `BlockKeys`; None where there are none so far."""

    k: jax.Array | None
    v: jax.Array | None
    k_local: jax.Array | None


class ForwardCarry(NamedTuple):
    """The gradients that the walk forwards adds up, and the sums before a block."""

    queries: BlockQueries
    keys: MetKeys
    parameters: Parameters
    log_total: jax.Array | None
    sums: Sums | None


class BackwardCarry(NamedTuple):
    """The gradients that the walk backwards adds up; `parameters` holds gradients of the keys' parameters."""

    keys: MetKeys
    parameters: Any
    log_total: jax.Array | None
    sums: Sums | None


class Backward:
    """The two walks of the backward pass.

    Keys that a query meets directly get their gradient on the walk forwards, and folded keys on the walk backwards.
    """

    def __init__(self, walk: BlockWalk, cotangents: Callable[[jax.Array | int, int], Fraction]):
        """Stores the walk; `cotangents(start, size)` returns the gradients of a block's numerators and denominators."""
        self.arrays, self.plan, self.cotangents = walk, walk.plan, cotangents
        compares, causal = walk.plan.shape.compares, walk.plan.options.causal
        self.met = MetKeys(
            walk.keys.k_BxKxExS if compares else None,
            walk.keys.v_BxKxDxS if causal else None,
            walk.keys.k_local_BxKxCxS,
        )

    def walk_forwards(self, sums: Sums | None) -> ForwardCarry:
        """Walks forwards; `sums` are the sums before the first block, or over all keys without a causal mask."""
        dqueries = jax.tree.map(jnp.zeros_like, self.arrays.queries)
        dtotal = _make_zeros(_total(self.arrays.decay))
        carry = ForwardCarry(dqueries, _make_zeros(self.met), _make_zeros(self.arrays.parameters), dtotal, sums)
        return self.plan.walk(self.step_forwards, carry)

    def step_forwards(self, start: jax.Array | int, size: int, carry: ForwardCarry) -> ForwardCarry:
        """Adds the gradients of a block's queries and of the keys that they meet directly."""
        walk, plan = self.arrays, self.plan

        def compute(slices, cotangents, sums):
            def call(queries, met, parameters, total):
                block = walk.block(slices, sums, start)
                keys = BlockKeys(*(a if b is None else b for a, b in zip(slices.keys, met, strict=True)))
                decay = _replace_total(slices.decay, total)
                return read(plan.shape, block._replace(queries=queries, keys=keys, parameters=parameters, decay=decay))

            met = MetKeys(*(None if a is None else b for a, b in zip(self.met, slices.keys, strict=True)))
            pull = jax.vjp(call, slices.queries, met, walk.parameters, _total(slices.decay))[1]
            return pull(cotangents), walk.advance_beside(slices, start, size, sums)

        arguments = walk.cut(start, size), self.cotangents(start, size), carry.sums
        (dqueries, dmet, dparameters, dtotal), after = call_in_branch(start, compute, *arguments)
        sums = carry.sums
        if plan.options.causal and plan.folds:
            sums = after if plan.reuses else walk.advance(start, size, sums)
        # The first entry belongs to the sums, not to a token.
        dtotal = None if dtotal is None else dtotal.at[..., 0].set(0.0)
        return ForwardCarry(
            _put(carry.queries, dqueries, start),
            (_add if plan.lag else _put)(carry.keys, dmet, start),
            _sum(carry.parameters, dparameters),
            _add(carry.log_total, dtotal, start),
            sums,
        )

    def differentiate_read(self, start: jax.Array | int, size: int) -> Sums:
        """Computes the gradient of the sums before a block, through its queries' reads."""
        walk, plan = self.arrays, self.plan

        def compute(slices, cotangents):
            def call(sums):
                return read(plan.shape, walk.block(slices, sums, start))

            return jax.vjp(call, plan.make_empty(walk.keys.v_BxKxDxS.shape[0]))[1](cotangents)[0]

        return call_in_branch(start, compute, walk.cut(start, size), self.cotangents(start, size))

    def step_reads(self, start: jax.Array | int, size: int, sums: Sums | None) -> Sums | None:
        """Adds the gradient of the sums over all keys through the reads of a block's queries."""
        return _sum(sums, self.differentiate_read(start, size))

    def step_backwards(self, start: jax.Array | int, size: int, carry: BackwardCarry) -> BackwardCarry:
        """Adds the gradients of a block's keys, and computes gradients of the sums before it from the sums after it."""
        plan = self.plan
        if plan.folds:
            carry = self.differentiate_fold(start, size, carry)
        if plan.options.causal and plan.shape.reads:
            carry = carry._replace(sums=_sum(carry.sums, self.differentiate_read(start, size)))
        return carry

    def differentiate_fold(self, start: jax.Array | int, size: int, carry: BackwardCarry) -> BackwardCarry:
        """Adds the gradients of the keys that a block folds into the sums."""
        walk, plan = self.arrays, self.plan
        decay = _cut(walk.decay, start, size + 1)
        last = None if decay is None else last_entry(decay, walk.bounds, start)

        def compute(keys, last, decay, dsums):
            def call(k, v, parameters, total):
                log_factors = None
                if decay is not None:
                    log_factors = decays.between(last, decays.entries(decay._replace(total=total), 1))
                return fold(plan.shape, FoldedKeys(k, v), parameters, walk.bounds, start, log_factors)

            folded = keys.folded
            pull = jax.vjp(call, folded.k_BxKxExS, folded.v_BxKxDxS, walk.parameters.keys, _total(decay))[1]
            return pull(dsums)

        dk, dv, dparameters, dtotal = call_in_branch(
            start, compute, _cut(walk.keys, start, size), last, decay, carry.sums
        )
        sums = carry.sums
        if decay is not None and last is not None:
            sums = decay_state(sums, decays.between(last, decays.entries(decay, 0, 1))[..., 0])
        dk = (_put if self.met.k is None else _add)(carry.keys.k, dk, start)
        return BackwardCarry(
            carry.keys._replace(k=dk, v=_add(carry.keys.v, dv, start)),
            _sum(carry.parameters, dparameters),
            _add(carry.log_total, dtotal, start),
            sums,
        )


def _attend_backward(plan: BlockPlan, residuals: WalkResiduals, cotangents: tuple[jax.Array, State | None]):
    inputs, (do, dstate) = residuals.inputs, cotangents
    walk, causal = BlockWalk.arrange(plan, inputs), plan.options.causal
    backward = Backward(walk, _make_cotangents(plan, do, residuals))
    forwards = backward.walk_forwards(walk.sums if causal else residuals.final_sums)

    # Keys that are only folded have no gradient so far.
    dkeys = MetKeys(*(_make_zeros(a) if b is None else b for a, b in zip(walk.keys, forwards.keys, strict=True)))
    dsums = plan.make_empty(do.shape[0]) if dstate is None else split(plan.options, dstate, plan.features)
    dtotal = forwards.log_total
    if walk.decay is not None and dstate is not None:
        end = plan.length if walk.bounds is None else jnp.minimum(walk.bounds.last, plan.length)
        products = zip(jax.tree.leaves(dsums), jax.tree.leaves(forwards.sums), strict=True)
        dlast_BxK = cast(jax.Array, sum((d * x).sum(tuple(range(2, x.ndim))) for d, x in products))
        dtotal = _add(dtotal, dlast_BxK[..., None], end)
    if not causal:
        dsums = plan.walk(backward.step_reads, dsums)
    carry = BackwardCarry(dkeys, forwards.parameters.keys, dtotal, dsums)
    if plan.folds or plan.before:
        carry = plan.walk(backward.step_backwards, carry, reverse=True)

    def finish(x, d):
        return jnp.zeros_like(x) if d is None else d.astype(x.dtype)

    dq, dq_local = (None if d is None else ungroup(d) for d in forwards.queries)
    dk, dv, dk_local = (None if d is None else d.transpose(0, 3, 1, 2) for d in carry.keys)
    parameters = Parameters(forwards.parameters.queries, carry.parameters)
    given = inputs._replace(initial_state=None, bounds=None, decay=None)
    found = given._replace(q_BxLxHxE=dq, q_local_BxLxHxC=dq_local, parameters=parameters)
    found = found._replace(k_BxSxKxE=dk, v_BxSxKxD=dv, k_local_BxSxKxC=dk_local)
    dstate = join(cast(Sums, carry.sums)) if plan.before else None
    ddecay = None if walk.decay is None else walk.decay._replace(total=carry.log_total, rest=None, segment=None)
    return (jax.tree.map(finish, given, found)._replace(initial_state=dstate, decay=ddecay),)


_attend.defvjp(_attend_forward, _attend_backward)


def _make_cotangents(
    plan: BlockPlan, do: jax.Array, residuals: WalkResiduals
) -> Callable[[jax.Array | int, int], Fraction]:
    """Makes the function (start, size) → the cotangents of numerator and denominator of a block."""
    do_BxKxDxGxL, o, inverse = group(do, plan.heads), residuals.o_BxLxHxD, residuals.inverse_BxKxGxL
    if o is None or inverse is None:
        zeros = jnp.zeros((*do_BxKxDxGxL.shape[:2], *do_BxKxDxGxL.shape[3:]), jnp.float32)
        return lambda start, size: Fraction(
            _cut(do_BxKxDxGxL, start, size).astype(jnp.float32), _cut(zeros, start, size)
        )
    row = (do.astype(jnp.float32) * o.astype(jnp.float32)).sum(-1)
    dden = -group(row[..., None], plan.heads)[:, :, 0] * inverse

    def cotangents(start, size):
        dnum = _cut(do_BxKxDxGxL, start, size).astype(jnp.float32) * _cut(inverse, start, size)[:, :, None]
        return Fraction(dnum, _cut(dden, start, size))

    return cotangents


def _total(decay: Decay | None) -> jax.Array | None:
    return None if decay is None else decay.total


def _replace_total(decay: Decay | None, total: jax.Array) -> Decay | None:
    return None if decay is None else decay._replace(total=total)


def _make_zeros(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)


def _cut(tree: Tree, start: jax.Array | int, size: int) -> Tree:
    return jax.tree.map(lambda x: x if size == x.shape[-1] else lax.dynamic_slice_in_dim(x, start, size, -1), tree)


def _put(tree: Tree, parts: Tree, start: jax.Array | int) -> Tree:
    def put(x, part):
        part = part.astype(x.dtype)
        return part if part.shape == x.shape else lax.dynamic_update_slice_in_dim(x, part, start, x.ndim - 1)

    return jax.tree.map(put, tree, parts)


def _add(tree: Tree, parts: Tree, start: jax.Array | int) -> Tree:
    return _put(tree, jax.tree.map(lambda x, part: _cut(x, start, part.shape[-1]) + part, tree, parts), start)


def _sum(a: Tree, b: Tree) -> Tree:
    return jax.tree.map(jnp.add, a, b)
