#!/usr/bin/env python3
"""Compares the runs of a sweep over functions of generalized attention, with their NaNs (Performer, Fig. 12).

    python configs/papers/performer/figure_12/kernels.py runs/kernels [--out kernels]

Draws the accuracy of every run against its steps, also of runs that ended early; both axes are logarithmic, as in the
paper. Prints a Markdown row per run: accuracy and perplexity of its last evaluation, the steps that were not finite,
and how the run ended. The trainer leaves out steps that are not finite.
"""

import argparse
import sys

import numpy as np
from etils import epath

from lm.errors import LmError
from lm.plots import Curve, draw_lines
from lm.runs.records import Run, is_run
from lm.runs.sweep_file import describe_status, read_rows
from lm.text import make_markdown_table

FUNCTION, DIVIDED = 'performer.features', 'performer.renormalize'


def name(row: dict) -> str:
    """Returns 'relu' or, without the division by the sum of the weights, 'relu, sums'."""
    settings = row['settings'] or {}
    function = settings.get(FUNCTION, row['point']).strip("'")
    return f'{function}, sums' if settings.get(DIVIDED) == 'False' else function


def compare(root: epath.Path) -> tuple[list[list[str]], list[Curve]]:
    """Returns a row per run, the most accurate first, and the curves of those that were evaluated."""
    rows, curves = [], []
    for style, point in enumerate(read_rows(root)):
        run = Run.read(root / point['point']) if is_run(root / point['point']) else None
        evals = [line for line in run.evals if line.get('accuracy')] if run else []
        skipped = max((line.get('skipped_steps') or 0 for line in run.train), default=0) if run else 0
        status = describe_status(point['status'], point['exit_code'])
        last = evals[-1] if evals else {'accuracy': float('nan'), 'loss': float('nan')}
        cells = [f'{100 * last["accuracy"]:.2f}', f'{np.exp(last["loss"]):.2f}', f'{skipped:,}', status]
        rows.append((-last['accuracy'] if evals else 0.0, [name(point), *cells]))
        if evals:
            steps, accuracy = (np.array([line[key] for line in evals], float) for key in ('step', 'accuracy'))
            curves.append(Curve(name(point), style, steps, 100 * accuracy))
    return [cells for _, cells in sorted(rows, key=lambda row: row[0])], curves


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('root', type=epath.Path, help='the folder of a sweep')
    parser.add_argument('--out', default='kernels', help='the picture, without suffix; default: kernels')
    arguments = parser.parse_args()
    try:
        rows, curves = compare(arguments.root)
        if not curves:
            raise LmError(f'{arguments.root}: has no run with accuracies yet; run the sweep first')
    except LmError as error:
        print(f'kernels: {error}', file=sys.stderr)
        return error.exit_code
    print(make_markdown_table(rows, ['f', 'accuracy (%)', 'perplexity', 'steps not finite', 'run']))
    draw_lines(
        arguments.out, curves, 'training steps', 'accuracy (%)', x_scale='log', y_scale='log', ticks=list(curves[0].x)
    )
    print(f'drawn in {arguments.out}.png and {arguments.out}.pdf')
    return 0


if __name__ == '__main__':
    sys.exit(main())
