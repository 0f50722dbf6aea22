"""Pre-training language models on TPUs with attention that the user selects.

import lm

experiment = lm.configure(['configs/experiments/quickstart.gin'], ['train.steps = 100'])
lm.train(experiment, 'runs/mine')
run = lm.load('runs/mine')
run.score('def main():').nats, lm.evaluate(run)['perplexity'], lm.generate(run, 'def main(')

What `PUBLIC` names is imported when it is first used, so that `import lm` and `lm --help` take no time. Nothing inside
`lm` uses these names: there, everything is imported from where it is made.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the names of `PUBLIC`, for type checkers and editors
    from lm.attention import mechanisms as mechanisms
    from lm.checkpoint.config import CheckpointConfig as CheckpointConfig
    from lm.config.text import dump as dump
    from lm.data.dataset import DataConfig as DataConfig
    from lm.data.prepare.config import PrepareConfig as PrepareConfig
    from lm.data.prepare.stages import prepare as prepare
    from lm.evaluation.config import EvaluateConfig as EvaluateConfig
    from lm.experiment import Experiment as Experiment
    from lm.experiment import load as _configure
    from lm.inference.evaluation import evaluate as evaluate
    from lm.inference.generation import generate as generate
    from lm.inference.loaded_run import LoadedRun as LoadedRun
    from lm.inference.loaded_run import open_run as _load
    from lm.model import ModelConfig as ModelConfig
    from lm.plan import validate as validate
    from lm.pod.mesh import MeshConfig as MeshConfig
    from lm.session.train import train as train
    from lm.training.config import TrainConfig as TrainConfig
    from lm.training.optimizer import OptimizerConfig as OptimizerConfig

    configure, load = _configure, _load  # an import under another name is private

__version__ = '1.0.0'
"""Its only place: `pyproject.toml` reads it from here, without importing the module."""

PUBLIC = {
    'CheckpointConfig': 'lm.checkpoint.config:CheckpointConfig',
    'DataConfig': 'lm.data.dataset:DataConfig',
    'EvaluateConfig': 'lm.evaluation.config:EvaluateConfig',
    'Experiment': 'lm.experiment:Experiment',
    'LoadedRun': 'lm.inference.loaded_run:LoadedRun',
    'MeshConfig': 'lm.pod.mesh:MeshConfig',
    'ModelConfig': 'lm.model:ModelConfig',
    'OptimizerConfig': 'lm.training.optimizer:OptimizerConfig',
    'PrepareConfig': 'lm.data.prepare.config:PrepareConfig',
    'TrainConfig': 'lm.training.config:TrainConfig',
    'configure': 'lm.experiment:load',
    'dump': 'lm.config.text:dump',
    'evaluate': 'lm.inference.evaluation:evaluate',
    'generate': 'lm.inference.generation:generate',
    'load': 'lm.inference.loaded_run:open_run',
    'mechanisms': 'lm.attention:mechanisms',
    'prepare': 'lm.data.prepare.stages:prepare',
    'train': 'lm.session.train:train',
    'validate': 'lm.plan:validate',
}
"""Name that `import lm` offers → 'module:name' of where it is made."""


if not TYPE_CHECKING:  # a type checker that saw `__getattr__` would accept every name

    def __getattr__(name: str) -> object:
        if name not in PUBLIC:
            raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
        module, _, attribute = PUBLIC[name].partition(':')
        return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
