"""The verb `lm sweep`."""

import argparse
import functools

from lm.commands.flags import add_gin_flags, add_job_flags, job_address, pick, read_points
from lm.commands.verb import Call, Verb
from lm.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--run_dir', metavar='ROOT', help='the folder that gets a run directory for each point')
    parser.add_argument(
        '--sweep_file',
        action='append',
        default=[],
        metavar='FILE',
        help='a gin file whose lists are the axes of a grid; lists of one scope zip/, zip_a/, … vary together',
    )
    parser.add_argument('--dry_run', action='store_true', help='print the list of runs and stop')
    parser.add_argument('--count', action='store_true', help='print the number of points and stop')
    parser.add_argument('--jobs', type=int, metavar='N', help='points at a time; default: 1')
    parser.add_argument('--gpus_per_job', type=int, metavar='K', help='share the GPUs out, K to a point')
    parser.add_argument('--index', type=int, metavar='I', help='run only point I, from 0, in this process')
    parser.add_argument('--retry_failed', action='store_true', help='run points again that diverged or were refused')
    add_gin_flags(parser)
    add_job_flags(parser)


def make_call(arguments: argparse.Namespace) -> Call:
    check_together(arguments)
    if not arguments.sweep_file:
        raise ConfigError('--sweep_file: name a gin file whose values are lists')
    points = read_points(arguments)
    if arguments.count:
        return functools.partial(print, len(points))
    if not arguments.run_dir:
        raise ConfigError('--run_dir: name the folder for the runs of the sweep')

    from lm.runs.paths import check_path
    from lm.sweep.run import run_point, run_sweep
    from lm.sweep.runner import SweepOptions
    from lm.sweep.sweep import Sweep

    check_path(arguments.run_dir)
    sweep = Sweep(arguments.run_dir, points)
    if arguments.index is not None:
        return functools.partial(run_point, sweep, arguments.index, job_address(arguments))
    options = SweepOptions(arguments.jobs or 1, **pick(arguments, 'gpus_per_job', 'retry_failed', 'allow_gin_imports'))
    return functools.partial(run_sweep, sweep, options, dry_run=arguments.dry_run)


def check_together(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for flags that exclude each other, and for numbers that are too small."""
    index, jobs, gpus = arguments.index, arguments.jobs, arguments.gpus_per_job
    for flag, number in (('--jobs', jobs), ('--gpus_per_job', gpus)):
        if number is not None and number < 1:
            raise ConfigError(f'{flag} {number}: must be at least 1')
        if number is not None and index is not None:
            raise ConfigError(
                f'--index {index} and {flag} {number}: give one of them; --index runs one point, in this process'
            )
    if index is not None and arguments.dry_run:
        raise ConfigError(f'--index {index} and --dry_run: give one of them; --dry_run lists all points')
    if index is not None and arguments.count:
        raise ConfigError(f'--index {index} and --count: give one of them; --count is of all points')
    if arguments.count and arguments.dry_run:
        raise ConfigError('--count and --dry_run: give one of them; --dry_run lists the points as well')
    given = arguments.coordinator_address, arguments.process_count, arguments.process_id
    if index is None and given != (None, None, None):
        raise ConfigError('--coordinator_address: runs of several processes need --index, one point for all of them')


VERB = Verb(
    name='sweep',
    place=80,
    help='train every point of a grid of configurations, or those that are not finished yet',
    example='lm sweep --run_dir runs/sweep --gin_file configs/experiments/quickstart.gin '
    '--sweep_file configs/sweeps/quickstart.gin --dry_run',
    add_flags=add_flags,
    make_call=make_call,
    exit_codes='\n  Of a sweep 1 also means that points did not succeed: its table says which and why.',
)
