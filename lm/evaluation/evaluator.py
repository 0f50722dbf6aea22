"""What measures the weights of a run."""

from jax.sharding import Mesh

from lm.data.dataset import DataConfig
from lm.data.store import TokenStore
from lm.evaluation.accuracy import TaskEvaluator
from lm.evaluation.config import EvaluateConfig
from lm.evaluation.perplexity import Evaluator
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
    split = config.split or data.eval_split
    context_length = config.context_length or context_length
    if data.task:
        return TaskEvaluator(functions, mesh, data.task, split, context_length, config.window, config.batch_size)
    return Evaluator(functions, mesh, store, config, split, context_length)
