"""Groups runs that belong together into series, and makes the curves of a report."""

import collections
import dataclasses
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import numpy as np

from lm.attention import Attention
from lm.config.names import find_omitted, may_change
from lm.experiment import load_registry
from lm.plots import Curve
from lm.report import paper
from lm.report.measures import get_status
from lm.runs.records import Run

BINS = 80
"""Points of a smoothed loss curve."""
SHOWN_FROM = 0.05
"""Share of the shortest training that loss curves leave out at the start, where nothing can be compared."""
FIRST_POSITION = 8
"""The loss at earlier positions is several times higher and would flatten the rest of the picture."""
ALWAYS_NAMED = 'train.steps'
"""The binding that all labels name where it differs between any two runs: curves that end early would mislead."""
MOST_NAMED = 4
"""Where runs differ in more bindings, labels and tables leave out what most runs have: they would be too long."""
FEWEST_TOKENS = 100
"""Tokens behind the loss at a position that is drawn: with fewer, chance moves it by more than a quarter of a nat."""


@dataclasses.dataclass(frozen=True)
class Series:
    """Runs that differ in seed and context length alone."""

    label: str
    style: int
    runs: tuple[Run, ...]

    def at(self, context: int) -> list[Run]:
        return [run for run in self.runs if run.value('train.context_length') == context]


def make_series(runs: Sequence[Run], axes: Collection[str] = ()) -> list[Series]:
    """Groups runs that differ in seed, context length and the bindings `axes` alone, in the paper's order.

    A label names the attention, and what else differs between series of the same attention. It names the steps where
    any runs differ in them, and the status where some runs are not done.
    """
    lengths = {run.config.get(ALWAYS_NAMED) for run in runs}
    names = [(paper.label_attention(run) or run.attention).replace(' (using FlashAttention)', '') for run in runs]
    named: dict[str, list[Run]] = {}
    for run, name in zip(runs, names, strict=True):
        named.setdefault(name, []).append(run)
    differing = {name: find_differing_bindings(others) for name, others in named.items()}
    described, standing = [], [get_status(run) for run in runs]
    for run, name, status in zip(runs, names, standing, strict=True):
        shown = differing[name] + ([ALWAYS_NAMED] if len(lengths) > 1 and ALWAYS_NAMED not in differing[name] else [])
        parts = describe_settings(run, named[name], [key for key in shown if key not in axes])
        ended = [status] if status != 'done' and len(set(standing)) > 1 else []
        described.append(', '.join([name, *parts, *ended]))
    groups: dict[str, list[Run]] = {}
    for run, label in zip(runs, described, strict=True):
        groups.setdefault(label, []).append(run)
    sorted_groups = sorted(groups.items(), key=lambda item: min(map(paper.rank_attention, item[1])))
    return [Series(label, i, tuple(members)) for i, (label, members) in enumerate(sorted_groups)]


def name_bindings(bindings: Sequence[str]) -> dict[str, str]:
    """Returns binding → its name in pictures and tables: 'peak learning rate' for 'optimizer.peak_learning_rate'.

    Where two would have one name, the owner stands before it: 'polysketch block' and 'performer block'.
    """
    short = {binding: binding.rpartition('.')[2].removeprefix('n_').replace('_', ' ') for binding in bindings}
    counts = collections.Counter(short.values())
    owners = {binding: binding.rpartition('.')[0] for binding in bindings}
    return {binding: name if counts[name] == 1 else f'{owners[binding]} {name}' for binding, name in short.items()}


def describe_settings(run: Run, runs: Sequence[Run], bindings: Sequence[str]) -> list[str]:
    """Returns name and value of the bindings that a run states.

    Of more than MOST_NAMED bindings, the values that most of `runs` have are left out; never the number of steps.
    """
    titles, described = name_bindings(bindings), []
    for binding, title in titles.items():
        value = run.config.get(binding)
        is_left_out = len(bindings) > MOST_NAMED and binding != ALWAYS_NAMED and value == find_usual(runs, binding)
        if value is not None and not is_left_out:
            known = {other.config[binding] for other in runs if binding in other.config}
            described.append(f'{title} {_shorten(value, known)}')
    return described


def find_usual(runs: Sequence[Run], binding: str) -> str | None:
    """Returns the value that more than half of the runs have; None: there is none, or they leave the binding out."""
    ((value, count),) = collections.Counter(run.config.get(binding) for run in runs).most_common(1)
    return value if count > len(runs) / 2 else None


def find_differing_bindings(runs: Sequence[Run]) -> list[str]:
    """Returns the bindings with several values among the runs that have them, and which make another series.

    A run that leaves a binding out at its default has it too.
    """
    names = filter(_makes_series, dict.fromkeys(name for run in runs for name in run.config))
    return [name for name in names if len({run.config.get(name) for run in runs if _has(run, name)}) > 1]


def _has(run: Run, name: str) -> bool:
    """Returns whether a run has a binding: its config.gin states it, or leaves it out beside others of its owner."""
    owner = f'{name.rpartition(".")[0]}.'
    return name in run.config or (find_omitted(name) is not None and any(key.startswith(owner) for key in run.config))


def find_numeric_axes(runs: Sequence[Run]) -> list[str]:
    """Returns the differing bindings with three values or more, all of them numbers."""
    found = []
    for name in find_differing_bindings(runs):
        values = {run.config[name] for run in runs if name in run.config}
        if len(values) > 2 and all(map(is_number, values)):
            found.append(name)
    return found


def is_number(value: str) -> bool:
    """Returns whether a value of a binding is a finite number."""
    try:
        return math.isfinite(float(value))
    except ValueError:
        return False


def is_under_way(run: Run) -> bool:
    """Returns whether a run has come far enough to be drawn."""
    return len(run.train) > 1 and run.step >= SHOWN_FROM * run.total_steps


def find_token_range(runs: Iterable[Run]) -> tuple[float, float]:
    """Returns the tokens between which the loss is drawn: SHOWN_FROM of the shortest run, and the longest run's end."""
    ends = [run.train[-1]['tokens'] for run in runs]
    return max(min(ends) * SHOWN_FROM, 1), max(ends)


def make_loss_curve(series: Series, context: int, start: float, end: float) -> Curve | None:
    """Returns the training loss against tokens from `start` to `end`.

    The points are means over bins of equal width on a logarithmic axis. A bin with one record is this record; the curve
    is smoothed where a bin holds several.
    """
    count = math.ceil(BINS * max(1, math.log(end / start) / -math.log(SHOWN_FROM)))
    edges = np.geomspace(start, end * (1 + 1e-9), count + 1)
    found, smoothed = [], False
    for run in series.at(context):
        tokens, loss = (np.array([r[k] for r in run.train], np.float64) for k in ('tokens', 'loss'))
        shown = np.isfinite(loss) & (tokens >= edges[0] * (1 - 1e-9)) & (tokens <= edges[-1])
        bins = np.digitize(tokens[shown], edges)
        of_bins = [bins == i for i in np.unique(bins)]
        if of_bins:
            smoothed |= len(of_bins) < len(bins)
            logs = np.log(tokens[shown])
            found.append([(logs[of_bin].mean(), loss[shown][of_bin].mean()) for of_bin in of_bins])
    if not found:
        return None
    x = np.unique([log for points in found for log, _ in points])
    ys = [np.interp(x, *np.transpose(points), left=np.nan, right=np.nan) for points in found]
    curve = _aggregate(series, np.exp(x), ys)
    return dataclasses.replace(curve, smoothed=smoothed) if curve else None


def make_position_curve(series: Series, context: int, measure: Callable[[Run], dict[str, Any]]) -> Curve | None:
    """Returns the loss by position in the evaluations that `measure` chooses, buckets at their geometric middles."""
    found = [measure(run).get('loss_by_position') for run in series.at(context)]
    found = [
        [b for b in buckets if b['start'] >= get_first_position(context) and b['tokens'] >= FEWEST_TOKENS]
        for buckets in found
        if buckets
    ]
    if not any(found):
        return None
    longest = max(found, key=len)
    x = np.array([np.sqrt((b['start'] + 1) * b['end']) for b in longest])
    same = [buckets for buckets in found if len(buckets) == len(x)]
    curve = _aggregate(series, x, [np.array([b['loss'] for b in buckets]) for buckets in same])
    tokens = np.sum([[b['tokens'] for b in buckets] for buckets in same], axis=0)
    return dataclasses.replace(curve, tokens=tokens) if curve and len(curve.x) == len(x) else curve


def find_left_out_losses(runs: Iterable[Run], measure: Callable[[Run], dict[str, Any]]) -> list[float]:
    """Returns the losses at the positions before the first one in the pictures, of all runs."""
    return [
        bucket['loss']
        for run in runs
        for bucket in measure(run).get('loss_by_position') or ()
        if bucket['start'] < get_first_position(run.value('train.context_length'))
    ]


def get_first_position(context: int) -> int:
    """Returns the first position in the pictures: FIRST_POSITION, or less in contexts that are hardly longer."""
    return min(FIRST_POSITION, context // 8)


def make_evaluation_curve(series: Series, context: int, figure: str, scale: float = 1.0) -> Curve | None:
    """Returns a figure of the periodic evaluations, times `scale`, against steps."""
    found = [[(r['step'], scale * r[figure]) for r in run.evals if figure in r] for run in series.at(context)]
    found = [records for records in found if records]
    if not found:
        return None
    x = np.unique([step for records in found for step, _ in records])
    curves = [np.array(records, np.float64).T for records in found]
    return _aggregate(series, x, [np.interp(x, steps, values, right=np.nan) for steps, values in curves])


def _aggregate(series: Series, x: np.ndarray, ys: list[np.ndarray]) -> Curve | None:
    """Returns the mean over runs with the band of their extremes."""
    y = np.array(ys)
    known = np.isfinite(y).any(axis=0)
    x, y = x[known], y[:, known]
    if not len(x):
        return None
    if len(y) == 1:
        return Curve(series.label, series.style, x, y[0])
    return Curve(series.label, series.style, x, np.nanmean(y, 0), np.nanmin(y, 0), np.nanmax(y, 0))


def make_speed_curve(series: Series, context: int) -> Curve | None:
    """Returns the microseconds per token of the logged intervals against steps; the first interval warms up."""
    found = []
    for run in series.at(context):
        start = run.branched_at
        own = [r for r in run.train if r['step'] > start and r.get('tokens_per_second')][1:]
        found += [np.array([(r['step'], 1e6 / r['tokens_per_second']) for r in own]).T] if own else []
    if not found:
        return None
    x = np.unique(np.concatenate([steps for steps, _ in found]))
    return _aggregate(series, x, [np.interp(x, steps, times, left=np.nan, right=np.nan) for steps, times in found])


def make_setting_curve(series: Series, values: Iterable[tuple[float, float | None]]) -> Curve:
    """Returns pairs of a setting, such as the context length, and measure, as means with the band of extremes."""
    groups: dict[float, list[float]] = {}
    for setting, value in values:
        if value is not None:
            groups.setdefault(setting, []).append(value)
    x = np.array(sorted(groups))
    y = [groups[setting] for setting in x]
    mean, low, high = (np.array([f(v) for v in y]) for f in (statistics.fmean, min, max))
    repeated = any(len(v) > 1 for v in y)
    return Curve(series.label, series.style, x, mean, low if repeated else None, high if repeated else None)


def _makes_series(binding: str) -> bool:
    """Returns whether a difference in this binding makes another series."""
    ignored = {'train.seed', 'train.context_length', 'train.microbatches', 'model.attention'}
    owner = load_registry().get(binding.rpartition('/')[2].partition('.')[0], object)
    is_of_mechanism = issubclass(owner, Attention)
    return binding == 'data.path' or not (binding in ignored or (may_change(binding) and not is_of_mechanism))


def _shorten(value: str, values: set[str]) -> str:
    """Returns a value without its quotes; for a path its last part, where no other value has the same."""

    def last(value: str) -> str:
        return value.strip("'").rstrip('/').rpartition('/')[2]

    is_alone = not any(last(other) == last(value) for other in values - {value})
    return last(value) if is_alone else value.strip("'")
