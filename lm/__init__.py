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
import sys
import types
from typing import Any

__version__ = '0.1.0'

PUBLIC = {
    'CheckpointConfig': 'lm.checkpoint.checkpointer:CheckpointConfig',
    'DataConfig': 'lm.data.dataset:DataConfig',
    'EvaluateConfig': 'lm.evaluation.config:EvaluateConfig',
    'Experiment': 'lm.experiment:Experiment',
    'LoadedRun': 'lm.experiment:LoadedRun',
    'MeshConfig': 'lm.training.mesh:MeshConfig',
    'ModelConfig': 'lm.model:ModelConfig',
    'OptimizerConfig': 'lm.training.optimizer:OptimizerConfig',
    'PrepareConfig': 'lm.data.prepare.config:PrepareConfig',
    'TrainConfig': 'lm.training.config:TrainConfig',
    'configure': 'lm.experiment:load',
    'dump': 'lm.config.text:dump',
    'evaluate': 'lm.evaluation.command:evaluate',
    'generate': 'lm.generate',
    'load': 'lm.experiment:open_run',
    'mechanisms': 'lm.attention:mechanisms',
    'prepare': 'lm.data.prepare.stages:prepare',
    'train': 'lm.train',
    'validate': 'lm.experiment:validate',
}
"""What `import lm` offers → where it is made. Without a colon it is a module, which is called itself."""


class CallableModule(types.ModuleType):
    """A module that stands for its function `call` too: `lm.train` is lm/train.py and what it is for."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.call(*arguments, **options)


def make_callable(module: str) -> None:
    """Makes the module of this name, which has a function `call`, a `CallableModule`."""
    sys.modules[module].__class__ = CallableModule


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    module, _, attribute = PUBLIC[name].partition(':')
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


def __dir__() -> list[str]:
    return sorted({*globals(), *PUBLIC})
