"""The perplexity of a run on a split: `lm evaluate`, and `lm.evaluate` in Python."""

import dataclasses
import functools
import hashlib
import json
from typing import Any

import jax

from lm.config.configurable import check_kind
from lm.evaluation.conditioning import FIELD as CONDITIONING
from lm.evaluation.evaluator import AnyEvaluator, make_evaluator
from lm.evaluation.finite import refuse_not_finite
from lm.evaluation.perplexity import format_word_perplexity
from lm.evaluation.plan import check_evaluation, plan_evaluation, settle_evaluation
from lm.experiment import Experiment
from lm.hardware import Target
from lm.inference.loaded_run import OPENED, LoadedRun, load_run
from lm.ops.platform import SEQUENCE_AXIS
from lm.pod.job import JobAddress, initialize_distributed
from lm.runs.records import to_json
from lm.text import make_visible, perplexity, print_table
from lm.training.objectives import check_objective

IN_FILE_NAME = {f'evaluate.{name}' for name in ('split', 'context_length', 'window', 'batch_size', 'chunk')}
"""Bindings that are part of the name of the file, or without effect on results."""


def evaluate_split(
    experiment: Experiment, run_dir: str, step: int | None, job: JobAddress, *, as_json: bool = False
) -> None:
    """Scores a split with the weights of a run at `step` (None: the newest), prints a table or JSON, and writes
    evaluations/*.json."""
    initialize_distributed(experiment.mesh, job)
    run = load_run(experiment, run_dir, step)
    evaluator = make_run_evaluator(run)
    result = evaluate_whole(evaluator, run)
    if jax.process_index() != 0:
        return
    # A changed model, other data and other figures each get their own file.
    changes = {name: new for name, new in run.changes.items() if name not in IN_FILE_NAME}
    result |= {'overrides': changes, 'data_sha256': run.store.fingerprints['data']}
    parts = [f'step-{run.step}', result['split'], str(result['context_length'])]
    parts += [experiment.evaluate.window.replace(':', '-')]
    parts += [hashlib.sha256(json.dumps(changes).encode()).hexdigest()[:8]] if changes else []
    path = run.directory.evaluations / ('_'.join(parts) + '.json')
    if as_json:
        print(to_json(result), flush=True)
    elif experiment.data.task:
        print(f'{result["split"]} at step {result["step"]}: {evaluator.describe(result)}', flush=True)
    else:
        print_result(result)
    run.directory.keep_evaluation(path, to_json(result) + '\n')  # the figures are already printed
    if not as_json:
        print(f'written to {path}')


def evaluate(run: LoadedRun, **settings: Any) -> dict[str, Any]:
    """Returns the result of `lm evaluate` as a dict, for a run that `lm.load` has opened; writes no file.

    Args:
        settings: values that replace the run's own, such as split = 'test' or context_length = 4096
            (`lm.evaluation.config.EvaluateConfig`).

    Raises ConfigError if they do not fit the split, and Diverged, which names the first layer, if a loss is not finite.
    """
    return evaluate_whole(make_run_evaluator(run, **settings), run)


def evaluate_whole(evaluator: AnyEvaluator, run: LoadedRun) -> dict[str, object]:
    """Evaluates the weights of a run completely; nothing can stop it."""
    result = evaluator(run.weights, run.step)
    assert result is not None
    return result


def make_run_evaluator(run: LoadedRun, **settings: object) -> AnyEvaluator:
    """Makes the evaluator of a run by its configuration, with changes by `settings`."""
    check_kind('run', run, LoadedRun, OPENED)
    experiment = run.experiment
    config = dataclasses.replace(experiment.evaluate, **settings)
    data, train, model = run.data, experiment.train, experiment.model
    check_objective(train.objective, data, model)
    settled = settle_evaluation(config, data, train, model)
    model.check_parts(run.mesh.shape.get(SEQUENCE_AXIS, 1), settled.context_length, 'evaluate.context_length')
    target = Target.of_devices(run.mesh.devices.flatten().tolist())
    if target.memory:
        check_evaluation(settled, model, run.mesh.size, run.functions.dtype.itemsize, target.memory)
    plan = plan_evaluation(settled, run.splits)
    return make_evaluator(plan, run.functions, run.mesh, functools.partial(refuse_not_finite, run.model))


def print_result(result: dict) -> None:
    """Prints the result for people."""
    rows = describe_figures(result)
    if 'bits_per_byte' in result:
        counts = (f'{result[name]:,}' for name in ('words', 'bytes', 'documents'))
        rows['words / bytes / documents'] = ' / '.join(counts)
    rows |= {
        'nats in total': f'{result["sum_nats"]:.3f}',
        'tokens scored': f'{result["tokens"]:,}',
        'context / window': f'{result["context_length"]} / {result["window"]}',
        'before texts / windows': describe_conditioning(result[CONDITIONING]),
        'tokenizer': result['tokenizer_sha256'][:16],
    }
    headings = ('', f'{result["split"]} at step {result["step"]}')
    print_table(headings, rows.items(), left=headings)
    if result.get('sets'):
        print_sets(result['sets'])
    buckets = [
        (f'{bucket["start"]}–{bucket["end"] - 1}', f'{bucket["loss"]:.4f}', f'{perplexity(bucket["loss"]):.2f}')
        for bucket in result['loss_by_position']
    ]
    print_table(('positions', 'loss', 'perplexity'), buckets, title='loss by position in the context')


def describe_conditioning(stated: dict[str, Any]) -> str:
    """Describes what stands before texts and windows, with the token where there is one."""
    token = f' ({make_visible(stated["token"] or str(stated["token_id"]))})' if 'token_id' in stated else ''
    return f'{stated["before_texts"]}{token} / {stated["before_windows"]}'


def print_sets(sets: dict[str, dict]) -> None:
    """Prints the figures of each set."""
    rows = {name: describe_figures(found) | {'tokens': f'{found["tokens"]:,}'} for name, found in sets.items()}
    shown = [title for title in next(iter(rows.values())) if all(title in row for row in rows.values())]
    cells = [(name, sets[name]['split'], *(row[title] for title in shown)) for name, row in rows.items()]
    print_table(('set', 'split', *shown), cells, left=('set', 'split'), title='by set')


def describe_figures(result: dict) -> dict[str, str]:
    """Describes the figures of a result for people, by title.

    Those per word and byte are missing where only some tokens were scored, because the others were not hidden.
    """
    rows = {'perplexity per token': f'{result["perplexity"]:.4f}'}
    if 'word_perplexity' in result:
        rows['perplexity per word'] = format_word_perplexity(result, 4)
    if 'bits_per_byte' in result:
        rows['bits per byte'] = f'{result["bits_per_byte"]:.5f}'
    if 'accuracy' in result:
        rows['accuracy'] = f'{result["accuracy"]:.2%}'
        rows['frequencies alone: perplexity'] = f'{result["baseline_perplexity"]:.4f}'
        rows['frequencies alone: accuracy'] = f'{result["baseline_accuracy"]:.2%}'
    return rows
