"""The start of a session: its checkpoint or initial weights, and the record of both."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from lm.checkpoint.checkpointer import Checkpointer
from lm.data.batches import BatchWindows
from lm.data.tokenizers.companions import take_over
from lm.experiment import Experiment, check_experiment
from lm.files import open_path
from lm.hardware import describe_libtpu_fault
from lm.model.functions import Weights, select_weights
from lm.parameters import AVERAGE
from lm.plan import RunPlan, settle_begin
from lm.pod.mesh import describe_mesh
from lm.runs.branch import Branch, find_branch
from lm.runs.config_diff import parse_bindings
from lm.runs.goodput import Goodput
from lm.runs.paths import read_text
from lm.runs.process_zero import check_same
from lm.runs.run_dir import RunDir
from lm.tasks import TaskStore
from lm.training.progress import print_rows
from lm.training.step import Fixed, State

KEPT_OF_BEGUN = (('data', 'begin_id'), ('model', 'unroll'))
"""Sections and fields whose number a run keeps where its command gives none. Runs of version 1.0 state `unroll`: their
programs stay as they are."""


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


def settle_begun(experiment: Experiment, run: RunDir, branch_from: str | None = None) -> Experiment:
    """Returns the experiment with the values that a run keeps (KEPT_OF_BEGUN): a run that has begun goes on as it
    began, and a branch as its parent. A new run takes the token of the model that it starts from (`settle_begin`)."""
    check_experiment(experiment)
    for directory in (run, *([RunDir(branch_from)] if branch_from else [])):
        if known := parse_bindings(read_text(directory.config)):
            for section, field in KEPT_OF_BEGUN:
                given, stated = getattr(experiment, section), known.get(f'{section}.{field}', 'None')
                if getattr(given, field) is None and stated.isdecimal():
                    experiment = dataclasses.replace(
                        experiment, **{section: dataclasses.replace(given, **{field: int(stated)})}
                    )
            return experiment
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


def read_fixed(plan: RunPlan, mesh: Mesh, is_new: bool) -> dict[str, Weights]:
    """Reads the weights that the step never changes, in float32: of the teacher, and those under adapters.

    A new run that takes layers of the teacher needs it too, even if the step does not.
    """
    step = plan.program.step
    takes_layers = plan.first.needs_teacher and (is_new or step.adapted)
    teacher = plan.first.read_teacher(mesh) if takes_layers or 'teacher' in step.find_fixed() else None
    found = {} if teacher is None else {'teacher': teacher}
    if plan.program.step.adapted:
        found['base'], line = plan.first.make_base(mesh, teacher)
        if jax.process_index() == 0:
            print(f'under adapters: {line}', flush=True)
    return found


def cast_fixed(plan: RunPlan, weights: dict[str, Weights]) -> Fixed | None:
    """Returns weights of `read_fixed` as the step takes them; None: it takes none."""
    return plan.program.step.cast_fixed(lambda cast, one: jax.jit(cast)(one), weights) or None


def give_fixed(compiled: jax.stages.Compiled, fixed: Fixed | None) -> Callable[..., Any]:
    """Returns the compiled step as a function of state and batch; `fixed` comes from `cast_fixed`."""
    return compiled if fixed is None else lambda state, batch: compiled(state, batch, fixed)


def restore_or_init(
    plan: RunPlan,
    abstract: State,
    source: Checkpointer,
    at: int | None,
    goodput: Goodput,
    fixed: Mapping[str, Weights],
) -> Start:
    """Restores the run or its branching point, else starts from weights of another run, else from the seed.

    Args:
        abstract: the sharding of each array of the state.
        source: the checkpoints to restore from.
        at: the step of the checkpoint to go on from; None: the newest.
        goodput: takes the seconds.
        fixed: the weights of `read_fixed`: a new student starts from its teacher's unless `train.init_from` names
            others. Adapters begin beside the base, with its buffers.
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
            drawn, found = select_weights(start.state), None
            if 'base' in fixed:
                start.state['buffers'] = jax.tree.map(jnp.copy, fixed['base']['buffers'])
            else:
                found = plan.first.take(drawn, select_weights(abstract), fixed.get('teacher'))
            if found:
                weights, line, _ = found
                start.state.update(weights)
                if AVERAGE in start.state:
                    start.state[AVERAGE] = jax.tree.map(jnp.copy, weights['params'])
                if jax.process_index() == 0:
                    print(line, flush=True)
    goodput.count_lost(start.saved.get('step_seconds') if start.saved is not None else 0.0)
    return start


def write_start(run: RunDir, plan: RunPlan, branch: Branch | None, start: Start, rewinds: bool) -> None:
    """Writes config.gin and run.json; for a branch, also the metrics of its parent up to the step."""
    facts: dict[str, Any] = {'parameters': plan.parameters, **plan.fingerprints}
    if plan.trained != plan.parameters:
        facts['trained_parameters'] = plan.trained
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
