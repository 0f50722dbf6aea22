"""One experiment: every section that a configuration can set.

experiment = load(['configs/models/small.gin'], ['train.steps = 1000'])
"""

import dataclasses
import typing
from collections.abc import Collection, Sequence

from lm.checkpoint.config import CheckpointConfig
from lm.config import load as gin
from lm.config.configurable import REGISTRY, check_kind, list_fields
from lm.data.dataset import DataConfig
from lm.data.prepare.config import PrepareConfig
from lm.errors import ConfigError
from lm.evaluation.config import EvaluateConfig
from lm.model import ModelConfig
from lm.pod.mesh import MeshConfig
from lm.runs.info import read_raw
from lm.runs.paths import explain_absence, find_import
from lm.runs.run_dir import RunDir
from lm.training.config import TrainConfig
from lm.training.optimizer import OptimizerConfig

OF_THE_JOB = ('mesh.processes', 'mesh.slices')
"""Bindings that describe the training job and are ignored when weights are loaded."""


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
        for name, kind in typing.get_type_hints(Experiment).items():
            check_kind(name, getattr(self, name), kind, f'such as lm.{kind.__name__}() is')


def load_registry() -> dict[str, type]:
    """Returns everything that a gin file can name: gin name → class. Importing this module registers all of it."""
    return REGISTRY


def load(
    gin_files: Sequence[str] = (),
    gin_params: Sequence[str] = (),
    *,
    allow_imports: bool = False,
    base: str | None = None,
    leave_out: Collection[str] = (),
) -> Experiment:
    """Returns the experiment that gin files and then gin parameters describe; arguments as in `lm.config.load.load`."""
    return gin.load(gin_files, gin_params, allow_imports=allow_imports, base=base, root=Experiment, leave_out=leave_out)


def list_not_inherited() -> list[str]:
    """Returns the bindings of a teacher's run that say nothing about its student (`inherit` of `field`)."""
    sections = typing.get_type_hints(Experiment).items()
    fields = ((name, field) for name, section in sections for field in list_fields(section).values())
    return [f'{name}.{field.name}' for name, field in fields if field.metadata.get('inherit') is False]


def load_of_run(
    run_dir: str, gin_files: Sequence[str] = (), gin_params: Sequence[str] = (), *, allow_imports: bool = False
) -> Experiment:
    """Returns the configuration of the run in `run_dir`, changed by gin files and parameters, for readers of its
    weights.

    A change may replace a mechanism (`model.attention = @softmax()`): the run's settings of the old one are dropped.

    Raises the errors of `load`, and ConfigError if `run_dir` holds no run.
    """
    run = RunDir(run_dir, found=True)
    if not run.config.exists() or find_import(run.path):
        raise ConfigError(f'--run_dir {run_dir}: {explain_absence(run.path)}')
    return gin.load(
        gin_files, gin_params, root=Experiment, allow_imports=allow_imports, base=str(run.config), leave_out=OF_THE_JOB
    )


def find_begin_id(experiment: Experiment, directory: RunDir) -> int | None:
    """Returns the token that a run has before each text: as its configuration says, or the checkpoint of its import.

    None: the end-of-document token. `experiment` is the configuration of the run in `directory`.
    """
    stated = experiment.data.begin_id
    return read_raw(directory.info).get('begin_id') if stated is None else stated


def read_begin_id(run_dir: str) -> int | None:
    """Returns the token that the run in `run_dir` has before each text; None: the end-of-document token, or no run."""
    directory = RunDir(run_dir)
    if not directory.config.exists():
        return None
    return find_begin_id(load_of_run(run_dir), directory)


def check_experiment(given: object) -> None:
    """Raises ConfigError if a public function gets something other than an experiment, such as a path."""
    check_kind('experiment', given, Experiment, "such as lm.configure(['FILE.gin']) gives")
