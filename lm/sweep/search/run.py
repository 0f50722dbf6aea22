"""`lm sweep --search`: draws trials and trains them, a few at a time, on one machine or several.

A trial is a point of a sweep: a run of `lm train` with a directory, a lock and a configuration of its own. Several
machines work on one search if each runs the same command with a folder that all of them reach.
"""

import contextlib
import time

import jax

from lm.errors import AbsentError, ConfigError, LmError, Preempted, WrongResults
from lm.plan import PlanCache
from lm.runs import sweep_file
from lm.sweep.options import SweepOptions
from lm.sweep.points import Point
from lm.sweep.run import validate_point
from lm.sweep.runner import Runner, RunningPoint
from lm.sweep.search.refusals import describe_refusals
from lm.sweep.search.search import Search
from lm.sweep.search.study import find_pruned_step
from lm.text import format_count

MOST_REFUSED = 20
"""If so many trials are refused and no other was drawn, the files that all trials share are at fault."""
LOOK_SECONDS = 2.0
"""Seconds between two looks at the folder, which may be in a bucket."""


def run_search(search: Search, options: SweepOptions, *, dry_run: bool = False) -> None:
    """Trains the trials that have not ended; `dry_run`: only lists and checks the trials that can be drawn now.

    Raises the errors of `validate_trials`, AbsentError if data are absent, Preempted if it was asked to stop, and
    LmError if no trial has a loss.
    """
    jax.config.update('jax_platforms', 'cpu')  # the trials need the accelerator of this machine
    search.refresh()
    search.sweep.check()
    absent = validate_trials(search, options.gpus_per_job)
    print(f'{format_count(search.options.trials, "trial")} in {search.sweep.root}')
    for point in search.sweep.points:
        values = ', '.join(f'{key} = {value}' for key, value in point.settings.items())
        status = 'refused' if point.index in search.refused else search.sweep.result(point)['status']
        print(f'{point.name}  [{status}]  {values}')
    for line in map(str, search.refused.values()):
        print(f'refused: {line}')
    for line in absent:
        print(f'not checked: {line}')
    if dry_run:
        print('\n'.join(describe_refusals(search.space, search.study)))
        return
    if absent and search.refresh():
        raise AbsentError(absent[0])
    SearchRunner(search, options).run()


def validate_trials(search: Search, devices: int | None) -> list[str]:
    """Refuses the trials whose values do not fit together, and draws others, until the next ones are good.

    Returns a line for each absent thing. Raises ConfigError if all trials are refused, and other errors of `lm train`.
    """
    checked = set[int]()
    absent: dict[str, None] = {}
    cache = PlanCache()
    while due := [point for point in search.refresh() if point.index not in checked]:
        for point in due:
            checked.add(point.index)
            try:
                absent |= dict.fromkeys(validate_point(search.sweep, point, devices, cache))
            except ConfigError as error:
                search.refused[point.index] = error
        if len(search.refused) == len(search.sweep.points) >= min(search.options.trials, MOST_REFUSED):
            raise next(iter(search.refused.values()))
    return list(absent)


class SearchRunner(Runner):
    """Runs the trials of a search as processes, `jobs` at a time, and ends the ones that are pruned."""

    def __init__(self, search: Search, options: SweepOptions):
        self.search = search
        super().__init__(search.sweep, options)
        self._looked, self._pruned, self._has_ended = -LOOK_SECONDS, set[str](), False
        self._written, self._noted = 0, set[int]()
        search.note_facts()

    def has_more(self) -> bool:
        return not self._has_ended

    def is_due(self, point: Point) -> bool:
        return self.search.study.judge(point.index) is None

    def look(self) -> None:
        if time.monotonic() - self._looked < LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        self._has_ended = all(map(self.search.study.judge, range(self.search.options.trials)))
        if self._has_ended:
            self.search.note_facts()  # of trials of other machines, too
        busy = {job.point.name for job in self.running}
        self.waiting = [point for point in self.search.refresh() if point.name not in busy]
        for point in self.sweep.points[self._written :]:  # `lm sweep --index` needs all of them
            self.sweep.write_config(point)
        self._written = len(self.sweep.points)
        self._note_refused()
        for job in self.running:
            ended = self.search.study.judge(job.point.index)
            if ended and (step := find_pruned_step(ended)) is not None and job.point.name not in self._pruned:
                self._pruned.add(job.point.name)
                self.say(f'{job.point.name}: pruned at step {step:,}')
                self.end_early(job)

    def _note_refused(self) -> None:
        """Records the trials that were refused without a process of their own."""
        for number in self.search.refused.keys() - self._noted:
            self._noted.add(number)
            error = self.search.refused[number]
            self.sweep.record_failure(self.sweep.points[number], error.exit_code, str(error))

    def launch(self, point: Point, held: contextlib.ExitStack) -> None:
        self.search.forgiven.discard(point.index)
        super().launch(point, held)

    def end(self, job: RunningPoint) -> None:
        ended = self.search.study.judge(job.point.index)
        self.search.note_facts()
        if ended and (step := find_pruned_step(ended)) is not None and job.process.returncode != 0:
            self.free(job)
            self.sweep.record_pruned(job.point, step)
            self.sweep.write_results()
        else:
            super().end(job)
            if job.process.returncode == WrongResults.exit_code:
                self.stop()  # another machine goes on with the search
        self._looked = -LOOK_SECONDS

    def conclude(self, rows: list[sweep_file.Row]) -> None:
        if self.signals:
            raise Preempted('stopped, what the trials did is saved: run the same command again')
        losses = {row['point']: row['loss'] for row in rows if row['status'] == 'done' and row['loss'] is not None}
        if not losses:
            raise LmError(f'no trial has a loss; see {self.sweep.notes}')
        best = min(losses, key=losses.__getitem__)
        (row,) = (row for row in rows if row['point'] == best)
        values = ', '.join(f'{key} = {value}' for key, value in row['settings'].items())
        kinds = [sweep_file.describe_status(row['status'], row['exit_code']) for row in rows]
        counts = ', '.join(f'{kinds.count(kind)} {kind}' for kind in sorted(set(kinds)))
        print(f'{counts}; the best is {best}, loss {losses[best]:.4f}: {values}')
