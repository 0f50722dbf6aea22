"""The verb `lm check`."""

import argparse
import functools
import math
from typing import TYPE_CHECKING

from lm.commands.flags import add_gin_flags, pick, read_experiment, read_index, refuse
from lm.commands.verb import Call, Verb
from lm.errors import ConfigError

if TYPE_CHECKING:
    from lm.check.check import CheckOptions


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--topology',
        action='append',
        default=[],
        metavar='NAME',
        help="compile for this TPU slice: 'v5e:4x8', 'v4:2x4x4', 'v6e-64', …, or for several, '2*v5e:8x8'; may be "
        'repeated; needs libtpu, no TPU',
    )
    parser.add_argument(
        '--no_advice', dest='advice', action='store_false', help='try no changes when a step does not fit'
    )
    parser.add_argument(
        '--advice_minutes',
        type=float,
        metavar='X',
        help='after a change that makes the step fit, search for X minutes for a faster one; default: 5, and no limit '
        'with --best',
    )
    parser.add_argument(
        '--best',
        action='store_true',
        help='try all changes of microbatches, remat and fsdp, also of a step that fits, the fastest unrolled, too, '
        'and print the fastest as gin',
    )
    parser.add_argument(
        '--gradients',
        action='store_true',
        help='compare the gradient of each array of a tiny model of this configuration with differences in float64; '
        'name those that are wrong or zero; takes up to a minute, and no device',
    )
    parser.add_argument(
        '--price_per_chip_hour',
        type=float,
        metavar='X',
        help='the price of a chip-hour, in any currency: print the price of the run',
    )
    parser.add_argument(
        '--if_possible',
        action='store_true',
        help='before machines are paid for, as scripts/tpu calls it: compile nothing where libtpu is missing or does '
        'not know the slice; check nothing where the run that is changed cannot be read from here; refuse tokens that '
        'are not there, and attention of which nothing is approximated',
    )
    parser.add_argument(
        '--run_dir',
        metavar='RUN',
        help='the run that lm train would write; without --gin_file, its config.gin is checked; of the folder of a '
        'sweep, all points',
    )
    parser.add_argument(
        '--branch_from', metavar='RUN', help='the run that lm train would branch from: its config.gin is checked'
    )
    parser.add_argument(
        '--sweep_file', action='append', default=[], metavar='FILE', help='a sweep: check each point, by name'
    )
    parser.add_argument(
        '--index', type=read_index, metavar='I', help='one point of the sweep, from 0 or by its name; default: all'
    )
    parser.add_argument('--json', action='store_true', help='print JSON instead of a table')
    add_gin_flags(parser)


def make_call(arguments: argparse.Namespace) -> Call:
    """Returns the check of the run that `lm train` would make of the same flags or, with --sweep_file, of its points.

    With --if_possible, the call does nothing if this machine cannot read the run that the flags change.
    """
    check_together(arguments)
    if arguments.sweep_file or names_sweep(arguments):
        return make_points_call(arguments)
    from lm.check.check import run_check
    from lm.check.reach import has_begun, is_in_reach
    from lm.runs.base import find_base

    runs = arguments.run_dir, arguments.branch_from, bool(arguments.gin_file)
    if not is_in_reach(*runs, if_possible=arguments.if_possible):
        return int
    if arguments.index is not None:
        raise ConfigError(
            f'--index {arguments.index}: is of a sweep; add --sweep_file, or name its folder by --run_dir'
        )
    experiment = read_experiment(arguments, base=find_base(*runs))
    begun = has_begun(arguments.run_dir, arguments.branch_from, experiment.train.init_from)
    return functools.partial(run_check, experiment, read_options(arguments), begun=begun)


def names_sweep(arguments: argparse.Namespace) -> bool:
    """Tells whether --run_dir is the folder of a sweep that this machine can read, and no run is described besides."""
    from etils import epath

    from lm.check.reach import out_of_reach
    from lm.runs.sweep_file import is_sweep

    if not arguments.run_dir or arguments.gin_file or arguments.branch_from:
        return False
    if arguments.if_possible and out_of_reach(arguments.run_dir):
        return False
    return is_sweep(epath.Path(arguments.run_dir))


def make_points_call(arguments: argparse.Namespace) -> Call:
    """Returns the check of all points of a sweep, or of its --index."""
    from lm.check.check import run_check
    from lm.check.points import run_checks
    from lm.commands.sweep import find_points
    from lm.sweep.points import find_point

    points, options = find_points(arguments), read_options(arguments)
    if arguments.index is not None or len(points) == 1:
        experiment = find_point(points, arguments.index or 0).experiment
        return functools.partial(run_check, experiment, options)
    if arguments.json:
        raise ConfigError(f'--json: is of one run, and the sweep has {len(points)} points; add --index')
    return functools.partial(run_checks, {point.name: point.experiment for point in points}, options)


def read_options(arguments: argparse.Namespace) -> 'CheckOptions':
    """Returns how runs are checked."""
    from lm.check.check import CheckOptions

    given = pick(arguments, 'if_possible', 'advice', 'best', 'price_per_chip_hour', 'gradients')
    limit = math.inf if arguments.best else CheckOptions.advice_seconds
    limit = limit if arguments.advice_minutes is None else 60 * arguments.advice_minutes
    return CheckOptions(tuple(arguments.topology), as_json=arguments.json, advice_seconds=limit, **given)


def check_together(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for a flag that would be ignored, and for an impossible price."""
    price = arguments.price_per_chip_hour
    if arguments.best and not arguments.advice:
        raise ConfigError('--best and --no_advice: give one of them')
    if (minutes := arguments.advice_minutes) is not None and (not minutes >= 0 or not arguments.advice):
        why = 'must be at least 0' if arguments.advice else 'is of the advice; leave this or --no_advice out'
        raise ConfigError(f'--advice_minutes {minutes:g}: {why}')
    if not arguments.topology:
        needing = {
            '--best': arguments.best,
            '--no_advice': not arguments.advice,
            f'--advice_minutes {minutes}': minutes is not None,
            f'--price_per_chip_hour {price}': price is not None,
        }
        for flag, is_given in needing.items():
            if is_given:
                raise ConfigError(f'{flag}: needs --topology, such as --topology v5e:4x8')
    if price is not None and not (price >= 0 and math.isfinite(price)):
        raise ConfigError(f'--price_per_chip_hour {price}: must be a number of at least 0')
    if arguments.sweep_file:
        why = 'the points of a sweep are new runs; leave this or --sweep_file out'
        refuse(arguments, ('run_dir', 'branch_from'), why)


VERB = Verb(
    place=70,
    help='show what a run needs before it is paid for: memory, collectives, hours; compiles for TPUs without one',
    example='lm check --gin_file configs/models/small.gin --gin_file configs/recipes/paper.gin --topology v5e:4x8',
)
