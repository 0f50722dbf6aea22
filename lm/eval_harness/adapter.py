"""A run as a model of lm-evaluation-harness. Importing this module needs the package `lm_eval`.

Texts are scored as in training: an end-of-document token stands in front. `loglikelihood_rolling` also scores the
end-of-document token after a text, like `lm evaluate`. So bits per byte of a split of one document are the same.
"""

import itertools
from typing import Any

import numpy as np
from lm_eval.api.model import TemplateLM

from lm.errors import ConfigError
from lm.inference.generation import generate
from lm.inference.loaded_run import LoadedRun

MAX_TOKENS = 256
"""New tokens of an answer, if the task does not say; at most half of the context."""

LENGTHS = 'max_gen_toks', 'max_new_tokens', 'max_tokens', 'max_completion_tokens'
"""The names that the harness has for the number of new tokens; the first that a task gives counts."""
READ = {*LENGTHS, 'until', 'do_sample', 'temperature', 'top_k', 'top_p'}
NEUTRAL = {'num_beams': 1, 'num_return_sequences': 1, 'repetition_penalty': 1.0, 'min_p': 0.0, 'use_cache': True}
"""Settings that lm does not have → the value that changes nothing."""


class RunModel(TemplateLM):
    """Answers requests of the harness with the weights of `run`, with at most the context length of its training."""

    def __init__(self, run: LoadedRun):
        super().__init__()
        self.run = run

    @property
    def eot_token_id(self) -> int:
        return self.run.tokenizer.eod_id

    @property
    def prefix_token_id(self) -> int:
        return self.run.begin_id

    @property
    def tokenizer_name(self) -> str:
        """The name by which the harness distinguishes its cached tokenized requests."""
        return self.run.store.fingerprints['tokenizer']

    @property
    def max_length(self) -> int:
        return self.run.scorer.context_length

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: object) -> list[int]:
        return self.run.tokenizer.encode(string).tolist()

    def _loglikelihood_tokens(
        self, requests: list[tuple[object, list[int], list[int]]], **options: object
    ) -> list[tuple]:
        """Returns (log-likelihood, whether greedy decoding writes it) of each continuation.

        A context that is too long loses its beginning.
        """
        rows, length = [], self.max_length
        for _, context, continuation in requests:
            if len(continuation) > length:
                raise ConfigError(
                    f'--context_length {length}: an answer has {len(continuation)} tokens; give a longer context'
                )
            begin = [] if context[:1] == [self.run.begin_id] else [self.run.begin_id]
            rows.append(np.array([*begin, *context, *continuation][-(length + 1) :], np.int32))
        answers = []
        scored_rows = self.run.scorer.score_rows(rows, accuracy=True)
        for (_, _, continuation), scored in zip(requests, scored_rows, strict=True):
            assert scored.correct is not None  # accuracy was requested
            first = len(scored.nats) - len(continuation)
            answers.append((-float(scored.nats[first:].sum()), bool(scored.correct[first:].all())))
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        texts = [request.args[0] for request in requests]
        scored = self.run.scorer.score_documents(self.run.tokenizer, texts, self.run.begin_id)
        return [-float(nats.sum()) for nats in scored]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        batches: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            batches.setdefault(repr(request.args[1]), []).append(i)
        answers = [''] * len(requests)
        size, seeds = self.run.scorer.batch_size, itertools.count()  # repeats of a question are samples of their own
        for indices in batches.values():
            options = self._options(requests[indices[0]].args[1])
            kept = self.max_length - options['max_tokens']
            if kept < 1:
                raise ConfigError(
                    f'--context_length {self.max_length}: answers have up to {options["max_tokens"]} tokens '
                    '(max_gen_toks of the task), so no question fits; give a longer context'
                )
            for first in range(0, len(indices), size):
                chosen = indices[first : first + size]
                prompts = [self.run.tokenizer.encode(requests[i].args[0])[-kept:] for i in chosen]
                texts = generate(self.run, prompts, seed=next(seeds), **options)
                for i, text in zip(chosen, texts, strict=True):
                    answers[i] = text
        return answers

    def _options(self, given: dict[str, Any]) -> dict[str, Any]:
        """Returns options of `generate` for options of the harness. Raises ConfigError for what lm does not compute."""
        for name, value in given.items():
            if name not in READ and value is not None and value != NEUTRAL.get(name):
                raise ConfigError(f'--tasks: a task sets {name} = {value!r}, which lm does not compute; leave it out')
        lengths = [given[name] for name in LENGTHS if given.get(name) is not None]
        until = given.get('until') or []
        samples = given.get('do_sample', given.get('temperature', 0.0) > 0)
        return {
            'max_tokens': int(lengths[0] if lengths else min(MAX_TOKENS, self.max_length // 2)),
            'until': [until] if isinstance(until, str) else list(until),
            'temperature': float(given.get('temperature', 1.0)) if samples else 0.0,
            'top_k': given.get('top_k') or None,  # 0 is no limit in transformers
            'top_p': given.get('top_p'),
        }
