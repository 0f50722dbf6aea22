"""The trials of a search in the folder of a sweep."""

import dataclasses
import json
from collections.abc import Mapping

from etils import epath

from lm.config.text import format_value
from lm.errors import ConfigError, WrongResults
from lm.runs import sweep_file
from lm.runs.records import Run, is_run
from lm.runs.sweep_file import Row
from lm.sweep.options import SearchOptions
from lm.sweep.points import Point
from lm.sweep.search.distributions import Drawn
from lm.sweep.search.space import SearchSpace, name_trial
from lm.sweep.search.study import Study, TrialResult, find_pruned_step
from lm.sweep.sweep import Sweep


class TrialFolder(Sweep):
    """The folder of a search. It reads a finished trial once, because the table is written after each trial."""

    draws_points = True

    def __init__(self, root: epath.PathLike):
        super().__init__(root, [])
        self._finished: dict[str, Row] = {}

    def result(self, point: Point) -> Row:
        row = self._finished.get(point.name) or super().result(point)
        if row['status'] == 'done':
            self._finished[point.name] = row
        return dict(row)


class Search:
    """The trials, and what the study says about them. `sweep.points` grows with the trials that are drawn.

    Args:
        root: the folder, a local path or an address.
        retry_failed: failures of earlier calls do not count.

    Raises ConfigError where the folder holds another search, a grid or a run.
    """

    def __init__(self, root: epath.PathLike, space: SearchSpace, options: SearchOptions, retry_failed: bool = False):
        self.sweep, self.space, self.options = TrialFolder(root), space, options
        first = space.make_point(0, {})
        self.study = Study(
            space.distributions, options, self._read, first.experiment.train.steps, first.experiment.train.eval_every
        )
        self.forgiven = set(range(options.trials)) if retry_failed else set()
        """Trials whose failure in an earlier call does not count until they start again."""
        self.refused: dict[int, ConfigError] = {}
        """Trials of this call whose values do not fit together → the error; they end without a loss."""
        self._check(first)

    def _check(self, first: Point) -> None:
        if self.options.prune and first.experiment.train.eval_every is None:
            raise ConfigError('--prune: needs evaluations during the training; set train.eval_every')
        if self.options.prune and 'train.steps' in self.space.distributions:
            raise ConfigError('--prune: compares trials of equal length; do not search train.steps')
        root = self.sweep.root
        if is_run(root):
            raise ConfigError(f'--run_dir {root}: is a run, which would hide the trials; name another folder')
        if not sweep_file.is_sweep(root):
            return
        before, now = sweep_file.read_search(root), self.describe()
        if not before:
            raise ConfigError(f'--run_dir {root}: holds a grid; name another folder for the search')
        for name in ('sampler', 'seed', 'parallel', 'prune', 'space'):
            if before.get(name) != now[name]:
                raise ConfigError(
                    f'--run_dir {root}: holds a search with {name} = {json.dumps(before.get(name))}, not '
                    f'{json.dumps(now[name])}; search as before, or name another folder'
                )

    def describe(self) -> dict[str, object]:
        """Returns the facts of the search for sweep.json."""
        names = 'sampler', 'seed', 'trials', 'parallel', 'prune'
        return {**{name: getattr(self.options, name) for name in names}, 'space': dict(self.space.written)}

    def refresh(self) -> list[Point]:
        """Draws the trials that can be drawn, and returns the ones that have not ended."""
        due = []
        for number in range(self.options.trials):
            if number >= len(self.sweep.points):
                values = self._values(number)
                if values is None:
                    break
                self.sweep.points.append(self._make_point(number, values))
            point = self.sweep.points[number]
            if (ended := self.study.judge(number)) is None:
                due.append(point)
            elif (step := find_pruned_step(ended)) is not None and self.sweep.result(point)['status'] == 'interrupted':
                self.sweep.record_pruned(point, step)
        return due

    def note_facts(self) -> None:
        """Has the next sweep.json tell how the trials were drawn, and which parameters matter."""
        self.sweep.facts = {'search': {**self.describe(), 'importance': self.study.rate()}}

    def _make_point(self, number: int, values: Mapping[str, Drawn]) -> Point:
        try:
            return self.space.make_point(number, values)
        except ConfigError as error:
            self.refused[number] = error
            made, distributions = self.space.make_point(number, {}), self.space.distributions
            settings = {key: format_value(distributions[key].to_gin(value)) for key, value in values.items()}
            return dataclasses.replace(made, settings=settings, fault=str(error))

    def _values(self, number: int) -> dict[str, Drawn] | None:
        """Returns the values of a trial: of its run directory, or else drawn."""
        if (result := self._read(number)) and result.values:
            return dict(result.values)
        return self.study.draw(number)

    def _read(self, number: int) -> TrialResult | None:
        if number in self.refused:
            return TrialResult(self.study.draw(number) or {}, (), False, ConfigError.exit_code)
        name = name_trial(number)
        path, failure = self.sweep.root / name, sweep_file.read_failure(self.sweep.root, name)
        stated = failure.get('exit_code')
        code = stated if isinstance(stated, int) else None
        counts = code is not None and code != WrongResults.exit_code and number not in self.forgiven
        if not is_run(path):
            drawn = self.study.draw(number) if counts else None
            return TrialResult(drawn, (), False, code) if drawn else None
        run = Run.read(path)
        losses = [(r['step'], r['loss']) for r in run.evals]
        return TrialResult(
            self.space.read_values(run.config, name), losses, run.is_finished(), code if counts else None
        )
