"""A ladder: a baseline at several sizes, the curve through its losses, and the effective speed-up of other runs.

The effective speed-up divides the compute with which the curve reaches the loss of a run by the compute of the run
(Marin's Speedrun, https://marin.community/speedrun). 1.2 means that the baseline needs 20 % more. The compute of a run
is its training tokens times `ModelConfig.flops_per_token`.
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from lm.config.text import join_names
from lm.errors import ConfigError
from lm.experiment import load
from lm.report.curves import Series, find_differing_bindings, make_series
from lm.report.measures import Measures, get_status
from lm.report.paper import name_devices
from lm.report.power_law import PowerLaw, fit_power_law
from lm.runs.records import Run
from lm.text import format_count, format_digits

FEWEST_SIZES = 3
"""Numbers of a power law, and so the fewest budgets of compute that determine one."""
ROUNDING = 1e-6
"""Nats beyond the ends of a curve that still count as its ends: a fit through three losses has such residuals."""


def format_power(value: float) -> str:
    """Formats 1234567 as '1.23e6'."""
    return f'{value:.2e}'.replace('e+', 'e').replace('e0', 'e')


class FinishedRun(NamedTuple):
    """A finished run.

    Attributes:
        compute: of its training, in FLOPs.
        loss: of its last evaluation, in nats per token.
        seconds: its training tokens over its median tokens per second; None: no speed was logged.
    """

    run: Run
    compute: float
    loss: float
    seconds: float | None


class Speedup(NamedTuple):
    """How many times the compute of a run the baseline needs for the same loss.

    Attributes:
        value: the factor; None where the loss lies beyond the ladder.
        above, below: bounds of the factor where the loss lies beyond the largest or the smallest size of the ladder.
    """

    value: float | None = None
    above: float | None = None
    below: float | None = None

    def __str__(self) -> str:
        if self.value is not None:
            return format_digits(self.value)
        return f'> {format_digits(self.above)}' if self.above is not None else f'< {format_digits(self.below or 0)}'


@dataclasses.dataclass(frozen=True)
class Ladder:
    """A baseline, the curve through its losses, and the runs that are compared with it.

    Attributes:
        name: the runs of the baseline as the flag names them.
        baseline: its finished runs, at three budgets of compute or more.
        compared: the runs of the report that can be compared, the baseline's among them.
        missing: the names of all other runs, each with the reason.
    """

    name: str
    baseline: tuple[FinishedRun, ...]
    compared: tuple[FinishedRun, ...]
    missing: tuple[str, ...]
    law: PowerLaw

    @functools.cached_property
    def sizes(self) -> list[float]:
        """The budgets of compute of the baseline, in FLOPs, from small to large."""
        return sorted({result.compute for result in self.baseline})

    @functools.cached_property
    def axes(self) -> list[str]:
        """The bindings in which the sizes differ."""
        return find_differing_bindings([result.run for result in self.baseline])

    @functools.cached_property
    def deviation(self) -> float | None:
        """The standard deviation of the residuals in nats; None: the curve has as many numbers as there are runs."""
        squares = [(result.loss - float(self.law.predict(result.compute))) ** 2 for result in self.baseline]
        free = len(squares) - FEWEST_SIZES
        return math.sqrt(sum(squares) / free) if free > 0 else None

    def find_result(self, run: Run) -> FinishedRun | None:
        """Returns the result of a run of the report; None if it cannot be compared with the baseline."""
        return next((result for result in self.compared if result.run is run), None)

    def compare(self, compute: float, loss: float) -> Speedup:
        """Returns the effective speed-up of a run with `compute` FLOPs and `loss` nats per token.

        The curve is not extended beyond the sizes of the baseline: such runs have a bound in place of a value.
        """
        least, most = self.sizes[0], self.sizes[-1]
        if loss < float(self.law.predict(most)) - ROUNDING:
            return Speedup(above=most / compute)
        if loss > float(self.law.predict(least)) + ROUNDING:
            return Speedup(below=least / compute)
        return Speedup(self.law.invert(loss) / compute)

    def compare_times(self, result: FinishedRun) -> float | None:
        """Returns the training time in which the baseline reaches the loss of a run, over the time of the run.

        None: it is not known, because the speed-up is a bound, the devices differ, or a run logged no speed.
        """
        speedup = self.compare(result.compute, result.loss).value
        if speedup is None or not result.seconds or {name_devices(result.run)} != self.devices:
            return None
        seconds = self.find_seconds(speedup * result.compute)
        return seconds and seconds / result.seconds

    @functools.cached_property
    def devices(self) -> set[str]:
        """The devices of the baseline, each kind once."""
        return {name_devices(result.run) for result in self.baseline}

    def find_seconds(self, compute: float) -> float | None:
        """Returns the training time that the baseline takes for `compute` FLOPs, interpolated between its sizes on
        logarithmic scales; None where a run logged no speed."""
        times = [[r.seconds for r in self.baseline if r.compute == size] for size in self.sizes]
        if not all(all(of_size) for of_size in times):
            return None
        logs = [np.mean(np.log(np.array(of_size, np.float64))) for of_size in times]
        return float(np.exp(np.interp(np.log(compute), np.log(self.sizes), logs)))

    def make_series(self) -> list[Series]:
        """Returns the compared runs as series over the sizes."""
        return make_series([result.run for result in self.compared], self.axes)

    def group_by_compute(self, series: Series) -> list[list[FinishedRun]]:
        """Returns the results of a series, in groups of equal compute, from small to large."""
        results = [result for run in series.runs if (result := self.find_result(run))]
        return [[r for r in results if r.compute == size] for size in sorted({r.compute for r in results})]

    def list_rows(self) -> list[dict[str, Any]]:
        """Returns a row per series and budget of compute: losses and speed-ups over the seeds."""
        return [
            self._make_row(series.label, results)
            for series in self.make_series()
            for results in self.group_by_compute(series)
        ]

    def _make_row(self, label: str, results: Sequence[FinishedRun]) -> dict[str, Any]:
        compute, losses = results[0].compute, [result.loss for result in results]
        loss, times = statistics.fmean(losses), [self.compare_times(result) for result in results]
        known = [time for time in times if time is not None]
        is_inside = self.sizes[0] <= compute <= self.sizes[-1]
        return {
            'series': label,
            'parameters': results[0].run.info.get('parameters'),
            'compute': compute,
            'runs': len(results),
            'loss': loss,
            'loss_low': min(losses),
            'loss_high': max(losses),
            'loss_of_curve': float(self.law.predict(compute)) if is_inside else None,
            'effective_speedup': self.compare(compute, loss),
            'effective_speedup_low': self.compare(compute, max(losses)),
            'effective_speedup_high': self.compare(compute, min(losses)),
            'time_speedup': statistics.fmean(known) if len(known) == len(times) else None,
        }


def make_ladder(name: str, baseline: Sequence[Run], runs: Sequence[Run], measures: Measures) -> Ladder:
    """Fits the curve of a baseline to the mean losses of its sizes, so that seeds do not give a size more weight.

    Args:
        name: the runs of the baseline as the flag names them.
        baseline: these runs. Those that are not finished are left out.
        runs: the runs of the report, the baseline's among them.

    Raises:
        ConfigError: fewer than three sizes, runs of several recipes, or losses that do not fall.
    """
    found = [(run, measure_result(run, measures)) for run in runs]
    paths = {str(run.directory.path) for run in baseline}
    of_baseline = [(run, result) for run, result in found if str(run.directory.path) in paths]
    results = [result for _, result in of_baseline if isinstance(result, FinishedRun)]
    _check_one_recipe(name, results)
    sizes = sorted({result.compute for result in results})
    if len(sizes) < FEWEST_SIZES:
        missing = '; '.join(_list_missing(of_baseline))
        raise ConfigError(
            f'--ladder {name}: has finished runs at {format_count(len(sizes), "size")}, and a curve needs '
            f'{FEWEST_SIZES}; train other sizes, such as by configs/sweeps/ladder.gin'
            + (f' (no result: {missing})' if missing else '')
        )
    try:
        means = [statistics.fmean(r.loss for r in results if r.compute == size) for size in sizes]
        law = fit_power_law(np.array(sizes), np.array(means))
    except ConfigError as error:
        raise ConfigError(f'--ladder {name}: {error}') from None
    judged = [
        (run, _compare_measures(one, results[0].run, measures) if isinstance(one, FinishedRun) else one)
        for run, one in found
    ]
    compared = tuple(one for _, one in judged if isinstance(one, FinishedRun))
    return Ladder(name, tuple(results), compared, tuple(_list_missing(judged)), law)


def _list_missing(found: Sequence[tuple[Run, FinishedRun | str]]) -> list[str]:
    """Returns the names of the runs without a result, each with the reason."""
    return [f'{run.name} ({reason})' for run, reason in found if isinstance(reason, str)]


def measure_result(run: Run, measures: Measures) -> FinishedRun | str:
    """Returns compute, loss and time of a run, or why it has none."""
    if (status := get_status(run)) != 'done':
        return status
    measured = measures.find_newest(run)
    if measures.perplexity(run) is None or measured['step'] != run.total_steps:
        return 'no loss on text after its last step'
    try:
        experiment = load([str(run.directory.config)])
    except ConfigError as error:
        return f'its compute is not known: {error}'
    train, rate = experiment.train, run.tokens_per_second
    tokens = train.steps * train.tokens_per_step
    compute = tokens * experiment.model.flops_per_token(train.context_length)
    return FinishedRun(run, compute, measured['loss'], tokens / rate if rate else None)


def _compare_measures(result: FinishedRun, first: Run, measures: Measures) -> FinishedRun | str:
    """Returns the result, or what its loss measures otherwise than the loss of the baseline."""
    if result.run.info.get('data') != first.info.get('data'):
        return 'other data than the baseline'
    ours, theirs = (measures.find_newest(run) for run in (result.run, first))
    for key, what in (('split', 'split'), ('context_length', 'context')):
        if ours.get(key) != theirs.get(key):
            return f'evaluated on another {what} than the baseline'
    return result


def _check_one_recipe(name: str, results: Sequence[FinishedRun]) -> None:
    """Raises ConfigError where the runs of a baseline differ in more than size and seed."""
    for what, values in (
        ('attention', {result.run.attention for result in results}),
        ('data', {str(result.run.info.get('data'))[:12] for result in results}),
        ('context', {str(result.run.value('train.context_length')) for result in results}),
    ):
        if len(values) > 1:
            raise ConfigError(
                f'--ladder {name}: its runs have different {what} ({join_names(sorted(values))}); name the runs of one'
            )
    for compute in {result.compute for result in results}:
        same = [result.run for result in results if result.compute == compute]
        if differing := find_differing_bindings(same):
            raise ConfigError(
                f'--ladder {name}: {same[0].name} and another run of its size differ in {differing[0]}; '
                'name the runs of one recipe'
            )
