"""One layer of the model.

B batch, L length, D model width, H query heads, K key/value heads. A key has C channels and a value V. A feed-forward
layer has width F.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from lm.attention import Attention, AttentionModule
from lm.attention.base import GATES
from lm.attention.recurrent.convolution import ShortConvolution
from lm.model.config import ModelConfig
from lm.model.dense import Dense, LowRank
from lm.model.feed_forward import FeedForward
from lm.model.feed_forward.base import ACTIVATIONS, FeedForwardShape, Routing
from lm.model.key_offset import offset_keys, select_channels
from lm.model.latent import LatentKeys, LatentQueries, turn_last
from lm.ops.rotary import Rotation, rotate
from lm.ops.tpu import lone_windows, tokens_on_lanes
from lm.parameters import NORMS, declare, rms_norm, stack


class EarlierTokens(NamedTuple):
    """The arrays of earlier tokens that a layer needs besides the state of its mechanism.

    Attributes:
        convolved: the last tokens that reached the convolution; None without a convolution.
        key: the last key [B, 1, K, C], where keys are offset; else None.
    """

    convolved: jax.Array | None = None
    key: jax.Array | None = None


class Projections(NamedTuple):
    """The products of one layer that its attention reads.

    Attributes:
        queries: [B, L, H, C].
        keys: [B, L, K, C].
        values: [B, L, K, V].
        kept: what later tokens need of these.
    """

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    kept: EarlierTokens


class FeedForwardUnits(nnx.Module):
    """The feed-forward layer of a layer: linear units that all tokens pass, experts, or both."""

    def make_units(
        self, kind: FeedForward, shape: FeedForwardShape, linear: Callable, rngs: nnx.Rngs, dtype: DTypeLike
    ) -> None:
        """Makes the parameters. `linear(inputs, sizes, *axes, is_last)` makes a linear map."""
        hidden = kind.dense_dim(shape)
        sizes = (hidden, hidden) if shape.gated else (hidden,)
        self.shape = shape
        self.glu_in = linear(shape.d_model, sizes, 'embed', 'mlp', False) if hidden else None
        self.glu_out = linear(hidden, (shape.d_model,), 'mlp', 'embed', True) if hidden else None
        self.experts = kind.build(shape, rngs, dtype)

    def transform(self, x_TxD: jax.Array) -> tuple[jax.Array, Routing | None]:
        """Computes the feed-forward layer of normalized inputs, and the choices of its router, if it has one.

        The tokens may have any number of axes.
        """
        if self.experts is None:
            return self._transform_all(x_TxD), None
        return self.experts.compute(x_TxD, None if self.glu_in is None else self._transform_all(x_TxD))

    def _transform_all(self, x_TxD: jax.Array) -> jax.Array:
        """Computes the linear units that all tokens pass."""
        assert self.glu_in is not None
        assert self.glu_out is not None
        activate = ACTIVATIONS[self.shape.activation]
        if self.shape.gated:
            products = self.glu_in.pieces(x_TxD, [self.glu_out.in_features] * 2)
            value_TxF, gate_TxF = map(tokens_on_lanes, products)
            hidden_TxF = value_TxF * activate(gate_TxF)
        else:
            hidden_TxF = activate(tokens_on_lanes(self.glu_in(x_TxD)))
        return self.glu_out(hidden_TxF)


class Block(FeedForwardUnits):
    """One layer: x += attention(norm(x)); x += glu(norm(x)), where experts may stand beside or for the linear units."""

    def __init__(
        self,
        config: ModelConfig,
        attention: Attention,
        feed_forward: FeedForward,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
    ):
        self.options = own = config.resolve(attention)
        dims, options = own.dims, {'dtype': dtype, 'epsilon': config.norm_epsilon}
        # Residual branches start smaller in deeper models, so that the sum over layers has unit scale (GPT-2 §2.3).
        residual_init = nnx.initializers.variance_scaling(1 / (2 * config.n_layers), 'fan_in', 'truncated_normal')

        def norm(is_there):
            return NORMS[config.norm](config.d_model, 'embed', rngs, part='norms', **options) if is_there else None

        def linear(n_in, sizes, *axes, part, init=None, biased=config.biases):
            init = init or nnx.initializers.lecun_normal()
            return Dense(
                n_in,
                sum(sizes),
                use_bias=biased,
                dtype=dtype,
                kernel_init=init,
                rngs=rngs,
                kernel_metadata=declare('matrix', *axes, part=part, pieces=sizes),
                bias_metadata=declare('bias', axes[-1], part=part) if biased else {},
            )

        is_before, is_after = config.norm_placement != 'after', config.norm_placement != 'before'
        self.attention_norm = norm(is_before)
        biased = config.biases or config.qkv_biases
        rows, axis = (config.d_model, 'embed') if own.query_rank is None else (own.query_rank, 'logits')
        self.qkv = linear(rows, own.projected_sizes, axis, 'all_heads', part='attention', biased=biased)
        self.attention = attention.build(dims, rngs)
        width = (config.d_model,)
        self.attention_out = linear(own.width, width, 'all_heads', 'embed', part='attention', init=residual_init)
        self.glu_norm = norm(is_before)

        def unit(n_in, sizes, n_axis, axis, is_last):
            return linear(n_in, sizes, n_axis, axis, part='glu', init=residual_init if is_last else None)

        self.make_units(feed_forward, config.feed_forward_shape, unit, rngs, dtype)
        # Parameters that only some models have come last. So the random draws of all others stay as they were.
        self.latent = None if own.latent is None else self._make_latent(config, linear, rngs)
        self.latent_queries = None if own.query_rank is None else self._make_latent_queries(config, linear, rngs)
        if own.projections:
            self.mechanism_in = linear(config.d_model, own.widths, 'embed', 'all_heads', part='mechanism')
        reach = own.convolution  # assigned once: an attribute that began as None could hold no module
        self.convolution = ShortConvolution(sum(own.qkv_sizes), reach, rngs, 'attention') if reach else None
        spans = (('head', 1), ('head', 1))
        if own.qk_norm == 'projection':
            spans = (('all_heads', own.heads.queries), ('all_heads', own.heads.keys))
        self.q_norm, self.k_norm = (
            rms_norm(n * dims.head_dim, axis, rngs, part='attention', **options) if own.qk_norm else None
            for axis, n in spans
        )
        if (gate := own.gate) is None:
            self.output_gate = None
        elif gate.rank is None:
            self.output_gate = linear(gate.inputs, (own.width,), 'embed', 'all_heads', part='attention')
        else:
            down = linear(gate.inputs, (gate.rank,), 'embed', 'logits', part='attention')
            self.output_gate = LowRank(down, linear(gate.rank, (own.width,), 'logits', 'all_heads', part='attention'))
        if own.output_norm:
            self.output_norm = rms_norm(dims.value_size, 'head', rngs, part='attention', **options)
        else:
            self.output_norm = None
        self.attention_out_norm = norm(is_after)
        self.glu_out_norm = norm(is_after)

    def _make_latent(self, config: ModelConfig, linear: Callable, rngs: nnx.Rngs) -> LatentKeys:
        """Makes the maps of latent keys and values."""
        own = self.options
        assert own.latent is not None
        down = linear(config.d_model, own.latent.down_sizes, 'embed', 'logits', part='attention')
        up = linear(own.latent.rank, own.latent_sizes, 'logits', 'all_heads', part='attention')
        return LatentKeys(own, down, up, rngs)

    def _make_latent_queries(self, config: ModelConfig, linear: Callable, rngs: nnx.Rngs) -> LatentQueries:
        """Makes the map to the numbers that queries are made of; `qkv` maps them to queries."""
        rank = self.options.query_rank
        assert rank is not None
        down = linear(config.d_model, (rank,), 'embed', 'logits', part='attention')
        return LatentQueries(rank, down, rngs)

    def __call__(self, x_BxLxD: jax.Array, rotation: Rotation | None, starts_BxL: jax.Array | None = None) -> jax.Array:
        """Computes the layer; `starts_BxL` is the first token of each token's document, if documents are separate."""
        return self.compute(x_BxLxD, rotation, starts_BxL)[0]

    def compute(
        self, x_BxLxD: jax.Array, rotation: Rotation | None, starts_BxL: jax.Array | None = None
    ) -> tuple[jax.Array, Routing | None]:
        """Computes the layer like `__call__`, and the choices of its router, if it has one."""
        with jax.named_scope('norms'):
            x_BxLxD = tokens_on_lanes(x_BxLxD)
            normed_BxLxD = self.normalize(x_BxLxD)
        return self._finish(x_BxLxD, self.mix(normed_BxLxD, rotation, starts_BxL))

    def normalize(self, x_BxLxD: jax.Array) -> jax.Array:
        """Computes the input of attention from the input of the layer."""
        return _apply(self.attention_norm, x_BxLxD)

    def mix(self, normed_BxLxD: jax.Array, rotation: Rotation | None, starts_BxL: jax.Array | None = None) -> jax.Array:
        """Computes the output of attention from the normalized input, after the output matrix."""
        q_BxLxHxC, k_BxLxKxC, v_BxLxKxV, _ = self._project(normed_BxLxD, rotation, self.attention.prepare, starts_BxL)
        inputs = self._project_for_mechanism(normed_BxLxD)
        with jax.named_scope('attention'):
            y_BxLxHxV = self.attention.attend(q_BxLxHxC, k_BxLxKxC, v_BxLxKxV, starts_BxL=starts_BxL, **inputs)
        return self._project_out(normed_BxLxD, y_BxLxHxV)

    def finish(self, x_BxLxD: jax.Array, mixed_BxLxD: jax.Array) -> jax.Array:
        """Computes the rest of the layer from its input and the output of attention (`mix`)."""
        return self._finish(x_BxLxD, mixed_BxLxD)[0]

    def _finish(self, x_BxLxD: jax.Array, mixed_BxLxD: jax.Array) -> tuple[jax.Array, Routing | None]:
        with jax.named_scope('attention_out'):
            x_BxLxD = tokens_on_lanes(x_BxLxD + _apply(self.attention_out_norm, mixed_BxLxD))
        y_TxD, routing = self._feed_forward(lone_windows(x_BxLxD))
        return y_TxD.reshape(x_BxLxD.shape), routing

    def init_state(self, batch: int, max_length: int, dtype: Any, documents: bool = False) -> Any:
        """Returns the decoding state of empty sequences: the mechanism's state, and what else the layer keeps."""
        state = (self._find_over_latent() or self.attention).init_state(batch, max_length, dtype, documents)
        convolved = self.convolution.init_state(batch, dtype) if self.convolution else None
        own = self.options
        key = jnp.zeros((batch, 1, own.heads.keys, own.dims.head_dim), dtype) if own.key_offset else None
        return state, EarlierTokens(convolved, key)

    def decode_step(
        self, state: Any, x_BxTxD: jax.Array, rotation: Rotation | None, starts_BxT: jax.Array | None = None
    ) -> tuple[Any, jax.Array]:
        """Computes T tokens that follow those in `state`, like `__call__`; `starts_BxT` counts from the first of the T
        tokens."""
        normed_BxTxD = _apply(self.attention_norm, x_BxTxD)
        state, kept = state
        if (over := self._find_over_latent()) is not None:
            state, y_BxTxHxV = self._decode_over_latent(over, state, normed_BxTxD, rotation, starts_BxT)
        else:
            *qkv, kept = self._project(normed_BxTxD, rotation, self._rotate, starts_BxT, kept)
            inputs = self._project_for_mechanism(normed_BxTxD)
            state, y_BxTxHxV = self.attention.decode_step(state, *qkv, starts_BxT=starts_BxT, **inputs)
        return (state, kept), self.finish(x_BxTxD, self._project_out(normed_BxTxD, y_BxTxHxV))

    def _find_over_latent(self) -> AttentionModule | None:
        """Returns the module that decodes over latent keys; None: decoding keeps whole keys and values."""
        own = self.options
        if own.latent is None or not own.latent.decoupled or own.convolution or own.qk_norm:
            return None
        return self.attention.over_latent(own.latent.rank, own.latent.shared)

    def _decode_over_latent(
        self,
        over: AttentionModule,
        state: Any,
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
        return self._project(_apply(self.attention_norm, x_BxLxD), rotation, self._rotate)

    def weigh(self, x_BxLxD: jax.Array, rotation: Rotation | None) -> jax.Array:
        """Computes the weights of attention, [B, H, L, L] float32 (`AttentionModule.weigh`)."""
        normed_BxLxD = _apply(self.attention_norm, x_BxLxD)
        q_BxLxHxC, k_BxLxKxC, *_ = self._project(normed_BxLxD, rotation, self.attention.prepare)
        return self.attention.weigh(q_BxLxHxC, k_BxLxKxC, **self._project_for_mechanism(normed_BxLxD))

    @jax.named_scope('qkv')
    def _project(
        self,
        normed_BxLxD: jax.Array,
        rotation: Rotation | None,
        prepare: Callable[[jax.Array, Rotation | None], tuple[jax.Array, jax.Array]],
        starts_BxL: jax.Array | None = None,
        kept: EarlierTokens = EarlierTokens(),  # noqa: B008
    ) -> Projections:
        """Computes queries, keys and values. `kept` is of the tokens before.

        `prepare` maps queries above keys, [B, L, H + K, C], and the rotation to queries and keys. If nothing is applied
        to both at once, queries and keys are separate products.
        """
        own, C = self.options, self.options.dims.head_dim
        if own.latent is not None and own.latent.decoupled:
            prepare = _turn_before(prepare)
        queries, keys, values = own.qkv_sizes
        is_joined = rotation is not None or self.attention.norms is not None
        if self.latent is None:
            products = self.qkv.pieces(normed_BxLxD, [queries + keys, values] if is_joined else [queries, keys, values])
        else:
            products = [self.qkv(self._find_query_inputs(normed_BxLxD)), *self.latent(normed_BxLxD)]
            if is_joined:
                products = [jnp.concatenate(products[:2], axis=-1), products[2]]
        convolved, key = kept
        if self.convolution:
            products, convolved = self.convolution(products, convolved, starts_BxL)
        sizes = *[C] * (len(products) - 1), own.dims.value_size
        *qk, v_BxLxKxV = (x.reshape(*x.shape[:2], -1, size) for x, size in zip(products, sizes, strict=True))
        if is_joined and self.q_norm is None and not own.key_offset and not own.repeats:
            return Projections(*prepare(qk[0], rotation), v_BxLxKxV, EarlierTokens(convolved))
        q_BxLxHxC, k_BxLxKxC = jnp.split(qk[0], [own.heads.queries], axis=2) if is_joined else qk
        if own.key_offset:
            key = k_BxLxKxC[:, -1:]
            k_BxLxKxC = offset_keys(k_BxLxKxC, select_channels(C, own.key_offset), kept.key, starts_BxL)
        q_BxLxHxC, k_BxLxKxC = self._normalize(q_BxLxHxC, k_BxLxKxC)
        if own.repeats:
            q_BxLxHxC = jnp.repeat(q_BxLxHxC, own.dims.n_heads // own.heads.queries, axis=2)
            k_BxLxKxC = jnp.repeat(k_BxLxKxC, own.dims.n_kv_heads // own.heads.keys, axis=2)
        if is_joined:
            q_BxLxHxC, k_BxLxKxC = prepare(jnp.concatenate([q_BxLxHxC, k_BxLxKxC], axis=2), rotation)
        return Projections(q_BxLxHxC, k_BxLxKxC, v_BxLxKxV, EarlierTokens(convolved, key))

    def _normalize(self, q_BxLxHxC: jax.Array, k_BxLxKxC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Applies `qk_norm`."""
        if self.q_norm is None or self.k_norm is None:
            return q_BxLxHxC, k_BxLxKxC
        if self.options.qk_norm == 'head':
            return self.q_norm(q_BxLxHxC), self.k_norm(k_BxLxKxC)
        whole = lambda norm, x_BxLxNxC: norm(x_BxLxNxC.reshape(*x_BxLxNxC.shape[:2], -1)).reshape(x_BxLxNxC.shape)  # noqa: E731
        return whole(self.q_norm, q_BxLxHxC), whole(self.k_norm, k_BxLxKxC)

    def _rotate(self, qk_BxLxNxC: jax.Array, rotation: Rotation | None) -> tuple[jax.Array, jax.Array]:
        """Rotates by XLA: decoding has too few tokens for a kernel."""
        return rotate(qk_BxLxNxC, rotation, self.options.dims.n_heads, implementation='xla')

    @jax.named_scope('qkv')
    def _project_for_mechanism(self, normed_BxLxD: jax.Array) -> dict[str, jax.Array]:
        """Computes the mechanism's further inputs, by name."""
        if not self.options.projections:
            return {}
        names, widths = zip(*self.options.projections, strict=True)
        pieces = jnp.split(self.mechanism_in(normed_BxLxD), np.cumsum(widths)[:-1], axis=-1)
        return dict(zip(names, pieces, strict=True))

    @jax.named_scope('attention_out')
    def _project_out(self, normed_BxLxD: jax.Array, y_BxLxHxV: jax.Array) -> jax.Array:
        """Applies norm and gate of the output, and the output matrix, to what the mechanism gives."""
        y_BxLxN = _apply(self.output_norm, y_BxLxHxV).reshape(*y_BxLxHxV.shape[:2], -1)
        if self.output_gate is not None and self.options.gate is not None:
            form, inputs = GATES[self.options.gate.form], self.options.gate.inputs
            y_BxLxN *= form(self.output_gate(normed_BxLxD[..., :inputs]))
        return self.attention_out(y_BxLxN)

    def _feed_forward(self, x_TxD: jax.Array) -> tuple[jax.Array, Routing | None]:
        """Adds the output of the feed-forward layer; the tokens may have any number of axes."""
        with jax.named_scope('norms'):
            normed_TxD = _apply(self.glu_norm, x_TxD)
        with jax.named_scope('glu'):
            y_TxD, routing = self.transform(normed_TxD)
            return x_TxD + _apply(self.glu_out_norm, y_TxD), routing


def _turn_before(prepare: Callable) -> Callable:
    """Returns `prepare` for positions that turn the last channels alone: they are turned first."""
    return lambda qk_BxLxNxC, rotation: prepare(turn_last(qk_BxLxNxC, rotation), None)


def _apply(norm: nnx.Module | None, x_TxD: jax.Array) -> jax.Array:
    """Applies a normalization, if there is one."""
    return x_TxD if norm is None else norm(x_TxD)


def stack_blocks(config: ModelConfig, which: int, rngs: nnx.Rngs, dtype: DTypeLike) -> Block:
    """Returns the layers of stack `which` as one Block whose arrays have a leading axis over the layers."""
    attention, feed_forward = config.stacks[which], config.find_feed_forward(config.list_layers(which)[0])

    @nnx.split_rngs(splits=config.count_layers(which))
    @nnx.vmap(in_axes=0, out_axes=0)
    def build(rngs):
        return Block(config, attention, feed_forward, rngs, dtype)

    blocks = build(rngs)
    stack(blocks)
    return blocks


def take_apart(blocks: Block) -> tuple[Callable, Any]:
    """Returns (apply, state): `apply(layer, f, …)` calls f(block, …) on the block with one layer's part of the stacked
    state."""
    graph, state = nnx.split(blocks)
    return lambda layer, function, *arguments: function(nnx.merge(graph, layer), *arguments), state
