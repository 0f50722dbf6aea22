"""The verb `lm distill`."""

import argparse
import functools

from lm.commands.flags import add_gin_flags, add_job_flags, job_address, pick, refuse
from lm.commands.verb import Call, Verb

STAGES = {
    'align': 'attention learns to give the outputs of the attention of the teacher, layer by layer',
    'distill': 'the whole student learns to predict what the teacher predicts',
}
"""The objective of each stage → what it does."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--teacher', required=True, metavar='RUN', help='the trained model: a run of lm train or import'
    )
    stages = '; '.join(f'{name}: {text}' for name, text in STAGES.items())
    parser.add_argument('--stage', choices=tuple(STAGES), help=stages)
    parser.add_argument(
        '--choose',
        type=int,
        metavar='K',
        help='after align: rank the layers of --run_dir by what recall loses without the attention of the teacher, and '
        'write the pattern in which K layers keep it',
    )
    parser.add_argument(
        '--forecast',
        action='store_true',
        help='print what --run_dir recalls beside the teacher: needles, layers, repeated passages; and, from the saved '
        "steps of stage 2, the tokens that it probably needs for 95 %% of the teacher's recall",
    )
    parser.add_argument(
        '--rank_by',
        choices=('recall_per_loss', 'recall'),
        help='with --choose: the rank of a layer; default: recall_per_loss, loss of recall per loss of text (HALO)',
    )
    parser.add_argument(
        '--cache',
        type=int,
        metavar='K',
        help='before distill: keep the K most probable tokens of the teacher for each window in the token store, for '
        'distill.top_k = K; then the teacher is not in memory; the same command goes on after a stop',
    )
    parser.add_argument('--run_dir', metavar='DIR', help='the run of this stage: a new folder, or one to resume')
    parser.add_argument(
        '--init_from', metavar='RUN', help='the run of the stage before; default: the weights of the teacher'
    )
    parser.add_argument(
        '--compile_cache', metavar='DIR', help="the folder of compiled programs; 'none' keeps none; default: in the run"
    )
    parser.add_argument('--rewind_to', type=int, metavar='STEP', help='go on from this checkpoint')
    add_gin_flags(parser)
    add_job_flags(parser)


def make_call(arguments: argparse.Namespace) -> Call:
    from lm.errors import ConfigError

    if [arguments.stage, arguments.choose, arguments.forecast or None, arguments.cache].count(None) != 3:
        raise ConfigError('--stage, --choose, --forecast and --cache: give one of them')
    if arguments.cache is not None:
        return make_cache_call(arguments)
    if arguments.run_dir is None:
        raise ConfigError('--run_dir DIR: name the run of this stage')
    if arguments.choose is not None or arguments.forecast:
        return make_measuring_call(arguments)
    if arguments.rank_by is not None:
        raise ConfigError(f'--rank_by {arguments.rank_by}: is of --choose; add it')

    from lm.experiment import list_not_inherited, load
    from lm.runs.paths import check_name, check_path, explain_absence, find_import
    from lm.runs.run_dir import RunDir

    run_dir, teacher = arguments.run_dir, arguments.teacher.rstrip('/')
    check_path(run_dir)
    check_name(run_dir.rstrip('/').rpartition('/')[2])
    run = RunDir(teacher, found=True)
    if not run.config.exists() or find_import(run.path):
        raise ConfigError(f'--teacher {teacher}: {explain_absence(run.path)}')
    params = [f'train.objective = @{arguments.stage}()', f'{arguments.stage}.teacher = {teacher!r}']
    if arguments.init_from is not None:
        params.append(f'train.init_from = {arguments.init_from!r}')
    experiment = load(
        arguments.gin_file,
        [*params, *arguments.gin_param],
        allow_imports=arguments.allow_gin_imports,
        base=str(run.config),
        leave_out=list_not_inherited(),
    )

    from lm.session.train import train_in_job

    return functools.partial(
        train_in_job, experiment, run_dir, job_address(arguments), **pick(arguments, 'rewind_to', 'compile_cache')
    )


def make_measuring_call(arguments: argparse.Namespace) -> Call:
    from lm.errors import ConfigError

    flag = '--forecast' if arguments.forecast else '--choose'
    if arguments.choose is not None and arguments.choose < 1:
        raise ConfigError(f'--choose {arguments.choose}: must be at least 1')
    unread = 'init_from', 'rewind_to', 'compile_cache', 'coordinator_address', 'process_count', 'process_id'
    refuse(arguments, unread, f'is of a --stage; {flag} trains nothing')
    for file in arguments.gin_file:
        raise ConfigError(f'--gin_file {file}: is of a --stage; {flag} reads both runs, and --set')
    given = arguments.run_dir, arguments.teacher
    if arguments.forecast:
        from lm.inference.forecast import forecast_recall

        refuse(arguments, ('rank_by',), 'is of --choose; leave it out')
        return functools.partial(forecast_recall, *given, arguments.gin_param)
    from lm.inference.layer_choice import choose_layers

    ranking = {} if arguments.rank_by is None else {'ranking': arguments.rank_by}
    return functools.partial(choose_layers, *given, arguments.choose, gin_params=arguments.gin_param, **ranking)


def make_cache_call(arguments: argparse.Namespace) -> Call:
    from lm.inference.teacher_cache import cache_predictions, load_cached

    unread = 'run_dir', 'init_from', 'rewind_to', 'compile_cache', 'rank_by'
    refuse(
        arguments, (*unread, 'coordinator_address', 'process_count', 'process_id'), 'is not of --cache; leave it out'
    )
    given = arguments.gin_file, arguments.gin_param
    experiment = load_cached(arguments.teacher.rstrip('/'), *given, allow_imports=arguments.allow_gin_imports)
    return functools.partial(cache_predictions, experiment, arguments.teacher.rstrip('/'), arguments.cache)


VERB = Verb(
    place=25,
    help='convert a trained model to another attention: its layers or its predictions are the aim',
    example='lm distill --teacher runs/softmax --stage align --run_dir runs/align --gin_file configs/recipes/align.gin',
    resumes=True,
)
