"""What measures the weights of a run."""

import dataclasses

from jax.sharding import Mesh

from lm.data.dataset import DataConfig, Store
from lm.data.mixture import Mixture
from lm.data.store import TokenStore
from lm.errors import ConfigError
from lm.evaluation.accuracy import TaskEvaluator, check_task
from lm.evaluation.config import EvaluateConfig
from lm.evaluation.perplexity import EvaluationWindows, Evaluator, scoring
from lm.evaluation.sets import SetsEvaluator, open_sets
from lm.training.step import TrainStep


def make_evaluator(
    config: EvaluateConfig,
    data: DataConfig,
    context_length: int,
    functions: TrainStep,
    mesh: Mesh,
    store: Store,
) -> Evaluator | SetsEvaluator | TaskEvaluator:
    """Perplexity on text, accuracy on a task; `context_length` is that of training, where `config` names no other."""
    split, context_length = what_is_scored(config, data, context_length)
    functions.model.check_length(context_length)
    others = open_sets(config, store)
    if data.task:
        return TaskEvaluator(functions, mesh, data.task, split, context_length, config.window, config.batch_size)
    documents = data.documents(store, config.mask_documents)
    program = scoring(functions, mesh, documents, config.chunk)
    config = dataclasses.replace(config, mask_documents=bool(documents))
    check_windows(config, split, context_length, store, others)
    if not others and not isinstance(store, Mixture):
        return Evaluator(program, mesh, store, config, split, context_length)
    parts = store.parts(split) if isinstance(store, Mixture) else {'': store}
    return SetsEvaluator(
        store,
        {name: Evaluator(program, mesh, part, config, split, context_length) for name, part in parts.items()},
        {name: Evaluator(program, mesh, s, config, own or split, context_length) for name, (s, own) in others.items()},
    )


def check_evaluation(
    config: EvaluateConfig,
    data: DataConfig,
    context_length: int,
    store: Store,
    others: dict[str, tuple[TokenStore, str]],
) -> None:
    """Raises the ConfigError that `make_evaluator` would, without devices; `others` is what `open_sets` returns."""
    split, context_length = what_is_scored(config, data, context_length)
    if data.task:
        check_task(data.task, split, context_length, config.window)
    else:
        check_windows(config, split, context_length, store, others)


def check_windows(
    config: EvaluateConfig,
    split: str,
    context_length: int,
    store: TokenStore | Mixture,
    others: dict[str, tuple[TokenStore, str]],
) -> None:
    """Raises ConfigError, which names the set, where a split is missing or shorter than a window."""
    parts = store.parts(split) if isinstance(store, Mixture) else {'': store}
    for name, (part, own) in ({name: (part, '') for name, part in parts.items()} | others).items():
        try:
            EvaluationWindows.create(part.tokens(own or split), context_length, config.window)
        except ConfigError as error:
            raise ConfigError(f'{error} (the set {name!r})' if name else str(error)) from None


def what_is_scored(config: EvaluateConfig, data: DataConfig, context_length: int) -> tuple[str, int]:
    """(split, context length) of the evaluations of a run that trains at `context_length`."""
    if data.task and config.mask_documents:
        raise ConfigError('evaluate.mask_documents = True: the examples of a task are no documents; delete this')
    if data.task and config.chunk:
        raise ConfigError(f'evaluate.chunk = {config.chunk}: the examples of a task are computed whole; delete this')
    return config.split or data.eval_split, config.context_length or context_length
