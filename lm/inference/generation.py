"""`lm generate`: continues prompts with the weights of a run, one token at a time through the decoding state.

Linear mechanisms carry a state of constant size, exact mechanisms a key/value cache. A prompt is read in pieces of
`PIECE` tokens, so that only this cache grows with it. Prompts of different lengths share a batch: pieces cover the
length of the shortest prompt. After that, some prompts are still read while others already generate.
"""

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lm.config.configurable import check_kind
from lm.data.tokenizers import Tokenizer
from lm.errors import ConfigError
from lm.experiment import Experiment
from lm.inference.loaded_run import OPENED, LoadedRun, load_run
from lm.model import Transformer
from lm.training.mesh import JobAddress, initialize_distributed

CHUNK = 16
"""Tokens per dispatch: enough to hide the host's work, few enough to stream."""
PIECE = 4096
"""Tokens of each prompt that are read at a time. The remainder of the length is a shorter piece, the first one."""
END = 1000
"""Tokens at either end of a long text over which its speed is reported."""


@dataclasses.dataclass(frozen=True)
class Sampling:
    """The way to draw the next token. `temperature` 0 takes the most probable token."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self):
        if not self.temperature >= 0:
            raise ConfigError(f'--temperature {self.temperature}: must be at least 0')
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f'--top_k {self.top_k}: must be at least 1')
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f'--top_p {self.top_p}: must be above 0 and at most 1')

    def __call__(self, logits_BxV: jax.Array, key: jax.Array) -> jax.Array:
        """Draws token ids [B] from logits [B, V]."""
        if self.temperature == 0:
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
    """
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
        return jnp.where(position < lengths_B, forced_BxL[:, position], sampled)

    # Weights and prompts are arguments: captured arrays would be compiled into the programs as constants.
    graph, weights = nnx.split(model)
    given = jnp.asarray(forced_BxL), jnp.asarray(lengths)

    def read(weights, state, tokens_BxT, position, key, given):
        model = nnx.merge(graph, weights)
        state = model.init_state(len(prompts), total) if state is None else state
        state, x_BxTxD = model.extend(state, tokens_BxT, position + jnp.arange(tokens_BxT.shape[1]))
        logits_BxV = model.logits(x_BxTxD[:, -1:])[:, 0]
        return state, choose(logits_BxV, position + tokens_BxT.shape[1], key, given)

    def advance(weights, state, token_B, position, key, given):
        model = nnx.merge(graph, weights)

        def one(carry, position):
            state, token_B = carry
            state, logits = model.decode_step(state, token_B[:, None], position)
            token_B = choose(logits[:, 0], position + 1, key, given)
            return (state, token_B), token_B

        (state, token_B), tokens = jax.lax.scan(one, (state, token_B), position + jnp.arange(CHUNK))
        return state, token_B, tokens.T

    read, advance = (jax.jit(function, donate_argnums=1) for function in (read, advance))
    key = jax.random.key(seed)
    state, start = None, 0
    for end in range((common - 1) % PIECE + 1, common + 1, PIECE):
        state, token_B = read(weights, state, forced_BxL[:, start:end], jnp.int32(start), key, given)
        start = end
    yield np.concatenate([forced_BxL[:, 1:common], token_B[:, None]], axis=1)
    for position in range(common, total - 1, CHUNK):
        state, token_B, tokens = advance(weights, state, token_B, jnp.int32(position), key, given)
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
    """Continues prompts (text, or token ids) with the weights of a run; returns the new texts, or one text for one
    prompt.

    A text ends with its document, before the first string of `until`, or after `max_tokens` tokens.

    Raises ConfigError for settings out of range (`Sampling`), and for ids that the tokenizer does not have.
    """
    check_kind('run', run, LoadedRun, OPENED)
    if isinstance(until, str):
        raise ConfigError(f'until = {until!r}: must be a list, such as [{until!r}]')
    if max_tokens < 1:
        raise ConfigError(f'max_tokens = {max_tokens}: must be at least 1')
    sampling, tokenizer = Sampling(temperature, top_k, top_p), run.tokenizer
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not texts:
        return []
    encoded = (tokenizer.encode(text) if isinstance(text, str) else text for text in texts)
    rows = [np.concatenate([[run.begin_id], tokens]) for tokens in encoded]
    for row in rows:
        if (wrong := row[(row < 0) | (row >= tokenizer.vocab_size)]).size:
            raise ConfigError(f'prompts: token id {wrong[0]}: must be 0 to {tokenizer.vocab_size - 1}')
    made = [np.zeros(0, np.int64)] * len(rows)
    results = [''] * len(rows)
    with jax.set_mesh(run.mesh):
        for new_BxT in generate_tokens(run.model, rows, max_tokens, sampling, seed, tokenizer.vocab_size):
            made = [np.concatenate(pair) for pair in zip(made, new_BxT, strict=True)]
            ended = []
            for i, (row, tokens) in enumerate(zip(rows, made, strict=True)):
                written = tokens[len(row) - 1 :][:max_tokens]
                ends = np.flatnonzero(written == tokenizer.eod_id)
                text = tokenizer.decode(written[: ends[0]] if len(ends) else written)
                stops = [at for stop in until if stop and (at := text.find(stop)) >= 0]
                results[i] = text[: min(stops)] if stops else text
                ended.append(bool(stops) or len(ends) > 0 or len(written) == max_tokens)
            if all(ended):
                break
    return results[0] if isinstance(prompts, str) else results


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
) -> None:
    """Prints the continuation of each prompt by the weights of a run at `step` (None: the newest)."""
    initialize_distributed(experiment.mesh, job)
    run = load_run(experiment, run_dir, step)
    tokenizer = run.tokenizer
    # Every document of the training data follows an end-of-document token, and so does a prompt.
    rows = [np.concatenate([[run.begin_id], tokenizer.encode(text)]) for text in prompts]
    with jax.set_mesh(run.mesh):
        _write(run.model, tokenizer, rows, max_tokens, sampling, seed)


class TextStream:
    """The text of tokens that arrive in parts; the cost of a part does not depend on the earlier text.

    Characters can span tokens: bytes without a complete character wait for the next part.
    """

    LONGEST = 64
    """The most tokens that wait: a longer sequence of broken bytes will not become a character."""

    def __init__(self, decode: Callable[[Sequence[int]], str]):
        self._decode = decode
        self._before: list[int] = []  # the last written token; tokenizers may drop a space before the first token
        self._waiting: list[int] = []
        self._written = 0  # characters of waiting tokens that are already written

    def __call__(self, tokens: Iterable[int], last: bool = False) -> str:
        """Returns the text that can be written after these tokens; with `last`, all of it."""
        self._waiting += map(int, tokens)
        text = self._decode(self._before + self._waiting)[len(self._decode(self._before)) :]
        whole = text if last or len(self._waiting) > self.LONGEST else text.rstrip('\ufffd')
        new = whole[self._written :]
        if whole == text and self._waiting:
            self._before, self._waiting, self._written = self._waiting[-1:], [], 0
        else:
            self._written = len(whole)
        return new


def show_text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """Returns the text of token ids for people.

    Between two documents stands the name of the end-of-document token, which has no text.
    """
    parts = np.split(np.asarray(ids), np.flatnonzero(np.asarray(ids) == tokenizer.eod_id))
    return tokenizer.piece(tokenizer.eod_id).join(map(tokenizer.decode, parts))


def _write(model, tokenizer: Tokenizer, prompts, max_tokens: int, sampling: Sampling, seed: int) -> None:
    """Streams one continuation to the terminal; several continuations are printed one by one, when they are
    complete."""
    decode = functools.partial(show_text, tokenizer)
    stream = TextStream(decode) if len(prompts) == 1 else None
    parts, times, made = [np.array([p[:1] for p in prompts])], [], []
    for new in generate_tokens(model, prompts, max_tokens, sampling, seed, tokenizer.vocab_size):
        times.append(time.perf_counter())
        made.append(new.shape[1])
        if stream:
            print(stream(new[0]), end='', flush=True)
        else:
            parts.append(new)
    if stream:
        print(stream([], last=True))
    else:
        tokens = np.concatenate(parts, axis=1)
        for prompt, row in zip(prompts, tokens, strict=True):
            print('-' * 20)
            print(decode(row[1 : len(prompt) + max_tokens]))
    size = state_bytes(model, 1 + sum(made))
    speed = _describe_speed(times, made, len(prompts))
    print(f'[{speed}; decoding state {size:,} bytes per sequence]', file=sys.stderr)


def _describe_speed(times: list[float], made: list[int], batch: int) -> str:
    """Describes the tokens per second of all sequences after the prompt; for a long text also the time per token at its
    ends."""
    seconds, steps = times[-1] - times[0], sum(made[1:])
    if not steps or not seconds:
        return 'one token'
    result = f'{steps * batch / seconds:.1f} tokens/s after the first'
    n = END // CHUNK
    if len(times) > 4 * n:
        # The first dispatches include compilation.
        first, last = (times[n + 2] - times[2], times[-2] - times[-2 - n])
        ms = [interval / (n * CHUNK) * 1e3 for interval in (first, last)]
        result += f'; {ms[0]:.3f} ms per token in the first {END:,}, {ms[1]:.3f} in the last'
    return result
