#!/usr/bin/env python3
"""Prints the best learning rate of each group of a sweep over rates.

    python configs/papers/study/width/best_rates.py runs/width_adamw

A Markdown row stands for all points that differ in the rate alone. The loss is the mean over the last fifth of the
training. The best rate is the lowest point of the parabola through the lowest loss and its neighbours, in the logarithm
of the rate.
"""

import collections
import math
import statistics
import sys

import numpy as np
from etils import epath

from lm.errors import ConfigError, LmError
from lm.runs.records import Run
from lm.runs.sweep_file import read_rows
from lm.text import make_markdown_table

RATE = 'optimizer.peak_learning_rate'
SHARE = 0.2


def last_loss(run: Run) -> float:
    """Returns the mean training loss, in nats per token, of the logged steps in the last `SHARE` of the run."""
    return statistics.mean(r['loss'] for r in run.train if r['step'] > (1 - SHARE) * run.total_steps)


def lowest(losses: dict[float, float]) -> tuple[float, float] | None:
    """Returns (rate, loss) at the lowest point; None where the sweep has no rate on both sides of the best one.

    Args:
        losses: rate → loss. Losses that are not finite, of runs that skipped a step, bound nothing.
    """
    rates = sorted(rate for rate, loss in losses.items() if math.isfinite(loss))
    if not rates:
        return None
    best = min(range(len(rates)), key=lambda i: losses[rates[i]])
    if not 0 < best < len(rates) - 1:
        return None
    x = [math.log(rate / rates[best]) for rate in rates[best - 1 : best + 2]]
    a, b, c = np.polyfit(x, [losses[rate] for rate in rates[best - 1 : best + 2]], 2)
    return rates[best] * math.exp(-b / (2 * a)), c - b**2 / (4 * a)


def table(folder: epath.Path) -> str:
    """Returns Markdown from the finished points of a sweep."""
    groups = collections.defaultdict(dict)
    for row in read_rows(folder):
        if RATE not in (row['settings'] or {}):
            raise ConfigError(f'{folder / "sweep.json"}: {row["point"]} has no {RATE}; name a sweep over rates')
        settings = dict(row['settings'])
        rate = float(settings.pop(RATE))
        if row['status'] == 'done':
            groups[tuple(settings.items())][rate] = last_loss(Run.read(folder / row['point']))
    cells = []
    for settings, losses in groups.items():
        found = lowest(losses)
        tried = ', '.join(f'{rate:g}: {losses[rate]:.3f}' for rate in sorted(losses))
        name = ', '.join(f'{key.rpartition(".")[2]} {value}' for key, value in settings)
        cells.append([name, *((f'{found[0]:.2g}', f'{found[1]:.3f}') if found else ('not between', '')), tried])
    return make_markdown_table(cells, ['point', 'best rate', 'loss there', 'rates tried: losses'])


if __name__ == '__main__':
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = epath.Path(sys.argv[1])
    if not (folder / 'sweep.json').is_file():
        sys.exit(f'{folder / "sweep.json"}: no such file; name the folder of a sweep')
    try:
        print(table(folder))
    except LmError as error:
        sys.exit(str(error))
