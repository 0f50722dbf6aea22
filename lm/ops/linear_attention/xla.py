"""Linear attention in blocks, in plain XLA: time and memory linear in the length.

Forward, one walk over the blocks: a query reads the sums over the keys of earlier blocks, adds the keys of its own
block directly, and the block's keys are then folded into the sums. Backward, two walks, neither of which keeps
features or sums of more than one block: forwards with the sums recomputed, for the gradients of queries and of what
they compared directly; backwards with the gradient of the sums, for the gradients of the keys and values that were
folded. Only inputs, outputs and one denominator a query are kept.

Numerator and denominator are differentiated as one linear operation: with o = num / den the cotangents are
do / den and -⟨do, o⟩ / den. What is left of a length that the block does not divide is a shorter block: nothing is
padded. Recovering the sums by subtraction in a single backward walk would save a third of it, and loses four digits.

With decay the sums are always as of the last key folded. The result does not depend on that choice, so the running
sums of log factors have gradients as those of a query and of a key alone, and, where sums are given out, as their last.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops import decay as decays
from lm.ops import platform
from lm.ops.blocks import apart
from lm.ops.linear_attention.block import (
    BlockKeys,
    BlockQueries,
    Bounds,
    Shape,
    advance,
    fold,
    grouped,
    join,
    last_entry,
    no_keys,
    numerators,
    split,
    token_minor,
    ungrouped,
)
from lm.ops.linear_attention.plan import BlockPlan
from lm.ops.linear_attention.types import LOCAL_BLOCK, Options, State, faded
from lm.ops.residuals import saved

BLOCK = {'cpu': 64}
"""Where the result does not depend on it."""

TILE = {'cpu': 256}


def linear_attention(
    q_BxLxHxE: jax.Array,
    k_BxLxKxE: jax.Array,
    v_BxLxKxD: jax.Array,
    q_parameters: Any,
    k_parameters: Any,
    q_local_BxLxHxC: jax.Array | None,
    k_local_BxLxKxC: jax.Array | None,
    initial_state: State | None,
    log_decay_BxLxK: jax.Array | None = None,
    *,
    options: Options,
    with_state: bool,
) -> tuple[jax.Array, State | None]:
    """Arguments as in `lm.ops.linear_attention`."""
    if options.local is None:
        q_local_BxLxHxC = k_local_BxLxKxC = None
    length, window = q_BxLxHxE.shape[1], options.window
    arrays, bounds = (k_BxLxKxE, v_BxLxKxD, k_local_BxLxKxC), None
    older = jnp.int32(0 if initial_state is not None else window or options.block or LOCAL_BLOCK)
    if window is not None:
        arrays = tuple(jnp.pad(x, ((0, 0), (window, 0), (0, 0), (0, 0))) for x in arrays)
        if log_decay_BxLxK is not None:
            log_decay_BxLxK = jnp.pad(log_decay_BxLxK, ((0, 0), (window, 0), (0, 0)))
        bounds = Bounds(jnp.int32(window), jnp.int32(window + length), older)
    elif options.local is not None and options.local.stable:
        bounds = Bounds(jnp.int32(0), jnp.int32(length), older)
    parameters = (q_parameters, k_parameters)
    queries = (q_BxLxHxE, q_local_BxLxHxC)
    o_BxLxHxD, state = attend(
        queries, arrays, parameters, initial_state, bounds, log_decay_BxLxK, options=options, with_state=with_state
    )
    if with_state and window is not None:
        # The window's own keys have not been folded.
        *rest, log_decay = (None if x is None else x[:, length:] for x in (*arrays, log_decay_BxLxK))
        inside = Bounds(jnp.int32(max(window - length, 0)), jnp.int32(window), older)
        state = add_keys(options, k_parameters, rest, state, inside, log_decay)
    return o_BxLxHxD, state


def unsupported(*args, **options) -> None:
    """Everything is supported."""


def attend(
    queries: tuple[jax.Array, jax.Array | None],
    keys: tuple[jax.Array, jax.Array, jax.Array | None],
    parameters: tuple[Any, Any],
    initial_state: State | None,
    bounds: Bounds | None,
    log_decay_BxSxK: jax.Array | None = None,
    *,
    options: Options,
    with_state: bool,
) -> tuple[jax.Array, State | None]:
    """Outputs, and the sums over the keys inside of the bounds that stand beside a query.

    Args:
        queries: q and q_local, L tokens.
        keys: k, v and k_local, L tokens, with a window N + L.
        parameters: the feature map's, for queries and for keys.
        initial_state: sums over keys before.
        bounds: of the indices of keys. None: no bounds.
        log_decay_BxSxK: of the keys; None: no decay. The sums before are as of the token before the first key, those
            given out as of the last key among them.
        options: as in `lm.ops.linear_attention`.
        with_state: whether the sums over all keys are wanted.
    """
    (batch, length), target = queries[0].shape[:2], platform.target_platform()
    exact_blocks = options.local is not None and options.window is None
    block = options.block or (LOCAL_BLOCK if exact_blocks else BLOCK.get(target, 512))
    plan = BlockPlan(
        options,
        length,
        min(block, length),
        TILE.get(target, 512),
        keys[1].shape[2],
        n_features(options, parameters[1], keys[0]),
        keys[1].shape[3],
        keys[1].dtype,
        initial_state is not None,
        with_state,
    )
    function = functools.partial(_attend, plan)
    if jax.tree.leaves(parameters) and batch % platform.batch_shards() == 0:
        function = platform.per_device(function, split=(True, True, False, True, False, True))
    decay = None if log_decay_BxSxK is None else decays.accumulate(log_decay_BxSxK)
    return function(queries, keys, parameters, initial_state, bounds, decay)


def add_keys(
    options: Options,
    parameters: Any,
    keys: tuple,
    state: State,
    bounds: Bounds | None = None,
    log_decay_BxSxK: jax.Array | None = None,
) -> State:
    """The state with these keys (k, v, …) folded in, except those outside of the bounds."""
    shape = Shape(options, 0, False, keys[1].dtype)
    features = n_features(options, parameters, keys[0])
    keys = BlockKeys(token_minor(keys[0]), token_minor(keys[1]), None)
    decay = None if log_decay_BxSxK is None else decays.accumulate(log_decay_BxSxK)
    return join(advance(shape, split(options, state, features), keys, parameters, bounds, 0, decay))


def n_features(options: Options, parameters: Any, k_BxLxKxE: jax.Array) -> int:
    """F."""
    batch, _, heads, size = k_BxLxKxE.shape
    one = jax.ShapeDtypeStruct((batch, 1, heads, size), k_BxLxKxE.dtype)
    return jax.eval_shape(lambda parameters, k: options.features(parameters, k, False), parameters, one).shape[-1]


def empty_state(options: Options, batch: int, heads: int, features: int, values: int) -> State:
    """The sums over no keys, for F = features and D = values."""
    return join(no_keys(options, batch, heads, features, values))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan, queries, keys, parameters, initial_state, bounds, decay):
    o, _, sums = _forward(plan, queries, keys, parameters, initial_state, bounds, decay)
    return o, join(sums) if plan.after else None


def _arranged(plan, queries, keys, initial_state):
    """Tokens last; only what is needed."""
    shape = plan.shape
    queries = BlockQueries(*(grouped(x, plan.heads) for x in queries))
    keys = BlockKeys(*(token_minor(x) for x in keys))
    if not (shape.reads or shape.compares):
        queries = queries._replace(q=None)
    if not (plan.folds or shape.compares):
        keys = keys._replace(k=None)
    sums = split(plan.options, initial_state, plan.features) if plan.before else plan.no_keys(keys.v.shape[0])
    return queries, keys, sums


def _forward(plan, queries, keys, parameters, initial_state, bounds, decay):
    batch, _, total = queries[0].shape[:3]
    queries, keys, sums = _arranged(plan, queries, keys, initial_state)
    lead = (batch, plan.heads, plan.values, total // plan.heads, plan.length)

    after = functools.partial(_after, plan, keys, parameters, bounds, decay)
    if not plan.options.causal:
        sums = plan.walk(after, sums)

    def body(start, size, carry):
        o, inverse, sums = carry

        def compute(tokens, seen, fading, sums):
            read = numerators(plan.shape, tokens, seen, parameters, sums, bounds, start, fading)
            return read, _shared(plan, seen, parameters, bounds, fading, start, size, sums)

        tokens, seen = _part(queries, start, size), _part(keys, start, size + plan.lag)
        (num, den), then = apart(start, compute, tokens, seen, _part(decay, start, size + plan.lag + 1), sums)
        if plan.options.normalize:
            inverse = _put(inverse, 1.0 / den, start)
            num *= (1.0 / den)[:, :, None]
        if plan.options.causal and plan.folds:
            sums = then if plan.reuses else after(start, size, sums)
        return _put(o, num, start), inverse, sums

    inverse = jnp.zeros(lead[:2] + lead[3:], jnp.float32) if plan.options.normalize else None
    o, inverse, sums = plan.walk(body, (jnp.zeros(lead, plan.dtype), inverse, sums))
    return ungrouped(o), inverse, sums


def _attend_forward(plan, queries, keys, parameters, initial_state, bounds, decay):
    o, inverse, sums = _forward(plan, queries, keys, parameters, initial_state, bounds, decay)
    o = saved(o)
    kept = (o, saved(inverse)) if plan.options.normalize else (None, None)
    final = None if plan.options.causal else sums
    residuals = (queries, keys, parameters, initial_state, bounds, decay, final, *kept)
    return (o, join(sums) if plan.after else None), residuals


def _attend_backward(plan, residuals, cotangents):
    outer_queries, outer_keys, parameters, initial_state, bounds, decay, final, o, inverse = residuals
    do, dstate = cotangents
    shape, causal, lag = plan.shape, plan.options.causal, plan.lag
    queries, keys, sums = _arranged(plan, outer_queries, outer_keys, initial_state)
    batch = keys.v.shape[0]
    cotangent = _output_cotangents(plan, do, o, inverse)

    # Those that a query meets directly get their gradient on the way forwards, those that are folded backwards.
    direct = BlockKeys(keys.k if shape.compares else None, keys.v if causal else None, keys.k_local)
    wide = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, jnp.float32))

    def inputs(start, size):
        """Queries of a block, the keys that they meet, the decay of these, and the cotangents."""
        tokens, seen = _part(queries, start, size), _part(keys, start, size + lag)
        return tokens, seen, _part(decay, start, size + lag + 1), cotangent(start, size)

    def forwards(start, size, carry):
        dqueries, dkeys, dparameters, dtotal, sums = carry

        def compute(tokens, seen, fading, d, sums):
            def call(tokens, met, parameters, total):
                all_seen = BlockKeys(*(a if b is None else b for a, b in zip(seen, met, strict=True)))
                return numerators(shape, tokens, all_seen, parameters, sums, bounds, start, _with_total(fading, total))

            met = BlockKeys(*(None if a is None else b for a, b in zip(direct, seen, strict=True)))
            gradients = jax.vjp(call, tokens, met, parameters, _total(fading))[1](d)
            return gradients, _shared(plan, seen, parameters, bounds, fading, start, size, sums)

        (dtokens, dseen, dpart, dfading), then = apart(start, compute, *inputs(start, size), sums)
        if causal and plan.folds:
            sums = then if plan.reuses else _after(plan, keys, parameters, bounds, decay, start, size, sums)
        dkeys = (_add if lag else _put)(dkeys, dseen, start)
        # The first entry is the moment of the sums, not a token's.
        dtotal = _add(dtotal, None if dfading is None else dfading.at[..., 0].set(0.0), start)
        return _put(dqueries, dtokens, start), dkeys, _sum(dparameters, dpart), dtotal, sums

    def read_gradient(start, size):
        def compute(tokens, seen, fading, d):
            def call(sums):
                return numerators(shape, tokens, seen, parameters, sums, bounds, start, fading)

            return jax.vjp(call, plan.no_keys(batch))[1](d)[0]

        return apart(start, compute, *inputs(start, size))

    def backwards(start, size, carry):
        dkeys, dparameters, dtotal, dsums = carry
        if plan.folds:
            fading = _part(decay, start, size + 1)
            last = None if decay is None else last_entry(fading, bounds, start)

            def compute(part, last, fading, dsums):
                def call(k, v, parameters, total):
                    later = None if decay is None else decays.entries(_with_total(fading, total), 1)
                    fade = None if decay is None else decays.between(last, later)
                    return fold(shape, BlockKeys(k, v, None), parameters, bounds, start, fade)

                return jax.vjp(call, part.k, part.v, parameters[1], _total(fading))[1](dsums)

            dk, dv, dpart, dfading = apart(start, compute, _part(keys, start, size), last, fading, dsums)
            if decay is not None:
                dsums = faded(dsums, decays.between(last, decays.entries(fading, 0, 1))[..., 0])
            dtotal = _add(dtotal, dfading, start)
            dk = (_add if direct.k is not None else _put)(dkeys.k, dk, start)
            dkeys = dkeys._replace(k=dk, v=_add(dkeys.v, dv, start))
            dparameters = _sum(dparameters, dpart)
        if causal and shape.reads:
            dsums = _sum(dsums, read_gradient(start, size))
        return dkeys, dparameters, dtotal, dsums

    dqueries = jax.tree.map(jnp.zeros_like, queries)
    carry = (dqueries, wide(direct), wide(parameters), wide(_total(decay)), sums if causal else final)
    dqueries, dkeys, (dq_parameters, dk_parameters), dtotal, sums = plan.walk(forwards, carry)
    # What is met only where it is folded has no gradient so far.
    dkeys = BlockKeys(*(wide(a) if b is None else b for a, b in zip(keys, dkeys, strict=True)))
    dsums = plan.no_keys(batch) if dstate is None else split(plan.options, dstate, plan.features)
    if decay is not None and dstate is not None:
        end = plan.length if bounds is None else jnp.minimum(bounds.last, plan.length)
        dlast_BxK = sum((d * x).sum(tuple(range(2, x.ndim))) for d, x in zip(_flat(dsums), _flat(sums), strict=True))
        dtotal = _add(dtotal, dlast_BxK[..., None], end)
    if not causal:
        dsums = plan.walk(lambda start, size, total: _sum(total, read_gradient(start, size)), dsums)
    if plan.folds or plan.before:
        carry = (dkeys, dk_parameters, dtotal, dsums)
        dkeys, dk_parameters, dtotal, dsums = plan.walk(backwards, carry, reverse=True)
    dinitial = join(dsums) if plan.before else None
    dqueries = tuple(None if d is None else ungrouped(d) for d in dqueries)
    dkeys = tuple(None if d is None else d.transpose(0, 3, 1, 2) for d in dkeys)
    given = (outer_queries, outer_keys, parameters)
    result = (dqueries, dkeys, (dq_parameters, dk_parameters))
    result = jax.tree.map(
        lambda x, d: jnp.zeros_like(x) if d is None else d.astype(x.dtype), given, _like(given, result)
    )
    return *result, dinitial, None, None if decay is None else decays.Decay(dtotal, None, None)


_attend.defvjp(_attend_forward, _attend_backward)


def _shared(plan, seen, parameters, bounds, fading, start, size, sums):
    """The sums after a block whose queries meet the keys `seen`, where the features of these serve both, or None."""
    if not plan.reuses:
        return None
    return advance(plan.shape, sums, _part(seen, 0, size), parameters[1], bounds, start, _part(fading, 0, size + 1))


def _after(plan, keys, parameters, bounds, decay, start, size, sums):
    def compute(sums, part, fading):
        return advance(plan.shape, sums, part, parameters[1], bounds, start, fading)

    return apart(start, compute, sums, _part(keys, start, size), _part(decay, start, size + 1))


def _total(decay):
    return None if decay is None else decay.total


def _with_total(decay, total):
    return None if decay is None else decay._replace(total=total)


def _output_cotangents(plan, do, o, inverse):
    """(start, size) → the cotangents of numerator and denominator of a block."""
    do_BxKxDxGxL = grouped(do, plan.heads)
    if not plan.options.normalize:
        zeros = jnp.zeros((*do_BxKxDxGxL.shape[:2], *do_BxKxDxGxL.shape[3:]), jnp.float32)
        return lambda start, size: (_part(do_BxKxDxGxL, start, size).astype(jnp.float32), _part(zeros, start, size))
    row = (do.astype(jnp.float32) * o.astype(jnp.float32)).sum(-1)
    dden = -grouped(row[..., None], plan.heads)[:, :, 0] * inverse

    def cotangent(start, size):
        dnum = _part(do_BxKxDxGxL, start, size).astype(jnp.float32) * _part(inverse, start, size)[:, :, None]
        return dnum, _part(dden, start, size)

    return cotangent


def _part(tree: Any, start: jax.Array | int, size: int) -> Any:
    return jax.tree.map(lambda x: x if size == x.shape[-1] else lax.dynamic_slice_in_dim(x, start, size, -1), tree)


def _put(tree: Any, parts: Any, start: jax.Array | int) -> Any:
    def put(x, part):
        part = part.astype(x.dtype)
        return part if part.shape == x.shape else lax.dynamic_update_slice_in_dim(x, part, start, x.ndim - 1)

    return jax.tree.map(put, tree, parts)


def _add(tree: Any, parts: Any, start: jax.Array | int) -> Any:
    return _put(tree, jax.tree.map(lambda x, part: _part(x, start, part.shape[-1]) + part, tree, parts), start)


def _sum(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)


def _like(given: Any, result: Any) -> Any:
    """`result` with None kept as a leaf wherever `given` has an array."""
    leaves = jax.tree.structure(given)
    flat = [r for g, r in zip(_flat(given), _flat(result), strict=True) if g is not None]
    return jax.tree.unflatten(leaves, flat)


def _flat(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=lambda x: x is None)
