#!/usr/bin/env python3
"""Draws docs/figures/time_per_token.svg from the figures in time_per_token.json: python docs/figures/draw.py"""

import json
import pathlib

import matplotlib

from lm.plots import COLOURS, MARKERS, STYLE

FOLDER = pathlib.Path(__file__).parent
STYLES = {
    'softmax': 0,
    'polynomial': 1,
    'polysketch, learned': 2,
    'polysketch, sketches given': 2,
    'polysketch, random': 3,
    'performer': 4,
}
"""The beginning of a curve's name → its colour and marker, which are the same in both panels."""


def style_of(name: str) -> int:
    """Returns the number of a curve's colour and marker."""
    return next(style for start, style in STYLES.items() if name.startswith(start))


def draw(figures: dict, path: pathlib.Path) -> None:
    """Writes one picture with a panel per device: time per token against context length, both axes logarithmic."""
    matplotlib.use('Agg')
    import matplotlib.pyplot as plt

    settings = STYLE | {'svg.hashsalt': 'lm', 'svg.fonttype': 'path'}
    with matplotlib.rc_context(settings):
        figure, axes = plt.subplots(1, len(figures['panels']), figsize=(7.2, 2.9), layout='constrained')
        for panel, ax in zip(figures['panels'], axes, strict=True):
            dashes = '--' if panel['kind'] == 'predicted' else '-'
            contexts = panel['contexts']
            for name, milliseconds in panel['curves'].items():
                microseconds = [1e3 * value / panel['tokens'] for value in milliseconds]
                style = style_of(name)
                looks = dict(color=COLOURS[style], marker=MARKERS[style], linestyle=dashes)
                ax.plot(contexts, microseconds, label=f'{name}, {panel["kind"]}', **looks)
            ax.set(xscale='log', yscale='log', xlabel='context length (tokens)', ylabel='time per token (µs)')
            ax.set_title(panel['title'], fontsize=7.5)
            ax.set_xticks(contexts, [f'{n // 1024}k' for n in contexts])
            low, high = ax.get_ylim()
            ticks = [t for t in (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low < t < high]
            ax.set_yticks(ticks, [f'{t:g}' for t in ticks])
            ax.minorticks_off()
            ax.legend(fontsize=6.5, framealpha=0.9)
        figure.savefig(path, metadata={'Date': None})
        plt.close(figure)


if __name__ == '__main__':
    draw(json.loads((FOLDER / 'time_per_token.json').read_text()), FOLDER / 'time_per_token.svg')
