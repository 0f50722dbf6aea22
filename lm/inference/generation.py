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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lm.config.configurable import check_kind
from lm.data.tokenizers import Tokenizer
from lm.errors import ConfigError
from lm.evaluation.finite import refuse_not_finite
from lm.experiment import Experiment
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
    made = [np.zeros(0, np.int64)] * len(rows)
    results, ended = [''] * len(rows), [False] * len(rows)
    with jax.set_mesh(run.mesh):
        for new_BxT in generate_tokens(run.model, rows, max_tokens, sampling, seed, tokenizer.vocab_size):
            made = [np.concatenate(pair) for pair in zip(made, new_BxT, strict=True)]
            for i, (row, tokens) in enumerate(zip(rows, made, strict=True)):
                if ended[i]:  # what the other rows still write must not change it
                    continue
                written = tokens[len(row) - 1 :][:max_tokens]
                ends = np.flatnonzero(written == tokenizer.eod_id)
                text = decode_after(tokenizer.decode, row[1:], written[: ends[0]] if len(ends) else written)
                begin = find_stop(text, until)
                results[i] = text[:begin]
                ended[i] = begin is not None or len(ends) > 0 or len(written) == max_tokens
            if all(ended):
                break
    return results[0] if isinstance(prompts, str) else results


def find_stop(text: str, until: Sequence[str]) -> int | None:
    """Returns where the first string of `until` that is complete begins; None: none is.

    Where several overlap, the first complete one counts: how many tokens come at once must not matter.
    """
    found = [(at + len(stop), at) for stop in until if stop and (at := text.find(stop)) >= 0]
    return min(found)[1] if found else None


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


def find_tokens(tokenizer: Tokenizer, names: Sequence[str]) -> dict[int, str]:
    """Returns id → name of the tokens that the tokenizer writes like this.

    Raises ConfigError for a name that no token has.
    """
    ids = {tokenizer.piece(i): i for i in reversed(range(tokenizer.vocab_size))} if names else {}
    ids.pop('', None)  # ids that no piece has
    for name in names:
        if name not in ids:
            known = ', '.join(filter(None, map(tokenizer.piece, tokenizer.special_ids[:8])))
            raise ConfigError(f'--stop {name!r}: is no token of this run; its special tokens are {known}')
    return {ids[name]: name for name in names}


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

    A continuation ends before the first token whose name is in `stop`. `as_json` prints one object per line and prompt.

    Raises the errors of `load_run` and `find_tokens`.
    """
    initialize_distributed(experiment.mesh, job)
    run = load_run(experiment, run_dir, step)
    tokenizer = run.tokenizer
    # Every document of the training data follows an end-of-document token, and so does a prompt.
    rows = [np.concatenate([[run.begin_id], tokenizer.encode(text)]) for text in prompts]
    stop_ids = find_tokens(tokenizer, stop)
    with jax.set_mesh(run.mesh):
        made = generate_tokens(run.model, rows, max_tokens, sampling, seed, tokenizer.vocab_size)
        continuations = Continuations(tokenizer, rows, max_tokens, stop_ids)
        _write(continuations, made, prompts if as_json else None)
    size = state_bytes(run.model, 1 + continuations.read)
    print(f'[{continuations.speed}; decoding state {size:,} bytes per sequence]', file=sys.stderr)


def decode_after(
    decode: Callable[[Sequence[int]], str], before: Sequence[int] | np.ndarray, tokens: Iterable[int] | np.ndarray
) -> str:
    """Returns the text of tokens that follow others. By themselves, tokenizers may drop a space before the first."""
    last = [int(token) for token in before[-1:]]
    return decode([*last, *map(int, tokens)])[len(decode(last)) :]


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
        text = decode_after(self._decode, self._before, self._waiting)
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


class Continuations:
    """The tokens that follow several prompts, as they arrive."""

    def __init__(self, tokenizer: Tokenizer, prompts: Sequence[np.ndarray], max_tokens: int, stop: Mapping[int, str]):
        """`stop`: id → name of the tokens before which a continuation ends."""
        self._decode = functools.partial(show_text, tokenizer)
        self._prompts, self._max_tokens, self._stop = prompts, max_tokens, stop
        self._rows: list[list[int]] = [[] for _ in prompts]
        self._stopped: list[int | None] = [None for _ in prompts]  # where the first token that stops a row stands
        self._times: list[float] = []
        self._counts: list[int] = []

    def add(self, new_BxT: np.ndarray) -> list[list[int]]:
        """Adds tokens that `generate_tokens` has yielded; returns those that are shown, of each row."""
        self._times.append(time.perf_counter())
        self._counts.append(new_BxT.shape[1])
        shown = []
        for i, new in enumerate(new_BxT.tolist()):
            row, read, before = self._rows[i], len(self._rows[i]), self._end(i)
            row += new
            if self._stopped[i] is None:
                places = range(max(read, len(self._prompts[i]) - 1), len(row))
                self._stopped[i] = next((at for at in places if row[at] in self._stop), None)
            shown.append(row[before : self._end(i)])
        return shown

    def _end(self, i: int) -> int:
        """Returns the number of tokens of row `i` that are shown, after the first token of its prompt."""
        end, stopped = min(len(self._rows[i]), len(self._prompts[i]) - 1 + self._max_tokens), self._stopped[i]
        return end if stopped is None else min(end, stopped)

    @property
    def ended(self) -> bool:
        """True if every continuation has met its end."""
        rows = enumerate(zip(self._rows, self._prompts, strict=True))
        return all(
            (end := self._end(i)) < len(row) or end == len(prompt) - 1 + self._max_tokens for i, (row, prompt) in rows
        )

    @property
    def read(self) -> int:
        """The number of tokens of a row after the first one."""
        return sum(self._counts)

    def texts(self) -> list[str]:
        """Returns the text of each prompt with its continuation."""
        return [self._decode(row[: self._end(i)]) for i, row in enumerate(self._rows)]

    def describe(self) -> list[dict[str, Any]]:
        """Returns the text of each continuation alone, its number of tokens, and the token that stopped it."""
        found = []
        for i, (row, prompt) in enumerate(zip(self._rows, self._prompts, strict=True)):
            begin, end = len(prompt) - 1, self._end(i)
            is_stopped = end < min(len(row), begin + self._max_tokens)
            text = decode_after(self._decode, row[:begin], row[begin:end])
            found.append({'text': text, 'tokens': end - begin, 'stop': self._stop[row[end]] if is_stopped else None})
        return found

    @property
    def speed(self) -> str:
        """The tokens per second of all sequences after the prompt; for a long text also the time per token at its
        ends."""
        times, counts = self._times, self._counts
        seconds, steps = times[-1] - times[0], sum(counts[1:])
        if not steps or not seconds:
            return 'one token'
        result = f'{steps * len(self._rows) / seconds:.1f} tokens/s after the first'
        chunk = max(counts[1:])
        n = END // chunk
        if len(times) > 4 * n:
            # The first dispatches include compilation.
            first, last = (times[n + 2] - times[2], times[-2] - times[-2 - n])
            ms = [interval / (n * chunk) * 1e3 for interval in (first, last)]
            result += f'; {ms[0]:.3f} ms per token in the first {END:,}, {ms[1]:.3f} in the last'
        return result

    def stream(self) -> TextStream:
        """Returns the text of one row in parts."""
        return TextStream(self._decode)


def _write(continuations: Continuations, made: Iterable[np.ndarray], prompts: Sequence[str] | None) -> None:
    """Prints continuations: one as its tokens come, several one by one when they are complete.

    With `prompts`, it prints an object of JSON per prompt.
    """
    stream = None
    for new_BxT in made:
        if len(new_BxT) == 1 and prompts is None:
            stream = stream or continuations.stream()
            print(stream(continuations.add(new_BxT)[0]), end='', flush=True)
        else:
            continuations.add(new_BxT)
        if continuations.ended:
            break
    if stream:
        print(stream([], last=True))
    elif prompts is None:
        for text in continuations.texts():
            print('-' * 20)
            print(text)
    else:
        for prompt, found in zip(prompts, continuations.describe(), strict=True):
            print(json.dumps({'prompt': prompt, **found}, ensure_ascii=False))
