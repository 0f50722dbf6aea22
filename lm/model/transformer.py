"""Transformer++ (PolySketchFormer App. H, I): the decoder-only language model, from tokens to per-token loss.

    pre-LayerNorm; sinusoidal positions added to the embeddings and rotary positions in every head;
    gated linear units with GELU; no biases; input and output embeddings tied.

Options make it a Llama: norm = 'rms', activation = 'silu', sinusoids = False, tied = False, rotary_base; or a GPT-2:
gated = False, biases = True, learned_positions = 1024, sinusoids = False, rotary_base = None.

B batch, L length, D model width, H query heads, K key/value heads, C head size, V vocabulary, R repeats of the pattern.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from lm.attention import AttentionModule
from lm.errors import ConfigError
from lm.model.block import Block, stack_blocks, take_apart
from lm.model.config import REMAT, ModelConfig
from lm.model.feed_forward.base import Routing
from lm.model.options import RotaryOptions
from lm.model.positions import rotary, sinusoids
from lm.model.routers import join_routings
from lm.model.width import compute_output_scale
from lm.ops.cross_entropy import capped, cross_entropy, weighted_cross_entropy
from lm.ops.platform import shares_parameters, target_platform
from lm.ops.rotary import Rotation
from lm.parameters import NORMS, declare

PLACES = 128
"""The number of tokens whose logits are in memory at once when the most probable token is searched."""
FINAL_GAIN = 0.7
"""The initial gains of the last norm, at the width for which the learning rate is given."""
_compute, _weigh = nnx.jit(Block.__call__), nnx.jit(Block.weigh)
"""Compiled once for all layers of a mechanism."""


class Transformer(nnx.Module):
    """The language model.

    `blocks[i]` holds the layers i, i + P, i + 2P, … of a pattern of P mechanisms, stacked. Where
    the last repeat is cut, each of its layers has a block of its own.
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32):
        self.config, self.dtype = config, jnp.dtype(dtype)

        # Vaswani et al. (2017) §3.4: the tied embedding gives logits of unit variance. At the input it is scaled by √D,
        # to the size of the sinusoids.
        def embedding(rows, axis):
            return nnx.Embed(
                rows,
                config.d_model,
                dtype=self.dtype,
                embedding_init=nnx.initializers.normal(config.d_model**-0.5),
                embedding_metadata=declare('embedding', axis, 'embed', part='embedding'),
                rngs=rngs,
            )

        self.embedding = embedding(config.vocab_size, 'vocabulary')
        if config.learned_positions:
            self.positions = embedding(config.learned_positions, 'position')
        self.blocks = nnx.List(stack_blocks(config, stack, rngs, self.dtype) for stack in range(len(config.stacks)))
        gains = _make_alternating(FINAL_GAIN * compute_output_scale(config.widening))
        options = {
            'part': 'norms',
            'output': True,
            'dtype': self.dtype,
            'scale_init': gains,
            'epsilon': config.norm_epsilon,
        }
        self.final_norm = NORMS[config.norm](config.d_model, 'embed', rngs, **options)
        if not config.tied:
            init = nnx.initializers.normal(config.d_model**-0.5)
            metadata = declare('matrix', 'vocabulary', 'embed', part='embedding', output=True)
            self.head = nnx.Param(init(rngs.params(), (config.vocab_size, config.d_model)), **metadata)

    def hidden(
        self, tokens_BxL: jax.Array, positions: jax.Array | None = None, starts_BxL: jax.Array | None = None
    ) -> jax.Array:
        """Returns the normalised output of the last layer, [B, L, D].

        Args:
            tokens_BxL: windows, or one part of each (`lm.ops.sequence`).
            positions: of the tokens, [L] or [B, L]; None: 0, 1, ….
            starts_BxL: the first token of each token's document, the earliest one that it sees; None: each window is
                one document (`lm.ops.documents`).
        """
        return self._compute(tokens_BxL, positions, starts_BxL, self.config.unroll or 1)[0]

    def _compute(
        self, tokens_BxL: jax.Array, positions: jax.Array | None, starts_BxL: jax.Array | None, unroll: int
    ) -> tuple[jax.Array, list[Routing | None]]:
        """Computes `hidden`, and the choices of the routers of each stack, whose layers are the first axis.

        `unroll`: layers per turn of the loop over them.
        """
        positions = jnp.arange(tokens_BxL.shape[1]) if positions is None else positions
        x_BxLxD, rotations = self._embed(tokens_BxL, positions)
        routings = []
        for part in self._scans:
            x_BxLxD, found = self._compute_layers(part, x_BxLxD, rotations[part], starts_BxL, unroll)
            routings += found
        with jax.named_scope('norms'):
            return self.final_norm(x_BxLxD), routings

    def _compute_layers(
        self,
        part: slice,
        x_BxLxD: jax.Array,
        rotations: Sequence[Rotation | None],
        starts_BxL: jax.Array | None,
        unroll: int,
    ) -> tuple[jax.Array, list[Routing | None]]:
        """Computes the layers of some stacks, which have one layer of each in turn."""
        applies, states = zip(*map(take_apart, self.blocks[part]), strict=True)

        def layers(x_BxLxD, states):
            routings = []
            for apply, state, rotation in zip(applies, states, rotations, strict=True):
                x_BxLxD, routing = apply(state, Block.compute, x_BxLxD, rotation, starts_BxL)
                routings.append(routing)
            return x_BxLxD, routings

        if self.config.remat != 'none':
            layers = jax.checkpoint(layers, policy=REMAT[self.config.remat], prevent_cse=False)
        return jax.lax.scan(layers, x_BxLxD, states, unroll=self._count_repeats(unroll))

    def attention_inputs(self, tokens_BxL: jax.Array) -> Iterator[tuple[AttentionModule, jax.Array, jax.Array]]:
        """Yields each layer's attention in turn, with the queries [B, L, H, C] and keys [B, L, K, C] that reach it."""
        for block, x_BxLxD, rotation in self.layers(tokens_BxL):
            yield block.attention, *block.project(x_BxLxD, rotation)[:2]

    def attention_weights(self, tokens_BxL: jax.Array) -> Iterator[jax.Array]:
        """Yields the weights of each layer's attention, [B, H, L, L] float32: of query i for value j
        (`AttentionModule.weigh`)."""
        for block, x_BxLxD, rotation in self.layers(tokens_BxL):
            yield _weigh(block, x_BxLxD, rotation)

    def layers(self, tokens_BxL: jax.Array) -> Iterator[tuple[Block, jax.Array, Rotation | None]]:
        """Yields each layer in turn with its inputs: [B, L, D] and the rotation of queries and keys."""
        x_BxLxD, rotations = self._embed(tokens_BxL, jnp.arange(tokens_BxL.shape[1]))
        for i in range(self.config.n_layers):
            block, rotation = self.layer(i), rotations[self.config.find_layer(i)[0]]
            yield block, x_BxLxD, rotation
            x_BxLxD = _compute(block, x_BxLxD, rotation)

    def layer(self, i: int) -> Block:
        """Returns layer `i` of the model."""
        stack, place = self.config.find_layer(i)
        apply, state = take_apart(self.blocks[stack])
        return apply(jax.tree.map(lambda leaf: leaf[place], state), lambda block: block)

    def __call__(self, tokens_BxL: jax.Array) -> jax.Array:
        """Returns logits, [B, L, V] float32. Training uses `token_losses`, which never holds all logits."""
        return self.logits(self.hidden(tokens_BxL))

    def token_losses(
        self,
        tokens_BxL: jax.Array,
        targets_BxL: jax.Array,
        positions: jax.Array | None = None,
        starts_BxL: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the negative log-likelihood of each target, [B, L] float32, in nats. Arguments as in `hidden`."""
        return self.losses(self.hidden(tokens_BxL, positions, starts_BxL), targets_BxL)

    def losses(self, x_BxLxD: jax.Array, targets_BxL: jax.Array) -> jax.Array:
        """Returns negative log-likelihoods like `token_losses`, from the normalised outputs of the last layer."""
        with jax.named_scope('cross_entropy'):
            found = cross_entropy(x_BxLxD, self._output[...], None, targets_BxL, cap=self.config.logit_cap)
            assert isinstance(found, jax.Array)  # only the normalizer makes it a pair
            return found

    def weighted_loss(
        self,
        tokens_BxL: jax.Array,
        targets_BxL: jax.Array,
        weights_BxL: jax.Array,
        positions: jax.Array | None = None,
        starts_BxL: jax.Array | None = None,
        *,
        z_loss: float = 0.0,
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Returns the sum of weighted losses to minimize, in parts [P, 1], `token_losses`, and the measures of routers.

        `lm.ops.cross_entropy.weighted_cross_entropy` describes the first two, and `lm.model.routers` the third, which
        are the share that these tokens have in them, [1, 1, …].
        """
        # Of all passes this one has a gradient, for which a loop stacks arrays.
        unroll = self.config.resolve_unroll(target_platform(), shares_parameters())
        x_BxLxD, routings = self._compute(tokens_BxL, positions, starts_BxL, unroll)
        options = {'cap': self.config.logit_cap, 'z_loss': z_loss}
        measures = {name: array_N[None, None] for name, array_N in join_routings(routings).items()}
        with jax.named_scope('cross_entropy'):
            loss_Px1, losses = weighted_cross_entropy(
                x_BxLxD, self._output[...], None, targets_BxL, weights_BxL, **options
            )
            return loss_Px1, losses, measures

    def init_state(self, batch: int, max_length: int, documents: bool = False) -> list[Any]:
        """Returns the decoding state of empty sequences: the states of each stack of layers.

        `documents`: the tokens will come with the starts of their documents (`extend`).

        Raises ConfigError if tokens see later tokens, which do not exist yet.
        """
        if not self.config.causal:
            raise ConfigError(
                'model.causal = False: no text can be written or read piece by piece where tokens see later ones; take '
                'a run of a causal model, or no --chunk'
            )

        def empty(block):
            return block.init_state(batch, max_length, self.dtype, documents)

        def stacked(blocks):
            apply, state = take_apart(blocks)
            return jax.vmap(lambda state: apply(state, empty))(state)

        return [stacked(blocks) for blocks in self.blocks]

    def decode_step(
        self, state: list[object], tokens_BxT: jax.Array, position: jax.Array
    ) -> tuple[list[Any], jax.Array]:
        """Appends T tokens, the first one at `position`; returns the state and the logits [B, T, V]."""
        state, x_BxTxD = self.extend(state, tokens_BxT, position + jnp.arange(tokens_BxT.shape[1]))
        return state, self.logits(x_BxTxD)

    def extend(
        self,
        state: list[object],
        tokens_BxT: jax.Array,
        positions: jax.Array,
        starts_BxT: jax.Array | None = None,
    ) -> tuple[list[object], jax.Array]:
        """Appends T tokens; returns the state and the normalised outputs of the last layer, [B, T, D].

        Args:
            positions: of the tokens, [T] or [B, T].
            starts_BxT: the first token of each token's document, as in `hidden`, but counted from the first of these
                tokens: negative for earlier tokens.
        """
        x_BxTxD, rotations = self._embed(tokens_BxT, positions)
        new_state = []
        for part in self._scans:
            x_BxTxD, new = self._extend_layers(part, state[part], x_BxTxD, rotations[part], starts_BxT)
            new_state += new
        return new_state, self.final_norm(x_BxTxD)

    def _extend_layers(
        self,
        part: slice,
        state: list[object],
        x_BxTxD: jax.Array,
        rotations: Sequence[Rotation | None],
        starts_BxT: jax.Array | None,
    ) -> tuple[jax.Array, list[object]]:
        """Computes the layers of some stacks like `_compute_layers`; also returns their state."""
        applies, params = zip(*map(take_apart, self.blocks[part]), strict=True)

        def layers(x_BxTxD, params_and_state):
            new = []
            for apply, param, old, rotation in zip(applies, *params_and_state, rotations, strict=True):
                layer_state, x_BxTxD = apply(param, Block.decode_step, old, x_BxTxD, rotation, starts_BxT)
                new.append(layer_state)
            return x_BxTxD, new

        return jax.lax.scan(layers, x_BxTxD, (params, state), unroll=self._count_repeats(self.config.unroll or 1))

    def redraw(self, which: Sequence[int], key: jax.Array) -> None:
        """Draws new random projections in the layers of the stacks `which` (`ModelConfig.stacks`)."""

        def redrawn(block, key):
            block.attention.redraw(key)
            return nnx.state(block)

        for i in which:
            apply, state = take_apart(self.blocks[i])
            keys = jax.random.split(jax.random.fold_in(key, i), self.config.count_layers(i))
            new = jax.vmap(lambda state, key, apply=apply: apply(state, redrawn, key))(state, keys)
            nnx.update(self.blocks[i], new)

    @property
    def _output(self) -> nnx.Param:
        return self.embedding.embedding if self.config.tied else self.head

    @property
    def _scans(self) -> list[slice]:
        """The stacks that each scan computes: the pattern, and what is left of its last repeat."""
        whole = len(self.config.pattern)
        return [slice(0, whole)] + [slice(whole, None)] * (len(self.config.stacks) > whole)

    def _count_repeats(self, layers: int) -> int:
        """Returns the repeats of the pattern in so many layers, at least 1."""
        return max(1, layers // len(self.config.pattern))

    def _embed(self, tokens_BxL, positions):
        return self.embed(tokens_BxL, positions), self.rotate_positions(positions)

    @jax.named_scope('embedding')
    def embed(self, tokens_BxL: jax.Array, positions: jax.Array) -> jax.Array:
        """Returns the input of the first layer, [B, L, D]."""
        config = self.config
        config.check_length(tokens_BxL.shape[1])
        x_BxLxD = self.embedding(tokens_BxL)
        if config.learned_positions:
            x_BxLxD += self.positions(positions)
        x_BxLxD *= math.sqrt(config.d_model) if config.embedding_scale is None else config.embedding_scale
        if config.sinusoids:
            x_BxLxD += sinusoids(positions, config.d_model).astype(x_BxLxD.dtype)
        return x_BxLxD

    @jax.named_scope('embedding')
    def rotate_positions(self, positions: jax.Array) -> list[Rotation | None]:
        """Returns the rotation of the positions for each stack of layers; equal ones are computed once."""
        chosen = [self.config.resolve(attention).rotary for attention in self.config.stacks]
        rotations: dict[RotaryOptions | None, Rotation | None] = {None: None}
        for one in dict.fromkeys(filter(None, chosen)):
            rotations[one] = rotary(positions, one.head_dim, one.base, one.fraction, one.scaling)
        return [rotations[one] for one in chosen]

    def logits(self, x_BxLxD: jax.Array) -> jax.Array:
        """Computes the logits of the normalised outputs of the last layer, [B, L, V] float32."""
        kernel_VxD = self._output[...].astype(x_BxLxD.dtype)
        logits_BxLxV = jnp.einsum('bld,vd->blv', x_BxLxD, kernel_VxD, preferred_element_type=jnp.float32)
        return capped(logits_BxLxV, self.config.logit_cap)

    def most_probable(self, x_BxLxD: jax.Array) -> jax.Array:
        """Returns the token with the largest logit at each position, [B, L]; never holds all logits."""
        best = lambda x_BxD: self.logits(x_BxD[:, None])[:, 0].argmax(-1)  # noqa: E731
        return jax.lax.map(best, x_BxLxD.swapaxes(0, 1), batch_size=PLACES).T


def _make_alternating(size: float) -> nnx.Initializer:
    """Returns the initial gains of the last norm: ±`size`, alternating.

    The last hidden state still holds the embedding of the current token. The tied output layer would give it a logit of
    about 0.7 √D. The first loss would be twice ln V, and training would have to unlearn a preference for repetition.
    Alternating signs cancel the product of an embedding with itself, and change nothing else: all logits have the
    variance size², and the first loss is ln V + size² / 2.
    """
    return lambda key, shape, dtype=jnp.float32: jnp.full(shape, size, dtype).at[1::2].multiply(-1)


def build(config: ModelConfig, seed: int, dtype: DTypeLike = jnp.float32) -> Transformer:
    """Returns the model with its initial parameters, a function of (config, seed) alone; it computes in `dtype`."""
    key = make_seed_key(seed)
    return Transformer(config, nnx.Rngs(params=key, projections=jax.random.fold_in(key, 1)), dtype)


def separate_layers(model: Transformer) -> Transformer:
    """Returns the same model with a stack of its own for each layer, so that its programs have no loop over layers.

    XLA copies the weights of a layer before each turn of such a loop. On a CPU the new weights are views of the old
    ones, where those are aligned: nothing is copied here.
    """
    config = dataclasses.replace(model.config, attention=model.config.layers)
    graph = nnx.graphdef(nnx.eval_shape(lambda: build(config, 0, model.dtype)))
    weights = nnx.to_pure_dict(nnx.state(model))
    blocks = weights['blocks']
    return nnx.merge(graph, weights | {'blocks': dict(enumerate(_take_layers(model.config, blocks, _view)))})


def separate_state(config: ModelConfig, state: Sequence[object]) -> list[Any]:
    """Returns the decoding state of a model as `separate_layers` has it."""
    return _take_layers(config, state, lambda leaf, place: leaf[place : place + 1])


def _take_layers(config: ModelConfig, stacks: Any, take: Callable[[jax.Array, int], jax.Array]) -> list[Any]:
    """Returns for each layer its part of the arrays of its stack, whose leading axis is then 1."""
    places = map(config.find_layer, range(config.n_layers))
    return [jax.tree.map(lambda leaf, at=place: take(leaf, at), stacks[stack]) for stack, place in places]


def _view(leaf: jax.Array, place: int) -> jax.Array:
    return jax.device_put(np.asarray(leaf)[place : place + 1], leaf.sharding, may_alias=True)


def make_seed_key(seed: int) -> jax.Array:
    """Returns the key from which parameters and projections are drawn. All bits of the seed count; JAX takes 32 of
    them."""
    if isinstance(seed, int) and seed >= 2**32:  # a traced seed has no more bits
        return jax.random.fold_in(jax.random.key(seed % 2**32), seed >> 32)
    return jax.random.key(seed)
