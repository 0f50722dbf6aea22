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

from typing import Any

import jax

from lm.errors import INTERRUPTED, AbsentError, ConfigError, LmError
from lm.plan import PlanCache, validate
from lm.runs.lock import OccupiedError
from lm.runs.run_dir import RunDir, check_path
from lm.session import train
from lm.sweep.flags import check_together
from lm.sweep.points import make_points
from lm.sweep.runner import Runner
from lm.sweep.sweep import Sweep
from lm.text import counted


def main(_: Any, arguments: Any) -> int:
    """The `lm sweep` command."""
    check_together(arguments)
    if not arguments.sweep_file:
        raise ConfigError('--sweep_file: name a gin file whose values are lists')
    points = make_points(
        arguments.gin_file, arguments.sweep_file, arguments.gin_param, allow_imports=arguments.allow_gin_imports
    )
    if arguments.count:
        print(len(points))
        return 0
    if not arguments.run_dir:
        raise ConfigError('--run_dir: name the folder for the runs of the sweep')
    check_path(arguments.run_dir)
    sweep = Sweep(arguments.run_dir, points)
    if arguments.index is not None:
        sweep.check()
        return run_one(sweep, arguments)
    # The points are processes of their own, which need the accelerator of this machine.
    jax.config.update('jax_platforms', 'cpu')
    sweep.check()
    print(f'{counted(len(points), "point")} in {sweep.root}')
    for point in points:
        print(f'{point.index:>4}  {point.name}  [{sweep.result(point)["status"]}]')
    absent = validate_points(sweep, arguments.gpus_per_job)
    if arguments.dry_run:
        for line in absent:
            print(f'not checked: {line}')
        return 0
    runner = Runner(sweep, arguments)
    if absent:
        raise AbsentError(absent[0])
    return runner.run()


def validate_points(sweep: Sweep, devices: int | None) -> list[str]:
    """Refuses the sweep if `lm train` would refuse a point that is not finished; returns what is not there."""
    absent: dict[str, None] = {}
    cache = PlanCache()
    for point in sweep.points:
        if sweep.is_finished(point):
            continue
        try:
            begun = RunDir(sweep.root / point.name).has_checkpoint()
            absent |= dict.fromkeys(validate(point.experiment, devices, cache, begun))
        except LmError as error:
            raise type(error)(f'{error} (in the point {point.name})') from None
    return list(absent)


def run_one(sweep: Sweep, arguments: Any) -> int:
    """Runs the point --index in this process, as `lm train` would, and keeps its exit code."""

    def leads() -> bool:
        return not jax.distributed.is_initialized() or jax.process_index() == 0

    if not 0 <= arguments.index < len(sweep.points):
        raise ConfigError(f'--index {arguments.index}: must be 0 to {len(sweep.points) - 1}')
    point = sweep.points[arguments.index]
    print(f'point {point.index} of {len(sweep.points)}: {point.name}')
    if sweep.is_finished(point):
        print('is finished already')
        return 0
    sweep.prepare(point)
    arguments.run_dir = str(sweep.root / point.name)
    try:
        code = train.main(point.experiment, arguments)
    except Exception as error:
        code = getattr(error, 'exit_code', 1)
        if code not in INTERRUPTED and not isinstance(error, OccupiedError) and leads():
            sweep.record_failure(point, code, ' '.join(str(error).split()))
        raise
    finally:
        if leads():
            sweep.write_results()
    return code
