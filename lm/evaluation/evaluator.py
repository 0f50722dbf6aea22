"""What measures the weights of a run."""

from jax.sharding import Mesh

from lm.data.dataset import DataConfig
from lm.data.store import TokenStore
from lm.evaluation.accuracy import TaskEvaluator, check_task
from lm.evaluation.config import EvaluateConfig
from lm.evaluation.perplexity import EvaluationWindows, Evaluator
from lm.tasks import TaskStore
from lm.training.step import TrainStep


def make_evaluator(
    config: EvaluateConfig,
    data: DataConfig,
    context_length: int,
    functions: TrainStep,
    mesh: Mesh,
    store: TokenStore | TaskStore,
) -> Evaluator | TaskEvaluator:
    """Perplexity on text, accuracy on a task; `context_length` is that of training, where `config` names no other."""
    split, context_length = what_is_scored(config, data, context_length)
    if data.task:
        return TaskEvaluator(functions, mesh, data.task, split, context_length, config.window, config.batch_size)
    return Evaluator(functions, mesh, store, config, split, context_length)


def check_evaluation(
    config: EvaluateConfig, data: DataConfig, context_length: int, store: TokenStore | TaskStore
) -> None:
    """Raises the ConfigError that `make_evaluator` would, without devices."""
    split, context_length = what_is_scored(config, data, context_length)
    if data.task:
        check_task(data.task, split, context_length, config.window)
    else:
        EvaluationWindows.create(store.tokens(split), context_length, config.window)


def what_is_scored(config: EvaluateConfig, data: DataConfig, context_length: int) -> tuple[str, int]:
    """(split, context length) of the evaluations of a run that trains at `context_length`."""
    return config.split or data.eval_split, config.context_length or context_length
