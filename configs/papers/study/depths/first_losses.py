#!/usr/bin/env python3
"""Prints the loss of models before the first step, on random tokens.

    python configs/papers/study/depths/first_losses.py small medium large

For each size of configs/models and every mechanism as configs/attention has it: a Markdown table of nats per token, and
how far each is from the logarithm of the vocabulary. Nothing is trained.
"""

import argparse
import math
import pathlib
import sys

import jax
import numpy as np

from lm.experiment import load
from lm.model import build
from lm.text import make_markdown_table

CONFIGS = pathlib.Path(__file__).resolve().parents[3]


def first_loss(size: str, mechanism: str, tokens: int, seed: int) -> tuple[float, float]:
    """Returns (nats per token, logarithm of the vocabulary) for one sequence of random tokens."""
    files = [CONFIGS / 'models' / f'{size}.gin', CONFIGS / 'attention' / f'{mechanism}.gin']
    model = load([str(path) for path in files], ["model.dtype = 'float32'"]).model
    ids = np.random.default_rng(seed).integers(0, model.vocab_size, (1, tokens + 1))

    def loss(ids):
        return build(model, seed).token_losses(ids[:, :-1], ids[:, 1:]).mean()

    return float(jax.jit(loss)(ids)), math.log(model.vocab_size)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    mechanisms = sorted(path.stem for path in (CONFIGS / 'attention').glob('*.gin'))
    parser.add_argument('sizes', nargs='+', choices=sorted(path.stem for path in (CONFIGS / 'models').glob('*.gin')))
    parser.add_argument('--mechanisms', nargs='+', choices=mechanisms, default=mechanisms)
    parser.add_argument('--tokens', type=int, default=1024)
    parser.add_argument('--seed', type=int, default=0)
    arguments = parser.parse_args()
    rows = []
    for mechanism in arguments.mechanisms:
        row = [mechanism]
        for size in arguments.sizes:
            loss, logarithm = first_loss(size, mechanism, arguments.tokens, arguments.seed)
            row.append(f'{loss:.3f} ({100 * (loss / logarithm - 1):+.1f} %)')
            print(mechanism, size, row[-1], file=sys.stderr, flush=True)
        rows.append(row)
    print(make_markdown_table(rows, ['mechanism', *arguments.sizes]))
    return 0


if __name__ == '__main__':
    sys.exit(main())
