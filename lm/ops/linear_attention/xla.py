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
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from lm.ops import decay as decays
from lm.ops import platform
from lm.ops.blocks import call_in_branch, put, take
from lm.ops.decay import Decay
from lm.ops.linear_attention import channels
from lm.ops.linear_attention.block import (
    BlockTokens,
    Bounds,
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
    Sides,
    State,
    decay_state,
)
from lm.ops.residuals import save_residual

BLOCK = {'cpu': 64}
"""Tokens per block by platform, elsewhere 512, where the result does not depend on the block."""

TILE = {'cpu': 256}
"""Queries per tile by platform, elsewhere 512."""

QUERIES = ('q_BxKxExGxT', 'q_local_BxKxCxGxT')
KEYS = ('k_BxKxExS', 'v_BxKxDxS', 'k_local_BxKxCxS')
"""The arrays of `BlockTokens` with an entry per query, and with an entry per key."""

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
        groups=call.q_BxLxHxE.shape[2] // call.v_BxLxKxD.shape[2],
        features=count_features(options, call.k_parameters, call.k_BxLxKxE),
        values=call.v_BxLxKxD.shape[3],
        dtype=call.v_BxLxKxD.dtype,
        before=call.initial_state is not None,
        after=call.with_state,
    )
    decay = None if call.log_decay_BxLxK is None else decays.accumulate(call.log_decay_BxLxK)
    local = {} if call.local is not None else {'q_local_BxLxHxC': None, 'k_local_BxLxKxC': None}
    tokens = dataclasses.replace(call, q_parameters=None, k_parameters=None, log_decay_BxLxK=None, **local)

    def function(parameters, bounds, tokens, decay) -> tuple[jax.Array, State | None]:
        whole = dataclasses.replace(tokens, q_parameters=parameters.queries, k_parameters=parameters.keys)
        return _attend(plan, whole, bounds, decay)

    if jax.tree.leaves(call.parameters) and call.q_BxLxHxE.shape[0] % platform.batch_shards() == 0:
        function = platform.per_device(function, split=(False, False, True, True))
    return LinearResult(*function(call.parameters, bounds, tokens, decay))


def add_keys(options: Options, parameters: object, keys: Keys, state: State, bounds: Bounds | None = None) -> State:
    """Folds these keys into the state, without keys outside the bounds."""
    shape = Shape(options, tile=0, reads=False, dtype=keys.v_BxSxKxD.dtype)
    decay = None if keys.log_decay_BxSxK is None else decays.accumulate(keys.log_decay_BxSxK)
    k, v = move_tokens_last(keys.k_BxSxKxE), move_tokens_last(keys.v_BxSxKxD)
    sums = split(options, state, count_features(options, parameters, keys.k_BxSxKxE))
    return join(advance(shape, sums, BlockTokens(v, k_BxKxExS=k, decay=decay), parameters, bounds, 0))


def count_features(options: Options, parameters: object, k_BxLxKxE: jax.Array) -> int:
    """Returns F."""
    batch, _, heads, size = k_BxLxKxE.shape
    one = jax.ShapeDtypeStruct((batch, 1, heads, size), k_BxLxKxE.dtype)
    features = jax.eval_shape(lambda parameters, k: options.compute_features(parameters, k, False), parameters, one)
    return features.shape[-1]


def make_empty_state(options: Options, batch: int, heads: int, features: int, values: int) -> State:
    """Makes the sums over no keys, for F = features and D = values."""
    return join(make_empty(options, batch, heads, features, values))


class BlockWalk:
    """The walk over the blocks of a call.

    Attributes:
        bounds: bounds on the indices of keys; None: no bounds.
        tokens: all tokens, last, where the plan needs them.
        sums: the sums before the first block; None where the plan needs none.
    """

    def __init__(self, plan: BlockPlan, call: LinearCall, bounds: Bounds | None, decay: Decay | None):
        """Arranges a call; `decay` has the running sums of its log factors."""
        shape, q, k, local = plan.shape, None, None, call.local
        if shape.reads or shape.compares:
            q = group(call.q_BxLxHxE, plan.heads)
        if plan.folds or shape.compares:
            k = move_tokens_last(call.k_BxLxKxE)
        self.plan, self.bounds, self.parameters = plan, bounds, call.parameters
        self.tokens = BlockTokens(move_tokens_last(call.v_BxLxKxD), k_BxKxExS=k, q_BxKxExGxT=q, decay=decay)
        if local is not None:
            q_local, k_local = group(local.queries, plan.heads), move_tokens_last(local.keys)
            self.tokens = self.tokens._replace(q_local_BxKxCxGxT=q_local, k_local_BxKxCxS=k_local)
        if call.initial_state is None:
            self.sums = plan.make_empty(call.v_BxLxKxD.shape[0])
        else:
            self.sums = split(plan.options, call.initial_state, plan.features)

    def cut(self, start: jax.Array | int, size: int) -> BlockTokens:
        """Cuts the queries of a block, the keys that they see, and the decay of these keys."""
        seen, tokens = size + self.plan.lag, self.tokens
        queries = {name: _cut(getattr(tokens, name), start, size) for name in QUERIES}
        keys = {name: _cut(getattr(tokens, name), start, seen) for name in KEYS}
        return BlockTokens(**queries, **keys, decay=_cut(tokens.decay, start, seen + 1))

    def read(
        self, tokens: BlockTokens, sums: Sums | None, start: jax.Array | int, parameters: Sides[Any] | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Computes the numerators and denominators of a block's queries, by default with the call's parameters."""
        parameters = self.parameters if parameters is None else parameters
        return read(self.plan.shape, tokens, sums, parameters=parameters, bounds=self.bounds, start=start)

    def advance(self, start: jax.Array | int, size: int, sums: Tree) -> Tree:
        """Computes the sums after a block."""

        def compute(sums, keys):
            return advance(self.plan.shape, sums, keys, self.parameters.keys, self.bounds, start)

        return call_in_branch(start, compute, sums, _cut_keys(self.tokens, start, size))

    def advance_beside(self, tokens: BlockTokens, start: jax.Array | int, size: int, sums: Sums | None) -> Sums | None:
        """Computes the sums after a block where its features serve its queries too; else None."""
        if not self.plan.reuses:
            return None
        keys = _cut_keys(tokens, 0, size)
        return advance(self.plan.shape, cast(Sums, sums), keys, self.parameters.keys, self.bounds, start)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: BlockPlan, call: LinearCall, bounds: Bounds | None, decay: Decay | None):
    """Returns outputs, and the sums over all keys or None."""
    o, _, sums = _forward(plan, BlockWalk(plan, call, bounds, decay))
    return o, join(sums) if plan.after and sums is not None else None


def _forward(plan: BlockPlan, walk: BlockWalk) -> tuple[jax.Array, jax.Array | None, Sums | None]:
    """Computes outputs, inverse denominators and the sums after all blocks."""
    batch, heads, sums = len(walk.tokens.v_BxKxDxS), plan.heads, walk.sums
    if not plan.options.causal:
        sums = plan.walk(walk.advance, sums)

    def body(start, size, carry):
        o, inverse, sums = carry

        def compute(tokens, sums):
            return walk.read(tokens, sums, start), walk.advance_beside(tokens, start, size, sums)

        (num, den), after = call_in_branch(start, compute, walk.cut(start, size), sums)
        if plan.options.normalize:
            inverse = _put(inverse, 1.0 / den, start)
            num *= (1.0 / den)[:, :, None]
        if plan.options.causal and plan.folds:
            sums = after if plan.reuses else walk.advance(start, size, sums)
        return _put(o, num, start), inverse, sums

    rows = plan.groups, plan.length
    inverse = jnp.zeros((batch, heads, *rows), jnp.float32) if plan.options.normalize else None
    o = jnp.zeros((batch, heads, plan.values, *rows), plan.dtype)
    o, inverse, sums = plan.walk(body, (o, inverse, sums))
    return ungroup(o), inverse, sums


def _attend_forward(plan: BlockPlan, call: LinearCall, bounds: Bounds | None, decay: Decay | None):
    o, inverse, sums = _forward(plan, BlockWalk(plan, call, bounds, decay))
    o, final = save_residual(o), None if plan.options.causal else sums
    fraction = None if inverse is None else (o, save_residual(inverse))
    return (o, join(sums) if plan.after and sums is not None else None), ((call, bounds, decay), final, fraction)


class Backward:
    """The two walks of the backward pass.

    Keys that a query meets directly get their gradient on the walk forwards, and folded keys on the walk backwards.
    Gradients of tokens go by the names in `BlockTokens`; `decay` is the gradient of the running sums' totals.
    """

    def __init__(self, walk: BlockWalk, cotangents: Callable[[jax.Array | int, int], tuple[jax.Array, jax.Array]]):
        """Stores the walk; `cotangents(start, size)` returns the gradients of a block's numerators and denominators."""
        self.walk, self.plan, self.cotangents = walk, walk.plan, cotangents
        by_sums = {'k_BxKxExS'} if not self.plan.shape.compares else set()
        by_sums |= {'v_BxKxDxS'} if not self.plan.options.causal else set()
        self.read = {name: array for name, array in _take(walk.tokens).items() if name not in by_sums}
        """The arrays that queries read without the sums, by name."""

    def walk_forwards(self, sums: Sums | None) -> tuple[dict[str, jax.Array], Sides[Any], Sums | None]:
        """Walks forwards from the sums before the first block, or over all keys without a causal mask.

        Returns:
            (the gradients of tokens, the gradients of the feature map's parameters, the sums after all blocks).
        """
        carry = {name: jnp.zeros(x.shape, x.dtype if name in QUERIES else jnp.float32) for name, x in self.read.items()}
        return self.plan.walk(self.step_forwards, (carry, _make_zeros(self.walk.parameters), sums))

    def step_forwards(self, start: jax.Array | int, size: int, carry):
        """Adds the gradients of a block's queries and of the keys that they meet directly."""
        walk, plan = self.walk, self.plan
        dtokens, dparameters, sums = carry

        def compute(tokens, cotangents, sums):
            def call(arrays, parameters):
                return walk.read(_set_arrays(tokens, arrays), sums, start, parameters)

            arrays = {name: array for name, array in _take(tokens).items() if name in self.read}
            pull = jax.vjp(call, arrays, walk.parameters)[1]
            return pull(cotangents), walk.advance_beside(tokens, start, size, sums)

        (found, more), after = call_in_branch(start, compute, walk.cut(start, size), self.cotangents(start, size), sums)
        if plan.options.causal and plan.folds:
            sums = after if plan.reuses else walk.advance(start, size, sums)
        if 'decay' in found:
            # The first entry belongs to the sums, not to a token.
            found['decay'] = found['decay'].at[..., 0].set(0.0)
        overlapping = {'decay', *(KEYS if plan.lag else ())}
        dtokens = {n: (_add if n in overlapping else _put)(d, found[n], start) for n, d in dtokens.items()}
        return dtokens, _sum(dparameters, more), sums

    def differentiate_read(self, start: jax.Array | int, size: int) -> Sums:
        """Computes the gradient of the sums before a block, through its queries' reads."""
        walk = self.walk

        def compute(tokens, cotangents):
            empty = self.plan.make_empty(len(tokens.v_BxKxDxS))
            return jax.vjp(lambda sums: walk.read(tokens, sums, start), empty)[1](cotangents)[0]

        return call_in_branch(start, compute, walk.cut(start, size), self.cotangents(start, size))

    def step_backwards(self, start: jax.Array | int, size: int, carry):
        """Adds the gradients of a block's keys, and computes gradients of the sums before it from the sums after it.

        The carry is (the gradients of keys, the gradients of the keys' parameters, the gradients of the sums).
        """
        plan = self.plan
        if plan.folds:
            carry = self.differentiate_fold(start, size, carry)
        if plan.options.causal and plan.shape.reads:
            dkeys, dparameters, dsums = carry
            carry = dkeys, dparameters, _sum(dsums, self.differentiate_read(start, size))
        return carry

    def differentiate_fold(self, start: jax.Array | int, size: int, carry):
        """Adds the gradients of the keys that a block folds into the sums."""
        walk, plan = self.walk, self.plan
        dkeys, dparameters, dsums = carry
        keys = _cut_keys(walk.tokens, start, size)
        last = None if keys.decay is None else last_entry(keys.decay, walk.bounds, start)

        def compute(keys, last, dsums):
            def call(arrays, parameters):
                tokens, log_factors = _set_arrays(keys, arrays), None
                if tokens.decay is not None:
                    log_factors = decays.between(last, decays.entries(tokens.decay, 1))
                return fold(plan.shape, tokens, parameters, walk.bounds, start, log_factors)

            return jax.vjp(call, _take(keys), walk.parameters.keys)[1](dsums)

        found, more = call_in_branch(start, compute, keys, last, dsums)
        if keys.decay is not None and last is not None:
            dsums = decay_state(dsums, decays.between(last, decays.entries(keys.decay, 0, 1))[..., 0])
        # Nothing else has a gradient of keys that are only folded.
        place = _add if 'k_BxKxExS' in self.read else _put
        added = {n: (place if n == 'k_BxKxExS' else _add)(dkeys[n], d, start) for n, d in found.items()}
        return dkeys | added, _sum(dparameters, more), dsums


def _attend_backward(plan: BlockPlan, residuals, cotangents: tuple[jax.Array, State | None]):
    ((call, bounds, decay), final, fraction), (do, dstate) = residuals, cotangents
    walk, causal = BlockWalk(plan, call, bounds, decay), plan.options.causal
    backward = Backward(walk, _make_cotangents(plan, do, fraction))
    dtokens, dparameters, sums = backward.walk_forwards(walk.sums if causal else final)
    dsums = plan.make_empty(do.shape[0]) if dstate is None else split(plan.options, dstate, plan.features)
    # Keys that are only folded have no gradient so far.
    dkeys = {n: _make_zeros(x) for n, x in _take(walk.tokens).items() if n in KEYS}
    dkeys |= {n: d for n, d in dtokens.items() if n not in QUERIES}
    if decay is not None and dstate is not None:
        end = plan.length if bounds is None else jnp.minimum(bounds.last, plan.length)
        products = zip(jax.tree.leaves(dsums), jax.tree.leaves(sums), strict=True)
        dlast_BxK = cast(jax.Array, sum((d * x).sum(tuple(range(2, x.ndim))) for d, x in products))
        dkeys['decay'] = _add(dkeys['decay'], dlast_BxK[..., None], end)
    if not causal:
        dsums = plan.walk(lambda start, size, d: _sum(d, backward.differentiate_read(start, size)), cast(Sums, dsums))
    dkey_parameters = dparameters.keys
    if plan.folds or plan.before:
        dkeys, dkey_parameters, dsums = plan.walk(
            backward.step_backwards, (dkeys, dkey_parameters, dsums), reverse=True
        )

    def finish(x, d):
        return jnp.zeros_like(x) if d is None else d.astype(x.dtype)

    def regroup(name):
        return ungroup(dtokens[name]) if name in dtokens else None

    def move_back(name):
        return dkeys[name].transpose(0, 3, 1, 2) if name in dkeys else None

    found = dataclasses.replace(
        call,
        q_BxLxHxE=regroup('q_BxKxExGxT'),
        k_BxLxKxE=move_back('k_BxKxExS'),
        v_BxLxKxD=move_back('v_BxKxDxS'),
        q_parameters=dparameters.queries,
        k_parameters=dkey_parameters,
        q_local_BxLxHxC=regroup('q_local_BxKxCxGxT'),
        k_local_BxLxKxC=move_back('k_local_BxKxCxS'),
        initial_state=None,
    )
    dcall = jax.tree.map(finish, dataclasses.replace(call, initial_state=None), found)
    dcall = dataclasses.replace(dcall, initial_state=join(cast(Sums, dsums)) if plan.before else None)
    ddecay = None if decay is None else decay._replace(total=dkeys['decay'], rest=None, segment=None)
    return dcall, None, ddecay


_attend.defvjp(_attend_forward, _attend_backward)


def _make_cotangents(
    plan: BlockPlan, do: jax.Array, fraction: tuple[jax.Array, jax.Array] | None
) -> Callable[[jax.Array | int, int], tuple[jax.Array, jax.Array]]:
    """Makes the function (start, size) → the cotangents of numerator and denominator of a block.

    `fraction` has the outputs and the inverse denominators; None where there are no denominators.
    """
    do_BxKxDxGxL = group(do, plan.heads)
    if fraction is None:
        zeros = jnp.zeros((*do_BxKxDxGxL.shape[:2], *do_BxKxDxGxL.shape[3:]), jnp.float32)
        return lambda start, size: (
            _cut(do_BxKxDxGxL, start, size).astype(jnp.float32),
            _cut(zeros, start, size),
        )
    o, inverse = fraction
    row = (do.astype(jnp.float32) * o.astype(jnp.float32)).sum(-1)
    dden = -group(row[..., None], plan.heads)[:, :, 0] * inverse

    def cotangents(start, size):
        dnum = _cut(do_BxKxDxGxL, start, size).astype(jnp.float32) * _cut(inverse, start, size)[:, :, None]
        return dnum, _cut(dden, start, size)

    return cotangents


def _take(tokens: BlockTokens) -> dict[str, jax.Array]:
    """Returns the arrays by name; `decay` has the totals of the running sums."""
    arrays = tokens._asdict() | {'decay': None if tokens.decay is None else tokens.decay.total}
    return {name: array for name, array in arrays.items() if array is not None}


def _set_arrays(tokens: BlockTokens, arrays: dict[str, jax.Array]) -> BlockTokens:
    """Replaces what `_take` returns."""
    replaced = tokens._replace(**arrays)
    return replaced if tokens.decay is None else replaced._replace(decay=tokens.decay._replace(total=arrays['decay']))


def _make_zeros(tree: Tree) -> Tree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree)


def _cut(tree: Tree, start: jax.Array | int, size: int) -> Tree:
    return jax.tree.map(lambda x: take(x, start, size, -1), tree)


def _cut_keys(tokens: BlockTokens, start: jax.Array | int, size: int) -> BlockTokens:
    """Cuts what the sums take of a block's tokens."""
    v, k = _cut((tokens.v_BxKxDxS, tokens.k_BxKxExS), start, size)
    return BlockTokens(v, k_BxKxExS=k, decay=_cut(tokens.decay, start, size + 1))


def _put(tree: Tree, parts: Tree, start: jax.Array | int) -> Tree:
    return jax.tree.map(lambda x, part: put(x, part, start, x.ndim - 1), tree, parts)


def _add(tree: Tree, parts: Tree, start: jax.Array | int) -> Tree:
    return _put(tree, jax.tree.map(lambda x, part: _cut(x, start, part.shape[-1]) + part, tree, parts), start)


def _sum(a: Tree, b: Tree) -> Tree:
    return jax.tree.map(jnp.add, a, b)
