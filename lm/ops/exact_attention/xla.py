"""Exact attention in blocks, in plain XLA: memory linear in the length, work only where the mask lets keys be seen.

For each block of queries a loop visits the blocks of keys that some query of it sees: blocks above the diagonal and to
the left of the window are skipped. The loop keeps the running output and normalizer in float32. The gradient recomputes
the weights block by block from the saved normalizer. Lengths that no block divides are not padded: the last block is
moved left until it fits, and entries that it shares with the block before it are counted once.

L queries, M keys; G query heads share each of the K key heads.
"""

import dataclasses
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops import blocks as along
from lm.ops import decay as decays
from lm.ops import platform
from lm.ops.blocks import even_block, loop, put, take
from lm.ops.custom_vjp import custom_vjp
from lm.ops.decay import Decay
from lm.ops.dots import dot
from lm.ops.exact_attention.types import ExactCall, PolynomialCall, SoftmaxCall
from lm.ops.residuals import save_residual

MASKED = -1e30  # Finite, so that a row without visible keys so far gives no NaN; the first real score erases it.


@dataclasses.dataclass(frozen=True)
class SoftmaxWeights:
    """Weights exp(scale s) / Σ exp(scale s); scale s may have a cap.

    From block to block of keys it keeps statistics of each query, besides the sum of the weighted values. Here they are
    the largest score so far, and the sum of the weights relative to it.
    """

    scale: float
    cap: float | None = None

    def start(self, rows: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        """Returns the statistics of queries that have met no key."""
        return jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32)

    def accumulate(self, acc, stats, s, visible, v, fade=None):
        """Adds a block of keys to the sum of the weighted values and to the statistics."""
        maximum, total = stats
        s = jnp.where(visible, self._logits(s, fade), MASKED)
        raised = jnp.maximum(maximum, s.max(-1))
        w = jnp.exp(s - raised[..., None])
        shrink = jnp.exp(maximum - raised)
        acc = acc * shrink[..., None] + dot('bkglm,bkmd->bkgld', w.astype(v.dtype), v)
        return acc, (raised, total * shrink + w.sum(-1))

    def finish(self, acc, stats):
        """Returns the outputs and the normalizers."""
        maximum, total = stats
        return acc / total[..., None], maximum + jnp.log(total)

    def weights(self, s, visible, normalizer, fade=None):
        """Returns the normalized weights and their derivative by s where the normalizer is held fixed."""
        w = jnp.exp(jnp.where(visible, self._logits(s, fade), MASKED) - normalizer[..., None])
        if self.cap is None:
            return w, w * self.scale
        return w, w * (self.scale * (1.0 - jnp.square(jnp.tanh(s * (self.scale / self.cap)))))

    def _logits(self, s, fade):
        logits = s * self.scale if self.cap is None else self.cap * jnp.tanh(s * (self.scale / self.cap))
        return logits if fade is None else logits + fade


@dataclasses.dataclass(frozen=True)
class PolynomialWeights:
    """Weights (scale s)^degree / (denominator_bias + Σ (scale s)^degree), by the methods of `SoftmaxWeights`.

    float32 needs no running maximum at usual degrees. The statistics are the denominators so far.
    """

    degree: int
    denominator_bias: float
    scale: float

    def start(self, rows: tuple[int, ...]) -> jax.Array:
        return jnp.full(rows, self.denominator_bias, jnp.float32)

    def accumulate(self, acc, stats, s, visible, v, fade=None):
        w = jnp.where(visible, lax.integer_pow(s * self.scale, self.degree), 0.0)
        w = w if fade is None else w * jnp.exp(fade)
        return acc + dot('bkglm,bkmd->bkgld', w.astype(v.dtype), v), stats + w.sum(-1)

    def finish(self, acc, stats):
        return acc / stats[..., None], stats

    def weights(self, s, visible, normalizer, fade=None):
        s = s * self.scale
        below = jnp.where(visible, lax.integer_pow(s, self.degree - 1), 0.0) * (1.0 / normalizer)[..., None]
        below = below if fade is None else below * jnp.exp(fade)
        return below * s, below * (self.degree * self.scale)


BlockWeights = SoftmaxWeights | PolynomialWeights
"""How scores become weights, a block of keys at a time; hashable.

Scores s are [B, K, G, L, M], values v [B, K, M, D]. `visible` tells which keys the queries see. `fade` has the log
factors of the decay [B, K, 1, L, M], or is None without decay.
"""


class Operands(NamedTuple):
    """The arrays of a call, by key head; `lm.ops.exact_attention` has the meanings.

    Attributes:
        first_N: the least of `starts_BxL` in each block of queries.
    """

    q_BxKxGxLxD: jax.Array
    k_BxKxMxD: jax.Array
    v_BxKxMxD: jax.Array
    q_offset: jax.Array
    k_start: jax.Array
    starts_BxL: jax.Array | None
    first_N: jax.Array | None
    decay: Decay | None
    sinks_KxG: jax.Array | None


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The blocks of L queries and M keys, and which keys a query sees."""

    queries: int
    keys: int
    block_q: int
    block_k: int
    causal: bool
    window: int | None

    @property
    def n_q(self) -> int:
        return -(-self.queries // self.block_q)

    @property
    def n_k(self) -> int:
        return -(-self.keys // self.block_k)

    def query_start(self, i):
        return along.start(i, self.block_q, self.queries)

    def key_start(self, j):
        return along.start(j, self.block_k, self.keys)

    def key_range(self, i, seen: Operands):
        """Returns the first and one past the last block of keys that block i of the queries sees."""
        first = seen.q_offset + self.query_start(i)
        begin = seen.k_start if self.window is None else jnp.maximum(seen.k_start, first - self.window + 1)
        if seen.first_N is not None:
            begin = jnp.maximum(begin, seen.first_N[i])
        end = first + self.block_q if self.causal else self.keys
        return jnp.clip(begin // self.block_k, 0, self.n_k), jnp.clip(-(-end // self.block_k), 0, self.n_k)

    def visible(self, i, j, seen: Operands):
        """Returns [queries, keys] of the blocks i and j, or [B, 1, 1, queries, keys] where rows of the batch differ."""
        query = seen.q_offset + self.query_start(i) + jnp.arange(self.block_q)[:, None]
        key = self.key_start(j) + jnp.arange(self.block_k)
        result = jnp.broadcast_to(key >= jnp.maximum(seen.k_start, j * self.block_k), (self.block_q, self.block_k))
        if self.causal:
            result &= key <= query
        if self.window is not None:
            result &= key > query - self.window
        if seen.starts_BxL is not None:
            start = take(seen.starts_BxL, self.query_start(i), self.block_q, 1)
            result &= key >= start[:, None, None, :, None]
        return result


def softmax_attention(call: SoftmaxCall) -> jax.Array:
    """Computes a call in blocks."""
    return _attend_in_blocks(SoftmaxWeights(call.scale, call.score_cap), call, call.sinks_H)


def polynomial_attention(call: PolynomialCall) -> jax.Array:
    """Computes a call in blocks."""
    return _attend_in_blocks(PolynomialWeights(call.degree, call.denominator_bias, call.scale), call)


def block_sizes(rows: int, queries: int, keys: int, block: int | None = None) -> tuple[int, int]:
    """Returns the blocks of queries and keys for `rows` = batch × heads on a device.

    Measured on a CPU, forward plus backward: the best blocks hold about 2^18 weights over all rows (they stay in the
    cache), and no side under 128 or over 512 pays. Accelerators want large matrices.
    """
    target = block or 512
    if block is None and platform.target_platform() == 'cpu':
        target = next(side for side in (512, 256, 128) if side == 128 or rows * side**2 <= 2**18)
    block_q = even_block(queries, target)
    # A few queries against a long cache: longer blocks of keys keep the matrices large.
    block_k = even_block(keys, target if block else target * min(8, max(1, target // block_q)))
    return block_q, block_k


def _attend_in_blocks(rule: BlockWeights, call: ExactCall, sinks_H: jax.Array | None = None) -> jax.Array:
    batch, length, heads, size = call.q_BxLxHxD.shape
    keys, kv_heads = call.k_BxMxKxD.shape[1:3]
    rows = -(-batch // platform.batch_shards()) * heads
    blocks = Blocks(length, keys, *block_sizes(rows, length, keys, call.block), call.causal, call.window)
    q_BxKxGxLxD = call.q_BxLxHxD.reshape(batch, length, kv_heads, heads // kv_heads, size).transpose(0, 2, 3, 1, 4)
    k_BxKxMxD, v_BxKxMxD = call.k_BxMxKxD.swapaxes(1, 2), call.v_BxMxKxD.swapaxes(1, 2)
    offset, k_start, starts_BxL = jax.tree.map(
        lambda n: jnp.asarray(n, jnp.int32), (call.q_offset, call.k_start, call.starts_BxL)
    )
    first_N = None
    if starts_BxL is not None:  # ascending: the first of a block is the least
        first_N = starts_BxL[:, blocks.query_start(jnp.arange(blocks.n_q))].min(0)
    decay = None if call.log_decay_BxMxK is None else decays.accumulate(call.log_decay_BxMxK)
    sinks_KxG = None if sinks_H is None else sinks_H.astype(jnp.float32).reshape(kv_heads, -1)
    seen = (offset, k_start, starts_BxL, first_N)
    o_BxKxGxLxD = _attend(rule, blocks, Operands(q_BxKxGxLxD, k_BxKxMxD, v_BxKxMxD, *seen, decay, sinks_KxG))
    return o_BxKxGxLxD.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, call.v_BxMxKxD.shape[-1])


@custom_vjp(0, 1)
def _attend(rule: BlockWeights, blocks: Blocks, operands: Operands) -> jax.Array:
    return _forward(rule, blocks, operands)[0]


def _forward(rule: BlockWeights, blocks: Blocks, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Returns the outputs and the normalizers. With sinks these are the logarithms of the sums."""
    q_BxKxGxLxD, k_BxKxMxD, v_BxKxMxD = operands[:3]
    sinks_KxG = operands.sinks_KxG
    lead, size = q_BxKxGxLxD.shape[:3], v_BxKxMxD.shape[-1]
    rows = (*lead, blocks.block_q)

    def query_block(i, outputs):
        o, normalizer = outputs
        start = blocks.query_start(i)
        q = take(q_BxKxGxLxD, start, blocks.block_q, 3)

        def key_block(j, carry):
            acc, stats = carry
            k = take(k_BxKxMxD, blocks.key_start(j), blocks.block_k, 2)
            v = take(v_BxKxMxD, blocks.key_start(j), blocks.block_k, 2)
            s = dot('bkgld,bkmd->bkglm', q, k)
            visible, fade = _visible_and_fade(blocks, i, j, operands)
            return rule.accumulate(acc, stats, s, visible, v, fade)

        carry = (jnp.zeros((*rows, size), jnp.float32), rule.start(rows))
        low, high = blocks.key_range(i, operands)
        o_block, normalizer_block = rule.finish(*loop(low, high, key_block, carry, blocks.n_k == 1))
        if sinks_KxG is not None:
            joined = jnp.logaddexp(normalizer_block, sinks_KxG[:, :, None])
            o_block, normalizer_block = o_block * jnp.exp(normalizer_block - joined)[..., None], joined
        return put(o, o_block, start, 3), put(normalizer, normalizer_block, start, 3)

    shape = (*lead, blocks.queries)
    outputs = (jnp.zeros((*shape, size), q_BxKxGxLxD.dtype), jnp.zeros(shape, jnp.float32))
    return loop(0, blocks.n_q, query_block, outputs, blocks.n_q == 1)


def _visible_and_fade(blocks: Blocks, i, j, operands: Operands) -> tuple[jax.Array, jax.Array | None]:
    """Returns which keys of block j the queries of block i see, and the log factors of the weights, [B, K, 1, L, M]."""
    visible, decay = blocks.visible(i, j, operands), operands.decay
    if decay is None:
        return visible, None
    later = jax.tree.map(lambda x: take(x, operands.q_offset + blocks.query_start(i) + 1, blocks.block_q, 2), decay)
    earlier = jax.tree.map(lambda x: take(x, blocks.key_start(j) + 1, blocks.block_k, 2), decay)
    later = jax.tree.map(lambda x: x[:, :, None, :, None], later)
    earlier = jax.tree.map(lambda x: x[:, :, None, None], earlier)
    fade = jnp.where(visible, decays.between(later, earlier), -jnp.inf)
    visible &= fade > -jnp.inf
    return visible, jnp.where(visible, fade, 0.0)


def _attend_forward(rule, blocks, operands):
    o, normalizer = map(save_residual, _forward(rule, blocks, operands))
    return o, (operands, o, normalizer)


def _attend_backward(rule: BlockWeights, blocks: Blocks, residuals, do_BxKxGxLxD: jax.Array) -> tuple[Operands]:
    operands, o_BxKxGxLxD, normalizer_BxKxGxL = residuals
    q_BxKxGxLxD, k_BxKxMxD, v_BxKxMxD = operands[:3]
    # Σ_j w_ij ⟨do_i, v_j⟩ = ⟨do_i, o_i⟩: the normalizer's part of the gradient, one number per row.
    row_BxKxGxL = dot('bkgld,bkgld->bkgl', do_BxKxGxLxD, o_BxKxGxLxD)

    def query_block(i, gradients):
        dq, sums = gradients
        start = blocks.query_start(i)
        whole = (q_BxKxGxLxD, do_BxKxGxLxD, row_BxKxGxL, normalizer_BxKxGxL)
        q, do, row, normalizer = (take(x, start, blocks.block_q, 3) for x in whole)

        def key_block(j, carry):
            dq_block, (dk, dv, dtotal) = carry
            at = blocks.key_start(j)
            k, v = take(k_BxKxMxD, at, blocks.block_k, 2), take(v_BxKxMxD, at, blocks.block_k, 2)
            visible, fade = _visible_and_fade(blocks, i, j, operands)
            w, slope = rule.weights(dot('bkgld,bkmd->bkglm', q, k), visible, normalizer, fade)
            dlog = dot('bkgld,bkmd->bkglm', do, v) - row[..., None]
            ds = slope * dlog
            dq_block = dq_block + dot('bkglm,bkmd->bkgld', ds.astype(k.dtype), k)
            if blocks.queries % blocks.block_q:
                fresh = along.find_new(i, blocks.block_q, blocks.queries)[:, None]
                w, ds = jnp.where(fresh, w, 0.0), jnp.where(fresh, ds, 0.0)
            dk_block = dot('bkglm,bkgld->bkmd', ds.astype(q.dtype), q) + take(dk, at, blocks.block_k, 2)
            dv_block = dot('bkglm,bkgld->bkmd', w.astype(do.dtype), do) + take(dv, at, blocks.block_k, 2)
            if dtotal is not None:
                dlog = (w * dlog).sum(2)
                first = operands.q_offset + start + 1
                dtotal = put(dtotal, take(dtotal, first, blocks.block_q, 2) + dlog.sum(-1), first, 2)
                dtotal = put(dtotal, take(dtotal, at + 1, blocks.block_k, 2) - dlog.sum(-2), at + 1, 2)
            return dq_block, (put(dk, dk_block, at, 2), put(dv, dv_block, at, 2), dtotal)

        low, high = blocks.key_range(i, operands)
        dq_block, sums = loop(low, high, key_block, (jnp.zeros(q.shape, jnp.float32), sums), blocks.n_k == 1)
        return put(dq, dq_block, start, 3), sums

    dtotal = None if operands.decay is None else jnp.zeros_like(operands.decay.total)
    sums = (jnp.zeros(k_BxKxMxD.shape, jnp.float32), jnp.zeros(v_BxKxMxD.shape, jnp.float32), dtotal)
    gradients = (jnp.zeros_like(q_BxKxGxLxD), sums)
    dq, (dk, dv, dtotal) = loop(0, blocks.n_q, query_block, gradients, blocks.n_q == 1)
    ddecay = None if dtotal is None else decays.cotangent(dtotal)
    dsinks_KxG = None
    if operands.sinks_KxG is not None:  # a key whose value is zero
        w_BxKxGxL = jnp.exp(operands.sinks_KxG[:, :, None] - normalizer_BxKxGxL)
        dsinks_KxG = -(w_BxKxGxL * row_BxKxGxL).sum((0, 3))
    dk, dv = dk.astype(k_BxKxMxD.dtype), dv.astype(v_BxKxMxD.dtype)
    nothing = cast(jax.Array, None)  # what JAX takes for the gradient of an array that has none
    return (Operands(dq, dk, dv, nothing, nothing, None, None, ddecay, dsinks_KxG),)


_attend.defvjp(_attend_forward, _attend_backward)
