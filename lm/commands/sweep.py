"""The verb `lm sweep`."""

import argparse
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from lm.commands.flags import (
    add_gin_flags,
    add_job_flags,
    add_option_flags,
    find_options,
    job_address,
    list_options,
    read_index,
    read_points,
)
from lm.commands.verb import Call, Verb
from lm.errors import ConfigError, require
from lm.sweep.options import ClusterOptions, SearchOptions, SweepOptions

if TYPE_CHECKING:
    from lm.sweep.points import Point


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--run_dir', metavar='ROOT', help='the folder that gets a run directory for each point')
    parser.add_argument(
        '--sweep_file',
        action='append',
        default=[],
        metavar='FILE',
        help='a gin file whose lists are the axes of a grid; lists of one scope zip/, zip_a/, … vary together; '
        'variant/NAME/… sets values of a named variant; default: the points that --emit wrote into ROOT',
    )
    parser.add_argument('--dry_run', action='store_true', help='print the list of runs and stop')
    parser.add_argument('--count', action='store_true', help='print the number of points and stop')
    add_option_flags(parser, SweepOptions)
    parser.add_argument(
        '--index', type=read_index, metavar='I', help='run only point I, from 0 or by its name, in this process'
    )
    parser.add_argument('--status', action='store_true', help='print how far the points in ROOT are and stop')
    parser.add_argument(
        '--emit',
        nargs=2,
        metavar=('FORMAT', 'DIR'),
        help='run nothing; write manifests into the folder DIR, with which a cluster runs the points: jobset, skypilot '
        'or slurm',
    )
    add_gin_flags(parser)
    add_job_flags(parser)
    add_search_flags(parser)
    machines = parser.add_argument_group('the machines of each point (--emit)', 'a format refuses what it does not use')
    add_option_flags(machines, ClusterOptions)


def add_search_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        'a search',
        'instead of lists, --sweep_file has distributions: log_uniform(1e-4, 1e-2), uniform(0.0, 0.2), '
        'integers(2, 8), choice(@softmax(), @polynomial())',
    )
    group.add_argument(
        '--search',
        nargs='?',
        const='tpe',
        choices=('tpe', 'random'),
        help='draw the points, for the least loss of the last evaluation; default: tpe',
    )
    add_option_flags(group, SearchOptions)


def make_call(arguments: argparse.Namespace) -> Call:
    given = [flag for flag in vars(arguments) if is_given(arguments, flag)]
    mode = next((mode for mode in MODES if mode.flag in given), TRAIN)
    for flag in given:
        takers = [other for other in (*MODES, TRAIN) if flag == other.flag or flag in other.options]
        if not takers or mode in takers:
            continue
        if not mode.flag:
            raise ConfigError(f'--{flag}: give --{takers[0].flag} as well; it is one of its flags')
        raise ConfigError(f'{show(arguments, mode.flag)} and {show(arguments, flag)}: give one of them; {mode.why}')
    return mode.make_call(arguments)


def make_train_call(arguments: argparse.Namespace) -> Call:
    """Returns the call that trains all points on this machine."""
    from lm.sweep.run import run_sweep
    from lm.sweep.sweep import Sweep

    sweep = Sweep(read_root(arguments, 'for the runs of the sweep'), find_points(arguments))
    return functools.partial(run_sweep, sweep, read_sweep_options(arguments), dry_run=arguments.dry_run)


def make_point_call(arguments: argparse.Namespace) -> Call:
    """Returns the call of --index."""
    from lm.sweep.run import run_point
    from lm.sweep.sweep import Sweep

    sweep = Sweep(read_root(arguments, 'for the runs of the sweep'), find_points(arguments))
    return functools.partial(run_point, sweep, arguments.index, job_address(arguments))


def read_root(arguments: argparse.Namespace, what: str) -> str:
    """Returns --run_dir. Raises ConfigError where it is missing, the folder `what`, or cannot be a folder."""
    from lm.runs.paths import check_path

    if not arguments.run_dir:
        raise ConfigError(f'--run_dir: name the folder {what}, such as --run_dir runs/sweep')
    check_path(arguments.run_dir)
    return arguments.run_dir


def find_points(arguments: argparse.Namespace, params: tuple[str, ...] = ()) -> 'list[Point]':
    """Returns the points of --sweep_file, or the points that the folder --run_dir lists."""
    from lm.files import open_path
    from lm.sweep import points

    if arguments.sweep_file:
        made = read_points(arguments, params)
        return points.keep_names(open_path(arguments.run_dir), made) if arguments.run_dir else made
    if not arguments.run_dir:
        raise ConfigError('--sweep_file: name a gin file whose values are lists')
    if arguments.gin_file or arguments.gin_param:
        raise ConfigError('--sweep_file: name a gin file whose values are lists; the points in --run_dir are complete')
    return points.read_points(arguments.run_dir, arguments.allow_gin_imports)


def make_emit_call(arguments: argparse.Namespace) -> Call:
    """Returns the call of --emit. The number of processes is part of the configuration of each point."""
    from lm.files import is_remote
    from lm.sweep.emit import emit_sweep, find_format
    from lm.sweep.sweep import Sweep

    name, folder = arguments.emit
    root = read_root(arguments, 'for the runs of the sweep')
    kind, options = find_format(name), read_cluster_options(arguments)
    kind.check(options, not is_remote(root))
    processes = (f'mesh.processes = {options.processes}',) if options.processes > 1 else ()
    sweep = Sweep(root, find_points(arguments, processes))
    return functools.partial(emit_sweep, sweep, kind, options, folder, retry_failed=bool(arguments.retry_failed))


def make_search_call(arguments: argparse.Namespace) -> Call:
    """Returns the call of --search."""
    if not arguments.sweep_file:
        raise ConfigError('--sweep_file: name a gin file with distributions')
    root = read_root(arguments, 'for the runs of the search')
    require('optuna', '--search', 'search')
    from lm.sweep.search.run import run_search
    from lm.sweep.search.search import Search
    from lm.sweep.search.space import make_space

    options = read_sweep_options(arguments)
    given: dict[str, Any] = {'parallel': options.jobs} | find_options(arguments, SearchOptions)
    search = SearchOptions(arguments.search, **given)
    if search.parallel < options.jobs:
        raise ConfigError(f'--parallel {search.parallel}: must be at least {options.jobs}, which is --jobs')
    space = make_space(
        *(arguments.gin_file, arguments.sweep_file, arguments.gin_param), allow_imports=arguments.allow_gin_imports
    )
    found = Search(root, space, search, options.retry_failed)
    return functools.partial(run_search, found, options, dry_run=arguments.dry_run)


def make_status_call(arguments: argparse.Namespace) -> Call:
    """Returns the call of --status, which needs the folder of the sweep alone."""
    from lm.sweep.status import show_status

    return functools.partial(show_status, read_root(arguments, 'of the sweep'))


def read_cluster_options(arguments: argparse.Namespace) -> ClusterOptions:
    """Returns the machines of each point. Raises ConfigError for a slice of TPUs that is not offered."""
    from lm.hardware import parse

    given = find_options(arguments, ClusterOptions)
    if 'topology' in given:
        given['topology'] = parse(given['topology'])
    return ClusterOptions(jobs=arguments.jobs, **given)


def read_sweep_options(arguments: argparse.Namespace) -> SweepOptions:
    """Returns how this machine runs the points."""
    return SweepOptions(allow_gin_imports=arguments.allow_gin_imports, **find_options(arguments, SweepOptions))


def is_given(arguments: argparse.Namespace, flag: str) -> bool:
    value = getattr(arguments, flag)
    return value is not None and value is not False and value != []


def show(arguments: argparse.Namespace, flag: str) -> str:
    """Returns a flag as the user wrote it; its value only where it is a number."""
    value = getattr(arguments, flag)
    return f'--{flag} {value}' if isinstance(value, int) and not isinstance(value, bool) else f'--{flag}'


class Mode(NamedTuple):
    """One action of `lm sweep`, such as --emit or --status; without its flag, the training of the points."""

    flag: str
    """The flag that asks for it; '': it is what the verb does without such a flag."""
    make_call: Callable[[argparse.Namespace], Call]
    options: tuple[str, ...]
    """Its flags, besides the flags that no mode lists: all modes take these."""
    why: str = ''
    """Why it takes no flag of another mode."""


def name_flags(options: type) -> list[str]:
    """Returns the names of the flags that a dataclass of options has."""
    return [field.name for field in list_options(options)]


RUN_FLAGS = ('dry_run', *name_flags(SweepOptions))
ADDRESS_FLAGS = ('coordinator_address', 'process_count', 'process_id')
MODES = (
    Mode('emit', make_emit_call, (*name_flags(ClusterOptions), 'jobs', 'retry_failed'), '--emit starts nothing'),
    Mode('status', make_status_call, (), '--status starts nothing'),
    Mode('search', make_search_call, (*RUN_FLAGS, *name_flags(SearchOptions)), '--search draws the points'),
    Mode('index', make_point_call, ADDRESS_FLAGS, '--index runs one point, in this process'),
    Mode(
        'count', lambda arguments: functools.partial(print, len(find_points(arguments))), (), '--count is of all points'
    ),
)
"""The first whose flag is given answers."""
TRAIN = Mode('', make_train_call, RUN_FLAGS)


VERB = Verb(
    place=80,
    help='train every point of a grid of configurations, or those that are not finished yet',
    example='lm sweep --run_dir runs/sweep --gin_file configs/experiments/quickstart.gin '
    '--sweep_file configs/sweeps/quickstart.gin --dry_run',
    exit_codes='\n  Of a sweep 1 also means that points did not succeed: its table says which and why.',
)
