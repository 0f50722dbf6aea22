"""Linear attention over windows that are split over devices (`lm.ops.sequence`).

Each device folds its own keys into sums, learns in a logarithmic number of exchanges what the keys before its part come
to (sums compose: `faded`), and then computes its part like one that follows those sums. What goes over the wires does
not depend on the length: the sums, and with a window the keys that it reaches back to.

Backward, all of this is differentiated as it stands: the same exchanges, in the other direction.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops import decay as decays
from lm.ops import platform, sequence
from lm.ops.linear_attention import xla
from lm.ops.linear_attention.block import BlockKeys, Bounds, Shape, fold, join, token_minor
from lm.ops.linear_attention.types import LOCAL_BLOCK, Options, State, faded


def linear_attention(
    q_BxLxHxE: jax.Array,
    k_BxLxKxE: jax.Array,
    v_BxLxKxD: jax.Array,
    q_parameters: Any,
    k_parameters: Any,
    q_local_BxLxHxC: jax.Array | None,
    k_local_BxLxKxC: jax.Array | None,
    initial_state: None,
    log_decay_BxLxK: jax.Array | None,
    *,
    options: Options,
) -> jax.Array:
    """The outputs [B, L, H, D] of this part; arguments as in `lm.ops.linear_attention`. The parts are no shorter than
    the window, and multiples of the exact blocks."""
    length, window = q_BxLxHxE.shape[1], options.window
    parameters = (q_parameters, k_parameters)
    local = (None, None) if options.local is None else (q_local_BxLxHxC, k_local_BxLxKxC)
    keys, bounds = (k_BxLxKxE, v_BxLxKxD, local[1]), None
    if window is not None:
        reach = lambda x: jnp.concatenate([sequence.tokens_before(x, window), x], axis=1)  # noqa: E731
        keys, log_decay_BxLxK = jax.tree.map(reach, (keys, log_decay_BxLxK))
        first = jnp.where(sequence.index() == 0, window, 0)
        bounds = Bounds(first, jnp.int32(window + length), first)
    elif options.local is not None:
        first = jnp.where(sequence.index() == 0, options.block or LOCAL_BLOCK, 0)
        bounds = Bounds(jnp.int32(0), jnp.int32(length), first)
    folded = tuple(x[:, :length] for x in keys[:2])
    decay = None if log_decay_BxLxK is None else log_decay_BxLxK[:, :length]
    before = sums_before(options, k_parameters, folded, decay, bounds)
    queries = (q_BxLxHxE, local[0])
    return xla.attend(queries, keys, parameters, before, bounds, log_decay_BxLxK, options=options, with_state=False)[0]


def unsupported(*args, **options) -> None:
    """Everything is supported."""


def carried(sums: Any, log_factor_BxK: jax.Array | None) -> Any:
    """The sums [B, K, …] over the keys of all parts before this one, as of its first token, from those of each part and
    the log factors from its first token to its last; None: no decay."""

    def compose(earlier, later):
        (before, log_before), (after, log_after) = earlier, later
        if log_after is None:
            return jax.tree.map(jnp.add, before, after), None
        return jax.tree.map(jnp.add, faded(before, log_after), after), log_before + log_after

    return sequence.carried((sums, log_factor_BxK), compose)[0]


def sums_before(
    options: Options, parameters: Any, keys: tuple, log_decay_BxLxK: jax.Array | None, bounds: Bounds | None
) -> State:
    """The sums over the keys of all parts before this one; `keys` are k and v of this, of which those inside of the
    bounds count."""
    function = functools.partial(_own_sums, options)
    if jax.tree.leaves(parameters) and keys[1].shape[0] % platform.batch_shards() == 0:
        function = platform.per_device(function, split=(False, True, True, False))
    return carried(*function(parameters, keys, log_decay_BxLxK, bounds))


def _own_sums(options, parameters, keys, log_decay_BxLxK, bounds):
    """The sums over these keys as of the last, and the log factor from the first to it, [B, K].

    Blocks are added up with the factors up to the end of the part: none depends on the sums before it, so that the
    gradient keeps no sums and no features.
    """
    shape = Shape(options, 0, False, keys[1].dtype)
    k, v = map(token_minor, keys)
    length, log_factor_BxK, fade_BxKxL = v.shape[-1], None, None
    if log_decay_BxLxK is not None:
        decay = decays.accumulate(log_decay_BxLxK)
        last = decays.entries(decay, length)
        fade_BxKxL = decays.between(last, decays.entries(decay, 1))
        log_factor_BxK = decays.between(last, decays.entries(decay, 0, 1))[..., 0]

    @jax.checkpoint
    def of_block(parameters, part, start):
        k, v, fade = part
        return join(fold(shape, BlockKeys(k, v, None), parameters, bounds, start, fade))

    block = min(length, options.block or xla.BLOCK.get(platform.target_platform(), 512))
    whole = length // block * block
    tokens = (k, v, fade_BxKxL)

    def cut(x):
        x = x[..., :whole]
        return jnp.moveaxis(x.reshape(*x.shape[:-1], -1, block), -2, 0)

    blocks = jax.tree.map(cut, tokens), jnp.arange(0, whole, block)
    empty = xla.empty_state(options, v.shape[0], v.shape[1], xla.n_features(options, parameters, keys[0]), v.shape[2])
    sums, _ = lax.scan(lambda s, x: (jax.tree.map(jnp.add, s, of_block(parameters, *x)), None), empty, blocks)
    if whole < length:
        rest = of_block(parameters, jax.tree.map(lambda x: x[..., whole:], tokens), whole)
        sums = jax.tree.map(jnp.add, sums, rest)
    return sums, log_factor_BxK
