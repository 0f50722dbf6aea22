#!/usr/bin/env python3
"""Trains every mechanism at several depths and prints how the loss falls.

    python configs/papers/study/depths/learning_curves.py --layers 12 24 36

Trains depths.gin, whose tokens `lm prepare` has made, once per mechanism of configs/attention and number of layers.
Prints a Markdown table of nats per token: means of the ten steps before the named ones.
"""

import argparse
import contextlib
import pathlib
import statistics
import sys
import tempfile

import lm
from lm.runs.records import Run
from lm.text import make_markdown_table

CONFIGS = pathlib.Path(__file__).resolve().parents[3]
MEAN_OF = 10
SMALLER = {
    'polysketch': ['sketch_size = 16', 'block = 64'],
    'performer': ['n_features = 256', 'block = 64'],
    'llops': ['n_features = 128'],
    'hybrid': ['window = 64'],
}
"""Settings for heads of 32 and a context of 256, so that sums over keys take part."""
ONLY_LOSSES = ['train.log_every = 1', 'train.eval_tokens = 256', 'checkpoint.save_every_steps = None']


def losses(mechanism: str, layers: int, seed: int) -> list[float]:
    """Returns the nats per token of each training step."""
    files = [CONFIGS / 'attention' / f'{mechanism}.gin', pathlib.Path(__file__).with_name('depths.gin')]
    kind = mechanism.partition('_')[0]
    smaller = [f'{kind}.{setting}' for setting in SMALLER.get(kind, [])]
    params = [f'model.n_layers = {layers}', f'train.seed = {seed}', *smaller, *ONLY_LOSSES]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        lm.train(lm.configure([str(path) for path in files], params), folder)
        return [record['loss'] for record in Run.read(folder).train]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    mechanisms = sorted(path.stem for path in (CONFIGS / 'attention').glob('*.gin'))
    parser.add_argument('--layers', nargs='+', type=int, default=[12])
    parser.add_argument('--mechanisms', nargs='+', choices=mechanisms, default=mechanisms)
    parser.add_argument('--steps', nargs='+', type=int, default=[20, 40, 80], help='steps of the columns')
    parser.add_argument('--seed', type=int, default=0)
    arguments = parser.parse_args()
    rows = []
    for mechanism in arguments.mechanisms:
        row = [mechanism]
        for layers in arguments.layers:
            curve = losses(mechanism, layers, arguments.seed)
            means = [statistics.mean(curve[max(0, step - MEAN_OF) : step]) for step in arguments.steps]
            row.append(', '.join(f'{loss:.2f}' for loss in means))
            print(mechanism, layers, row[-1], file=sys.stderr, flush=True)
        rows.append(row)
    heading = ' and '.join(f'{step}' for step in arguments.steps)
    print(
        make_markdown_table(rows, ['mechanism', *(f'{layers} layers, steps {heading}' for layers in arguments.layers)])
    )
    return 0


if __name__ == '__main__':
    sys.exit(main())
