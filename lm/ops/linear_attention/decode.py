"""Linear attention some tokens at a time: the state that decoding needs, of constant size.

     call = LinearCall.from_arguments(arguments)     the call of `linear_attention(**arguments)`

     init_state(call)            before the first token; only shapes and dtypes matter, not the length
     decode_step(state, call)    the call holds the next tokens

`decode_step` computes the outputs of `linear_attention` on the whole sequence, however its tokens are spread over
calls. Decoding is causal, and has one implementation.
"""

import dataclasses
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from lm.ops import decay as decays
from lm.ops.linear_attention import block as one_block
from lm.ops.linear_attention import xla
from lm.ops.linear_attention.types import LOCAL_BLOCK, Keys, LinearCall, State


class DecodeState(NamedTuple):
    """The state of decoding: sums and keys of earlier tokens.

    Attributes:
        sums: the sums over the keys out of the exact kernel's reach, or over all keys where there is no exact kernel.
            They have decayed up to the last of these keys.
        recent: the other keys. With a window they are the N last tokens in the order of time, right-aligned. Else they
            are the tokens of the current block from index 0, of which the first `position % block` count.
        position: tokens so far, int32.
    """

    sums: State
    recent: Keys | None
    position: jax.Array


def init_state(call: LinearCall, max_length: int | None = None) -> DecodeState:
    """Makes the state before the first token.

    `max_length`: tokens of the longest sequence to come. The state is as short as it, where it is shorter than the
    block.
    """
    batch, _, heads, _ = call.k_BxLxKxE.shape
    features = xla.count_features(call.options, call.k_parameters, call.k_BxLxKxE)
    sums = xla.make_empty_state(call.options, batch, heads, features, call.v_BxLxKxD.shape[-1])
    recent = None
    if call.options.local is not None:
        block = call.options.block or LOCAL_BLOCK
        kept = call.options.window or min(block, max_length or LOCAL_BLOCK * 2**20)
        recent = jax.tree.map(lambda x: jnp.zeros((batch, kept, *x.shape[2:]), x.dtype), call.keys)
    return DecodeState(sums, recent, jnp.zeros((), jnp.int32))


def decode_step(state: DecodeState, call: LinearCall) -> tuple[DecodeState, jax.Array]:
    """Appends L ≥ 1 tokens and returns (state, outputs [B, L, H, D])."""
    call = dataclasses.replace(call, initial_state=state.sums, with_state=True)
    count, window, recent = call.q_BxLxHxE.shape[1], call.options.window, None
    if state.recent is None:
        o, sums = xla.attend(call, None)
    elif window is not None:
        keys = jax.tree.map(lambda old, new: jnp.concatenate([old, new.astype(old.dtype)], 1), state.recent, call.keys)
        first = jnp.maximum(window - state.position, 0)
        o, sums = xla.attend(call.replace_keys(keys), one_block.Bounds(first, jnp.int32(window + count), first))
        recent = jax.tree.map(lambda x: x[:, count:], keys)
    elif count == 1:
        o, sums, recent = _append_token(call, state, state.recent)
    else:
        o, sums, recent = _append_tokens(call, state, state.recent)
    return DecodeState(cast(State, sums), recent, state.position + count), o


def _append_tokens(call: LinearCall, state: DecodeState, recent: Keys) -> tuple[jax.Array, State, Keys]:
    """Appends any number of tokens, and cuts blocks as the whole sequence does.

    Returns:
        (outputs, the sums, the recent keys).
    """
    block, count = recent.v_BxSxKxD.shape[1], call.q_BxLxHxE.shape[1]
    at = state.position % block
    complete = (at + count) // block * block

    def append(old, new):
        return lax.dynamic_update_slice_in_dim(
            jnp.pad(old, ((0, 0), (0, block + count), *[(0, 0)] * (old.ndim - 2))), new.astype(old.dtype), at, 1
        )

    def append_queries(x):
        return append(jnp.zeros((x.shape[0], block, *x.shape[2:]), x.dtype), x)[:, : block + count]

    keys = jax.tree.map(append, recent, call.keys)
    # Padding after the last token is hidden from all tokens before it, and the bounds keep it out of the sums.
    bounds = one_block.Bounds(jnp.int32(0), complete, _find_older(state, block))
    call = dataclasses.replace(
        call.replace_keys(jax.tree.map(lambda x: x[:, : block + count], keys)),
        q_BxLxHxE=append_queries(call.q_BxLxHxE),
        q_local_BxLxHxC=jax.tree.map(append_queries, call.q_local_BxLxHxC),
        options=dataclasses.replace(call.options, block=block),
    )
    o, sums = xla.attend(call, bounds)
    recent = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, complete, block, 1), keys)
    return lax.dynamic_slice_in_dim(o, at, count, 1), cast(State, sums), recent


def _append_token(call: LinearCall, state: DecodeState, recent: Keys) -> tuple[jax.Array, State, Keys]:
    """Appends one token, likewise: the exact kernel over the current block, and one read of the sums."""
    options, block, dtype = call.options, recent.v_BxSxKxD.shape[1], call.v_BxLxKxD.dtype
    at = state.position % block
    recent = jax.tree.map(
        lambda old, new: lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), at, 1), recent, call.keys
    )
    heads, features = call.v_BxLxKxD.shape[2], xla.count_features(options, call.k_parameters, call.k_BxLxKxE)
    k, v, k_local = jax.tree.map(one_block.move_tokens_last, tuple(recent[:3]))
    num_BxKxDxGx1, den_BxKxGx1 = one_block.read_one(
        one_block.Shape(options, block, True, dtype),
        one_block.BlockTokens(
            v,
            k_BxKxExS=k,
            k_local_BxKxCxS=k_local,
            q_BxKxExGxT=one_block.group(call.q_BxLxHxE, heads),
            q_local_BxKxCxGxT=None if call.local is None else one_block.group(call.local.queries, heads),
            decay=None if recent.log_decay_BxSxK is None else decays.accumulate(recent.log_decay_BxSxK),
        ),
        one_block.split(options, state.sums, features),
        parameters=call.parameters,
        bounds=one_block.Bounds(jnp.int32(0), jnp.int32(block), _find_older(state, block)),
        at=at,
    )
    o_BxKxDxGx1 = num_BxKxDxGx1 / den_BxKxGx1[:, :, None] if options.normalize else num_BxKxDxGx1
    # A full block is folded as a whole, so that a token of an unfinished one costs no more than its own weights.
    sums = lax.cond(
        at == block - 1,
        lambda: xla.add_keys(options, call.k_parameters, recent, state.sums),
        lambda: state.sums,
    )
    return one_block.ungroup(o_BxKxDxGx1).astype(dtype), sums, recent


def _find_older(state: DecodeState, block: int) -> jax.Array:
    """Returns the first query, counted from the start of the current block, with keys before its block."""
    return jnp.where(state.position < block, block, 0)


__all__ = ['DecodeState', 'decode_step', 'init_state']
