"""One layer of the model. B batch, L length, D model width."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from lm.attention import Attention
from lm.model.attention_branch import AttentionBranch
from lm.model.config import ModelConfig
from lm.model.feed_forward import FeedForward
from lm.model.feed_forward.base import Routing
from lm.model.feed_forward_branch import FeedForwardBranch
from lm.model.parts.branch import make_branch_part, make_norm_after, make_norm_before
from lm.model.parts.convolution import make_convolution
from lm.model.parts.head_norm import make_key_norm, make_query_norm
from lm.model.parts.latent import make_latent_keys, make_latent_queries
from lm.model.parts.maker import Maker
from lm.model.parts.mechanism_inputs import make_mechanism_inputs
from lm.model.parts.output import make_output, make_output_gate, make_output_norm
from lm.model.parts.projection import make_qkv
from lm.model.parts.units import make_experts, make_units_in, make_units_out
from lm.ops.rotary import Rotation
from lm.ops.tpu import lone_windows, tokens_on_lanes
from lm.parameters import stack

PARTS: dict[str, Callable[[Maker], nnx.Module | None]] = {
    'attention_norm': make_norm_before,
    'qkv': make_qkv,
    'attention': lambda maker: maker.attention.build(maker.options.dims, maker.rngs),
    'attention_out': make_output,
    'glu_norm': make_norm_before,
    'glu_in': make_units_in,
    'glu_out': make_units_out,
    'experts': make_experts,
    # Parameters that only some models have come last. So the random draws of all others stay as they were.
    'latent': make_latent_keys,
    'latent_queries': make_latent_queries,
    'mechanism_in': make_mechanism_inputs,
    'convolution': make_convolution,
    'q_norm': make_query_norm,
    'k_norm': make_key_norm,
    'output_gate': make_output_gate,
    'output_norm': make_output_norm,
    'attention_out_norm': make_norm_after,
    'glu_out_norm': make_norm_after,
    'attention_branch': make_branch_part,
    'glu_branch': make_branch_part,
}
"""Name in checkpoints → what makes the part, or None where the layer has no such part; in the order of random draws."""


class Block(AttentionBranch, FeedForwardBranch):
    """One layer: x += attention(norm(x)); x += glu(norm(x)), where experts may stand beside or for the linear units."""

    def __init__(
        self,
        config: ModelConfig,
        attention: Attention,
        feed_forward: FeedForward,
        rngs: nnx.Rngs,
        dtype: DTypeLike = jnp.float32,
    ):
        maker = Maker(config, attention, feed_forward, rngs, dtype)
        self.options, self.shape = maker.options, maker.shape
        for name, make in PARTS.items():
            setattr(self, name, make(maker))

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

    def finish(self, x_BxLxD: jax.Array, mixed_BxLxD: jax.Array) -> jax.Array:
        """Computes the rest of the layer from its input and the output of attention (`mix`)."""
        return self._finish(x_BxLxD, mixed_BxLxD)[0]

    def _finish(self, x_BxLxD: jax.Array, mixed_BxLxD: jax.Array) -> tuple[jax.Array, Routing | None]:
        x_BxLxD = self.add_mixed(x_BxLxD, mixed_BxLxD)
        y_TxD, routing = self.add_units(lone_windows(x_BxLxD))
        return y_TxD.reshape(x_BxLxD.shape), routing

    def decode_step(
        self, state: object, x_BxTxD: jax.Array, rotation: Rotation | None, starts_BxT: jax.Array | None = None
    ) -> tuple[Any, jax.Array]:
        """Computes T tokens that follow those in `state`, like `__call__`; `starts_BxT` counts from the first of the T
        tokens."""
        state, mixed_BxTxD = self.mix_next(state, x_BxTxD, rotation, starts_BxT)
        return state, self.finish(x_BxTxD, mixed_BxTxD)


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


def take_apart(blocks: Block) -> tuple[Callable, object]:
    """Returns (apply, state): `apply(layer, f, …)` calls f(block, …) on the block with one layer's part of the stacked
    state."""
    graph, state = nnx.split(blocks)
    return lambda layer, function, *arguments: function(nnx.merge(graph, layer), *arguments), state
