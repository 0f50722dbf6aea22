"""The start of a session: its checkpoint or initial weights, and the record of both."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lm.checkpoint.checkpointer import Checkpointer
from lm.checkpoint.snapshot import flatten
from lm.data.batches import BatchWindows
from lm.data.tokenizers.companions import take_over
from lm.experiment import Experiment, check_experiment
from lm.files import open_path
from lm.hardware import describe_libtpu_fault
from lm.model.functions import ModelFunctions, Weights, select_weights
from lm.model.layers import copy_layers, find_copied
from lm.parameters import AVERAGE
from lm.plan import RunPlan, settle_begin
from lm.pod.mesh import describe_mesh, place
from lm.runs.branch import Branch, find_branch
from lm.runs.config_diff import parse_bindings
from lm.runs.goodput import Goodput
from lm.runs.paths import read_text
from lm.runs.process_zero import check_same
from lm.runs.run_dir import RunDir
from lm.runs.weights import SavedWeights
from lm.tasks import TaskStore
from lm.training.program import get_shardings
from lm.training.progress import print_rows
from lm.training.step import State


@dataclasses.dataclass(frozen=True)
class Request:
    """The run that a user asks for, and the checkpoint to go on from; see the arguments of `lm.session.train.train`."""

    run_dir: str
    rewind_to: int | None = None
    branch_from: str | None = None
    step: int | None = None


@dataclasses.dataclass(frozen=True)
class Start:
    """The state with which a session begins, after `step` steps.

    Attributes:
        windows: the windows of all further steps.
        saved: the metadata of the checkpoint; None if there was none.
        stored: the newest step in the run directory up to there: another one if the state comes from memory.
    """

    state: State
    step: int
    windows: BatchWindows
    saved: dict[str, Any] | None
    stored: int | None = None

    @property
    def is_from_memory(self) -> bool:
        """The state comes from the memory of the hosts."""
        return self.saved is not None and self.stored != self.step


def print_plan(plan: RunPlan, mesh: Mesh) -> None:
    """Prints the plan of the run."""
    rows = plan.describe(plan.windows.describe(plan.experiment.train.steps, plan.store.path))
    fault = describe_libtpu_fault() if jax.default_backend() == 'tpu' else None
    rows |= {'warning': fault} if fault else {}
    print_rows(rows | {'devices': describe_mesh(mesh, plan.mesh.slices, plan.functions.dtype)})


def settle_texts(experiment: Experiment, run: RunDir, branch_from: str | None = None) -> Experiment:
    """Returns the experiment with the token before each text: a run that has begun goes on as it began, and a branch as
    its parent. A new run takes the token of the model that it starts from (`lm.plan.settle_begin`)."""
    check_experiment(experiment)
    for directory in (run, *([RunDir(branch_from)] if branch_from else [])):
        if known := parse_bindings(read_text(directory.config)):
            stated = known.get('data.begin_id', 'None')
            if experiment.data.begin_id is not None or not stated.isdecimal():
                return experiment
            return dataclasses.replace(experiment, data=dataclasses.replace(experiment.data, begin_id=int(stated)))
    return settle_begin(experiment)


def find_origin(run: RunDir, request: Request, plan: RunPlan) -> tuple[Branch | None, int | None]:
    """Finds the checkpoint to go on from, and writes nothing. All processes call it together.

    Returns the checkpoint of another run (None: the run's own), and the step that the run goes back to (None: the
    newest).

    Raises ConfigError or MismatchError if the run, or the run that it branches from, cannot go on as planned.
    """
    rewind_to = request.rewind_to
    check_same({'--rewind_to': rewind_to, '--branch_from': request.branch_from, '--step': request.step})
    if rewind_to is not None and run.is_rewound(rewind_to, plan.text):
        if jax.process_index() == 0:
            note = 'done before by this configuration; going on from the newest'
            print(f'--rewind_to {rewind_to}: {note}', flush=True)
        rewind_to = None
    branch = find_branch(run, request.branch_from, request.step, request.rewind_to)
    if branch:
        branch.check(plan.text, plan.experiment.train.steps)
    run.check_unchanged(plan.text, rewind_to is not None)
    return branch, rewind_to


def read_teacher(plan: RunPlan, mesh: Mesh) -> Weights | None:
    """Reads the weights of the teacher, in float32; None without a teacher."""
    teaching = plan.program.step.teaching
    if teaching is None or plan.teacher is None:
        return None
    return plan.teacher.read(place(teaching.functions.abstract, mesh, teaching.functions.declared))


def cast_teacher(plan: RunPlan, teacher: Weights | None) -> Weights | None:
    """Returns the teacher's weights as the step takes them; None without a teacher."""
    teaching = plan.program.step.teaching
    return None if teaching is None or teacher is None else jax.jit(teaching.cast)(teacher)


def give_teacher(compiled: jax.stages.Compiled, weights: Weights | None) -> Callable[..., Any]:
    """Returns the compiled step as a function of state and batch; `weights` come from `cast_teacher`."""
    return compiled if weights is None else lambda state, batch: compiled(state, batch, weights)


def restore_or_init(
    plan: RunPlan,
    abstract: State,
    source: Checkpointer,
    at: int | None,
    goodput: Goodput,
    teacher: Weights | None = None,
) -> Start:
    """Restores the run or its branching point, else starts from weights of another run, else from the seed.

    Args:
        plan: the plan of the run.
        abstract: the sharding of each array of the state.
        source: the checkpoints to restore from.
        at: the step of the checkpoint to go on from; None: the newest.
        goodput: takes the seconds.
        teacher: the weights of the teacher: a new student starts from them unless `train.init_from` names others.
    """
    is_new = source.latest_step() is None
    with goodput.charge('initialize' if is_new else 'restore'):
        restored = source.restore(abstract, at)
        if restored:
            state, step, saved = restored
            windows = plan.windows.resume(step, saved.get('skipped_batches'))
            start = Start(state, step, windows, saved, source.stored)
        else:
            start = Start(plan.program.init_state(abstract, plan.experiment.train.seed), 0, plan.windows, None)
            found = None
            if plan.initial and plan.source is None:
                found = plan.initial.take(select_weights(start.state), select_weights(abstract))
            elif plan.initial or teacher is not None:
                found = take_layers(plan, start.state, abstract, teacher)
            if found:
                weights, line = found
                start.state.update(weights)
                if AVERAGE in start.state:
                    start.state[AVERAGE] = jax.tree.map(jnp.copy, weights['params'])
                if jax.process_index() == 0:
                    print(line, flush=True)
    goodput.count_lost(start.saved.get('step_seconds') if start.saved is not None else 0.0)
    return start


def take_layers(plan: RunPlan, state: State, abstract: State, teacher: Weights | None) -> tuple[Weights, str]:
    """Returns the weights of a new run whose layers come from the teacher, and from the run of `train.init_from`.

    The latter gives a student those layers whose mechanism is the same in both. Returns the weights with one line that
    names the arrays that keep their initial values.
    """
    student, made, taken = plan.functions, select_weights(state), {}

    def take(source: ModelFunctions, weights: Weights, same_mechanism: bool) -> None:
        for kind in made:
            copy = jax.jit(
                functools.partial(copy_layers, source, student, same_mechanism=same_mechanism, kind=kind),
                out_shardings=get_shardings(abstract[kind]),
            )
            made[kind] = copy(weights[kind], made[kind])
            copied = flatten(find_copied(source, student, same_mechanism, kind))
            taken.update({name: taken.get(name, False) or is_copied for name, is_copied in copied.items()})

    teaching = plan.program.step.teaching
    if teaching and teacher is not None:
        source = teaching.objective.find_source(teaching.functions)
        make_source = functools.partial(teaching.objective.make_source, teaching.functions)
        take(source, jax.jit(make_source)(teacher), False)
    if plan.initial and plan.source:
        saved = SavedWeights('train.init_from', plan.initial.run_dir, None, plan.store.fingerprints)
        mesh = jax.sharding.get_mesh()
        weights = saved.read(place(plan.source.abstract, mesh, plan.source.declared))
        take(plan.source, weights, teacher is not None)
    left = [name for name, is_taken in taken.items() if not is_taken]
    line = f'{len(taken) - len(left)} of {len(taken)} arrays taken from '
    line += ' and '.join(filter(None, ['the teacher' if teacher else '', plan.initial.run_dir if plan.initial else '']))
    return made, f'{line}; these not: {", ".join(left)}' if left else line


def write_start(run: RunDir, plan: RunPlan, branch: Branch | None, start: Start, rewinds: bool) -> None:
    """Writes config.gin and run.json; for a branch, also the metrics of its parent up to the step."""
    facts: dict[str, Any] = {'parameters': plan.parameters, **plan.fingerprints}
    if branch:
        facts['branch'] = branch.record(plan.text)
    if start.is_from_memory:
        facts['saved_step'] = start.stored
    store, name, tokenizer = plan.store, '', None
    if not isinstance(store, TaskStore):
        name, tokenizer = store.read_tokenizer_file()
        facts['end_id'] = store.info['tokenizer'].get('eod_id')
    run.create_or_resume(plan.text, facts, start.step, rewinds)
    if tokenizer is not None:  # a copy of the run can write text without the data
        run.keep_file(name, tokenizer)
    if branch:
        branch.copy_metrics()
    parents = [branch.parent.path] if branch else map(open_path, plan.origins)
    for source in parents if jax.process_index() == 0 else ():
        take_over(source, run.path)
