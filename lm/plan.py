"""The plan of a run: what an experiment will do on given devices. It is built in one order, and touches no device.

make_plan   everything that `lm train` does, from the experiment, its data and a description of the devices
plan_step   the part that needs no data: the mesh and the program of the step
validate    refuses what `make_plan` refuses

All errors that a run can meet before its first step are raised here, each at one place. Only what lies in the run's own
directory is checked later, by the session.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

from lm.config.text import dump
from lm.data.batches import BatchWindows
from lm.data.dataset import Store
from lm.errors import FINAL, AbsentError, LmError, UnnamedError
from lm.evaluation.plan import EvaluationPlan, open_sets, plan_evaluation, settle_evaluation
from lm.experiment import Experiment, check_experiment
from lm.hardware import Target
from lm.model.functions import ModelFunctions
from lm.runs.initial import InitialParameters
from lm.training.inputs import check_vocabulary, choose_unpacking, make_windows
from lm.training.mesh import MeshShape
from lm.training.objectives import check_objective
from lm.training.program import StepProgram
from lm.training.step import TrainStep

PATIENCE_SECONDS = 20.0
"""How long a bucket may keep `validate` waiting."""
UNKNOWN = Target()
"""Devices of which nothing is known; the step computes as on a CPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The part of a plan that the experiment and the target determine.

    Attributes:
        mesh: the sizes of its axes.
        program: the training step, with the shape and type of its batches.
    """

    experiment: Experiment
    target: Target
    mesh: MeshShape
    program: StepProgram

    @property
    def functions(self) -> ModelFunctions:
        """The functions of the model, which computes in the type that the target's platform asks for."""
        return self.program.step.functions

    @property
    def parameters(self) -> int:
        """The number of trainable parameters."""
        return sum(self.functions.count_parameters().values())

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations of a training step per token (`ModelConfig.flops_per_token`)."""
        return self.experiment.model.flops_per_token(self.experiment.train.context_length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan(StepPlan):
    """What a run will do.

    Attributes:
        store: the data.
        windows: the windows that each step sees.
        evaluation: what its evaluations score.
        initial: the run whose weights a new run starts from; None: weights are drawn.
    """

    store: Store
    windows: BatchWindows
    evaluation: EvaluationPlan
    initial: InitialParameters | None

    @property
    def split(self) -> str:
        """The split that is trained on."""
        return self.experiment.data.train_split

    @functools.cached_property
    def text(self) -> str:
        """The whole configuration as gin text."""
        return dump(self.experiment)

    def check_initial(self) -> None:
        """Raises AbsentError or MismatchError where the weights for a new run are not there or do not fit."""
        if self.initial:
            self.initial.check(self.functions.abstract['params'])


class PlanCache:
    """What plans have opened and built, or failed to open. Many plans with one cache do nothing twice."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Any] = {}

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Returns what `make` returned for this key at the first call, or raises what it raised."""
        if key not in self._found:
            try:
                self._found[key] = make()
            except LmError as error:
                self._found[key] = error
        if isinstance(found := self._found[key], LmError):
            raise found
        return found


def plan_step(experiment: Experiment, target: Target = UNKNOWN) -> StepPlan:
    """Plans the step alone. Without data an objective assumes a tokenizer that fits the model.

    Raises ConfigError where the sections do not fit each other or the target.
    """
    mesh, step = _plan_mesh_and_step(experiment, target, PlanCache())
    program = _make_program(experiment, step, None, experiment.data.guess_dtype(experiment.model.vocab_size))
    return StepPlan(experiment=experiment, target=target, mesh=mesh, program=program)


def make_plan(
    experiment: Experiment,
    target: Target = UNKNOWN,
    cache: PlanCache | None = None,
    timeout: float | None = None,
) -> RunPlan:
    """Plans a run.

    Args:
        target: the devices; what is not known of them is not checked.
        cache: what earlier plans have opened and built.
        timeout: seconds after which a store counts as out of reach; None: never.

    Raises ConfigError, MismatchError (AbsentError where data are not there), or LmError where they are out of reach.
    """
    cache = PlanCache() if cache is None else cache
    train, model, data, evaluate = experiment.train, experiment.model, experiment.data, experiment.evaluate
    mesh, step = _plan_mesh_and_step(experiment, target, cache)
    settings = settle_evaluation(evaluate, data, train, model, train.eval_tokens)

    source = data, train.context_length if data.task else None
    store = cache.get(('store', source), lambda: data.open(train.context_length, timeout))
    check_vocabulary(store, data, model)
    windows = make_windows(data, train, store)
    dtype = cache.get(('dtype', source), lambda: store.read(data.train_split, 0, 1).dtype)
    program = _make_program(experiment, step, store, dtype)
    sets = cache.get(('sets', source, evaluate.sets), lambda: open_sets(evaluate, store, timeout))
    return RunPlan(
        experiment=experiment,
        target=target,
        mesh=mesh,
        program=program,
        store=store,
        windows=windows,
        evaluation=plan_evaluation(settings, store, sets),
        initial=InitialParameters(train.init_from, store.fingerprints, store.path) if train.init_from else None,
    )


def validate(
    experiment: Experiment, devices: int | None = None, cache: PlanCache | None = None, begun: bool = False
) -> list[str]:
    """Refuses what `lm train` would refuse before its first step, without devices and within a fraction of a second.

    Args:
        devices: how many there will be, if that is known.
        cache: for many experiments, so that nothing is opened or built twice.
        begun: the run goes on from a checkpoint of its own: what train.init_from names is not read again.

    Returns:
        what could not be checked because it is not there, or out of reach from here, one line each.

    Raises ConfigError or MismatchError.
    """
    target = UNKNOWN if devices is None else Target(slices=(devices,))
    try:
        plan = make_plan(experiment, target, cache, PATIENCE_SECONDS)
        if not begun:
            plan.check_initial()
    except (AbsentError, UnnamedError) as error:
        return [str(error)]
    except LmError as error:
        if error.exit_code in FINAL:
            raise
        return [str(error)]
    return []


def _plan_mesh_and_step(experiment: Experiment, target: Target, cache: PlanCache) -> tuple[MeshShape, TrainStep]:
    """Plans the mesh and the step, which does not know its data yet."""
    check_experiment(experiment)
    train, model, optimizer = experiment.train, experiment.model, experiment.optimizer
    mesh = experiment.mesh.plan(target)
    if mesh.shards is not None:
        train.check_divides(mesh.shards)
    train.check_parts(mesh.sequence)
    check_objective(train.objective, experiment.data, model)
    model.check_parts(mesh.sequence)
    model.check_length(train.context_length)
    dtype = model.resolve_dtype(target.platform)
    functions = cache.get(('model', model, dtype), lambda: ModelFunctions(model, dtype))
    key = 'step', model, dtype, optimizer, train.steps
    return mesh, cache.get(key, lambda: TrainStep(functions, optimizer, train.steps))


def _make_program(experiment: Experiment, step: TrainStep, store: Store | None, dtype: Any) -> StepProgram:
    """The program of the step on its data; None: without data."""
    data, train = experiment.data, experiment.train
    unpack = choose_unpacking(data, train, experiment.model, store)
    step = step.with_data(unpack, by_window=bool(data.mixture), documents=data.documents(store))
    return StepProgram(step, train.batch_shape, dtype)
