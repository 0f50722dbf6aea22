"""Needles in a haystack: numbers that a model finds in a text of a given length.

The text is `niah_single_1` of RULER (Hsieh et al. 2024): a number stands between sentences that repeat, at depths that
are evenly spaced, and the end asks for it. A sample is right if each token of the number is the most probable one,
after the right tokens before it. A blank before the number is given: RULER's metric looks for the number in the answer,
and takes "is: 1234567" too. One forward pass per sample makes this cheaper than `lm evaluate --tasks niah_single_1`,
which writes each answer.
"""

from typing import NamedTuple

import numpy as np

from lm.data.tokenizers import Tokenizer
from lm.errors import ConfigError
from lm.evaluation.scoring import Scorer
from lm.inference.loaded_run import LoadedRun
from lm.model.functions import Scored

HAY = 'The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n'
BEGIN = (
    'A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about the '
    'number afterwards.\n'
)
NEEDLE = 'One of the special magic numbers for {} is: {}.\n'
END = (
    'What is the special magic number for {0} mentioned in the provided text? The special magic number for {0} '
    'mentioned in the provided text is'
)
KEYS = ('quiet-harbor', 'amber-lantern', 'distant-orchard', 'silver-meadow')


class Haystack(NamedTuple):
    """A text with a needle, and how many tokens its number has, which are the last ones."""

    tokens: np.ndarray
    answer: int


def make_samples(tokenizer: Tokenizer, length: int, count: int, seed: int = 0) -> list[Haystack]:
    """Makes texts of at most `length` tokens, and as long as whole sentences allow.

    Raises ConfigError if `length` is too short for one sentence.
    """
    random = np.random.default_rng(seed)
    size = len(tokenizer.encode(HAY))
    found = []
    for i in range(count):
        key, number = KEYS[i % len(KEYS)], str(random.integers(10**6, 10**7))
        answer = tokenizer.encode(f' {number}')
        ends = [tokenizer.encode(part) for part in (BEGIN, NEEDLE.format(key, number), END.format(key))]
        sentences = (length - len(answer) - sum(map(len, ends))) // size
        if sentences < 1:
            raise ConfigError(f'{length} tokens are too few for a needle; give evaluate.context_length more')
        before = round(sentences * i / max(1, count - 1))
        hay = [tokenizer.encode(HAY * n) for n in (before, sentences - before) if n]
        parts = [ends[0], hay[0], ends[1], *hay[1:], ends[2], answer] if before else [*ends[:2], *hay, ends[2], answer]
        is_blank = not tokenizer.decode(answer[:1]).strip()
        found.append(Haystack(np.concatenate(parts)[-length:], len(answer) - is_blank))
    return found


def find_needles(run: LoadedRun, length: int, count: int, seed: int = 0) -> list[Scored]:
    """Scores the answers of `count` texts of `length` tokens. Raises the errors of `make_samples`."""
    samples = make_samples(run.tokenizer, length, count, seed)
    scorer = Scorer(run.functions, run.mesh, run.weights, length, 1)
    scored = [scorer.score_rows([sample.tokens], accuracy=True)[0] for sample in samples]
    return [
        found._replace(nats=found.nats[-sample.answer :], correct=np.asarray(found.correct)[-sample.answer :])
        for found, sample in zip(scored, samples, strict=True)
    ]


def describe_needles(answers: list[Scored]) -> str:
    """Returns how many answers are right, and the nats per token of all."""
    right = sum(bool(np.all(answer.correct)) for answer in answers)
    return f'{right} of {len(answers)}, {np.mean([np.mean(answer.nats) for answer in answers]):.2f}'
