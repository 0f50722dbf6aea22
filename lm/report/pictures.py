"""The pictures of a report, and the points that they show."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm import plots
from lm.plots import Curve
from lm.report.curves import (
    FEWEST_TOKENS,
    Series,
    find_left_out_losses,
    find_numeric_axes,
    find_token_range,
    get_first_position,
    is_under_way,
    make_evaluation_curve,
    make_loss_curve,
    make_position_curve,
    make_series,
    make_setting_curve,
    make_speed_curve,
    name_bindings,
)
from lm.report.ladder import Ladder
from lm.report.measures import Measures, get_status, measure_microseconds_per_token, name_loss
from lm.report.paper import name_devices
from lm.runs.records import Run
from lm.text import shorten

LADDER_POINTS = 50
"""Points of the curve of a baseline, fewer than the page draws without markers."""
SPEED = {'y_scale': 'log', 'right': ('tokens per second', lambda value: 1e6 / np.maximum(value, 1e-12))}


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture before it is drawn.

    Attributes:
        name: of its files, without a suffix.
        caption: what it shows, and what it leaves out.
        curves: lines, or rows of dots.
        x_label, y_label: of the axes; rows of dots have no second axis.
        options: of `lm.plots.draw_lines`.
    """

    name: str
    caption: str
    curves: Sequence[Curve]
    x_label: str
    y_label: str | None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    def draw(self, out: Path) -> None:
        """Writes the files of the picture into the folder `out`. Needs matplotlib."""
        if self.y_label is None:
            plots.draw_dots(out / self.name, self.curves, self.x_label)
        else:
            plots.draw_lines(out / self.name, self.curves, self.x_label, self.y_label, **self.options)

    def list_points(self) -> Iterable[dict[str, Any]]:
        """Yields the points, a dict each."""
        for curve in self.curves:
            for i, (x, y) in enumerate(zip(curve.x, curve.y, strict=True)):
                point = {'picture': self.name, 'series': curve.label, 'x': float(x), 'y': float(y)}
                for column in ('low', 'high', 'tokens'):
                    values = getattr(curve, column)
                    point[column] = None if values is None else float(values[i])
                yield point


class Pictures:
    """The pictures of runs, and of their ladder if there is one.

    Attributes:
        drawn: the runs that have come far enough.
        made: every picture for which there are data.
        courses: perplexity and speed of several runs during training, which the page alone shows.
    """

    def __init__(self, runs: Sequence[Run], measures: Measures, ladder: Ladder | None = None):
        self.measures = measures
        self.drawn = [run for run in runs if is_under_way(run)]
        self.series = make_series(self.drawn)
        self.contexts = sorted({run.value('train.context_length') for run in self.drawn})
        splits = sorted({split for run in self.drawn if (split := measures.find_newest(run).get('split'))})
        self.split = ' and '.join(splits)
        self.made: list[Picture] = []
        self.courses: list[Picture] = []
        self._make()
        if ladder:
            self._make_ladder(ladder)

    def _make(self) -> None:
        for context in self.contexts:
            suffix, where = (f'_{context}', f', context {context:,}') if len(self.contexts) > 1 else ('', '')
            self._make_loss(context, suffix, where)
            self._make_positions(context, suffix, where)
            self._add_lines(
                f'accuracy{suffix}',
                [curve for s in self.series if (curve := make_evaluation_curve(s, context, 'accuracy', 100.0))],
                f'Accuracy during training{where}.',
                'training steps',
                f'{self.split} accuracy (%)',
                y_limits=(-3, 103),
            )
            self._make_courses(context, suffix, where)
        self._make_against_context('perplexity', self.measures.perplexity, f'{self.split} perplexity per token')
        self._make_against_context('accuracy', self.measures.accuracy, f'{self.split} accuracy (%)')
        note = f', measured on {self._name_devices()}; bands of single runs: quartiles of the logged intervals'
        time = 'training time per token (µs)'
        self._make_against_context('speed', measure_microseconds_per_token, time, note, **SPEED)
        axes = find_numeric_axes(self.drawn) if len(self.contexts) == 1 else []
        for axis, title in name_bindings(axes).items():
            perplexity = f'{self.split} perplexity per token'
            self._make_against_setting('perplexity', axis, title, self.measures.perplexity, perplexity)
            self._make_against_setting('accuracy', axis, title, self.measures.accuracy, f'{self.split} accuracy (%)')
        self._make_other_contexts()

    def _make_loss(self, context: int, suffix: str, where: str) -> None:
        """Makes the training losses, one picture for each kind of loss: only losses of one kind can be compared."""
        groups: dict[str | None, list[Series]] = {}
        for s in self.series:
            groups.setdefault(name_loss(s.runs[0]), []).append(s)
        for kind, series in groups.items():
            if not any(s.at(context) for s in series):
                continue
            start, end = find_token_range(run for s in series for run in s.at(context))
            curves = [curve for s in series if (curve := make_loss_curve(s, context, start, end))]
            smoothed = [curve.label for curve in curves if curve.smoothed]
            named = '' if len(smoothed) == len(curves) else f': {"; ".join(smoothed)}'
            note = f' (smoothed{named})' if smoothed else ''
            bands = '; bands (of up to 6 curves): extremes over seeds' if any(c.low is not None for c in curves) else ''
            of = f': {kind}' if kind else ''
            objective = series[0].runs[0].objective.replace('/', '_')
            name = f'loss_{objective}' if kind else 'loss'
            label = f'training loss: {kind}' if kind else 'training loss (nats per token)'
            caption = f'Training loss{of}{note}{where}{bands}.'
            self._add_lines(f'{name}{suffix}', curves, caption, 'training tokens', label, x_scale='log')

    def _make_positions(self, context: int, suffix: str, where: str) -> None:
        first, newest = get_first_position(context), self.measures.find_newest
        losses = find_left_out_losses((run for s in self.series for run in s.at(context)), newest)
        bounds = ' to '.join(dict.fromkeys(f'{value:.2f}' for value in (min(losses), max(losses)))) if losses else ''
        left_out = f'; the first {first:,} positions, with losses of {bounds}, are left out' if losses else ''
        self._add_lines(
            f'position{suffix}',
            [curve for s in self.series if (curve := make_position_curve(s, context, newest))],
            f'Loss by position in the context{where}{left_out}; positions with fewer than {FEWEST_TOKENS:,} tokens are '
            'left out, and curves.csv counts the tokens of each point.',
            'position in the context (tokens)',
            f'{self.split} loss (nats per token)',
            x_scale='log',
            markers=True,
            ticks=_thin([2**i for i in range(context.bit_length()) if 2**i >= first]),
        )

    def _make_courses(self, context: int, suffix: str, where: str) -> None:
        """Makes perplexity and speed against steps. Of a single run they are drawn too, in place of single dots."""
        made = {
            'perplexity_steps': [make_evaluation_curve(s, context, 'perplexity') for s in self.series],
            'speed_steps': [make_speed_curve(s, context) for s in self.series],
        }
        if any(self.measures.accuracy(run) is not None for run in self.drawn):
            made.pop('perplexity_steps')
        for name, found in made.items():
            curves = [curve for curve in found if curve and len(curve.x) > 1]
            if not curves:
                continue
            is_speed = name == 'speed_steps'
            label = 'training time per token (µs)' if is_speed else f'{self.split} perplexity per token'
            measured = f', measured on {self._name_devices()}' if is_speed else ''
            caption = f'{label[0].upper()}{label[1:]} during training{where}{measured}.'
            options = {'right': SPEED['right']} if is_speed else {'markers': True}
            picture = Picture(f'{name}{suffix}', caption, curves, 'training steps', label, options)
            (self.made if len(self.drawn) == 1 else self.courses).append(picture)

    def _name_devices(self) -> str:
        return '; '.join(sorted({name_devices(run) for run in self.drawn}))

    def _make_against_context(
        self, name: str, measure: Callable[[Run], float | None], label: str, note: str = '', **options: Any
    ) -> None:
        """Makes a measure against the context length in training; with one length alone, a row of dots per series.
        A single run has no such picture: its dot would say less than the table."""
        series = self._keep_styles(_split_by_devices(self.series)) if name == 'speed' else self.series
        values = [[(run, measure(run)) for run in s.runs] for s in series]
        title = f'{label[0].upper()}{label[1:]}'
        if len(self.contexts) > 1:
            curves = []
            for s, found in zip(series, values, strict=True):
                curve = make_setting_curve(s, [(run.value('train.context_length'), value) for run, value in found])
                if name == 'speed' and curve.low is None:
                    curve = _add_quartiles(curve, [run for run, value in found if value is not None])
                curves.append(curve)
            self._add_lines(
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
        if rows and len(self.drawn) > 1:
            note = note.replace('bands of single runs', 'thin lines')
            caption = f'{title}, one dot per run, the bar at their mean{note}.'
            self.made.append(Picture(f'{name}_runs', caption, rows, label, None))

    def _make_against_setting(
        self, name: str, axis: str, title: str, measure: Callable[[Run], float | None], label: str
    ) -> None:
        """Makes a measure against a swept setting, called `title`, where a series has three values of it."""
        curves, values = [], [float(run.config[axis]) for run in self.drawn if axis in run.config]
        for s in self._keep_styles(make_series(self.drawn, [axis])):
            curve = make_setting_curve(s, [(float(r.config[axis]), measure(r)) for r in s.runs if axis in r.config])
            curves += [curve] if len(curve.x) else []
        if not any(len(curve.x) > 2 for curve in curves):
            return
        without = [run for run in self.drawn if measure(run) is None]
        named = ', '.join(f'{run.name} ({get_status(run)})' for run in without)
        note = f'; without a value: {named}' if without else ''
        self._add_lines(
            f'{name}_{re.sub("[^A-Za-z0-9]+", "_", title)}',
            curves,
            f'{label[0].upper()}{label[1:]} against {title}{note}.',
            title,
            label,
            x_scale='log' if min(values) > 0 and max(values) > 5 * min(values) else 'linear',
            markers=True,
            ticks=_thin(sorted(set(values))),
        )

    def _make_other_contexts(self) -> None:
        """Makes the perplexity of runs that were evaluated at several context lengths, against these lengths."""
        shown, contexts = [], set()
        for s in self.series:
            for trained in self.contexts:
                runs = s.at(trained)
                lengths = {r['context_length'] for run in runs for r in run.evaluations if r.get('context_length')}
                pairs = [(n, self.measures.perplexity(run, n)) for run in runs for n in lengths]
                values = [(n, value) for n, value in pairs if value is not None]
                if len({n for n, _ in values}) > 1:
                    label = s.label if len(self.contexts) == 1 else f'{s.label}, trained at {shorten(trained)}'
                    shown.append((dataclasses.replace(s, label=label, runs=tuple(runs)), values))
                    contexts |= {n for n, _ in values}
        styled = self._keep_styles([s for s, _ in shown])
        curves = [make_setting_curve(s, values) for s, (_, values) in zip(styled, shown, strict=True)]
        self._add_lines(
            'perplexity_evaluated',
            curves,
            'Perplexity per token against the context length in evaluation.',
            'context length in evaluation (tokens)',
            f'{self.split} perplexity per token',
            x_scale='log',
            markers=True,
            ticks=sorted(contexts),
        )

    def _make_ladder(self, ladder: Ladder) -> None:
        """Makes the losses of the compared runs against their compute, with the curve of the baseline."""
        least, most = ladder.sizes[0], ladder.sizes[-1]
        x = np.geomspace(least, most, LADDER_POINTS)
        curves = [Curve('curve of the baseline', 0, x, ladder.law.predict(x), marked=False)]
        spread = False
        for s in self._keep_styles(ladder.make_series()):
            groups = ladder.group_by_compute(s)
            of_series = [(results[0].compute, result.loss) for results in groups for result in results]
            curves.append(dataclasses.replace(make_setting_curve(s, of_series), joined=False))
            spread |= curves[-1].low is not None
            if any(result in ladder.baseline for results in groups for result in results):
                curves[0] = dataclasses.replace(curves[0], style=s.style)
        bars = '; bars: extremes over seeds' if spread else ''
        caption = f'Loss against the compute of training, with the curve of {ladder.name}: {ladder.law}{bars}.'
        label = f'{self.split} loss (nats per token)'
        self._add_lines('ladder', curves, caption, 'compute of training (FLOPs)', label, x_scale='log', markers=True)

    def _add_lines(self, name: str, curves: list[Curve], caption: str, x: str, y: str, **options: Any) -> None:
        if curves:
            self.made.append(Picture(name, caption, curves, x, y, options))

    def _keep_styles(self, series: Sequence[Series]) -> list[Series]:
        """Gives each series the style that its first run has in the other pictures. Where two would look alike, the
        second gets a style that no other picture uses."""
        styles = {run.directory.path: s.style for s in self.series for run in s.runs}
        unused, taken, found = itertools.count(len(self.series)), set(), []
        for s in series:
            style = styles.get(s.runs[0].directory.path)
            style = next(unused) if style is None or style in taken else style
            taken.add(style)
            found.append(dataclasses.replace(s, style=style))
        return found


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
