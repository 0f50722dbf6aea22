"""The verb `lm evaluate`."""

import argparse
import functools

from lm.commands.flags import (
    add_gin_flags,
    add_job_flags,
    add_run_flags,
    bindings,
    choose_run,
    job_address,
    pick,
    read_experiment_of_run,
    refuse,
)
from lm.commands.verb import Call, Verb
from lm.errors import ConfigError

OF_TASKS = ('num_fewshot', 'include_path', 'task_data', 'limit', 'sample_seed')
OF_SPLITS = ('split', 'window', 'chunk')
"""The flags that only have a meaning with --tasks, and without it."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_run_flags(parser)
    parser.add_argument('--split', help='the split to measure; default: data.eval_split')
    parser.add_argument('--context_length', type=int, metavar='N', help='tokens per window; default: as in training')
    parser.add_argument('--window', help="'disjoint' or 'sliding:STRIDE'")
    parser.add_argument('--batch_size', type=int, metavar='N', help='how many windows are computed at a time')
    parser.add_argument(
        '--chunk', type=int, metavar='N', help='how many tokens of a window are computed at a time; default: all'
    )
    parser.add_argument(
        '--tasks',
        metavar='A,B,…',
        help='tasks of lm-evaluation-harness, or .jsonl files of questions, in place of a split',
    )
    parser.add_argument(
        '--num_fewshot', type=int, metavar='N', help='with --tasks: how many examples stand before each question'
    )
    parser.add_argument('--include_path', metavar='DIR', help='with --tasks: a folder with tasks of your own (YAML)')
    parser.add_argument('--task_data', metavar='DIR', help='with --tasks: read data from DIR/TASK, not from the hub')
    parser.add_argument('--limit', type=int, metavar='N', help='with --tasks: take only the first N examples of each')
    parser.add_argument(
        '--sample_seed', type=int, metavar='SEED', help='with --limit: draw the N examples at random by this seed'
    )
    parser.add_argument('--json', action='store_true', help='print JSON instead of a table')
    add_gin_flags(parser)
    add_job_flags(parser)


def make_call(arguments: argparse.Namespace) -> Call:
    flags = pick(arguments, 'split', 'context_length', 'window', 'batch_size', 'chunk')
    experiment = read_experiment_of_run(arguments, bindings('evaluate', flags))
    check_together(arguments)
    run, job = (experiment, choose_run(arguments), arguments.step), job_address(arguments)
    if arguments.tasks is None:
        from lm.inference.evaluation import evaluate_split

        return functools.partial(evaluate_split, *run, job, as_json=arguments.json)
    from lm.eval_harness.tasks import evaluate_on_tasks

    return functools.partial(
        evaluate_on_tasks,
        *run,
        job,
        list(dict.fromkeys(name.strip() for name in arguments.tasks.split(',') if name.strip())),
        as_json=arguments.json,
        **pick(arguments, *OF_TASKS),
    )


def check_together(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for a flag that would be ignored, and for numbers that the harness would misread."""
    of_tasks = arguments.tasks is not None
    why = 'is of a split, not of --tasks; leave out one' if of_tasks else 'is of tasks; add --tasks'
    refuse(arguments, OF_SPLITS if of_tasks else OF_TASKS, why)
    for flag, least in (('limit', 1), ('num_fewshot', 0), ('sample_seed', 0)):
        if (value := getattr(arguments, flag)) is not None and value < least:
            raise ConfigError(f'--{flag} {value}: must be at least {least}')
    if arguments.sample_seed is not None and arguments.limit is None:
        raise ConfigError(f'--sample_seed {arguments.sample_seed}: says which examples --limit takes; add --limit')


VERB = Verb(
    place=30,
    help='measure the perplexity of a run on a split',
    example='lm evaluate runs/quickstart --split validation --window sliding:256',
)
