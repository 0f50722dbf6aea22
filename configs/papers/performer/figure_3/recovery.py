#!/usr/bin/env python3
"""Compares the accuracy of Performer with a softmax model's weights, before and after tuning (Performer, Fig. 3).

    python configs/papers/performer/figure_3/recovery.py runs/transfer [--out recovery]

The runs of the sweep started from the weights of one softmax run (`train.init_from`). The script scores this run, and
Performer with its weights before the first step, on the tokens that the runs evaluate. It draws the accuracy against
the steps of tuning. It prints a Markdown row per run: accuracy before and after, and the steps to 90, 95 and 99 % of
the accuracy of softmax.
"""

import argparse
import sys
from typing import Any

import numpy as np
from etils import epath

import lm
from lm.errors import LmError
from lm.evaluation.evaluator import make_evaluator
from lm.evaluation.plan import plan_evaluation, settle_evaluation
from lm.inference.loaded_run import LoadedRun
from lm.model.functions import Weights
from lm.plots import Curve, draw_lines
from lm.runs.records import Run, is_run
from lm.runs.sweep_file import read_rows
from lm.text import make_markdown_table

SHARES = (0.9, 0.95, 0.99)


def score(run: LoadedRun, weights: Weights) -> dict[str, Any]:
    """Returns accuracy and loss of `weights` in the model of a run, on the tokens that its training evaluates."""
    asked = run.experiment
    settings = settle_evaluation(asked.evaluate, asked.data, asked.train, asked.model, asked.train.eval_tokens)
    result = make_evaluator(plan_evaluation(settings, run.splits), run.functions, run.mesh)(weights, 0)
    assert result is not None, 'nothing stops it'
    return result


def open_softmax(run: LoadedRun) -> LoadedRun:
    """Opens the run that `run` started from, with the evaluation and the data of `run`."""
    train, data = run.experiment.train, run.experiment.data
    given = [f'train.eval_tokens = {train.eval_tokens}', f'data.path = {data.path!r}', 'evaluate.accuracy = True']
    return lm.load(str(train.init_from), given)


def find_steps(evals: list[dict[str, Any]], accuracy: float) -> str:
    """Returns the first step whose evaluation reaches an accuracy, or '–'."""
    return next((f'{line["step"]:,}' for line in evals if line['accuracy'] >= accuracy), '–')


def compare(root: epath.Path) -> tuple[list[list[str]], list[Curve]]:
    """Returns a row for softmax and a row per run, and the curves, the first of which is the accuracy of softmax.

    Raises LmError if the sweep has no run that was evaluated with accuracies.
    """
    rows: list[list[str]] = []
    curves: list[Curve] = []
    softmax, taught = None, {}
    for style, point in enumerate(read_rows(root), start=1):
        folder = root / point['point']
        evals = [line for line in Run.read(folder).evals if line.get('accuracy')] if is_run(folder) else []
        if not evals:
            continue
        run = lm.load(str(folder))
        if softmax is None:
            softmax = open_softmax(run)
            taught = score(softmax, softmax.weights)
            rows.append(['softmax', *describe(taught), *('' for _ in range(2 + len(SHARES)))])
        first = score(run, {'params': softmax.weights['params'], 'buffers': run.weights['buffers']})
        reached = [find_steps(evals, share * taught['accuracy']) for share in SHARES]
        rows.append([point['point'], *describe(first), *describe(evals[-1]), *reached])
        steps, accuracy = (np.array([line[key] for line in [first, *evals]], float) for key in ('step', 'accuracy'))
        curves.append(Curve(point['point'], style, steps, 100 * accuracy))
    if not curves:
        raise LmError(f'{root}: has no run with accuracies yet; run the sweep first')
    ends = np.array([0.0, max(curve.x[-1] for curve in curves)])
    return rows, [Curve('softmax', 0, ends, np.full(2, 100 * taught['accuracy'])), *curves]


def describe(measured: dict[str, Any]) -> tuple[str, str]:
    """Returns accuracy and perplexity as text."""
    return f'{100 * measured["accuracy"]:.2f}', f'{np.exp(measured["loss"]):.2f}'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('root', type=epath.Path, help='the folder of a sweep')
    parser.add_argument('--out', default='recovery', help='the picture, without suffix; default: recovery')
    arguments = parser.parse_args()
    try:
        rows, curves = compare(arguments.root)
    except LmError as error:
        print(f'recovery: {error}', file=sys.stderr)
        return error.exit_code
    before, after = ('accuracy before (%)', 'perplexity'), ('accuracy after (%)', 'perplexity')
    reached = [f'steps to {share:.0%} of softmax' for share in SHARES]
    print(make_markdown_table(rows, ['run', *before, *after, *reached]))
    draw_lines(arguments.out, curves, 'steps of tuning', 'accuracy (%)')
    print(f'drawn in {arguments.out}.png and {arguments.out}.pdf')
    return 0


if __name__ == '__main__':
    sys.exit(main())
