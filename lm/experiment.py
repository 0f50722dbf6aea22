"""One experiment: every section that a configuration can set, and the weights of a run that was made with one.

experiment = load(['configs/models/small.gin'], ['train.steps = 1000'])
run = load_run(experiment, 'runs/small')          # or open_run('runs/small'), by its own configuration
run.score('some text').nats
"""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from lm.checkpoint.checkpointer import Checkpointer
from lm.checkpoint.config import CheckpointConfig
from lm.config import load as gin
from lm.config.configurable import REGISTRY, check_kind
from lm.config.text import dump
from lm.data.dataset import DataConfig, Store
from lm.data.prepare.config import PrepareConfig
from lm.data.tokenizers import Tokenizer
from lm.errors import FINAL, AbsentError, ConfigError, LmError, MismatchError
from lm.evaluation.config import EvaluateConfig
from lm.evaluation.evaluator import check_evaluation
from lm.evaluation.scoring import Scorer, Scores
from lm.evaluation.sets import open_sets
from lm.model import ModelConfig, Transformer
from lm.runs.config_diff import compare_texts
from lm.runs.initial import InitialParameters
from lm.runs.run_dir import RunDir
from lm.training.config import TrainConfig
from lm.training.inputs import check_vocabulary, make_windows, unpacking
from lm.training.mesh import MeshConfig, make_mesh
from lm.training.objectives import check_objective
from lm.training.optimizer import OptimizerConfig
from lm.training.program import abstract_state
from lm.training.step import State, TrainStep, weights

OPENED = "such as lm.load('runs/mine') gives"
"""Where functions for users get a `LoadedRun` from."""
OF_THE_JOB = ('mesh.processes', 'mesh.slices')
"""What a run says of the job that trained it, and not of those that read its weights."""
PATIENCE_SECONDS = 20.0
"""How long a bucket may keep `validate` waiting."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """All sections, each a frozen dataclass that a gin file fills; the name of a field is its gin name."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    prepare: PrepareConfig = dataclasses.field(default_factory=PrepareConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = dataclasses.field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)

    def __post_init__(self):
        for section in dataclasses.fields(self):
            given = getattr(self, section.name)
            check_kind(section.name, given, section.type, f'such as lm.{section.type.__name__}() is')


def load_registry() -> dict[str, type]:
    """Returns everything that a gin file can name: gin name → class. To import this module is to register all of it."""
    return REGISTRY


def load(
    gin_files: Sequence[str] = (),
    gin_params: Sequence[str] = (),
    *,
    allow_imports: bool = False,
    base: str | None = None,
) -> Experiment:
    """The experiment that gin files and then gin parameters describe; arguments as in `lm.config.load.load`."""
    return gin.load(gin_files, gin_params, allow_imports=allow_imports, base=base, root=Experiment)


def load_of_run(
    run_dir: str, gin_files: Sequence[str] = (), gin_params: Sequence[str] = (), *, allow_imports: bool = False
) -> Experiment:
    """The configuration of the run in `run_dir`, changed by gin files and parameters, for who reads its weights.

    A change may replace a mechanism (`model.attention = @softmax()`): what the run said about the old one is dropped.

    Raises what `load` raises, and ConfigError where `run_dir` holds no run.
    """
    config = RunDir(run_dir).config
    if not config.exists():
        raise ConfigError(f'--run_dir {run_dir}: holds no config.gin, so it is not a run of lm train')
    options = dict(allow_imports=allow_imports, base=str(config), leave_out=OF_THE_JOB)
    return gin.load(gin_files, gin_params, root=Experiment, **options)


def check_experiment(given: Any) -> None:
    """Raises ConfigError where a function for users is given something else for an experiment, such as a path."""
    check_kind('experiment', given, Experiment, "such as lm.configure(['FILE.gin']) gives")


def validate(
    experiment: Experiment, devices: int | None = None, known: dict | None = None, begun: bool = False
) -> list[str]:
    """Refuses what `lm train` would refuse before its first step, without devices and within a fraction of a second.

    Args:
        devices: how many there will be, if that is known.
        known: what earlier calls have opened and built; one dict for many experiments does nothing twice.
        begun: the run goes on from a checkpoint of its own: what train.init_from names is not read again.

    Returns:
        what could not be checked because it is not there, or out of reach from here, a line each.

    Raises ConfigError or MismatchError.
    """
    check_experiment(experiment)
    train, model, data = experiment.train, experiment.model, experiment.data
    if devices is not None:
        experiment.mesh.check_divides(devices)
        train.check_divides(devices // experiment.mesh.sequence)
    train.check_parts(experiment.mesh.sequence)
    model.check_parts(experiment.mesh.sequence)
    check_objective(train.objective, data, model)
    for length in (train.context_length, experiment.evaluate.context_length or 0):
        model.check_length(length)
    known = {} if known is None else known
    step, tokens = (model, experiment.optimizer, train.steps), (data, train.context_length if data.task else None)
    if step not in known:
        known[step] = TrainStep(*step)
    if tokens not in known:
        known[tokens] = _open_or_say(data, train.context_length)
    store = known[tokens]
    if isinstance(store, str):
        return [store]
    check_vocabulary(store, data, model)
    unpacking(data, train, model, store)
    make_windows(data, train, store)
    store.read(data.train_split, 0, 1)
    sets = tokens, experiment.evaluate.sets
    if sets not in known:
        known[sets] = _or_say(lambda: open_sets(experiment.evaluate, store, PATIENCE_SECONDS))
    if isinstance(known[sets], str):
        return [known[sets]]
    check_evaluation(experiment.evaluate, data, model, train, store, known[sets])
    if train.init_from and not begun:
        params = known[step].abstract()['params']
        try:
            InitialParameters(train.init_from, store.fingerprints, store.path).check(params)
        except AbsentError as error:
            return [str(error)]
    return []


def _open_or_say(data: DataConfig, context_length: int) -> Store | str:
    """What the data section names, or why it cannot be had here."""
    if data.task is None and not data.path and not data.mixture:
        return "data.path = '': names no token store"
    return _or_say(lambda: data.open(context_length, timeout=PATIENCE_SECONDS))


def _or_say(work: Callable[[], Any]) -> Any:
    """What `work` returns, or why it cannot be had here."""
    try:
        return work()
    except LmError as error:
        if error.exit_code in FINAL and not isinstance(error, AbsentError):
            raise
        return str(error)


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """What a checkpoint of a run needs to be used: its functions, weights (params and buffers), data and devices, and
    the `step` after which it was saved."""

    experiment: Experiment
    directory: RunDir
    store: Store
    mesh: Mesh
    functions: TrainStep
    weights: State
    step: int

    @property
    def changes(self) -> dict[str, str | None]:
        """Binding → gin text, where the weights are run otherwise than the run's config.gin says; not the devices."""
        differences = compare_texts(self.directory.config.read_text(), dump(self.experiment))
        return {name: new for name, _, new in differences if not name.startswith('mesh.')}

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """That of the data."""
        return self.store.tokenizer()

    @functools.cached_property
    def model(self) -> Transformer:
        """Tokens [B, L] → logits [B, L, V]."""
        return nnx.merge(self.functions.graph, self.weights['params'], self.weights['buffers'])

    @functools.cached_property
    def scorer(self) -> Scorer:
        """Log-likelihoods of rows of tokens, at the context length of the training at most."""
        config = self.experiment
        length = config.evaluate.context_length or config.train.context_length
        return Scorer(self.functions, self.mesh, self.weights, length, config.evaluate.batch_size)

    def score(self, text: str) -> Scores:
        """How probable each token of `text` is after those before it, the first one as the first of a document.

        Text longer than the context is cut into windows of that length, as `lm evaluate` cuts a split.
        """
        return self.scorer.score_text(self.tokenizer, text)


def open_run(run_dir: str, gin_params: Sequence[str] = (), step: int | None = None) -> LoadedRun:
    """The run in `run_dir` by its own configuration, changed by `gin_params`, such as "data.path = '…'".

    Raises what `load` and `load_run` raise, and ConfigError where `run_dir` holds no run.
    """
    return load_run(load_of_run(run_dir, (), gin_params), run_dir, step)


def training_step(experiment: Experiment, store: Store | None = None) -> TrainStep:
    """The functions of the steps that `experiment` describes. Without the store an objective asks nothing of its
    tokenizer. Build it under the mesh: what that is for decides in which type the model computes."""
    model, config, data = experiment.model, experiment.train, experiment.data
    model.check_parts(experiment.mesh.sequence)
    unpack = unpacking(data, config, model, store)
    return TrainStep(model, experiment.optimizer, config.steps, unpack, bool(data.mixture), data.documents(store))


def load_run(experiment: Experiment, run_dir: str, step: int | None = None) -> LoadedRun:
    """The weights of the run in `run_dir` at `step` (None: the newest), laid out on all devices, however many trained.

    Raises MismatchError where the checkpoint does not fit the model or was trained with another tokenizer.
    """
    if step is not None and not isinstance(step, numbers.Integral):
        raise ConfigError(f'step = {step!r}: must be an int')
    store = experiment.data.open(experiment.train.context_length)
    fitted = experiment.mesh.fitted(jax.devices())
    experiment.model.check_parts(fitted.sequence)
    mesh = make_mesh(fitted)
    directory = RunDir(run_dir)
    with jax.set_mesh(mesh):
        functions = TrainStep(experiment.model, experiment.optimizer, experiment.train.steps)
        abstract = weights(abstract_state(functions, mesh))
    # Other data may be scored, but only tokens of the same kind.
    tokenizer = {name: value for name, value in store.fingerprints.items() if name == 'tokenizer'}
    with Checkpointer(directory.checkpoints, experiment.checkpoint, tokenizer) as saved:
        restored = saved.restore(abstract, step=step)
    if restored is None:
        raise MismatchError(f'--run_dir {run_dir}: holds no checkpoint; train it first with lm train')
    return LoadedRun(experiment, directory, store, mesh, functions, restored[0], restored[1])
