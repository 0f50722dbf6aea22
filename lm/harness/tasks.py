"""`lm evaluate --tasks`: tasks of lm-evaluation-harness, local ones, and multiple-choice questions from a file.

A questions file has one JSON object a line: {"question": "…", "choices": ["…", …], "answer": 0}, the answer being the
index of a choice or its letter.
"""

import difflib
import hashlib
import importlib.util
import json
import os
import pathlib
from typing import Any

import jax

from lm.errors import ConfigError
from lm.experiment import LoadedRun
from lm.files import write_atomically

QUESTIONS = '.jsonl'
"""How the name of a questions file ends."""
BOOTSTRAP = 1000
"""Draws for the standard error of metrics that have no formula for it."""


def evaluate_tasks(
    run: LoadedRun,
    tasks: list[str],
    num_fewshot: int | None = None,
    include_path: str | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """What the harness finds with the weights of a run.

    Args:
        tasks: names of the harness's, of those in `include_path`, or questions files.
        num_fewshot: examples in front of each question; None: as the task says.
        include_path: a folder of the user's own tasks (YAML files).
        limit: examples of each task, for trying.

    Returns:
        step, tasks → metric → value (and `…_stderr`), versions and n-shot of each task, all plain JSON.

    Raises:
        ConfigError: lm_eval is not installed, there is no such task, or a questions file is wrong.
    """
    if importlib.util.find_spec('lm_eval') is None:
        raise ConfigError("--tasks: needs lm-evaluation-harness: pip install -e '.[harness]'")
    os.environ.setdefault('DISABLE_MULTIPROC', '1')  # its pool of processes would be forked under JAX's threads
    import lm_eval
    from lm_eval.tasks import TaskManager

    from lm.harness.adapter import RunModel

    # To read the descriptions of the harness's own tasks takes it many seconds: only where they are asked for.
    manager = TaskManager(include_path=include_path, include_defaults=False)
    if any(not name.endswith(QUESTIONS) and name not in manager.all_tasks for name in tasks):
        manager = TaskManager(include_path=include_path)
    chosen = [known_task(name, manager.all_tasks) for name in tasks]
    found = lm_eval.simple_evaluate(
        RunModel(run),
        tasks=chosen,
        num_fewshot=num_fewshot,
        limit=limit,
        task_manager=manager,
        log_samples=False,
        bootstrap_iters=BOOTSTRAP,
    )
    kept = {name: found.get(name, {}) for name in ('results', 'n-shot', 'versions', 'n-samples')}
    facts = {'step': run.step, 'context_length': run.scorer.context_length, 'limit': limit}
    return facts | json.loads(json.dumps(kept, default=str))


def main(run: LoadedRun, arguments: Any) -> int:
    """`lm evaluate --tasks`: prints a table and writes evaluations/harness/*.json."""
    tasks = [name.strip() for name in arguments.tasks.split(',') if name.strip()]
    result = evaluate_tasks(run, tasks, arguments.num_fewshot, arguments.include_path, arguments.limit)
    if jax.process_index():
        return 0
    asked = json.dumps([tasks, arguments.num_fewshot, arguments.limit, result['context_length']])
    name = f'step-{run.step}_{hashlib.sha256(asked.encode()).hexdigest()[:8]}.json'
    path = run.directory.evaluations / 'harness' / name
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(result, indent=2) + '\n')
    if arguments.json:
        print(json.dumps(result, indent=2))
        return 0
    _print_table(result)
    print(f'written to {path}')
    return 0


def read_questions(path: pathlib.Path) -> list[dict[str, Any]]:
    """The questions of a file, `answer` as an index. Raises ConfigError, which names the line."""
    try:
        lines = path.read_text(encoding='utf-8').splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f'--tasks {path}: cannot be read ({error})') from None
    questions = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            choices, answer = [str(choice) for choice in entry['choices']], entry['answer']
            answer = ord(answer.strip().upper()) - ord('A') if isinstance(answer, str) else int(answer)
            if not (isinstance(entry['choices'], list) and len(choices) > 1 and 0 <= answer < len(choices)):
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


def known_task(name: str, known: list[str]) -> str | dict[str, Any]:
    """The name of a task that is known, or the description of one that asks the questions of a file.

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
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f'tasks at step {result["step"]}', title_justify='left')
    for heading, justify in (
        ('task', 'left'),
        ('shots', 'right'),
        ('metric', 'left'),
        ('value', 'right'),
        ('±', 'right'),
    ):
        table.add_column(heading, justify=justify)
    for task, metrics in result['results'].items():
        shots = str(result['n-shot'].get(task, ''))
        for key, value in metrics.items():
            metric, _, kind = key.partition(',')
            if not isinstance(value, int | float) or metric.endswith('_stderr') or not kind:
                continue
            error = metrics.get(f'{metric}_stderr,{kind}')
            table.add_row(task, shots, metric, f'{value:.4f}', f'{error:.4f}' if isinstance(error, float) else '')
    Console().print(table)
