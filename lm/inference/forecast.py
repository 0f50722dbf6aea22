"""`lm distill --forecast`: what a student recalls, beside its teacher, and the tokens of stage 2 that it needs.

Recall is a difference of accuracies: where a passage stands a second time, and at the same places of the text as it
is. The saved steps of a run of stage 2 are points of a curve, which `forecast` extrapolates.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lm.checkpoint.snapshot import find_committed_steps
from lm.errors import LmError
from lm.evaluation.perplexity import make_scoring_program
from lm.inference.layer_choice import ROWS, PlantedText, measure_layers, print_effects, rank_layers, read_planted
from lm.inference.loaded_run import LoadedRun, load_run, open_run
from lm.inference.needles import describe_needles, find_needles, make_samples
from lm.inference.recall_law import forecast
from lm.model.functions import Weights
from lm.ops.documents import TextBegin
from lm.training.objectives.distill import Distill
from lm.training.schedules.constant import Constant

NEEDLES = 8
"""Needles per model."""
LEAST_RECALL = 0.1
"""A teacher with less recall has none that a student could be seen to learn."""


def forecast_recall(run_dir: str, teacher_dir: str, gin_params: Sequence[str] = ()) -> None:
    """Prints what a student recalls: needles, layers, and repeated passages at each saved step of stage 2. Then it
    prints the forecast, or why there is none.

    Args:
        run_dir: the student, behind stage 1 or in stage 2.
        teacher_dir: its teacher.
        gin_params: change the configuration of the student, such as "data.path = '…'".

    Raises the errors of `read_planted` and `measure_layers`.
    """
    student, teacher = open_run(run_dir, gin_params), open_run(teacher_dir)
    config = student.experiment
    length = config.evaluate.context_length or config.train.context_length
    print_needles({'teacher': teacher, 'student': student}, length)
    text, begin = read_planted(student), student.data.text_begin(student.splits)
    print_effects(rank_layers(measure_layers(student, teacher, text), 'recall'))
    known = make_recall_measure(teacher, text, begin)(teacher.weights)
    measure = make_recall_measure(student, text, begin)
    print(f'recall of the teacher: {known:.3f}')
    if known < LEAST_RECALL:
        print(f'no forecast: the teacher itself recalls less than {LEAST_RECALL}')
        return
    if not isinstance(config.train.objective, Distill):
        print(f'recall of the student: {measure(student.weights):.3f}')
        print(f'no forecast: {run_dir} has no steps of stage 2; {advise(run_dir, teacher_dir)}')
        return
    tokens, missing = [], []
    print(f'{"step":>8}  {"tokens":>12}  {"recall":>7}  {"share":>7}')
    for step in find_committed_steps(student.directory.checkpoints):
        found = measure(load_run(config, run_dir, step).weights)
        print(f'{step:>8}  {step * config.train.tokens_per_step:>12,}  {found:>7.3f}  {found / known:>7.3f}')
        if step > config.optimizer.warmup_steps:
            tokens.append(step * config.train.tokens_per_step)
            missing.append(1 - found / known)
    if not isinstance(config.optimizer.schedule, Constant):
        schedule = config.optimizer.schedule.gin_name
        print(f'no forecast: optimizer.schedule = @{schedule}(): the rate of a longer run would fall later; give the '
              'run @constant()')  # fmt: skip
        return
    print('\n'.join(forecast(np.array(tokens, float), np.array(missing))))


def print_needles(runs: dict[str, LoadedRun], length: int) -> None:
    """Prints the needles that each of the runs finds, by its name, in texts of `length` tokens."""
    try:
        for run in runs.values():
            make_samples(run.tokenizer, length, 1)
    except LmError as error:
        print(f'no needles: {error}')
        return
    found = {name: find_needles(run, length, NEEDLES) for name, run in runs.items()}
    said = '; '.join(f'{name} {describe_needles(one)} nats per token' for name, one in found.items())
    print(f'needles found in {length:,} tokens: {said}')


def make_recall_measure(run: LoadedRun, text: PlantedText, begin: TextBegin | None) -> Callable[[Weights], float]:
    """Returns the function that computes the recall of weights of a run on a text; `begin` stands before its parts."""
    program = make_scoring_program(run.functions, run.mesh, accuracy=True, begin=begin)

    def share_right(weights: Weights, windows_BxL: np.ndarray) -> float:
        batches = (jnp.asarray(windows_BxL[i : i + ROWS]) for i in range(0, len(windows_BxL), ROWS))
        correct_BxL = np.concatenate([np.asarray(program(weights, batch).correct) for batch in batches])
        return float(correct_BxL[text.told[:, 1:]].mean())

    def measure(weights: Weights) -> float:
        with jax.set_mesh(run.mesh):
            return share_right(weights, text.planted) - share_right(weights, text.plain)

    return measure


def advise(run_dir: str, teacher_dir: str) -> str:
    """Returns the command that makes the points of a forecast."""
    return (
        f'make some: lm distill --stage distill --teacher {teacher_dir} --init_from {run_dir} --run_dir '
        f'{run_dir}_pilot … --set "optimizer.schedule=@constant()" --set train.steps=160 --set '
        'checkpoint.save_every_steps=10 --set checkpoint.keep_every=10'
    )
