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
from typing import Any

__version__ = '1.0.0'
"""Its only place: `pyproject.toml` reads it from here, without importing the module."""

PUBLIC = {
    'CheckpointConfig': 'lm.checkpoint.checkpointer:CheckpointConfig',
    'DataConfig': 'lm.data.dataset:DataConfig',
    'EvaluateConfig': 'lm.evaluation.config:EvaluateConfig',
    'Experiment': 'lm.experiment:Experiment',
    'LoadedRun': 'lm.inference.loaded_run:LoadedRun',
    'MeshConfig': 'lm.training.mesh:MeshConfig',
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
"""What `import lm` offers → 'module:name' of where it is made."""


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    module, _, attribute = PUBLIC[name].partition(':')
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
