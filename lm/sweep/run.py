"""`lm sweep`: the points of a sweep file (`lm.sweep.points`), each a run of `lm train` in a directory of its own.

      ROOT/NAME/               the run directories
      ROOT/points/NAME.gin     the configuration of a point
      ROOT/points/NAME.log     what `lm train` printed, of all attempts (with a local ROOT)
      ROOT/points/NAME.json    how a point failed
      ROOT/sweep.json          the table of results

A point is finished when its last step is evaluated and saved: it is not run again. An interrupted one continues
exactly. One that diverged or does not fit its data (43, 44, 2) stays failed until --retry_failed; other failures are
tried again. One that another process trains is left to it, and is no failure. Whatever becomes of a sweep, its points
end with it: they save and exit when it dies.
"""

import shlex

import jax

from lm.errors import AbsentError, ConfigError, LmError, WrongResults, exit_code_of
from lm.plan import PlanCache, validate
from lm.pod.job import JobAddress, joined
from lm.runs.info import count_fruitless, read_info
from lm.runs.lock import OccupiedError
from lm.runs.run_dir import RunDir
from lm.session.train import train_in_job
from lm.signals import INTERRUPTED
from lm.sweep.options import SweepOptions
from lm.sweep.points import Point, find_point
from lm.sweep.runner import Runner
from lm.sweep.sweep import Sweep
from lm.text import format_count

FRUITLESS_STARTS = 10
"""A cluster starts a point no more after so many starts in a row that saved no step."""


def run_sweep(sweep: Sweep, options: SweepOptions, *, dry_run: bool = False) -> None:
    """Lists the points and runs those that are due, each as a process; `dry_run`: only lists and checks them.

    Raises the errors of `validate_points` and `Runner.run`, and AbsentError if the data of a point are absent.
    """
    # The points are separate processes, which need the accelerator of this machine.
    jax.config.update('jax_platforms', 'cpu')
    sweep.check()
    print(f'{format_count(len(sweep.points), "point")} in {sweep.root}')
    for point in sweep.points:
        print(f'{point.index:>4}  {point.name}  [{sweep.result(point)["status"]}]')
    absent = validate_points(sweep, options.gpus_per_job)
    if dry_run:
        for line in absent:
            print(f'not checked: {line}')
        return
    runner = Runner(sweep, options)
    if absent:
        raise AbsentError(absent[0])
    runner.run()


def validate_points(sweep: Sweep, devices: int | None) -> list[str]:
    """Raises the errors of `lm train` for points that are not finished; returns a line for each absent thing."""
    cache = PlanCache()
    due = [point for point in sweep.points if not point.fault and not sweep.is_finished(point)]
    return list(dict.fromkeys(line for point in due for line in validate_point(sweep, point, devices, cache)))


def validate_point(sweep: Sweep, point: Point, devices: int | None, cache: PlanCache) -> list[str]:
    """Raises the errors of `lm train` for one point; returns a line for each absent thing."""
    try:
        return validate(point.experiment, devices, cache, RunDir(sweep.root / point.name).has_checkpoint())
    except LmError as error:
        raise type(error)(f'{error} (in the point {point.name})') from None


def run_point(sweep: Sweep, index: int | str, job: JobAddress) -> None:
    """Runs one point, by number or name, in this process, as `lm train` would, and records a failure."""

    def leads() -> bool:
        return not jax.distributed.is_initialized() or jax.process_index() == 0

    sweep.check()
    point = find_point(sweep.points, index)
    print(f'point {point.index} of {len(sweep.points)}: {point.name}')
    if point.fault:
        raise ConfigError(f'point {point.name}: {point.fault}')
    if sweep.is_finished(point):
        print('is finished already')
        return
    run = RunDir(sweep.root / point.name)
    if run.path.exists() and count_fruitless(read_info(run.info)) >= FRUITLESS_STARTS:
        raise ConfigError(
            f'point {point.name}: its last {FRUITLESS_STARTS} starts saved no step, so clusters start it no more; read '
            f'its log, then train it by hand: {shlex.join(["lm", "train", "--run_dir", str(run.path)])}'
        )
    sweep.prepare(point)
    try:
        train_in_job(point.experiment, str(sweep.root / point.name), job)
    except Exception as error:
        code, text = exit_code_of(error), ' '.join(str(error).split())
        if isinstance(error, WrongResults) and (not error.processes or joined()[0] in error.processes):
            sweep.record_wrong_machine(point, text)
        if code not in INTERRUPTED and not isinstance(error, OccupiedError) and leads():
            sweep.record_failure(point, code, text)
        raise
    finally:
        if leads():
            sweep.write_results()
