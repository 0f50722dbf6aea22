#!/usr/bin/env python3
"""Draws the pictures of the documentation, NAME.svg from the figures in NAME.json: python docs/figures/draw.py

A picture is a list of panels. Each panel says how its figures were made (`kind`, `device`, `versions`, `command`,
`source`), and has a class here by its `shape`.
"""

import json
import math
import pathlib

import matplotlib

from lm.plots import COLOURS, MARKERS, STYLE

FOLDER = pathlib.Path(__file__).parent
STYLES = {
    'softmax': 0,
    'polynomial': 1,
    'polysketch, random': 3,
    'random, published factor': 3,
    'polysketch with gate': 3,
    'polysketch': 2,
    'performer': 4,
    'three gated delta': 1,
    'three polysketch': 3,
    'gated_delta, stage 2 alone': 2,
    'gated_delta': 6,
    'gated_': 5,
    'retention': 6,
    'taylor': 5,
    'llops': 6,
    'window of 64, layer 1': 0,
    'window of 64, stage 2 alone': 5,
    'after stage 1': 3,
    'after both': 4,
    'window of 128': 4,
    'window': 3,
    'hedgehog': 1,
    'seed 0': 0,
    'seed 1': 1,
    'seed 2': 2,
    'hybrid, degree 1': 1,
    'hybrid, degree 2': 2,
    'hybrid, degree 3': 5,
    'hybrid, degree 4': 4,
}
"""The beginning of a curve's name → its colour and marker, which are the same in all panels of a picture."""


def style_of(name: str) -> dict:
    """Returns the colour and marker of a curve."""
    style = next(style for start, style in STYLES.items() if name.startswith(start))
    return {'color': COLOURS[style], 'marker': MARKERS[style]}


def draw_lines(panel: dict, ax) -> None:
    """Draws values against a number of tokens. Predictions are dashed. Short curves end early."""
    dashes = '--' if panel['kind'] == 'predicted' else '-'
    for name, values in panel['curves'].items():
        scaled = [panel.get('factor', 1) * value for value in values]
        ax.plot(panel['x'][: len(scaled)], scaled, label=name, linestyle=dashes, **style_of(name))
    ax.set(xscale=panel.get('xscale', 'log'), yscale='log')
    names = [f'{n >> 20}M' if n >= 1 << 20 else f'{n >> 10}k' if n >= 1 << 10 else str(n) for n in panel['x']]
    ax.set_xticks(panel['x'], names)
    ax.set_ylim(bottom=panel.get('bottom'))
    low, high = ax.get_ylim()
    digits = (1, 2, 3, 4, 5, 6, 8) if high < 10 * low else (1, 2, 5)
    ticks = [digit * 10.0**power for power in range(-3, 6) for digit in digits]
    if high > 200 * low:
        ticks = [tick for tick in ticks if f'{tick:e}'.startswith('1')]
    ticks = [tick for tick in ticks if low < tick < high]
    ax.set_yticks(ticks, [f'{tick:,g}' for tick in ticks])


def draw_rows(panel: dict, ax) -> None:
    """Draws a row per name, and a dot per seed or measurement."""
    for row, (name, values) in enumerate(panel['curves'].items()):
        ax.plot(values, [row] * len(values), linestyle='', alpha=0.8, **style_of(name))
    ax.set_yticks(range(len(panel['curves'])), panel['curves'])
    ax.set_ylim(len(panel['curves']) - 0.5, -0.5)
    ax.set_xlim(left=panel.get('left'))


def draw_points(panel: dict, ax) -> None:
    """Draws a value against a size: points of one mechanism are joined, and bars reach from one of two seeds to the
    other."""
    for name, points in panel['curves'].items():
        sizes, values, deviations = zip(*points, strict=True)
        halves = [deviation / math.sqrt(2) for deviation in deviations]
        ax.errorbar(sizes, values, yerr=halves, label=name, capsize=2, linewidth=0.9, **style_of(name))
    ax.set(xscale='log', ylim=(0, 105))
    ax.set_xticks(panel['x'], [f'{n // 1000}k' for n in panel['x']])


def draw_curve(panel: dict, ax) -> None:
    """Draws values against steps, and single points such as the last evaluation."""
    for name, values in panel['curves'].items():
        ax.plot(panel['x'], values, label=name, color=COLOURS[0])
    for name, (x, y) in panel['end'].items():
        ax.plot([x], [y], label=name, linestyle='', color=COLOURS[1], marker=MARKERS[1])


SHAPES = {'curve': draw_curve, 'lines': draw_lines, 'rows': draw_rows, 'points': draw_points}


def draw(figures: dict, path: pathlib.Path) -> None:
    """Writes one picture with a panel per entry, side by side."""
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    settings = STYLE | {'svg.hashsalt': 'lm', 'svg.fonttype': 'path'}
    with matplotlib.rc_context(settings):
        panels = figures['panels']
        figure, axes = plt.subplots(
            1, len(panels), figsize=(figures.get('width', 3.6) * len(panels), 2.9), layout='constrained', squeeze=False
        )
        for panel, ax in zip(panels, axes[0], strict=True):
            SHAPES[panel['shape']](panel, ax)
            ax.set(xlabel=panel['xlabel'], ylabel=panel['ylabel'])
            ax.set_title(panel['title'], fontsize=7.5)
            ax.minorticks_off()
            if panel['shape'] != 'rows':
                beside = {'loc': 'upper left', 'bbox_to_anchor': (1, 1)} if panel.get('legend') == 'beside' else {}
                ax.legend(fontsize=6.5, framealpha=0.9, **beside)
        figure.savefig(path, metadata={'Date': None})
        plt.close(figure)


if __name__ == '__main__':
    for source in sorted(FOLDER.glob('*.json')):
        draw(json.loads(source.read_text()), source.with_suffix('.svg'))
