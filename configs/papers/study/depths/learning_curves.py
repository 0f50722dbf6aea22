#!/usr/bin/env python3
"""Trains every mechanism at several depths and prints how the loss falls.

    python configs/papers/study/depths/learning_curves.py --layers 12 24 36

Trains depths.gin, whose tokens `lm prepare` has made, once per mechanism of configs/attention and number of layers.
Prints a Markdown table of nats per token: means of the ten steps before the named ones. Saves nothing.
"""

import argparse
import pathlib
import statistics
import sys

import jax

from lm.data.batches import Batches
from lm.experiment import load
from lm.hardware import Target
from lm.plan import make_plan
from lm.text import markdown_table
from lm.training.mesh import batch_sharding
from lm.training.program import lower_step

CONFIGS = pathlib.Path(__file__).resolve().parents[3]
MEAN_OF = 10
SMALLER = {
    'polysketch': ['sketch_size = 16', 'block = 64'],
    'performer': ['n_features = 256', 'block = 64'],
    'llops': ['n_features = 128'],
    'hybrid': ['window = 64'],
}
"""For heads of 32 and a context of 256, so that sums over keys take part."""


def losses(mechanism: str, layers: int, seed: int) -> list[float]:
    """Nats per token of each training step."""
    files = [CONFIGS / 'attention' / f'{mechanism}.gin', pathlib.Path(__file__).with_name('depths.gin')]
    kind = mechanism.partition('_')[0]
    smaller = [f'{kind}.{setting}' for setting in SMALLER.get(kind, [])]
    params = [f'model.n_layers = {layers}', f'train.seed = {seed}', *smaller]
    experiment = load([str(path) for path in files], params)
    config, devices = experiment.train, jax.devices()
    plan = make_plan(experiment, Target.of_devices(devices))
    mesh = plan.mesh.arrange(devices)
    batches = Batches(plan.store, plan.split, plan.windows, config.microbatches, batch_sharding(mesh, axis=1))
    with jax.set_mesh(mesh):
        advance = lower_step(plan.program, mesh).compile()
        state, found = plan.program.init_state(plan.program.place_state(mesh), seed), []
        for batch in batches.prefetch(0, config.steps):
            state, metrics = advance(state, batch)
            found.append(float(metrics['loss']))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    mechanisms = sorted(path.stem for path in (CONFIGS / 'attention').glob('*.gin'))
    parser.add_argument('--layers', nargs='+', type=int, default=[12])
    parser.add_argument('--mechanisms', nargs='+', choices=mechanisms, default=mechanisms)
    parser.add_argument('--steps', nargs='+', type=int, default=[20, 40, 80], help='where the loss is told')
    parser.add_argument('--seed', type=int, default=0)
    arguments = parser.parse_args()
    rows = []
    for mechanism in arguments.mechanisms:
        row = [mechanism]
        for layers in arguments.layers:
            curve = losses(mechanism, layers, arguments.seed)
            told = [statistics.mean(curve[max(0, step - MEAN_OF) : step]) for step in arguments.steps]
            row.append(', '.join(f'{loss:.2f}' for loss in told))
            print(mechanism, layers, row[-1], file=sys.stderr, flush=True)
        rows.append(row)
    heading = ' and '.join(f'{step}' for step in arguments.steps)
    print(markdown_table(rows, ['mechanism', *(f'{layers} layers, steps {heading}' for layers in arguments.layers)]))
    return 0


if __name__ == '__main__':
    sys.exit(main())
