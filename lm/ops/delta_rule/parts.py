"""The delta rule over windows that are split over devices (`lm.ops.sequence`).

A part changes the state before it by an affine map, S → P S + R, and its queries read an affine map of it too. Each
device walks its part once. Columns of the state that hold R start at 0; beside them, columns that hold P start at I. A
logarithmic number of exchanges gives the state after the parts before, and each device adds what its queries read of
it.
"""

import dataclasses
from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp

from lm.ops import sequence
from lm.ops.delta_rule import xla
from lm.ops.delta_rule.types import DeltaCall, DeltaResult
from lm.ops.dots import dot


def delta_rule(call: DeltaCall) -> DeltaResult:
    """Computes the outputs of this part."""
    wide = dataclasses.replace(call, v_BxLxKxD=call.v_BxLxKxD.astype(jnp.float32))
    return DeltaResult(compute_part(xla.delta_rule, wide).astype(call.v_BxLxKxD.dtype), None)


def compute_part(walk: Callable[[DeltaCall], DeltaResult], call: DeltaCall) -> jax.Array:
    """Computes the outputs of this part; `walk` is an implementation's `delta_rule`, which walks the part once."""
    (*lead, size), key_size = call.v_BxLxKxD.shape, call.k_BxLxKxE.shape[-1]
    extended = extend(call)
    o, state = walk(extended)
    own, through = jnp.split(o, [size], axis=-1)
    change = cast(jax.Array, state) - extended.first_state_BxKxExD
    before = _carry(*jnp.split(change, [size], axis=-1))
    through = through.reshape(*lead, -1, key_size)
    return own + dot('blkge,bked->blkgd', through, before).reshape(own.shape).astype(call.v_BxLxKxD.dtype)


def extend(call: DeltaCall) -> DeltaCall:
    """Extends values to [B, L, K, D + E], and the state before them to [B, K, E, D + E]: columns for P beside R's."""
    batch, _, heads, size = call.k_BxLxKxE.shape
    zeros = jnp.zeros((batch, heads, size, call.v_BxLxKxD.shape[-1]), jnp.float32)
    identity = jnp.broadcast_to(jnp.eye(size, dtype=jnp.float32), (batch, heads, size, size))
    columns = jnp.pad(call.v_BxLxKxD, ((0, 0), (0, 0), (0, 0), (0, size)))
    state = jnp.concatenate([zeros, identity], axis=-1)
    return dataclasses.replace(call, v_BxLxKxD=columns, initial_state_BxKxExD=state)


def _carry(added_BxKxExD: jax.Array, change_BxKxExE: jax.Array) -> jax.Array:
    """Returns the state after all parts before this one. A part adds R to the state, and P - I times the state."""

    def compose(earlier, later):
        (added, change), (more, later_change) = earlier, later
        both = dot('bkef,bkfd->bked', later_change, jnp.concatenate(earlier, axis=-1))
        through_added, through_change = jnp.split(both, [added.shape[-1]], axis=-1)
        return added + through_added + more, change + through_change + later_change

    return sequence.carried((added_BxKxExD, change_BxKxExE), compose)[0]
