"""The pictures of a report, and the points that they show."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm import plots
from lm.plots import Curve
from lm.report.curves import (
    FEWEST_TOKENS,
    Series,
    find_numeric_axes,
    get_first_position,
    is_under_way,
    make_accuracy_curve,
    make_loss_curve,
    make_position_curve,
    make_series,
    make_setting_curve,
    name_binding,
)
from lm.report.measures import Measures, get_status, measure_microseconds_per_token
from lm.report.paper import name_devices
from lm.runs.records import Run
from lm.text import short

SPEED = {'y_scale': 'log', 'right': ('tokens per second', lambda value: 1e6 / np.maximum(value, 1e-12))}


class Pictures:
    """Draws runs into a folder.

    Attributes:
        drawn: the runs that have come far enough.
        files: (name, caption) of each picture.
        points: the points of all pictures, a dict each.
    """

    def __init__(self, runs: Sequence[Run], out: Path, measures: Measures):
        self.out, self.measures = out, measures
        self.drawn = [run for run in runs if is_under_way(run)]
        self.series = make_series(self.drawn)
        self.contexts = sorted({run.value('train.context_length') for run in self.drawn})
        splits = sorted({split for run in self.drawn if (split := measures.find_newest(run).get('split'))})
        self.split = ' and '.join(splits)
        self.files: list[tuple[str, str]] = []
        self.points: list[dict[str, Any]] = []

    def draw(self) -> None:
        """Draws every picture for which there are data."""
        for context in self.contexts:
            suffix, where = (f'_{context}', f', context {context:,}') if len(self.contexts) > 1 else ('', '')
            end = max(run.train[-1]['tokens'] for s in self.series for run in s.at(context))
            self._draw_lines(
                f'loss{suffix}',
                [curve for s in self.series if (curve := make_loss_curve(s, context, end))],
                f'Training loss (smoothed){where}; bands (of up to 6 curves): extremes over seeds.',
                'training tokens',
                'training loss (nats per token)',
                x_scale='log',
            )
            self._draw_lines(
                f'position{suffix}',
                [curve for s in self.series if (curve := make_position_curve(s, context, self.measures.find_newest))],
                f'Loss by position in the context{where}; positions with fewer than {FEWEST_TOKENS:,} tokens are left '
                'out, and curves.csv counts those of each point.',
                'position in the context (tokens)',
                f'{self.split} loss (nats per token)',
                x_scale='log',
                markers=True,
                ticks=_thin([2**i for i in range(context.bit_length()) if 2**i >= get_first_position(context)]),
            )
            self._draw_lines(
                f'accuracy{suffix}',
                [curve for s in self.series if (curve := make_accuracy_curve(s, context))],
                f'Accuracy during training{where}.',
                'training steps',
                f'{self.split} accuracy (%)',
                y_limits=(-3, 103),
            )
        self._draw_against_context('perplexity', self.measures.perplexity, f'{self.split} perplexity per token')
        self._draw_against_context('accuracy', self.measures.accuracy, f'{self.split} accuracy (%)')
        devices = '; '.join(sorted({name_devices(run) for run in self.drawn}))
        note = f', measured on {devices}; bands of single runs: quartiles of the logged intervals'
        time = 'training time per token (µs)'
        self._draw_against_context('speed', measure_microseconds_per_token, time, note, **SPEED)
        for axis in find_numeric_axes(self.drawn) if len(self.contexts) == 1 else ():
            perplexity = f'{self.split} perplexity per token'
            self._draw_against_setting('perplexity', axis, self.measures.perplexity, perplexity)
            self._draw_against_setting('accuracy', axis, self.measures.accuracy, f'{self.split} accuracy (%)')
        self._draw_other_contexts()

    def _draw_against_context(
        self, name: str, measure: Callable[[Run], float | None], label: str, note: str = '', **options: Any
    ) -> None:
        """Draws a measure against the context length in training; with one length alone, a row of dots per series."""
        series = _split_by_devices(self.series) if name == 'speed' else self.series
        values = [[(run, measure(run)) for run in s.runs] for s in series]
        title = f'{label[0].upper()}{label[1:]}'
        if len(self.contexts) > 1:
            curves = []
            for s, found in zip(series, values, strict=True):
                curve = make_setting_curve(s, [(run.value('train.context_length'), value) for run, value in found])
                if name == 'speed' and curve.low is None:
                    curve = _add_quartiles(curve, [run for run, value in found if value is not None])
                curves.append(curve)
            self._draw_lines(
                f'{name}_context',
                [curve for curve in curves if len(curve.x)],
                f'{title} against context length{note}.',
                'context length (tokens)',
                label,
                x_scale='log',
                markers=True,
                ticks=self.contexts,
                **options,
            )
            return
        rows = []
        for s, found in zip(series, values, strict=True):
            members = [(run, value) for run, value in found if value is not None]
            x = np.array([value for _, value in members])
            if len(x):
                row = Curve(s.label, s.style, x, np.zeros(len(x)))
                rows.append(_add_quartiles(row, [run for run, _ in members]) if name == 'speed' else row)
        if rows:
            note = note.replace('bands of single runs', 'thin lines')
            plots.draw_dots(self.out / f'{name}_runs', rows, label)
            self._record(f'{name}_runs', f'{title}, a dot a run, the bar at their mean{note}.', rows)

    def _draw_against_setting(self, name: str, axis: str, measure: Callable[[Run], float | None], label: str) -> None:
        """Draws a measure against a swept setting, where a series has three values of it."""
        curves, values = [], [float(run.config[axis]) for run in self.drawn if axis in run.config]
        for s in make_series(self.drawn, axis):
            curve = make_setting_curve(s, [(float(r.config[axis]), measure(r)) for r in s.runs if axis in r.config])
            curves += [curve] if len(curve.x) else []
        if not any(len(curve.x) > 2 for curve in curves):
            return
        without = [run for run in self.drawn if measure(run) is None]
        named = ', '.join(f'{run.name} ({get_status(run)})' for run in without)
        note = f'; without a value: {named}' if without else ''
        self._draw_lines(
            f'{name}_{name_binding(axis).replace(" ", "_")}',
            curves,
            f'{label[0].upper()}{label[1:]} against {name_binding(axis)}{note}.',
            name_binding(axis),
            label,
            x_scale='log' if min(values) > 0 and max(values) > 5 * min(values) else 'linear',
            markers=True,
            ticks=_thin(sorted(set(values))),
        )

    def _draw_other_contexts(self) -> None:
        """Draws the perplexity of runs that were evaluated at several context lengths, against these lengths."""
        curves, contexts = [], set()
        for s in self.series:
            for trained in self.contexts:
                runs = s.at(trained)
                lengths = {r['context_length'] for run in runs for r in run.evaluations if r.get('context_length')}
                pairs = [(n, self.measures.perplexity(run, n)) for run in runs for n in lengths]
                values = [(n, value) for n, value in pairs if value is not None]
                if len({n for n, _ in values}) > 1:
                    label = s.label if len(self.contexts) == 1 else f'{s.label}, trained at {short(trained)}'
                    curves.append(make_setting_curve(dataclasses.replace(s, label=label, style=len(curves)), values))
                    contexts |= {n for n, _ in values}
        self._draw_lines(
            'perplexity_evaluated',
            curves,
            'Perplexity per token against the context length in evaluation.',
            'context length in evaluation (tokens)',
            f'{self.split} perplexity per token',
            x_scale='log',
            markers=True,
            ticks=sorted(contexts),
        )

    def _draw_lines(self, name: str, curves: list[Curve], caption: str, x: str, y: str, **options: Any) -> None:
        if curves:
            plots.draw_lines(self.out / name, curves, x, y, **options)
            self._record(name, caption, curves)

    def _record(self, name: str, caption: str, curves: Iterable[Curve]) -> None:
        self.files.append((f'{name}.png', caption))
        for curve in curves:
            for i, (x, y) in enumerate(zip(curve.x, curve.y, strict=True)):
                point = {'picture': name, 'series': curve.label, 'x': float(x), 'y': float(y)}
                for column in ('low', 'high', 'tokens'):
                    values = getattr(curve, column)
                    point[column] = None if values is None else float(values[i])
                self.points.append(point)


def _split_by_devices(series: Sequence[Series]) -> list[Series]:
    """Returns the same series, or, where the runs had different devices, a series per kind of device."""
    if len({name_devices(run) for s in series for run in s.runs}) == 1:
        return list(series)
    found = []
    for s in series:
        for devices in dict.fromkeys(map(name_devices, s.runs)):
            runs = tuple(run for run in s.runs if name_devices(run) == devices)
            found.append(Series(f'{s.label}, {devices}', len(found), runs))
    return found


def _add_quartiles(curve: Curve, runs: Sequence[Run]) -> Curve:
    """Returns a curve of speeds, a point per run, with the quartiles of the run's own intervals as the band."""
    by_x = sorted(runs, key=lambda run: run.value('train.context_length'))  # of equal contexts, in the order of x
    ranges = [run.speed_range for run in by_x if run.speed_range]
    if not ranges or not len(runs) == len(curve.x) == len(ranges):
        return curve
    high, low = 1e6 / np.array(ranges).T
    return dataclasses.replace(curve, low=low, high=high)


def _thin(ticks: list[Any]) -> list[Any]:
    """Returns at most eight of the ticks, evenly spaced, the last among them."""
    stride = -(-len(ticks) // 8)
    return ticks[::-1][::stride][::-1]
