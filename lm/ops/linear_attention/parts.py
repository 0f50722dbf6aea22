"""Linear attention over windows that are split over devices (`lm.ops.sequence`).

Each device folds its keys into sums. A logarithmic number of exchanges gives it the sums over the keys before its part
(sums compose: `decay_state`), and it computes its part from them. Messages between devices hold the sums, and with a
window the keys that it reaches back to: their size does not depend on the length.

The backward pass differentiates this as it stands: the same exchanges, in the other direction.
"""

import dataclasses
import functools
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops import decay as decays
from lm.ops import platform, sequence
from lm.ops.linear_attention import channels, xla
from lm.ops.linear_attention.block import BlockTokens, Bounds, Shape, fold, join, move_tokens_last
from lm.ops.linear_attention.types import Keys, LinearCall, LinearResult, Options, State, decay_state

Tree = TypeVar('Tree')


def linear_attention(call: LinearCall) -> LinearResult:
    """Computes the outputs of this part. It is no shorter than the window, and a multiple of the exact blocks."""
    if call.channel_log_decay_BxLxKxE is not None:
        return channels.attend_part(channels.walk, call)
    options, length, keys, bounds = call.options, call.q_BxLxHxE.shape[1], call.keys, None
    if (window := options.window) is not None:
        keys = jax.tree.map(lambda x: jnp.concatenate([sequence.tokens_before(x, window), x], axis=1), keys)
        first = jnp.where(sequence.index() == 0, window, 0)
        bounds = Bounds(first, jnp.int32(window + length), first)
    elif options.exact_block is not None:
        first = jnp.where(sequence.index() == 0, options.exact_block, 0)
        bounds = Bounds(jnp.int32(0), jnp.int32(length), first)
    folded = jax.tree.map(lambda x: x[:, :length], keys._replace(k_local_BxSxKxC=None))
    before = sum_before(options, call.k_parameters, folded, bounds)
    return xla.attend(dataclasses.replace(call.replace_keys(keys), initial_state=before), bounds)


def carry_sums(state: Tree, log_factor_BxK: jax.Array | None) -> Tree:
    """Returns the sums [B, K, …] over the keys of all parts before this one, decayed up to its first token.

    Args:
        state: the sums over the keys of this part, decayed up to its last token.
        log_factor_BxK: the log factor of the whole part; None: no decay.
    """

    def compose(earlier, later):
        (before, earlier_log), (state, log) = earlier, later
        if log is None:
            return _add(before, state), None
        return _add(decay_state(before, log), state), earlier_log + log

    return sequence.carried((state, log_factor_BxK), compose)[0]


def _add(a: Tree, b: Tree) -> Tree:
    return jax.tree.map(jnp.add, a, b)


def sum_before(options: Options, parameters: object, keys: Keys, bounds: Bounds | None) -> State:
    """Computes the sums over the keys of all parts before this one.

    `keys` are the keys of this part; only keys inside the bounds count.
    """
    function = functools.partial(_sum_part, options)
    if jax.tree.leaves(parameters) and keys.v_BxSxKxD.shape[0] % platform.batch_shards() == 0:
        function = platform.per_device(function, split=(False, True, False))
    sums, log_factor_BxK = function(parameters, keys, bounds)
    return carry_sums(sums, log_factor_BxK)


def _sum_part(
    options: Options, parameters: object, keys: Keys, bounds: Bounds | None
) -> tuple[State, jax.Array | None]:
    """Computes the arguments of `carry_sums`.

    Blocks are added with their factors up to the end of the part. None depends on the sums before it, so that the
    gradient keeps no sums and no features.
    """
    shape = Shape(options, tile=0, reads=False, dtype=keys.v_BxSxKxD.dtype)
    k, v = move_tokens_last(keys.k_BxSxKxE), move_tokens_last(keys.v_BxSxKxD)
    length, log_factor_BxK, log_factors_BxKxL = v.shape[-1], None, None
    if keys.log_decay_BxSxK is not None:
        decay = decays.accumulate(keys.log_decay_BxSxK)
        last = decays.entries(decay, length)
        log_factors_BxKxL = decays.between(last, decays.entries(decay, 1))
        log_factor_BxK = decays.between(last, decays.entries(decay, 0, 1))[..., 0]

    @jax.checkpoint
    def sum_block(parameters, tokens, start):
        k, v, log_factors = tokens
        return join(fold(shape, BlockTokens(v, k_BxKxExS=k), parameters, bounds, start, log_factors))

    block = min(length, options.block or xla.BLOCK.get(platform.target_platform(), 512))
    whole = length // block * block
    tokens = (k, v, log_factors_BxKxL)

    def cut(x):
        x = x[..., :whole]
        return jnp.moveaxis(x.reshape(*x.shape[:-1], -1, block), -2, 0)

    blocks = jax.tree.map(cut, tokens), jnp.arange(0, whole, block)
    features = xla.count_features(options, parameters, keys.k_BxSxKxE)
    empty = xla.make_empty_state(options, v.shape[0], v.shape[1], features, v.shape[2])
    sums, _ = lax.scan(lambda s, x: (_add(s, sum_block(parameters, *x)), None), empty, blocks)
    if whole < length:
        rest = sum_block(parameters, jax.tree.map(lambda x: x[..., whole:], tokens), whole)
        sums = _add(sums, rest)
    return sums, log_factor_BxK
