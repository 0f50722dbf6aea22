"""`lm generate`: continues prompts with the weights of a run, one token at a time through the decoding state.

Linear mechanisms carry a state of constant size, exact mechanisms a key/value cache. A prompt is read in pieces of
`PIECE` tokens, so that only this cache grows with it. Prompts of different lengths share a batch: pieces cover the
length of the shortest prompt. After that, some prompts are still read while others already generate.
"""

import dataclasses
import functools
import json
import math
import numbers
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lm.config.configurable import check_kind
from lm.data.tokenizers import Tokenizer
from lm.errors import ConfigError
from lm.evaluation.finite import refuse_not_finite
from lm.experiment import Experiment
from lm.inference.continuation import Continuation, Stops, show_text
from lm.inference.loaded_run import OPENED, LoadedRun, load_run
from lm.model import Transformer
from lm.model.transformer import separate_layers, separate_state
from lm.ops.platform import target_platform
from lm.pod.job import JobAddress, initialize_distributed

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
"""Tokens of each prompt that are read at a time. The remainder of the length is a shorter piece, the first one."""
PROMPTS = 'must be text, or a list whose members are texts or arrays of token ids, such as [np.array([5, 6])]'
"""The prompts that `generate` takes, for error messages."""
LEAST_TEMPERATURE = 1e-6
"""A lower one takes the most probable token, as 0 does; its quotients would leave float32."""
NOT_FINITE = -1
"""Stands for a token whose logits are not finite."""
END = 1000
"""Tokens at either end of a long text over which its speed is reported."""


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


def generate_tokens(
    model: Transformer,
    prompts: list[np.ndarray],
    max_tokens: int,
    sampling: Sampling,
    seed: int,
    pieces: int | None = None,
) -> Iterator[np.ndarray]:
    """Continues token-id prompts, none of them empty.

    Args:
        pieces: the number of the tokenizer's pieces. If the model's vocabulary is larger, the ids above have no meaning
            and are never drawn; None: all may be drawn.

    Yields:
        [B, t] token ids that follow one another on the time axis, from the second token of the prompts on. Prompt
            tokens come back as they are. Then `max_tokens` or more new ones follow (the longest prompt sets the end).

    Raises Diverged, which names the first layer, if logits are not finite.
    """
    made = [np.array([prompt[:1] for prompt in prompts])]
    for new_BxT in _draw_tokens(model, prompts, max_tokens, sampling, seed, pieces):
        made.append(new_BxT)
        if (new_BxT == NOT_FINITE).any():
            tokens_BxL = np.concatenate(made, axis=1)
            row, end = np.argwhere(tokens_BxL == NOT_FINITE)[0]
            refuse_not_finite(model, tokens_BxL[row, :end], 'what predicts the next token')
        yield new_BxT


def _draw_tokens(
    model: Transformer, prompts: list[np.ndarray], max_tokens: int, sampling: Sampling, seed: int, pieces: int | None
) -> Iterator[np.ndarray]:
    """Yields tokens like `generate_tokens`, and NOT_FINITE where logits are not finite."""
    lengths = np.array([len(p) for p in prompts])
    total = int(lengths.max()) + max_tokens
    model.config.check_length(total - 1)  # no token follows the last one
    forced_BxL = np.zeros((len(prompts), total), np.int32)
    for row, prompt in zip(forced_BxL, prompts, strict=True):
        row[: len(prompt)] = prompt
    common = int(lengths.min())

    def choose(logits_BxV, position, key, given):
        """Chooses the token at `position`: the prompt's own, or a sampled one after its end."""
        forced_BxL, lengths_B = given
        sampled = sampling(logits_BxV[:, :pieces], jax.random.fold_in(key, position))
        sampled = jnp.where(jnp.isfinite(logits_BxV).all(-1), sampled, NOT_FINITE)
        return jnp.where(position < lengths_B, forced_BxL[:, position], sampled)

    chunk = choose_chunk(model)
    decoder = separate_layers(model) if pays_to_separate(model, total - common) else model

    # Weights and prompts are arguments: captured arrays would be compiled into the programs as constants.
    graph, weights = nnx.split(model)
    decoder_graph, decoder_weights = nnx.split(decoder)
    given = jnp.asarray(forced_BxL), jnp.asarray(lengths)

    def read(weights, state, tokens_BxT, position, key, given):
        model = nnx.merge(graph, weights)
        state = model.init_state(len(prompts), total) if state is None else state
        state, x_BxTxD = model.extend(state, tokens_BxT, position + jnp.arange(tokens_BxT.shape[1]))
        logits_BxV = model.logits(x_BxTxD[:, -1:])[:, 0]
        return state, choose(logits_BxV, position + tokens_BxT.shape[1], key, given)

    def advance(weights, state, token_B, position, key, given):
        model = nnx.merge(decoder_graph, weights)

        def one(carry, position):
            state, token_B = carry
            state, logits = model.decode_step(state, token_B[:, None], position)
            token_B = choose(logits[:, 0], position + 1, key, given)
            return (state, token_B), token_B

        (state, token_B), tokens = jax.lax.scan(one, (state, token_B), position + jnp.arange(chunk))
        return state, token_B, tokens.T

    read, advance = (jax.jit(function, donate_argnums=1) for function in (read, advance))
    key = jax.random.key(seed)
    state, start = None, 0
    for end in range((common - 1) % PIECE + 1, common + 1, PIECE):
        state, token_B = read(weights, state, forced_BxL[:, start:end], jnp.int32(start), key, given)
        start = end
    yield np.concatenate([forced_BxL[:, 1:common], token_B[:, None]], axis=1)
    if decoder is not model:
        state = jax.jit(functools.partial(separate_state, model.config))(state)
    for position in range(common, total - 1, chunk):
        state, token_B, tokens = advance(decoder_weights, state, token_B, jnp.int32(position), key, given)
        yield np.asarray(tokens)[:, : total - 1 - position]


def generate(
    run: LoadedRun,
    prompts: str | Sequence[str | np.ndarray],
    *,
    max_tokens: int = 256,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    until: Sequence[str] = (),
) -> str | list[str]:
    """Continues prompts with the weights of a run; returns the new texts, or one text for one text.

    `prompts` is a text, or a list whose members are texts or arrays of token ids, [tokens]. A new text ends with its
    document, before the first string of `until`, or after `max_tokens` tokens.

    Raises ConfigError for settings out of range (`Sampling`), for other prompts, and for ids that the tokenizer does
    not have.
    """
    check_kind('run', run, LoadedRun, OPENED)
    if isinstance(until, str):
        raise ConfigError(f'until = {until!r}: must be a list, such as [{until!r}]')
    if not isinstance(max_tokens, numbers.Integral) or max_tokens < 1:
        raise ConfigError(f'max_tokens = {max_tokens!r}: must be an int of at least 1')
    if not isinstance(seed, numbers.Integral) or not 0 <= seed < 2**32:
        raise ConfigError(f'seed = {seed!r}: must be an int, 0 to {2**32 - 1}')
    sampling, tokenizer = Sampling(temperature, top_k, top_p), run.tokenizer
    if not isinstance(prompts, Iterable):
        raise ConfigError(f'prompts = {prompts!r}: {PROMPTS}')
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not texts:
        return []
    rows = [np.concatenate([[run.begin_id], _encode(tokenizer, text)]) for text in texts]
    for row in rows:
        if (wrong := row[(row < 0) | (row >= tokenizer.vocab_size)]).size:
            raise ConfigError(f'prompts: token id {wrong[0]}: must be 0 to {tokenizer.vocab_size - 1}')
    stops = Stops(tuple(filter(None, until)), {tokenizer.eod_id: tokenizer.piece(tokenizer.eod_id)})
    made = [Continuation(tokenizer.decode, row, max_tokens, stops) for row in rows]
    with jax.set_mesh(run.mesh):
        for new_BxT in generate_tokens(run.model, rows, max_tokens, sampling, seed, tokenizer.vocab_size):
            for continuation, tokens in zip(made, new_BxT, strict=True):
                continuation.add(tokens)
            if all(continuation.ended for continuation in made):
                break
    return made[0].text if isinstance(prompts, str) else [continuation.text for continuation in made]


def _encode(tokenizer: Tokenizer, prompt: str | np.ndarray) -> np.ndarray:
    """Returns the token ids of a prompt, [tokens]; raises ConfigError unless it is text or holds token ids."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    try:
        ids = np.asarray(prompt)
    except ValueError:  # rows of several lengths
        ids = None
    if ids is None or ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        text = ' '.join(repr(prompt).split())
        raise ConfigError(f'prompts: {text[:40] + "…" if len(text) > 80 else text}: {PROMPTS}')
    return ids.astype(np.int64)


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


def write_continuations(
    experiment: Experiment,
    run_dir: str,
    step: int | None,
    job: JobAddress,
    *,
    prompts: Sequence[str],
    max_tokens: int,
    sampling: Sampling,
    seed: int,
    stop: Sequence[str] = (),
    as_json: bool = False,
) -> None:
    """Prints the continuation of each prompt by the weights of a run at `step` (None: the newest).

    A continuation ends before the first text of `stop`, or the first token with such a name. `as_json` prints an object
    per prompt.

    Raises the errors of `load_run` and `Stops.find`.
    """
    initialize_distributed(experiment.mesh, job)
    run = load_run(experiment, run_dir, step)
    tokenizer = run.tokenizer
    # Every document of the training data follows an end-of-document token, and so does a prompt.
    rows = [np.concatenate([[run.begin_id], tokenizer.encode(text)]) for text in prompts]
    stops = Stops.find(tokenizer, stop)
    made = [Continuation(functools.partial(show_text, tokenizer), row, max_tokens, stops) for row in rows]
    pace = Pace(len(rows))
    with jax.set_mesh(run.mesh):
        tokens = generate_tokens(run.model, rows, max_tokens, sampling, seed, tokenizer.vocab_size)
        _write(made, pace.measure(tokens), prompts if as_json else None)
    size = state_bytes(run.model, 1 + pace.read)
    print(f'[{pace.speed}; decoding state {size:,} bytes per sequence]', file=sys.stderr)


class Pace:
    """The speed at which the tokens of several sequences arrive."""

    def __init__(self, sequences: int):
        self._sequences = sequences
        self._times: list[float] = []
        self._counts: list[int] = []

    def measure(self, made: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Passes token ids [B, t] on, and notes when they come."""
        for new_BxT in made:
            self._times.append(time.perf_counter())
            self._counts.append(new_BxT.shape[1])
            yield new_BxT

    @property
    def read(self) -> int:
        """The number of tokens of a sequence after the first one."""
        return sum(self._counts)

    @property
    def speed(self) -> str:
        """The tokens per second of all sequences after the prompt; for a long text also the time per token at its
        ends."""
        times, counts = self._times, self._counts
        seconds, steps = times[-1] - times[0], sum(counts[1:])
        if not steps or not seconds:
            return 'one token'
        result = f'{steps * self._sequences / seconds:.1f} tokens/s after the first'
        chunk = max(counts[1:])
        n = END // chunk
        if len(times) > 4 * n:
            # The first dispatches include compilation.
            first, last = (times[n + 2] - times[2], times[-2] - times[-2 - n])
            ms = [interval / (n * chunk) * 1e3 for interval in (first, last)]
            result += f'; {ms[0]:.3f} ms per token in the first {END:,}, {ms[1]:.3f} in the last'
        return result


def _write(made: Sequence[Continuation], tokens: Iterable[np.ndarray], prompts: Sequence[str] | None) -> None:
    """Prints continuations: one as its tokens come, several one by one when they are complete.

    With `prompts`, it prints an object of JSON per prompt.
    """
    streams = len(made) == 1 and prompts is None
    if streams:
        print(made[0].before, end='', flush=True)
    for new_BxT in tokens:
        shown = [continuation.add(new) for continuation, new in zip(made, new_BxT, strict=True)]
        if streams:
            print(shown[0], end='', flush=True)
        if all(continuation.ended for continuation in made):
            break
    if streams:
        print()
    elif prompts is None:
        for continuation in made:
            print('-' * 20)
            print(continuation.before + continuation.text)
    else:
        for prompt, found in zip(prompts, made, strict=True):
            line = {'prompt': prompt, 'text': found.text, 'tokens': found.tokens, 'stop': found.stop}
            print(json.dumps(line, ensure_ascii=False))
