#!/usr/bin/env python3
"""Prints the accuracy of associative recall against the bytes of the decoding state.

    python configs/papers/llops/tables_4_5_recall/recall_states.py runs/mqar_small

Reads the finished runs of a sweep over mechanisms, their sizes and seeds, such as sweep_multiquery_recall_small.gin.
Prints a Markdown row per mechanism and size: means and standard deviations (n - 1) over the seeds for each segment of
the task. With --out PATH it draws the picture PATH.png and PATH.pdf of one segment. The state is the whole model's
state after --tokens tokens of one sequence.
"""

import argparse
import collections
import statistics
import sys

import numpy as np
from etils import epath
from flax import nnx

from lm.errors import LmError
from lm.experiment import load
from lm.inference.generation import state_bytes
from lm.model import build
from lm.runs.records import Run
from lm.runs.sweep_file import read_rows
from lm.text import make_markdown_table


def bytes_of(run: Run, tokens: int) -> int:
    """Returns the bytes of the decoding state of a run's model after so many tokens."""
    model = load([str(run.directory.config)]).model
    return state_bytes(nnx.eval_shape(lambda: build(model, 0)), tokens)


def kind_of(settings: str) -> str:
    """Returns 'taylor' for '@size8/taylor()'."""
    return settings.strip('@()').rpartition('/')[2]


def segments_of(run: Run) -> dict[str, float]:
    """Returns segment → accuracy in the last evaluation of a run."""
    return (run.last_evaluation or {}).get('accuracy_by_slice', {})


def groups_of(root: epath.Path) -> dict[str, list[Run]]:
    """Returns settings without the seed → the finished runs, in the order of the sweep."""
    found = collections.defaultdict(list)
    for row in read_rows(root):
        if row['status'] == 'done':
            settings = [value for name, value in row['settings'].items() if name != 'train.seed']
            found[' '.join(settings)].append(Run.read(root / row['point']))
    return found


def table(groups: dict[str, list[Run]], sizes: dict[str, int]) -> str:
    """Returns Markdown: accuracies in percent."""
    segments = list(segments_of(next(iter(groups.values()))[0]))
    rows = []
    for name, runs in groups.items():
        cells = [name.strip('@()'), f'{sizes[name]:,}', str(len(runs))]
        for segment in segments:
            values = [100 * segments_of(run)[segment] for run in runs]
            spread = f' ± {statistics.stdev(values):.1f}' if len(values) > 1 else ''
            cells.append(f'{statistics.mean(values):.1f}{spread}')
        rows.append(cells)
    return make_markdown_table(rows, ['mechanism', 'state, bytes', 'seeds', *segments])


def draw(path: str, groups: dict[str, list[Run]], sizes: dict[str, int], segment: str) -> None:
    """Draws a curve per mechanism over its sizes, with a band from the lowest to the highest seed."""
    from lm import plots

    points = collections.defaultdict(list)
    for name, runs in groups.items():
        values = [100 * segments_of(run)[segment] for run in runs]
        points[kind_of(name)].append((sizes[name], statistics.mean(values), min(values), max(values)))
    curves = [
        plots.Curve(kind, style, *np.array(sorted(found), float).T)
        for style, (kind, found) in enumerate(points.items())
    ]
    label = f'accuracy (%), {segment}'
    plots.draw_lines(path, curves, 'decoding state (bytes)', label, x_scale='log', markers=True, y_limits=(0, 100))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('root', type=epath.Path, help='the folder of a sweep')
    parser.add_argument('--tokens', type=int, default=128, help='length of the sequence whose state is counted')
    parser.add_argument('--segment', default='8 pairs in 64', help='the segment of the picture')
    parser.add_argument('--out', help='the picture, without suffix')
    arguments = parser.parse_args()
    groups = {name: runs for name, runs in groups_of(arguments.root).items() if runs}
    if not groups:
        raise LmError(f'{arguments.root}: holds no finished run of lm sweep; run the sweep first')
    segments = segments_of(next(iter(groups.values()))[0])
    if not segments or (arguments.out and arguments.segment not in segments):
        raise LmError(f'--segment {arguments.segment!r}: the runs have {", ".join(segments) or "no segments"}')
    sizes = {name: bytes_of(runs[0], arguments.tokens) for name, runs in groups.items()}
    print(table(groups, sizes))
    if arguments.out:
        draw(arguments.out, groups, sizes, arguments.segment)
    return 0


if __name__ == '__main__':
    try:
        sys.exit(main())
    except LmError as error:
        sys.exit(str(error))
