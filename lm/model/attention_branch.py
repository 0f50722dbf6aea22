"""The first half of a layer: attention, from the residual stream to what is added to it.

B batch, L length, D model width, H query heads, K key/value heads. A key has C channels and a value V.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lm.attention import AttentionModule
from lm.attention.recurrent.convolution import ShortConvolution
from lm.model.dense import Dense, LowRank
from lm.model.options import ResolvedLayer
from lm.model.parts.branch import apply_part
from lm.model.parts.head_norm import find_root_norms, normalize_heads
from lm.model.parts.key_offset import offset_keys
from lm.model.parts.latent import LatentKeys, LatentQueries, turn_last
from lm.model.parts.mechanism_inputs import compute_mechanism_inputs
from lm.model.parts.output import gate_output
from lm.model.parts.projection import repeat_heads, split_heads
from lm.ops.rotary import RootNorms, Rotation, rotate
from lm.ops.tpu import tokens_on_lanes


class EarlierTokens(NamedTuple):
    """The arrays of earlier tokens that a layer needs besides the state of its mechanism.

    Attributes:
        convolved: the last tokens that reached the convolution; None without a convolution.
        key: the last key [B, 1, K, C], where keys are offset; else None.
    """

    convolved: jax.Array | None = None
    key: jax.Array | None = None


Projections = tuple[jax.Array, jax.Array, jax.Array, EarlierTokens]
"""Queries [B, L, H, C], keys [B, L, K, C], values [B, L, K, V], and what later tokens need of these."""


class AttentionBranch(nnx.Module):
    """Computes attention(norm(x)): the steps around a mechanism, in the order of `_project` and `_project_out`."""

    options: ResolvedLayer
    attention_norm: nnx.Module | None
    qkv: Dense
    attention: AttentionModule
    attention_out: Dense
    latent: LatentKeys | None
    latent_queries: LatentQueries | None
    mechanism_in: Dense | None
    convolution: ShortConvolution | None
    q_norm: nnx.RMSNorm | None
    k_norm: nnx.RMSNorm | None
    output_gate: Dense | LowRank | None
    output_norm: nnx.RMSNorm | None
    attention_out_norm: nnx.Module | None
    attention_branch: nnx.Module | None

    def normalize(self, x_BxLxD: jax.Array) -> jax.Array:
        """Computes the input of attention from the input of the layer."""
        return apply_part(self.attention_norm, x_BxLxD)

    def mix(self, normed_BxLxD: jax.Array, rotation: Rotation | None, starts_BxL: jax.Array | None = None) -> jax.Array:
        """Computes the output of attention from the normalized input, after the output matrix."""
        q_BxLxHxC, k_BxLxKxC, v_BxLxKxV, _ = self._project(normed_BxLxD, rotation, self.attention.prepare, starts_BxL)
        inputs = compute_mechanism_inputs(self.mechanism_in, normed_BxLxD, self.options)
        with jax.named_scope('attention'):
            y_BxLxHxV = self.attention.attend(q_BxLxHxC, k_BxLxKxC, v_BxLxKxV, starts_BxL=starts_BxL, **inputs)
        return self._project_out(normed_BxLxD, y_BxLxHxV)

    def add_mixed(self, x_BxLxD: jax.Array, mixed_BxLxD: jax.Array) -> jax.Array:
        """Adds the output of attention (`mix`) to the residual stream."""
        with jax.named_scope('attention_out'):
            added_BxLxD = apply_part(self.attention_branch, apply_part(self.attention_out_norm, mixed_BxLxD))
            return tokens_on_lanes(x_BxLxD + added_BxLxD)

    def init_state(self, batch: int, max_length: int, dtype: DTypeLike, documents: bool = False) -> Any:
        """Returns the decoding state of empty sequences: the mechanism's state, and what else the layer keeps."""
        state = (self._find_over_latent() or self.attention).init_state(batch, max_length, dtype, documents)
        convolved = self.convolution.init_state(batch, dtype) if self.convolution else None
        own = self.options
        key = jnp.zeros((batch, 1, own.heads.keys, own.dims.head_dim), dtype) if own.key_offset else None
        return state, EarlierTokens(convolved, key)

    def mix_next(
        self, state: Any, x_BxTxD: jax.Array, rotation: Rotation | None, starts_BxT: jax.Array | None = None
    ) -> tuple[Any, jax.Array]:
        """Computes the output of attention like `mix`, for T tokens that follow those in `state`."""
        normed_BxTxD = self.normalize(x_BxTxD)
        state, kept = state
        if (over := self._find_over_latent()) is not None:
            state, y_BxTxHxV = self._decode_over_latent(over, state, normed_BxTxD, rotation, starts_BxT)
        else:
            *qkv, kept = self._project(normed_BxTxD, rotation, self._rotate, starts_BxT, kept)
            inputs = compute_mechanism_inputs(self.mechanism_in, normed_BxTxD, self.options)
            state, y_BxTxHxV = self.attention.decode_step(state, *qkv, starts_BxT=starts_BxT, **inputs)
        return (state, kept), self._project_out(normed_BxTxD, y_BxTxHxV)

    def _find_over_latent(self) -> AttentionModule | None:
        """Returns the module that decodes over latent keys; None: decoding keeps whole keys and values."""
        own = self.options
        if own.latent_rank is None or not own.rotary_decoupled or own.convolution or own.qk_norm:
            return None
        return self.attention.over_latent(own.latent_rank, own.shared_key_dim)

    def _decode_over_latent(
        self,
        over: AttentionModule,
        state: object,
        normed_BxTxD: jax.Array,
        rotation: Rotation | None,
        starts_BxT: jax.Array | None,
    ) -> tuple[Any, jax.Array]:
        """Computes state and output of the mechanism like its `decode_step`, over latent keys."""
        assert self.latent is not None
        products = self.qkv(self._find_query_inputs(normed_BxTxD))
        q_BxTxHxC = products.reshape(*products.shape[:2], self.options.heads.queries, -1)
        q_BxTxHxN = self.latent.absorb(turn_last(q_BxTxHxC, rotation))
        k_BxTx1xN = self.latent.make_shared(normed_BxTxD, rotation)
        nothing = k_BxTx1xN[..., :0]  # the keys are the values
        state, o_BxTxHxR = over.decode_step(state, q_BxTxHxN, k_BxTx1xN, nothing, starts_BxT=starts_BxT)
        return state, self.latent.read(o_BxTxHxR)

    def _find_query_inputs(self, normed_BxLxD: jax.Array) -> jax.Array:
        """Returns what the matrix of queries maps."""
        return normed_BxLxD if self.latent_queries is None else self.latent_queries(normed_BxLxD)

    def project(self, x_BxLxD: jax.Array, rotation: Rotation | None) -> Projections:
        """Computes queries, keys and values; queries and keys are rotated, if there is a rotation."""
        return self._project(self.normalize(x_BxLxD), rotation, self._rotate)

    def weigh(self, x_BxLxD: jax.Array, rotation: Rotation | None) -> jax.Array:
        """Computes the weights of attention, [B, H, L, L] float32 (`AttentionModule.weigh`)."""
        normed_BxLxD = self.normalize(x_BxLxD)
        q_BxLxHxC, k_BxLxKxC, *_ = self._project(normed_BxLxD, rotation, self.attention.prepare)
        inputs = compute_mechanism_inputs(self.mechanism_in, normed_BxLxD, self.options)
        return self.attention.weigh(q_BxLxHxC, k_BxLxKxC, **inputs)

    @jax.named_scope('qkv')
    def _project(
        self,
        normed_BxLxD: jax.Array,
        rotation: Rotation | None,
        prepare: Callable[..., tuple[jax.Array, jax.Array]],
        starts_BxL: jax.Array | None = None,
        kept: EarlierTokens = EarlierTokens(),  # noqa: B008
    ) -> Projections:
        """Computes queries, keys and values. `kept` is of the tokens before.

        `prepare` maps queries above keys, [B, L, H + K, C], the rotation and norms before it to queries and keys. If
        nothing is applied to both at once, queries and keys are separate products.
        """
        own = self.options
        is_joined = rotation is not None or self.attention.norms is not None
        if own.rotary_decoupled:
            prepare = _turn_before(prepare)
        products, convolved = self._multiply(normed_BxLxD, is_joined), None
        if self.convolution:
            products, convolved = self.convolution(products, kept.convolved, starts_BxL)
        *qk, v_BxLxKxV = split_heads(products, own)
        roots = find_root_norms(self.q_norm, self.k_norm, own)
        if is_joined and (self.q_norm is None or roots) and not own.key_offset and not own.repeats:
            return *prepare(qk[0], rotation, roots), v_BxLxKxV, EarlierTokens(convolved)
        q_BxLxHxC, k_BxLxKxC = jnp.split(qk[0], [own.heads.queries], axis=2) if is_joined else qk
        k_BxLxKxC, key = offset_keys(k_BxLxKxC, own.key_offset, kept.key, starts_BxL)
        q_BxLxHxC = normalize_heads(self.q_norm, q_BxLxHxC, own)
        k_BxLxKxC = normalize_heads(self.k_norm, k_BxLxKxC, own)
        q_BxLxHxC, k_BxLxKxC = repeat_heads(q_BxLxHxC, k_BxLxKxC, own)
        if is_joined:
            q_BxLxHxC, k_BxLxKxC = prepare(jnp.concatenate([q_BxLxHxC, k_BxLxKxC], axis=2), rotation)
        return q_BxLxHxC, k_BxLxKxC, v_BxLxKxV, EarlierTokens(convolved, key)

    def _multiply(self, normed_BxLxD: jax.Array, is_joined: bool) -> list[jax.Array]:
        """Returns the products [B, L, N] of queries, keys and values; where `is_joined`, the first two as one array."""
        queries, keys, values = self.options.qkv_sizes
        if self.latent is None:
            return self.qkv.pieces(normed_BxLxD, [queries + keys, values] if is_joined else [queries, keys, values])
        products = [self.qkv(self._find_query_inputs(normed_BxLxD)), *self.latent(normed_BxLxD)]
        return [jnp.concatenate(products[:2], axis=-1), products[2]] if is_joined else products

    def _rotate(
        self, qk_BxLxNxC: jax.Array, rotation: Rotation | None, roots: RootNorms | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Rotates by XLA: decoding has too few tokens for a kernel."""
        return rotate(qk_BxLxNxC, rotation, self.options.dims.n_heads, roots=roots, implementation='xla')

    @jax.named_scope('attention_out')
    def _project_out(self, normed_BxLxD: jax.Array, y_BxLxHxV: jax.Array) -> jax.Array:
        """Applies norm and gate of the output, and the output matrix, to what the mechanism gives."""
        y_BxLxN = apply_part(self.output_norm, y_BxLxHxV).reshape(*y_BxLxHxV.shape[:2], -1)
        return self.attention_out(gate_output(self.output_gate, y_BxLxN, normed_BxLxD, self.options))


def _turn_before(prepare: Callable) -> Callable:
    """Returns `prepare` for positions that turn the last channels alone: they are turned first."""
    return lambda qk_BxLxNxC, rotation, *_: prepare(turn_last(qk_BxLxNxC, rotation), None)
