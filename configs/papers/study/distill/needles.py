#!/usr/bin/env python3
"""Scores needles in a haystack of several lengths: what a converted model recalls, beside its teacher.

    python configs/papers/study/distill/needles.py runs/teacher runs/student [--lengths 1024,2048] [--samples 8]

The text is `niah_single_1` of RULER (Hsieh et al. 2024): a number stands between sentences that repeat, at depths that
are evenly spaced, and the end asks for it. A sample is right if each token of the number is the most probable one,
after the right tokens before it. Greedy decoding would give the number in exactly these cases. The script prints a
Markdown row per run: the share of right samples, and the nats per token of the numbers. One forward pass per sample
makes this cheaper than `lm evaluate --tasks niah_single_1`, which writes each answer.
"""

import argparse
import dataclasses
import sys

import numpy as np

import lm
from lm.data.tokenizers import Tokenizer
from lm.errors import ConfigError, LmError
from lm.inference.loaded_run import LoadedRun
from lm.text import make_markdown_table

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


@dataclasses.dataclass(frozen=True)
class Sample:
    """A text with a needle, and the number of tokens of its answer, which are the last ones."""

    tokens: np.ndarray
    answer: int


def make_samples(tokenizer: Tokenizer, length: int, count: int, seed: int = 0) -> list[Sample]:
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
            raise ConfigError(f'--lengths {length}: too short for a needle; give more')
        before = round(sentences * i / max(1, count - 1))
        hay = [tokenizer.encode(HAY * n) for n in (before, sentences - before) if n]
        parts = [ends[0], hay[0], ends[1], *hay[1:], ends[2], answer] if before else [*ends[:2], *hay, ends[2], answer]
        found.append(Sample(np.concatenate(parts)[-length:], len(answer)))
    return found


def measure(run: LoadedRun, length: int, count: int) -> tuple[float, float]:
    """Returns the share of right samples, and the nats per token of the answers."""
    samples = make_samples(run.tokenizer, length, count)
    scorer = dataclasses.replace(run, experiment=_with_context(run, length)).scorer
    scored = [scorer.score_rows([sample.tokens], accuracy=True)[0] for sample in samples]
    right = [np.all(np.asarray(found.correct)[-one.answer :]) for found, one in zip(scored, samples, strict=True)]
    nats = [found.nats[-sample.answer :].mean() for found, sample in zip(scored, samples, strict=True)]
    return float(np.mean(right)), float(np.mean(nats))


def _with_context(run: LoadedRun, length: int):
    """Returns the configuration of a run, evaluated one window of `length` at a time."""
    evaluate = dataclasses.replace(run.experiment.evaluate, context_length=length, batch_size=1)
    return dataclasses.replace(run.experiment, evaluate=evaluate)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('runs', nargs='+', metavar='RUN')
    parser.add_argument('--lengths', default='1024,2048,4096,8192', metavar='N,…', help='tokens of a text')
    parser.add_argument('--samples', type=int, default=8, metavar='N', help='of each length; default: 8')
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(',')]
    rows = []
    try:
        for name in arguments.runs:
            run = lm.load(name)
            cells = []
            for length in lengths:
                right, nats = measure(run, length, arguments.samples)
                cells.append(f'{right:.0%}, {nats:.2f}')
                print(f'{name} {length}: {cells[-1]}', file=sys.stderr, flush=True)
            rows.append([name, *cells])
    except LmError as error:
        print(f'needles: {error}', file=sys.stderr)
        return error.exit_code
    print(make_markdown_table(rows, ['right, nats', *(f'{length:,}' for length in lengths)]))
    return 0


if __name__ == '__main__':
    sys.exit(main())
