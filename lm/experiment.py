"""One experiment: every section that a configuration can set. A verb of the command line takes one of these."""

import dataclasses

from lm.checkpoint import CheckpointConfig
from lm.data.dataset import DataConfig
from lm.data.prepare import PrepareConfig
from lm.evaluate import EvaluateConfig
from lm.mesh import MeshConfig
from lm.model import ModelConfig
from lm.optimizer import OptimizerConfig
from lm.train import TrainConfig


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
