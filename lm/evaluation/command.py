"""`lm evaluate`."""

import dataclasses
import hashlib
import json
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from lm.config.configurable import check_kind
from lm.errors import ConfigError
from lm.evaluation.evaluator import AnyEvaluator, make_evaluator
from lm.evaluation.perplexity import by_word
from lm.evaluation.plan import plan_evaluation, settle_evaluation
from lm.experiment import Experiment
from lm.loaded_run import OPENED, LoadedRun, load_run
from lm.runs.records import to_json
from lm.text import perplexity
from lm.training.mesh import initialize_distributed
from lm.training.objectives import check_objective

TOLD = {f'evaluate.{name}' for name in ('split', 'context_length', 'window', 'batch_size', 'chunk')}
"""What the name of a file tells, or what changes no result."""
OF_TASKS, OF_SPLITS = ('num_fewshot', 'include_path', 'task_data', 'limit'), ('split', 'window', 'chunk')
"""Flags that only mean something with --tasks, and without it."""


def main(experiment: Experiment, arguments: Any) -> int:
    """`lm evaluate`: scores a split with the weights of a run, prints a table and writes evaluations/*.json."""
    check_flags(arguments)
    initialize_distributed(
        experiment.mesh, arguments.coordinator_address, arguments.process_count, arguments.process_id
    )
    run = load_run(experiment, arguments.run_dir, arguments.step)
    if arguments.tasks is not None:
        from lm.eval_harness.tasks import main as evaluate_tasks

        return evaluate_tasks(run, arguments)
    evaluator = evaluator_of(run)
    result = evaluator(run.weights, run.step)
    if jax.process_index() == 0:
        # A model that is run otherwise than it was trained, other data and other figures have a file of their own.
        changes = {name: new for name, new in run.changes.items() if name not in TOLD}
        result |= {'overrides': changes, 'data_sha256': run.store.fingerprints['data']}
        parts = [f'step-{run.step}', result['split'], str(result['context_length'])]
        parts += [experiment.evaluate.window.replace(':', '-')]
        parts += [hashlib.sha256(json.dumps(changes).encode()).hexdigest()[:8]] if changes else []
        path = run.directory.evaluations / ('_'.join(parts) + '.json')
        if arguments.json:
            print(to_json(result), flush=True)
        elif experiment.data.task:
            print(f'{result["split"]} at step {result["step"]}: {evaluator.describe(result)}', flush=True)
        else:
            print_table(result)
        run.directory.keep_evaluation(path, to_json(result) + '\n')  # by now the figures are told
        if not arguments.json:
            print(f'written to {path}')
    return 0


def check_flags(arguments: Any) -> None:
    """Raises ConfigError for a flag that would be ignored, and for numbers that the harness would take for others."""
    of_tasks = arguments.tasks is not None
    for flag in OF_SPLITS if of_tasks else OF_TASKS:
        if (value := getattr(arguments, flag)) is not None:
            remedy = 'is of a split, not of --tasks; leave out one' if of_tasks else 'is of tasks; add --tasks'
            raise ConfigError(f'--{flag} {value}: {remedy}')
    for flag, least in (('limit', 1), ('num_fewshot', 0)):
        if (value := getattr(arguments, flag)) is not None and value < least:
            raise ConfigError(f'--{flag} {value}: must be at least {least}')


def evaluate(run: LoadedRun, **settings: Any) -> dict[str, Any]:
    """The result of `lm evaluate` as a dict: of a run that `lm.load` has opened, nothing is written.

    Args:
        settings: what differs from the run's own, such as split = 'test' or context_length = 4096
            (`lm.evaluation.config.EvaluateConfig`).

    Raises ConfigError where they do not fit the split.
    """
    return evaluator_of(run, **settings)(run.weights, run.step)


def evaluator_of(run: LoadedRun, **settings: Any) -> AnyEvaluator:
    """What scores the weights of a run as its configuration says, but for `settings`."""
    check_kind('run', run, LoadedRun, OPENED)
    experiment = run.experiment
    config = dataclasses.replace(experiment.evaluate, **settings)
    data, train, model = experiment.data, experiment.train, experiment.model
    check_objective(train.objective, data, model)
    plan = plan_evaluation(settle_evaluation(config, data, train, model), run.store)
    return make_evaluator(plan, run.functions, run.mesh)


def print_table(result: dict) -> None:
    """The result for people."""
    table = Table(title=f'{result["split"]} at step {result["step"]}', show_header=False, title_justify='left')
    rows = {
        'perplexity per token': f'{result["perplexity"]:.4f}',
        **by_word_and_byte(result),
        **accuracies(result),
        'nats in total': f'{result["sum_nats"]:.3f}',
        'tokens scored': f'{result["tokens"]:,}',
        'context / window': f'{result["context_length"]} / {result["window"]}',
        'tokenizer': result['tokenizer_sha256'][:16],
    }
    for name, value in rows.items():
        table.add_row(name, value)
    by_position = Table(title='loss by position in the context', title_justify='left')
    for heading in ('positions', 'loss', 'perplexity'):
        by_position.add_column(heading, justify='right')
    for bucket in result['loss_by_position']:
        by_position.add_row(
            f'{bucket["start"]}–{bucket["end"] - 1}', f'{bucket["loss"]:.4f}', f'{perplexity(bucket["loss"]):.2f}'
        )
    console = Console()
    console.print(table)
    if result.get('sets'):
        console.print(table_of_sets(result['sets']))
    console.print(by_position)


def table_of_sets(sets: dict[str, dict]) -> Table:
    """The figures of each set for people."""
    table = Table(title='by set', title_justify='left')
    columns = {
        'perplexity per token': ('perplexity', '.4f'),
        'per word': ('word_perplexity', '.4f'),
        'bits per byte': ('bits_per_byte', '.5f'),
        'accuracy': ('accuracy', '.2%'),
        'frequencies alone: perplexity': ('baseline_perplexity', '.4f'),
        'accuracy of these': ('baseline_accuracy', '.2%'),
        'tokens': ('tokens', ','),
    }
    shown = {heading: told for heading, told in columns.items() if all(told[0] in found for found in sets.values())}
    for heading in ('set', 'split', *shown):
        table.add_column(heading, justify='left' if heading in ('set', 'split') else 'right')
    for name, found in sets.items():
        table.add_row(name, found['split'], *(format(found[figure], form) for figure, form in shown.values()))
    return table


def by_word_and_byte(result: dict) -> dict[str, str]:
    """Rows for people; none where only some tokens were scored, because the others were not hidden."""
    if 'word_perplexity' not in result:
        return {}
    return {
        'perplexity per word': by_word(result, 4),
        'bits per byte': f'{result["bits_per_byte"]:.5f}',
        'words / bytes / documents': f'{result["words"]:,} / {result["bytes"]:,} / {result["documents"]:,}',
    }


def accuracies(result: dict) -> dict[str, str]:
    """Rows for people: how often no token was more probable, and what their frequencies alone would give."""
    if 'accuracy' not in result:
        return {}
    return {
        'accuracy': f'{result["accuracy"]:.2%}',
        'frequencies alone: perplexity': f'{result["baseline_perplexity"]:.4f}',
        'frequencies alone: accuracy': f'{result["baseline_accuracy"]:.2%}',
    }
