"""The programs that continue prompts, one token at a time through the decoding state.

Linear mechanisms carry a state of constant size, exact mechanisms a key/value cache. A prompt is read in pieces of at
most `PIECE` tokens, so that only this cache grows with it. Prompts of different lengths share a batch: pieces cover
most of the shortest prompt. After that, prompts are still read while others already generate.

Pieces and decoding states have few sizes, so that few programs serve all lengths. A model keeps its programs.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lm.errors import ConfigError
from lm.evaluation.finite import refuse_not_finite
from lm.evaluation.scoring import pad_length
from lm.model import Transformer
from lm.model.transformer import separate_layers, separate_state
from lm.ops.platform import target_platform

CHUNK = 16
"""Tokens per dispatch: enough to hide the host's work, few enough to stream."""
SLOW = 2**26
"""Bytes of weights that a CPU reads in several milliseconds. The host's work per dispatch is less than one. So each
token of a larger model is a dispatch of its own, and is shown at once."""
COPIED = 25e9
"""Bytes per second of the copies that a loop over layers makes of their weights on a CPU. The copies of the 425 MB of
SmolLM2-135M took 9 to 25 ms per token, the longer the more other processes used the memory."""
UNROLLED = 0.11
"""Seconds of processor time that a program without this loop takes longer to make, per layer: 3 to 5 s for 30."""
PIECE = 4096
"""Tokens of each prompt that are read at a time, at most."""
LEAST_TEMPERATURE = 1e-6
"""A lower one takes the most probable token, as 0 does; its quotients would leave float32."""
NOT_FINITE = -1
"""Stands for a token whose logits are not finite."""
DRAWING = 'sampling', 'pieces'
"""Arguments of programs that are compiled in."""
FORCED = 16
"""Fewer tokens at the end of a prompt are read one by one, as the tokens after it are written."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The way to draw the next token. `temperature` 0 takes the most probable token."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ConfigError(f'--temperature {self.temperature}: must be at least 0, and finite')
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f'--top_k {self.top_k}: must be at least 1')
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f'--top_p {self.top_p}: must be above 0 and at most 1')

    def __call__(self, logits_BxV: jax.Array, key: jax.Array) -> jax.Array:
        """Draws token ids [B] from logits [B, V]."""
        if self.temperature < LEAST_TEMPERATURE:
            return logits_BxV.argmax(-1)
        logits_BxV = logits_BxV / self.temperature
        if self.top_k is not None and self.top_k < logits_BxV.shape[-1]:
            least = jax.lax.top_k(logits_BxV, self.top_k)[0][:, -1:]
            logits_BxV = jnp.where(logits_BxV < least, -jnp.inf, logits_BxV)
        if self.top_p is not None:
            ordered = jnp.sort(logits_BxV, axis=-1, descending=True)
            mass_before = jnp.cumsum(jax.nn.softmax(ordered), axis=-1) - jax.nn.softmax(ordered)
            kept = jnp.where(mass_before < self.top_p, ordered, jnp.inf)
            logits_BxV = jnp.where(logits_BxV < kept.min(-1, keepdims=True), -jnp.inf, logits_BxV)
        return jax.random.categorical(key, logits_BxV)


class Given(NamedTuple):
    """The prompts [B, L], their lengths [B], and the key from which tokens are drawn."""

    forced_BxL: jax.Array
    lengths_B: jax.Array
    key: jax.Array

    def choose(self, logits_BxV: jax.Array, position: jax.Array, sampling: Sampling, pieces: int | None) -> jax.Array:
        """Chooses the token at `position`: the prompt's own, or one of the first `pieces` after its end (None: all)."""
        sampled = sampling(logits_BxV[:, :pieces], jax.random.fold_in(self.key, position))
        sampled = jnp.where(jnp.isfinite(logits_BxV).all(-1), sampled, NOT_FINITE)
        return jnp.where(position < self.lengths_B, self.forced_BxL[:, position], sampled)


class TokenWriter:
    """The programs of one model, which are compiled once per number of prompts, padded length and way to draw."""

    def __init__(self, model: Transformer):
        self.model, self.chunk = model, choose_chunk(model)
        # Weights and prompts are arguments: captured arrays would be compiled into the programs as constants.
        self.graph, self.weights = nnx.split(model)
        self._start = jax.jit(
            lambda weights, rows, size: nnx.merge(self.graph, weights).init_state(rows, size),
            static_argnames=('rows', 'size'),
        )
        self._read = jax.jit(self._make_read(), static_argnames=DRAWING, donate_argnames='state')
        self._advance = {False: self._make_advance(self.graph)}
        self._separate = jax.jit(functools.partial(separate_state, model.config))

    @functools.cached_property
    def separated(self) -> Any:
        """The weights of the model without a loop over layers."""
        graph, weights = nnx.split(separate_layers(self.model))
        self._advance[True] = self._make_advance(graph)
        return weights

    def draw(
        self, prompts: Sequence[np.ndarray], max_tokens: int, sampling: Sampling, seed: int, pieces: int | None = None
    ) -> Iterator[np.ndarray]:
        """Yields tokens like `generate_tokens`, and NOT_FINITE where logits are not finite."""
        lengths = np.array([len(prompt) for prompt in prompts])
        total, common = int(lengths.max()) + max_tokens, int(lengths.min())
        self.model.config.check_length(total - 1)  # no token follows the last one
        size = pad_length(total)
        forced_BxL = np.zeros((len(prompts), size), np.int32)
        for row, prompt in zip(forced_BxL, prompts, strict=True):
            row[: len(prompt)] = prompt
        given = Given(jnp.asarray(forced_BxL), jnp.asarray(lengths), jax.random.key(seed))
        state, start = self._start(self.weights, len(prompts), size), 0
        for length in cut_prompt(common):
            tokens_BxT = forced_BxL[:, start : start + length]
            state, token_B = self._read(self.weights, state, tokens_BxT, jnp.int32(start), given, sampling, pieces)
            start += length
        yield np.concatenate([forced_BxL[:, 1:start], token_B[:, None]], axis=1)
        is_separated = 'separated' in vars(self) or pays_to_separate(self.model, total - common)
        weights = self.weights
        if is_separated:
            weights, state = self.separated, self._separate(state)
        advance = self._advance[is_separated]
        for position in range(start, total - 1, self.chunk):
            state, token_B, tokens_BxT = advance(weights, state, token_B, jnp.int32(position), given, sampling, pieces)
            yield np.asarray(tokens_BxT)[:, : total - 1 - position]

    def _make_read(self) -> Any:
        def read(weights, state, tokens_BxT, position, given, sampling, pieces):
            model, length = nnx.merge(self.graph, weights), tokens_BxT.shape[1]
            state, x_BxTxD = model.extend(state, tokens_BxT, position + jnp.arange(length))
            logits_BxV = model.logits(x_BxTxD[:, -1:])[:, 0]
            return state, given.choose(logits_BxV, position + length, sampling, pieces)

        return read

    def _make_advance(self, graph: nnx.GraphDef) -> Any:
        def advance(weights, state, token_B, position, given, sampling, pieces):
            model = nnx.merge(graph, weights)

            def one(carry, position):
                state, token_B = carry
                state, logits = model.decode_step(state, token_B[:, None], position)
                token_B = given.choose(logits[:, 0], position + 1, sampling, pieces)
                return (state, token_B), token_B

            (state, token_B), tokens = jax.lax.scan(one, (state, token_B), position + jnp.arange(self.chunk))
            return state, token_B, tokens.T

        return jax.jit(advance, static_argnames=DRAWING, donate_argnames='state')


def cut_prompt(length: int) -> list[int]:
    """Returns the numbers of tokens that are read together; the rest of a prompt of `length` is less than `FORCED`.

    There are four numbers between two powers of two, so that few programs serve all prompts.
    """
    pieces, left = [], length
    while left and (not pieces or left >= FORCED):
        step = 1 << max(0, left.bit_length() - 3)
        pieces.append(min(PIECE, left // step * step))
        left -= pieces[-1]
    return pieces


def generate_tokens(
    model: Transformer | TokenWriter,
    prompts: list[np.ndarray],
    max_tokens: int,
    sampling: Sampling,
    seed: int,
    pieces: int | None = None,
) -> Iterator[np.ndarray]:
    """Continues token-id prompts, none of them empty.

    Args:
        model: a model, or the programs of one, for further calls.
        pieces: the number of the tokenizer's pieces. If the model's vocabulary is larger, the ids above have no meaning
            and are never drawn; None: all may be drawn.

    Yields:
        [B, t] token ids that follow one another on the time axis, from the second token of the prompts on. Prompt
            tokens come back as they are. Then `max_tokens` or more new ones follow (the longest prompt sets the end).

    Raises Diverged, which names the first layer, if logits are not finite.
    """
    decoder = model if isinstance(model, TokenWriter) else TokenWriter(model)
    made = [np.array([prompt[:1] for prompt in prompts])]
    for new_BxT in decoder.draw(prompts, max_tokens, sampling, seed, pieces):
        made.append(new_BxT)
        if (new_BxT == NOT_FINITE).any():
            tokens_BxL = np.concatenate(made, axis=1)
            row, end = np.argwhere(tokens_BxL == NOT_FINITE)[0]
            refuse_not_finite(decoder.model, tokens_BxL[row, :end], 'what predicts the next token')
        yield new_BxT


def choose_chunk(model: Transformer) -> int:
    """Returns the number of tokens per dispatch."""
    return 1 if target_platform() == 'cpu' and _count_bytes(model) > SLOW else CHUNK


def pays_to_separate(model: Transformer, tokens: int) -> bool:
    """Returns whether so many decoded tokens repay the longer compilation of a program without a loop over layers.

    It pays on one CPU alone. An accelerator reads a layer's weights in their place, and its programs compile longer.
    """
    leaves = jax.tree.leaves(nnx.state(model))
    is_alone = all(isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) == 1 for leaf in leaves)
    layers = model.config.n_layers
    if target_platform() != 'cpu' or not is_alone or len(model.config.stacks) == layers:
        return False
    return tokens * _count_bytes(model.blocks) / COPIED > layers * UNROLLED


def _count_bytes(module: nnx.Module) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(nnx.state(module)))


def state_bytes(model: Transformer, max_length: int) -> int:
    """Returns the bytes of the decoding state per sequence."""
    state = jax.eval_shape(lambda: model.init_state(1, max_length))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
