"""`lm generate`: continues prompts with the weights of a run (`lm.inference.decoding`)."""

import functools
import json
import numbers
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

import jax
import numpy as np

from lm.config.configurable import check_kind
from lm.data.tokenizers import Tokenizer
from lm.errors import ConfigError
from lm.experiment import Experiment
from lm.inference.continuation import Continuation, Stops, show_text
from lm.inference.decoding import Sampling, generate_tokens, state_bytes
from lm.inference.loaded_run import OPENED, LoadedRun, load_run
from lm.pod.job import JobAddress, initialize_distributed

PROMPTS = 'must be text, or a list whose members are texts or arrays of token ids, such as [np.array([5, 6])]'
"""The prompts that `generate` takes, for error messages."""
END = 1000
"""Tokens at either end of a long text over which its speed is reported."""


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
    special_tokens: bool = False,
) -> str | list[str]:
    """Continues prompts with the weights of a run; returns the new texts, or one text for one text.

    `prompts` is a text, or a list whose members are texts or arrays of token ids, [tokens]. A new text ends with its
    document, before the first string of `until`, or after `max_tokens` tokens. With `special_tokens`, names of special
    tokens in a text stand for these tokens. A text that begins with one has no other token before it.

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
    rows = [_begin(run, _encode(tokenizer, text, special_tokens), special_tokens) for text in texts]
    for row in rows:
        if (wrong := row[(row < 0) | (row >= tokenizer.vocab_size)]).size:
            raise ConfigError(f'prompts: token id {wrong[0]}: must be 0 to {tokenizer.vocab_size - 1}')
    stops = Stops(tuple(filter(None, until)), {i: tokenizer.piece(i) for i in run.end_ids})
    made = [Continuation(tokenizer.decode, row, max_tokens, stops) for row in rows]
    with jax.set_mesh(run.mesh):
        for new_BxT in generate_tokens(run.token_writer, rows, max_tokens, sampling, seed, tokenizer.vocab_size):
            for continuation, tokens in zip(made, new_BxT, strict=True):
                continuation.add(tokens)
            if all(continuation.ended for continuation in made):
                break
    return made[0].text if isinstance(prompts, str) else [continuation.text for continuation in made]


def _begin(run: LoadedRun, ids: np.ndarray, special_tokens: bool) -> np.ndarray:
    """Returns a prompt with the token before it: every document of the training data follows one."""
    is_begun = special_tokens and len(ids) > 0 and ids[0] in run.tokenizer.special_ids
    return ids if is_begun else np.concatenate([[run.begin_id], ids])


def _encode(tokenizer: Tokenizer, prompt: str | np.ndarray, special_tokens: bool = False) -> np.ndarray:
    """Returns the token ids of a prompt, [tokens]; raises ConfigError unless it is text or holds token ids."""
    if isinstance(prompt, str):
        return tokenizer.encode_marked(prompt) if special_tokens else tokenizer.encode(prompt)
    try:
        ids = np.asarray(prompt)
    except ValueError:  # rows of several lengths
        ids = None
    if ids is None or ids.ndim != 1 or (ids.size and not np.issubdtype(ids.dtype, np.integer)):
        text = ' '.join(repr(prompt).split())
        raise ConfigError(f'prompts: {text[:40] + "…" if len(text) > 80 else text}: {PROMPTS}')
    return ids.astype(np.int64)


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
    special_tokens: bool = False,
    as_json: bool = False,
) -> None:
    """Prints the continuation of each prompt by the weights of a run at `step` (None: the newest).

    A continuation ends before the first text of `stop`, or the first token with such a name. `as_json` prints an object
    per prompt, and `special_tokens` is as in `generate`.

    Raises the errors of `load_run` and `Stops.find`.
    """
    initialize_distributed(experiment.mesh, job)
    run = load_run(experiment, run_dir, step)
    tokenizer = run.tokenizer
    rows = [_begin(run, _encode(tokenizer, text, special_tokens), special_tokens) for text in prompts]
    stops = Stops.find(tokenizer, stop)
    made = [Continuation(functools.partial(show_text, tokenizer), row, max_tokens, stops) for row in rows]
    pace = Pace(len(rows))
    with jax.set_mesh(run.mesh):
        tokens = generate_tokens(run.token_writer, rows, max_tokens, sampling, seed, tokenizer.vocab_size)
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
