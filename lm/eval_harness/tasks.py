"""`lm evaluate --tasks`: tasks of lm-evaluation-harness, local tasks, and multiple-choice questions from a file.

A questions file has one JSON object per line: {"question": "…", "choices": ["…", …], "answer": 0}. The answer is the
index of a choice or its letter.
"""

import contextlib
import difflib
import hashlib
import importlib.util
import io
import json
import os
import pathlib
import tempfile
import zlib
from typing import Any

import jax
import numpy as np

from lm.errors import ConfigError, MissingPackageError
from lm.eval_harness.ruler import NEEDS_NOTHING, check_answers, check_fits, measured_by
from lm.experiment import Experiment
from lm.files import parse_json
from lm.inference.loaded_run import LoadedRun, load_run
from lm.pod.job import JobAddress, initialize_distributed
from lm.runs.records import to_json
from lm.text import print_table

QUESTIONS = '.jsonl'
"""The ending of the name of a questions file."""
BOOTSTRAP = 1000
"""Draws for the standard error of metrics that have no formula for it."""


def evaluate_tasks(
    run: LoadedRun,
    tasks: list[str],
    num_fewshot: int | None = None,
    include_path: str | None = None,
    limit: int | None = None,
    task_data: str | None = None,
    sample_seed: int | None = None,
) -> dict[str, Any]:
    """Evaluates the weights of a run with the harness.

    Args:
        tasks: names of the harness's tasks, names of tasks in `include_path`, or questions files.
        num_fewshot: examples in front of each question; None: the task decides.
        include_path: a folder of the user's own tasks (YAML files).
        limit: examples per task, the first ones.
        task_data: a folder of data sets instead of the hub; each is in a folder with its task's name.
        sample_seed: draws the `limit` examples of each task at random; None: they are the first ones.

    Returns:
        step, tasks → metric → value (and `…_stderr`), versions and n-shot of each task, all plain JSON.

    Raises:
        ConfigError: lm_eval is not installed, a task or its data cannot be found, a questions file is wrong, or two
            tasks have one name.
    """
    if importlib.util.find_spec('lm_eval') is None:
        raise MissingPackageError('--tasks', 'lm-evaluation-harness', 'harness')
    check_names(tasks)
    os.environ.setdefault('DISABLE_MULTIPROC', '1')  # its pool of processes would be forked under JAX's threads
    import lm_eval
    from lm_eval.tasks import TaskManager

    from lm.eval_harness.adapter import RunModel

    # The tasks of RULER read these settings; other tasks do not.
    told = {'tokenizer': run.store.fingerprints['tokenizer'], 'max_seq_lengths': [run.scorer.context_length]}
    # The harness takes many seconds to read the descriptions of its own tasks, so this happens only if they are needed.
    manager = TaskManager(include_path=include_path, include_defaults=False, metadata=told)
    if any(not name.endswith(QUESTIONS) and name not in manager.all_tasks for name in tasks):
        manager = TaskManager(include_path=include_path, metadata=told)
    chosen = [known_task(name, manager.all_tasks) for name in tasks]
    if task_data is not None and not pathlib.Path(task_data).expanduser().is_dir():
        raise ConfigError(f'--task_data {task_data}: is no folder')
    loaded = [each for task in chosen for each in _load(task, manager, run, task_data)]
    drawn = None if sample_seed is None or limit is None else draw_examples(loaded, limit, sample_seed)
    found = lm_eval.simple_evaluate(
        RunModel(run),
        tasks=loaded,
        num_fewshot=num_fewshot,
        limit=limit if drawn is None else None,
        samples=drawn,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=BOOTSTRAP,
    )
    kept = {name: found.get(name, {}) for name in ('results', 'n-shot', 'versions', 'n-samples')}
    facts = {'step': run.step, 'context_length': run.scorer.context_length, 'limit': limit, 'sample_seed': sample_seed}
    return facts | json.loads(json.dumps(kept, default=str))


def draw_examples(tasks: list[Any], limit: int, seed: int) -> dict[str, list[int]]:
    """Returns task → the numbers of `limit` examples, drawn without replacement; all where a task has fewer.

    The draw depends on the seed, the name of the task and its number of examples. A group is drawn task by task.
    """
    drawn = {}
    for task in tasks:
        for leaf in task.get_all_tasks() if hasattr(task, 'get_all_tasks') else [task]:
            generator = np.random.default_rng([seed, zlib.crc32(leaf.task_name.encode())])
            drawn[leaf.task_name] = sorted(generator.permutation(len(leaf.eval_docs))[:limit].tolist())
    return drawn


def _load(task: str | dict[str, Any], manager: Any, run: LoadedRun, task_data: str | None) -> list[Any]:
    """Loads tasks of the harness, or a group of them, with their data. Raises ConfigError if this fails."""
    if isinstance(task, dict):
        return list(manager.load(task)['tasks'].values())
    path = manager.task_index[task].yaml_path
    is_ruler = path is not None and path.parent.name == 'ruler'
    remedy = f'put them into a folder {task} and name the one above with --task_data'
    if is_ruler:
        check_fits(task, run.tokenizer, run.scorer.context_length)
        remedy = f'without a network there are {", ".join(NEEDS_NOTHING)}'
    with contextlib.ExitStack() as stack:
        own = pathlib.Path(task_data or '').expanduser().absolute() / task
        spec = task
        if task_data and path is not None and own.is_dir():
            spec = str(pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory())) / f'{task}.yaml')
            changes = {'include': str(path), 'task': task, 'dataset_path': str(own), 'dataset_name': None}
            pathlib.Path(spec).write_text(json.dumps(changes | {'dataset_kwargs': None}))  # JSON is YAML
        stack.enter_context(measured_by(run.tokenizer) if is_ruler else contextlib.nullcontext())
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))  # some tasks print their progress
        try:
            found = manager.load(spec)
        except (OSError, ValueError, LookupError) as error:  # the errors of data sets, the hub and parsers
            reason = str(error).strip().partition('\n')[0] or type(error).__name__
            raise ConfigError(f'--tasks {task}: its data cannot be had: {reason}; {remedy}') from None
    if is_ruler:
        check_answers(found['tasks'], run.scorer.context_length)
    return [found['groups'][task]] if task in found['groups'] else list(found['tasks'].values())


def evaluate_on_tasks(
    experiment: Experiment,
    run_dir: str,
    step: int | None,
    job: JobAddress,
    tasks: list[str],
    *,
    as_json: bool = False,
    **options: Any,
) -> None:
    """Evaluates the weights of a run at `step` (None: the newest), prints a table or JSON, and writes a file.

    The file is evaluations/harness/*.json. `options` are arguments of `evaluate_tasks`.
    """
    initialize_distributed(experiment.mesh, job)
    run = load_run(experiment, run_dir, step)
    result = evaluate_tasks(run, tasks, **options)
    if jax.process_index():
        return
    result['overrides'] = run.changes
    num_fewshot, limit, *sources = map(options.get, ('num_fewshot', 'limit', 'task_data', 'include_path'))
    sources += [seed] if (seed := options.get('sample_seed')) is not None else []  # older names stay
    asked = json.dumps([tasks, num_fewshot, limit, result['context_length'], run.changes, sources])
    name = f'step-{run.step}_{hashlib.sha256(asked.encode()).hexdigest()[:8]}.json'
    path = run.directory.evaluations / 'harness' / name
    if as_json:
        print(to_json(result), flush=True)
    else:
        _print_table(result)
    run.directory.keep_evaluation(path, to_json(result) + '\n')  # the figures are already printed
    if not as_json:
        print(f'written to {path}')


def check_names(tasks: list[str]) -> None:
    """Raises ConfigError if no task is named, or if two results would have one name: a questions file gives
    its name."""
    if not tasks:
        raise ConfigError('--tasks: names none; write tasks of lm-evaluation-harness, or .jsonl files, with commas')
    called: dict[str, str] = {}
    for task in tasks:
        name = pathlib.Path(task).stem if task.endswith(QUESTIONS) else task
        if name in called:
            raise ConfigError(f'--tasks {task}: is called {name} in the results, as {called[name]} is; rename the file')
        called[name] = task


def read_questions(path: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the questions of a file, `answer` as an index. Raises ConfigError, which names the line."""
    try:
        lines = path.read_text(encoding='utf-8-sig').split('\n')  # JSON strings may contain other line ends
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'--tasks {path}: cannot be read ({error})') from None
    questions = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = parse_json(line)
            choices, answer = [str(choice) for choice in entry['choices']], entry['answer']
            answer = ord(answer.strip().upper()) - ord('A') if isinstance(answer, str) else answer
            is_index = type(answer) is int and 0 <= answer < len(choices)
            if not (isinstance(entry['choices'], list) and len(choices) > 1 and is_index):
                raise ValueError
            questions.append({'question': str(entry['question']), 'choices': choices, 'answer': answer})
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f'--tasks {path}: line {number} is not {{"question": …, "choices": [two or more], "answer": index or '
                'letter of one}'
            ) from None
    if not questions:
        raise ConfigError(f'--tasks {path}: holds no question')
    return questions


def known_task(name: str, known: list[str]) -> str | dict[str, object]:
    """Returns the name of a known task, or the description of a task that asks the questions of a file.

    Raises ConfigError for any other name.
    """
    if not name.endswith(QUESTIONS):
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f'did you mean {close[0]}?' if close else 'name a folder of your own tasks with --include_path'
            raise ConfigError(f'--tasks {name}: there is no such task; {hint}')
        return name
    import datasets

    path = pathlib.Path(name).expanduser().absolute()
    questions = read_questions(path)
    return {
        'task': path.stem,
        'custom_dataset': lambda **_: {'test': datasets.Dataset.from_list(questions)},
        'test_split': 'test',
        'fewshot_split': 'test',
        'output_type': 'multiple_choice',
        'doc_to_text': 'Question: {{question}}\nAnswer:',
        'doc_to_choice': 'choices',
        'doc_to_target': 'answer',
        'metric_list': [
            {'metric': metric, 'aggregation': 'mean', 'higher_is_better': True} for metric in ('acc', 'acc_norm')
        ],
    }


def _print_table(result: dict[str, Any]) -> None:
    rows = []
    for task, metrics in result['results'].items():
        shots = str(result['n-shot'].get(task, ''))
        for key, value in metrics.items():
            metric, _, kind = key.partition(',')
            if not isinstance(value, int | float) or metric.endswith('_stderr') or not kind:
                continue
            if metric.isdigit() and value < 0:  # lengths of RULER that were not requested
                continue
            error = metrics.get(f'{metric}_stderr,{kind}')
            rows.append((task, shots, metric, f'{value:.4f}', f'{error:.4f}' if isinstance(error, float) else ''))
    headings, title = ('task', 'shots', 'metric', 'value', '±'), f'tasks at step {result["step"]}'
    print_table(headings, rows, left=('task', 'metric'), title=title)
