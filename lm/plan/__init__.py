"""The plan of a run: what an experiment will do on given devices. It is built in one order, and touches no device.

make_plan   everything that `lm train` does, from the experiment, its data and a description of the devices
plan_step   the part that needs no data: the mesh and the program of the step
validate    refuses what `make_plan` refuses

All errors that a run can meet before its first step are raised here, each at one place. Only what lies in the run's own
directory is checked later, by the session.
"""

import dataclasses
import functools

import jax

from lm.config.text import dump
from lm.data.batches import BatchWindows
from lm.data.dataset import Store
from lm.data.teacher_logits import TeacherLogits
from lm.errors import FINAL, AbsentError, LmError, UnnamedError
from lm.evaluation.plan import (
    EvaluationPlan,
    EvaluationSettings,
    check_evaluation,
    open_sets,
    plan_evaluation,
    settle_evaluation,
)
from lm.experiment import Experiment, check_experiment, read_begin_id
from lm.hardware import Target
from lm.model.adapters import AdaptedFunctions, find_base
from lm.model.functions import ModelFunctions
from lm.model.layers import find_misfits
from lm.plan.weights import PlanCache, open_taught, plan_adapters, plan_first, plan_teaching
from lm.pod.mesh import MeshShape
from lm.runs.initial import check_initial, describe_misfit, refuse_initial
from lm.text import format_count, format_si
from lm.training.first_weights import BASE, AdaptedWeights, FirstWeights
from lm.training.inputs import (
    check_training,
    check_vocabulary,
    choose_reader,
    choose_unpacking,
    make_windows,
    reads_marks,
)
from lm.training.objectives import Distillation
from lm.training.program import StepProgram
from lm.training.replay import describe_replay
from lm.training.room import check_arrays, check_state, check_tokens
from lm.training.step import TrainStep

PATIENCE_SECONDS = 20.0
"""How long a bucket may keep `validate` waiting."""
UNKNOWN = Target()
"""Unknown devices; the step computes as on a CPU."""


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
        """The number of parameters of the model, without adapters."""
        return sum(find_base(self.functions).count_parameters().values())

    def describe(self, epochs: str = '') -> dict[str, str]:
        """Describes the run by name; `epochs` is a text on how often it will see its data."""
        model, train, (microbatches, rows, _) = self.experiment.model, self.experiment.train, self.program.batch_shape
        mechanisms = ', '.join(attention.gin_name for attention in model.pattern)
        windows = f'{format_count(microbatches * rows, "window")} of {train.context_length:,}'
        parts = format_count(microbatches, 'microbatch', 'microbatches')
        layers = f'{format_count(model.n_layers, "layer")} of width {model.d_model}'
        total = (
            f'{train.steps * train.tokens_per_step:,} ({format_count(train.steps, "step")}{epochs and f", {epochs}"})'
        )
        active = f'; {self.parameters - model.idle_parameters:,} of them per token' if model.idle_parameters else ''
        return {
            'parameters': f'{self.parameters:,} ({layers}, {mechanisms}){active}',
            **self._describe_trained(),
            **self._describe_teacher(),
            **self._describe_begin(),
            'tokens per step': f'{train.tokens_per_step:,} ({windows}, {parts})',
            'tokens in total': total,
            'FLOPs per token': format_si(self.flops_per_token),
            **self._describe_exact(),
            **describe_replay(train.replay_every, self.mesh.data, self.mesh.fsdp * self.mesh.sequence),
        }

    def _describe_exact(self) -> dict[str, str]:
        """Says which mechanisms, whose cost is linear in long contexts, are exact in this one."""
        length = self.experiment.train.context_length
        reasons = dict.fromkeys(attention.why_exact(length) for attention in self.experiment.model.pattern)
        return {'note': '; '.join(found)} if (found := [reason for reason in reasons if reason]) else {}

    def _describe_begin(self) -> dict[str, str]:
        begin = self.experiment.data.begin_id
        return {} if begin is None else {'texts begin with': f'token {begin} (data.begin_id)'}

    @property
    def trained(self) -> int:
        """The number of parameters that learn: without frozen parts; under adapters, of these alone."""
        pairs = zip(*map(jax.tree.leaves, (self.functions.abstract['params'], self.program.step.frozen)), strict=True)
        return sum(leaf.size for leaf, is_frozen in pairs if not is_frozen)

    def _describe_trained(self) -> dict[str, str]:
        if self.trained == self.parameters:
            return {}
        text, functions = f'{self.trained:,}, {self.trained / self.parameters:.2%} of the number', self.functions
        if isinstance(functions, AdaptedFunctions):
            text += f': adapters of rank {functions.lora.rank} beside {", ".join(functions.lora.targets)}'
        return {'trained': text}

    def _describe_teacher(self) -> dict[str, str]:
        teaching = self.program.step.teaching
        if teaching is None:
            return {}
        parameters = sum(teaching.functions.count_parameters().values())
        mechanisms = ', '.join(attention.gin_name for attention in teaching.functions.config.pattern)
        return {'teacher': f'{parameters:,} parameters ({mechanisms}) of {teaching.objective.teacher}'}

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations of a training step per token (`ModelConfig.flops_per_token`), with a teacher's."""
        model, length, step = self.experiment.model, self.experiment.train.context_length, self.program.step
        # Weights under adapters have no gradient.
        less = 2 * model.count_products() - 6 * step.adapted.count_adapters() if step.adapted else 0
        if step.teaching:
            return step.teaching.objective.flops_per_token(model, step.teaching.functions.config, length) - less
        return model.flops_per_token(length) - less


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunPlan(StepPlan):
    """The plan of a run.

    Attributes:
        windows: the windows that each step sees.
        evaluation: what its evaluations score.
        first: what the weights of a new run are taken from; under adapters, of every session.
        taught: the cached predictions of the teacher; None: there are none.
    """

    store: Store
    windows: BatchWindows
    evaluation: EvaluationPlan
    first: FirstWeights
    taught: TeacherLogits | None

    @property
    def split(self) -> str:
        """The split for training."""
        return self.experiment.data.train_split

    @property
    def origins(self) -> list[str]:
        """The directories of the runs whose weights a new run starts from, or learns from."""
        return self.first.origins

    @functools.cached_property
    def text(self) -> str:
        """The whole configuration as gin text."""
        return dump(self.experiment)

    def check_initial(self) -> None:
        """Raises AbsentError or MismatchError if the weights for a new run are absent or do not fit."""
        initial, source, functions = self.first.initial, self.first.source, self.first.functions
        if initial and not (source and isinstance(self.first.given, AdaptedWeights)):
            check_initial(initial, self.first.data, (source or functions).abstract['params'])
        if initial and source and (misfits := find_misfits(source, functions)):
            refuse_initial(initial, [describe_misfit(*one) for one in misfits])

    @functools.cached_property
    def fingerprints(self) -> dict[str, str]:
        """The fingerprints that a checkpoint of the run depends on: of data, tokenizer, a teacher's weights, and those
        under adapters."""
        teacher = {'teacher': self.first.teacher.fingerprint()} if self.first.teacher else {}
        base = {BASE: self.first.fingerprint()} if self.program.step.adapted else {}
        return {**self.store.fingerprints, **teacher, **base}


def plan_step(experiment: Experiment, target: Target = UNKNOWN, cache: PlanCache | None = None) -> StepPlan:
    """Plans the step alone; arguments as in `make_plan`. Without data, an objective assumes a tokenizer that fits the
    model.

    Raises ConfigError if the sections do not fit each other or the target.
    """
    check_experiment(experiment)
    cache = PlanCache() if cache is None else cache
    train, model, data, optimizer = experiment.train, experiment.model, experiment.data, experiment.optimizer
    mesh = experiment.mesh.plan(target)
    check_training(train, optimizer, data, model, mesh)
    dtype = model.resolve_dtype(target.platform)
    functions = cache.get(('model', model, dtype), lambda: ModelFunctions(model, dtype))
    unpack, documents = choose_unpacking(data, train, model, None), data.documents(None)
    teaching = plan_teaching(train.objective, functions, cache)
    functions = plan_adapters(train, functions, cache)
    step = TrainStep(functions, optimizer, train.steps, unpack, bool(data.mixture), documents, teaching)
    program = StepProgram(step, train.batch_shape, data.guess_dtype(model.vocab_size))
    check_arrays(program, mesh.fsdp)
    return StepPlan(experiment=experiment, target=target, mesh=mesh, program=program)


def make_plan(
    experiment: Experiment,
    target: Target = UNKNOWN,
    cache: PlanCache | None = None,
    timeout: float | None = None,
) -> RunPlan:
    """Plans a run.

    Args:
        target: the devices; their unknown properties are not checked.
        cache: the stores and functions that earlier plans have opened and built.
        timeout: seconds after which a store counts as out of reach; None: never.

    Raises ConfigError, MismatchError (AbsentError if data are absent), or LmError if they are out of reach.
    """
    check_experiment(experiment)
    cache = PlanCache() if cache is None else cache
    train, model, data, optimizer = experiment.train, experiment.model, experiment.data, experiment.optimizer
    # Errors of the configuration alone come first, before anything is opened.
    settings = settle_evaluation(experiment.evaluate, data, train, model, train.eval_tokens)
    mesh = experiment.mesh.plan(target)
    check_training(train, optimizer, data, model, mesh)
    model.check_parts(mesh.sequence, settings.context_length, 'evaluate.context_length')
    compute_dtype = model.resolve_dtype(target.platform)
    functions = cache.get(('model', model, compute_dtype), lambda: ModelFunctions(model, compute_dtype))
    # Errors of the data.
    source = data, train.context_length if data.task else None
    store = cache.get(('store', source), lambda: data.open(train.context_length, timeout))
    reader, marks = choose_reader(train, store), reads_marks(train, store)
    dtype = cache.get(('dtype', source, marks), lambda: reader.read_many(data.train_split, [0], 1).dtype)
    documents = data.documents(store)
    check_vocabulary(store, data, model)
    windows = make_windows(data, train, store)
    unpack = choose_unpacking(data, train, model, store)
    teaching = plan_teaching(train.objective, functions, cache)
    functions = plan_adapters(train, functions, cache)
    step = TrainStep(functions, optimizer, train.steps, unpack, bool(data.mixture), documents, teaching)
    program = StepProgram(step, train.batch_shape, dtype)
    check_room(experiment, program, mesh, settings, target.memory)
    sets = cache.get(('sets', source, settings.config.sets), lambda: open_sets(settings, store, timeout))
    first = plan_first(train, find_base(functions), teaching, store.fingerprints, store.path, cache)
    return RunPlan(
        experiment=experiment,
        target=target,
        mesh=mesh,
        program=program,
        store=store,
        windows=windows,
        evaluation=plan_evaluation(settings, store, sets),
        first=first,
        taught=open_taught(experiment, store, first),
    )


def check_room(
    experiment: Experiment, program: StepProgram, mesh: MeshShape, settings: EvaluationSettings, memory: int | None
) -> None:
    """Raises ConfigError for what surely does not fit a device with so many bytes of memory; None: not known."""
    check_arrays(program, mesh.fsdp)
    if memory is None or mesh.shards is None:
        return
    model, devices = experiment.model, mesh.shards * mesh.sequence
    itemsize, (_, rows, length) = program.step.functions.dtype.itemsize, program.batch_shape
    check_state(program, mesh.fsdp, memory)
    trained = rows * (length - 1) / devices
    check_tokens('train.tokens_per_step', experiment.train.tokens_per_step, model, trained, itemsize, memory)
    check_evaluation(settings, model, devices, itemsize, memory)


def settle_begin(experiment: Experiment, cache: PlanCache | None = None) -> Experiment:
    """Returns the experiment of a new run with the token before each text (`data.begin_id`) that its model is used to.

    The teacher says it, or else the run of `train.init_from`. A value that is given stays.
    """
    check_experiment(experiment)
    train, data, cache = experiment.train, experiment.data, PlanCache() if cache is None else cache
    if data.begin_id is not None or data.task or train.objective.looks_ahead:
        return experiment
    teacher = train.objective.teacher if isinstance(train.objective, Distillation) else None
    for run_dir in filter(None, (teacher, train.init_from)):
        found = cache.get(('begin', run_dir), functools.partial(read_begin_id, run_dir))
        if found is not None:
            return dataclasses.replace(experiment, data=dataclasses.replace(data, begin_id=found))
    return experiment


def validate(
    experiment: Experiment, devices: int | None = None, cache: PlanCache | None = None, begun: bool = False
) -> list[str]:
    """Refuses what `lm train` would refuse before its first step, without devices and within a fraction of a second.

    Args:
        devices: their number, if it is known.
        cache: for many experiments, so that stores and functions are opened and built once.
        begun: the run goes on from its own checkpoint, so train.init_from is not read again.

    Returns:
        one line for each thing that could not be checked because it is absent or out of reach.

    Raises ConfigError or MismatchError.
    """
    target = UNKNOWN if devices is None else Target(slices=(devices,))
    try:
        plan = make_plan(experiment if begun else settle_begin(experiment, cache), target, cache, PATIENCE_SECONDS)
        if not begun:
            plan.check_initial()
    except (AbsentError, UnnamedError) as error:
        return [str(error)]
    except LmError as error:
        if error.exit_code in FINAL:
            raise
        return [str(error)]
    return []
