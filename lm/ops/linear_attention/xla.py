"""Linear attention in blocks, in plain XLA: time and memory linear in the length.

Forward, one walk over the blocks: a query reads the sums over the keys of earlier blocks, adds the keys of its own
block directly, and the block's keys are then folded into the sums. Backward, two walks, neither of which keeps
features or sums of more than one block: forwards with the sums recomputed, for the gradients of queries and of what
they compared directly; backwards with the gradient of the sums, for the gradients of the keys and values that were
folded. Only inputs, outputs and one denominator a query are kept.

Numerator and denominator are differentiated as one linear operation: with o = num / den the cotangents are
do / den and -⟨do, o⟩ / den. A block is cut in tiles of rows, so that work above the diagonal is skipped. What is left
of a length that the block does not divide is a shorter block: nothing is padded.

With a window the keys are shifted by its size N against the queries: entry j of the shifted keys is key j - N. The
approximate part is then ordinary causal attention to them, the exact part sees entries i + 1 … i + N.

G query heads share each of the K key heads, T rows of a tile, S keys.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from lm.ops import platform
from lm.ops.exact_attention import RESIDUAL_NAME
from lm.ops.linear_attention import expansion
from lm.ops.linear_attention.types import Options, State

LOCAL_BLOCK = 1024
BLOCK = {'cpu': 256}
TILE = {'cpu': 256}


class Queries(NamedTuple):
    """Of the tokens of a sequence or of a block: [B, T, H, …]."""

    q: jax.Array
    q_local: jax.Array | None


class Keys(NamedTuple):
    """Of the tokens of a sequence or of a block, and with a window of the `window` tokens before: [B, S, K, …]."""

    k: jax.Array
    v: jax.Array
    k_local: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Plan:
    """The static side of a call: options, the cut into blocks and tiles, and which sums are needed."""

    options: Options
    length: int
    block: int
    tile: int
    before: bool
    """Whether there are sums over keys before the first block."""
    after: bool
    """Whether the sums over all keys are wanted."""

    @property
    def lag(self) -> int:
        return self.options.window or 0

    @property
    def folds(self) -> bool:
        """Whether any block folds its keys into the sums."""
        return self.after or self.length > self.block or not self.options.causal

    @property
    def reads(self) -> bool:
        """Whether any block reads the sums."""
        return self.before or self.length > self.block or not self.options.causal

    def walk(self, body: Callable[[Any, int, Any], Any], carry: Any, reverse: bool = False) -> Any:
        """body(start, size, carry) for each block in order."""
        whole, rest = divmod(self.length, self.block)

        def tail(carry):
            return body(whole * self.block, rest, carry) if rest else carry

        def index(i):
            return (whole - 1 - i if reverse else i) * self.block

        carry = tail(carry) if reverse else carry
        if whole == 1:
            carry = body(0, self.block, carry)
        elif whole:
            carry = lax.fori_loop(0, whole, lambda i, c: body(index(i), self.block, c), carry)
        return carry if reverse else tail(carry)


def linear_attention(
    q_BxLxHxE: jax.Array,
    k_BxLxKxE: jax.Array,
    v_BxLxKxD: jax.Array,
    q_parameters: Any,
    k_parameters: Any,
    q_local_BxLxHxC: jax.Array | None,
    k_local_BxLxKxC: jax.Array | None,
    initial_state: State | None,
    *,
    options: Options,
    with_state: bool,
) -> tuple[jax.Array, State | None]:
    """Arguments as in `lm.ops.linear_attention`."""
    if options.local is None:
        q_local_BxLxHxC = k_local_BxLxKxC = None
    keys = Keys(k_BxLxKxE, v_BxLxKxD, k_local_BxLxKxC)
    bounds = None
    if options.window is not None:
        keys = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (options.window, 0), (0, 0), (0, 0))), keys)
        bounds = (jnp.int32(options.window), jnp.int32(options.window + q_BxLxHxE.shape[1]))
    parameters = (q_parameters, k_parameters)
    queries = Queries(q_BxLxHxE, q_local_BxLxHxC)
    o_BxLxHxD, state = attend(queries, keys, parameters, initial_state, bounds, options=options, with_state=with_state)
    if with_state and options.window is not None:
        # The window's own keys have not been folded.
        keys = jax.tree.map(lambda x: x[:, q_BxLxHxE.shape[1] :], keys)
        start = jnp.maximum(options.window - q_BxLxHxE.shape[1], 0)
        state = fold(options, k_parameters, keys, state, (start, jnp.int32(options.window)), 0)
    return o_BxLxHxD, state


def unsupported(*args, **options) -> None:
    """Everything is supported."""


def attend(
    queries: Queries,
    keys: Keys,
    parameters: tuple[Any, Any],
    initial_state: State | None,
    bounds: tuple[jax.Array, jax.Array] | None,
    *,
    options: Options,
    with_state: bool,
) -> tuple[jax.Array, State | None]:
    """Outputs, and the sums over the keys with an index in [bounds[0], bounds[1]) that stand beside a query.

    Args:
        queries: L tokens.
        keys: L tokens, or window + L.
        parameters: the feature map's, for queries and for keys.
        initial_state: sums over keys before.
        bounds: keys outside are left out of the sums; those before bounds[0] are hidden altogether. None: no bounds.
        options: as in `lm.ops.linear_attention`.
        with_state: whether the sums over all keys are wanted.
    """
    length, target = queries.q.shape[1], platform.target_platform()
    exact_blocks = options.local is not None and options.window is None
    block = options.block or (LOCAL_BLOCK if exact_blocks else BLOCK.get(target, 512))
    plan = Plan(options, length, min(block, length), TILE.get(target, 512), initial_state is not None, with_state)
    function = functools.partial(_attend, plan)
    batch, shards = queries.q.shape[0], platform.batch_shards()
    if jax.tree.leaves(parameters) and batch % shards == 0:
        function = platform.per_device(function, split=(True, True, False, True, False))
    return function(queries, keys, parameters, initial_state, bounds)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan, queries, keys, parameters, initial_state, bounds):
    outputs, _, sums = _forward(plan, queries, keys, parameters, initial_state, bounds)
    return outputs, sums if plan.after else None


def _forward(plan, queries, keys, parameters, initial_state, bounds):
    options, shape = plan.options, (*queries.q.shape[:3], keys.v.shape[-1])
    sums = initial_state if plan.before else _no_keys(plan, keys, parameters)

    def folded(start, size, sums):
        return fold(options, parameters[1], _part(keys, start, size), sums, bounds, start)

    if not options.causal:
        sums = plan.walk(folded, sums)

    def body(start, size, carry):
        o, inverse, sums = carry
        tokens = _part(queries, start, size)
        seen = _part(keys, start, size + plan.lag)
        num_BxTxHxD, den_BxTxH = numerators(plan, tokens, seen, parameters, sums, bounds, start)
        if options.normalize:
            inverse_BxTxH = 1.0 / den_BxTxH
            num_BxTxHxD *= inverse_BxTxH[..., None]
            inverse = _put(inverse, inverse_BxTxH, start)
        if options.causal and plan.folds:
            sums = folded(start, size, sums)
        return _put(o, num_BxTxHxD, start), inverse, sums

    inverse = jnp.zeros(shape[:3], jnp.float32) if options.normalize else None
    return plan.walk(body, (jnp.zeros(shape, keys.v.dtype), inverse, sums))


def _attend_forward(plan, queries, keys, parameters, initial_state, bounds):
    o, inverse, sums = _forward(plan, queries, keys, parameters, initial_state, bounds)
    if plan.options.normalize:
        o, inverse = checkpoint_name(o, RESIDUAL_NAME), checkpoint_name(inverse, RESIDUAL_NAME)
    kept = sums if not plan.options.causal else initial_state
    residuals = (queries, keys, parameters, kept, bounds, o if plan.options.normalize else None, inverse)
    return (o, sums if plan.after else None), residuals


def _attend_backward(plan, residuals, cotangents):
    queries, keys, parameters, kept, bounds, o, inverse = residuals
    do, dsums = cotangents
    options = plan.options

    def output_cotangents(start, size):
        """Of numerator and denominator."""
        do_BxTxHxD = _part(do, start, size).astype(jnp.float32)
        if not options.normalize:
            return do_BxTxHxD, jnp.zeros(do_BxTxHxD.shape[:3], jnp.float32)
        dnum_BxTxHxD = do_BxTxHxD * _part(inverse, start, size)[..., None]
        return dnum_BxTxHxD, -(dnum_BxTxHxD * _part(o, start, size).astype(jnp.float32)).sum(-1)

    def forwards(start, size, carry):
        dqueries, dkeys, dparameters, sums = carry
        tokens, seen = _part(queries, start, size), _part(keys, start, size + plan.lag)
        call = functools.partial(numerators, plan, sums=sums, bounds=bounds, start=start)
        pull = jax.vjp(lambda *args: call(*args), tokens, seen, parameters)[1]
        dtokens, dseen, dpart = pull(output_cotangents(start, size))
        if options.causal and plan.folds:
            sums = fold(options, parameters[1], _part(keys, start, size), sums, bounds, start)
        return _put(dqueries, dtokens, start), _add(dkeys, dseen, start), _sum(dparameters, dpart), sums

    def backwards(start, size, carry):
        dkeys, dparameters, dsums = carry
        if plan.folds:
            folded = lambda part, p: fold(options, p, part, _no_keys(plan, keys, parameters), bounds, start)  # noqa: E731
            dpart, dp = jax.vjp(folded, _part(keys, start, size), parameters[1])[1](dsums)
            dkeys, dparameters = _add(dkeys, dpart, start), _sum(dparameters, dp)
        if options.causal and plan.reads:
            dsums = _sum(dsums, read_gradient(start, size))
        return dkeys, dparameters, dsums

    def read_gradient(start, size):
        tokens, seen = _part(queries, start, size), _part(keys, start, size + plan.lag)
        call = functools.partial(numerators, plan, tokens, seen, parameters, bounds=bounds, start=start)
        return jax.vjp(lambda sums: call(sums=sums), _no_keys(plan, keys, parameters))[1](
            output_cotangents(start, size)
        )[0]

    wide = functools.partial(jax.tree.map, lambda x: jnp.zeros(x.shape, jnp.float32))
    sums = kept if kept is not None else _no_keys(plan, keys, parameters)
    dsums = _no_keys(plan, keys, parameters) if dsums is None else dsums
    carry = (jax.tree.map(jnp.zeros_like, queries), wide(keys), wide(parameters), sums)
    dqueries, dkeys, (dq_parameters, dk_parameters), _ = plan.walk(forwards, carry)
    if not options.causal:
        dsums = plan.walk(lambda start, size, total: _sum(total, read_gradient(start, size)), dsums)
    if plan.folds or plan.before:
        dkeys, dk_parameters, dsums = plan.walk(backwards, (dkeys, dk_parameters, dsums), reverse=True)
    narrow = functools.partial(jax.tree.map, lambda d, x: d.astype(x.dtype))
    dparameters = narrow((dq_parameters, dk_parameters), parameters)
    return dqueries, narrow(dkeys, keys), dparameters, dsums if plan.before else None, None


_attend.defvjp(_attend_forward, _attend_backward)


def numerators(
    plan: Plan, queries: Queries, keys: Keys, parameters: Any, sums: State, bounds: Any, start: jax.Array | int
) -> tuple[jax.Array, jax.Array]:
    """Σ_j w_ij v_j and bias + Σ_j w_ij for the queries of one block, [B, T, H, D] and [B, T, H] float32."""
    options, heads = plan.options, keys.v.shape[2]
    x = y = None
    if plan.reads or options.local is None or options.window is not None:
        x = _grouped(options.features(parameters[0], queries.q).astype(keys.v.dtype), heads)
    if options.causal and (options.local is None or options.window is not None):
        count = queries.q.shape[1]
        y = options.features(parameters[1], keys.k[:, :count]).astype(keys.v.dtype).swapaxes(1, 2)
    exact = (None, None) if options.local is None else (_grouped(queries.q_local, heads), keys.k_local.swapaxes(1, 2))
    v = keys.v.swapaxes(1, 2)
    if plan.reads:
        sums = _weighted(options, sums, x.shape[-1], v.dtype)
    tiles = []
    for top in range(0, queries.q.shape[1], plan.tile):
        rows = slice(top, min(top + plan.tile, queries.q.shape[1]))
        x_rows, q_rows = (None if a is None else a[:, :, :, rows] for a in (x, exact[0]))
        tiles.append(_tile(plan, rows, x_rows, y, q_rows, exact[1], v, sums, bounds, start))
    num_BxKxGxTxD, den_BxKxGxT = (jnp.concatenate(parts, axis=3) for parts in zip(*tiles, strict=True))
    return _ungrouped(num_BxKxGxTxD), _ungrouped(den_BxKxGxT)


def one_row(
    options: Options, queries: Queries, keys: Keys, parameters: Any, sums: State, at: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """As `numerators`, for the query of token `at` of a block, of which `keys` holds that many and one more."""
    heads, block = keys.v.shape[2:0:-1]
    plan = Plan(options, block, block, block, before=True, after=False)
    x = _grouped(options.features(parameters[0], queries.q).astype(keys.v.dtype), heads)
    sums = _weighted(options, sums, x.shape[-1], keys.v.dtype)
    q, k, v = _grouped(queries.q_local, heads), keys.k_local.swapaxes(1, 2), keys.v.swapaxes(1, 2)
    num, den = _tile(plan, slice(block - 1, block), x, None, q, k, v, sums, None, 0, at)
    return _ungrouped(num), _ungrouped(den)


def _weighted(options: Options, sums: State, features: int, dtype: Any) -> State:
    """The sums with coefficients and counts multiplied in, as an operand of `dtype`."""
    kv = sums.kv_BxKxRxD * expansion.weights(options.powers, features)[:, None]
    return State(kv.astype(dtype), sums.totals)


def _tile(plan, rows, x, y, q, k, v, sums, bounds, start, at=None):
    """As `numerators`, for some rows of the block, in the layout [B, K, G, T, …]. `at`: where the row really is."""
    options = plan.options
    parts, shrink = [], None
    i = jnp.arange(rows.start, rows.stop)[:, None] if at is None else at
    if options.local is not None:
        first, last = (rows.start + 1, rows.stop + plan.lag) if plan.lag else (0, rows.stop)
        s_BxKxGxTxS = _dot('bkgtc,bksc->bkgts', q, k[:, :, first:last])
        j = jnp.arange(first, last)
        visible = ((j > i) & (j <= i + plan.lag)) if plan.lag else j <= i
        if bounds is not None:
            visible &= start + j >= bounds[0]
        if options.local.stable:
            s_BxKxGxTxS = jnp.where(visible, s_BxKxGxTxS * options.local.scale, -jnp.inf)
            m_BxKxGxTx1 = lax.stop_gradient(jnp.maximum(s_BxKxGxTxS.max(-1, keepdims=True), 0.0))
            shrink = jnp.exp(-m_BxKxGxTx1[..., 0])
            parts.append((jnp.exp(s_BxKxGxTxS - m_BxKxGxTx1), v[:, :, first:last]))
        else:
            parts.append((jnp.where(visible, options.local.weights(s_BxKxGxTxS), 0.0), v[:, :, first:last]))
    scale = (lambda a: a) if shrink is None else lambda a: a * shrink.reshape(shrink.shape + (1,) * (a.ndim - 4))
    if y is not None:
        s_BxKxGxTxS = _dot('bkgtf,bksf->bkgts', x, y[:, :, : rows.stop])
        j = jnp.arange(rows.stop)
        visible = j <= i if bounds is None else (j <= i) & (start + j >= bounds[0])
        parts.append((scale(jnp.where(visible, options.approximate(s_BxKxGxTxS), 0.0)), v[:, :, : rows.stop]))
    num_BxKxGxTxD = jnp.float32(0.0)
    den_BxKxGxT = scale(jnp.full(v.shape[:2] + (q if x is None else x).shape[2:4], options.bias, jnp.float32))
    for w_BxKxGxTxS, values in parts:
        num_BxKxGxTxD += _dot('bkgts,bksd->bkgtd', w_BxKxGxTxS.astype(v.dtype), values)
        den_BxKxGxT += w_BxKxGxTxS.sum(-1)
    if plan.reads:
        num_BxKxGxTxD += scale(_dot('bkgtr,bkrd->bkgtd', expansion.expand(options.powers, x), sums.kv_BxKxRxD))
        den_BxKxGxT += scale(expansion.read_totals(options.powers, x, sums.totals))
    return num_BxKxGxTxD, den_BxKxGxT


def fold(
    options: Options, parameters: Any, keys: Keys, sums: State, bounds: Any = None, start: jax.Array | int = 0
) -> State:
    """The sums with these keys in addition, except those with an index (from `start` on) outside of `bounds`."""
    y = options.features(parameters, keys.k).astype(keys.v.dtype).swapaxes(1, 2)
    one = None
    if bounds is not None:
        index = start + jnp.arange(keys.k.shape[1])
        one = (index >= bounds[0]) & (index < bounds[1])
        y = jnp.where(one[:, None], y, 0)
        one = one.astype(jnp.float32)
    phi = expansion.expand(options.powers, y, one)
    kv_BxKxRxD = _dot('bktr,bktd->bkrd', phi, keys.v.swapaxes(1, 2))
    return _sum(sums, State(kv_BxKxRxD, expansion.totals(options.powers, y, one)))


def empty_state(options: Options, batch: int, heads: int, features: int, values: int) -> State:
    """The sums over no keys, for F = features and D = values."""
    return State(*expansion.empty(options.powers, batch, heads, features, values))


def _no_keys(plan: Plan, keys: Keys, parameters: Any) -> State | None:
    if not (plan.folds or plan.reads):
        return None
    part = jax.ShapeDtypeStruct((keys.k.shape[0], 1, *keys.k.shape[2:]), keys.k.dtype)
    features = jax.eval_shape(plan.options.features, parameters[1], part).shape[-1]
    return empty_state(plan.options, keys.k.shape[0], keys.k.shape[2], features, keys.v.shape[-1])


def _dot(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(formula, a, b, preferred_element_type=jnp.float32)


def _grouped(x_BxTxHxF: jax.Array, heads: int) -> jax.Array:
    batch, count, total, size = x_BxTxHxF.shape
    return x_BxTxHxF.reshape(batch, count, heads, total // heads, size).transpose(0, 2, 3, 1, 4)


def _ungrouped(x_BxKxGxTxF: jax.Array) -> jax.Array:
    batch, heads, groups, count, *rest = x_BxKxGxTxF.shape
    return jnp.moveaxis(x_BxKxGxTxF, 3, 1).reshape(batch, count, heads * groups, *rest)


def _part(tree: Any, start: jax.Array | int, size: int) -> Any:
    return jax.tree.map(lambda x: x if size == x.shape[1] else lax.dynamic_slice_in_dim(x, start, size, 1), tree)


def _put(tree: Any, parts: Any, start: jax.Array | int) -> Any:
    def put(x, part):
        part = part.astype(x.dtype)
        return part if part.shape == x.shape else lax.dynamic_update_slice_in_dim(x, part, start, 1)

    return jax.tree.map(put, tree, parts)


def _add(tree: Any, parts: Any, start: jax.Array | int) -> Any:
    return _put(tree, jax.tree.map(lambda x, part: _part(x, start, part.shape[1]) + part, tree, parts), start)


def _sum(a: Any, b: Any) -> Any:
    return jax.tree.map(jnp.add, a, b)
