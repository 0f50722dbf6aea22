"""The verb `lm train`."""

import argparse
import functools

from lm.commands.flags import add_gin_flags, add_job_flags, job_address, pick, read_experiment
from lm.commands.verb import Call, Verb
from lm.errors import ConfigError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--run_dir',
        required=True,
        metavar='DIR',
        help='the run: a new folder, or one to resume; its name names the run',
    )
    parser.add_argument(
        '--compile_cache', metavar='DIR', help="the folder of compiled programs; 'none' keeps none; default: in the run"
    )
    parser.add_argument(
        '--rewind_to',
        type=int,
        metavar='STEP',
        help='go on from this checkpoint, with a lower rate or without some batches; later ones are moved aside',
    )
    parser.add_argument(
        '--branch_from',
        metavar='RUN',
        help="begin a new run from a checkpoint of another one, with that one's configuration but for what is given "
        'here: optimizer state, step count and position in the data go on',
    )
    parser.add_argument('--step', type=int, metavar='N', help='the checkpoint for --branch_from')
    add_gin_flags(parser)
    add_job_flags(parser)


def make_call(arguments: argparse.Namespace) -> Call:
    from lm.runs.base import check_start, find_base
    from lm.runs.paths import check_name, check_path

    run_dir, parent = arguments.run_dir, arguments.branch_from
    check_path(run_dir)
    check_name(run_dir.rstrip('/').rpartition('/')[2])
    check_start(parent, arguments.step, arguments.rewind_to)
    base = find_base(run_dir, parent, bool(arguments.gin_file))
    experiment = read_experiment(arguments, base=base)
    data = experiment.data
    if not (base or arguments.gin_file or data.path or data.mixture or data.task):
        raise ConfigError(
            f"--run_dir {run_dir}: holds no run to go on with, and data.path = '' names no data for a new one; name "
            'another run, or the data, for example --set data.path=data/pg19'
        )

    from lm.session.train import train_in_job

    return functools.partial(
        train_in_job,
        experiment,
        run_dir,
        job_address(arguments),
        **pick(arguments, 'rewind_to', 'compile_cache', 'branch_from', 'step'),
    )


VERB = Verb(
    place=20,
    help='train a model, or resume a run: the same command does both',
    example='lm train --run_dir runs/quickstart --gin_file configs/experiments/quickstart.gin',
    resumes=True,
)
