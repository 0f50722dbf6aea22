"""What measures the weights of a run."""

import dataclasses
import functools
from typing import Any

from jax.sharding import Mesh

from lm.data.dataset import DataConfig, Store
from lm.data.mixture import Mixture
from lm.data.store import TokenStore
from lm.errors import ConfigError
from lm.evaluation.accuracy import TaskEvaluator, check_context, check_task
from lm.evaluation.baseline import EmpiricalBaseline
from lm.evaluation.config import EvaluateConfig
from lm.evaluation.masked import MaskedEvaluator, check_masked, make_hidden_scoring_program
from lm.evaluation.perplexity import EvaluationWindows, Evaluator, make_scoring_program
from lm.evaluation.sets import SetsEvaluator, open_sets
from lm.model import ModelConfig
from lm.model.functions import ModelFunctions
from lm.training.config import TrainConfig
from lm.training.objectives import check_objective


def make_evaluator(
    config: EvaluateConfig,
    data: DataConfig,
    train: TrainConfig,
    functions: ModelFunctions,
    mesh: Mesh,
    store: Store,
    first_tokens: int | None = None,
) -> Evaluator | SetsEvaluator | TaskEvaluator:
    """Perplexity on text, or what the objective of the training asks for; accuracy on a task. With `first_tokens` only
    so many of each text are scored, which must be a window at least; a task has its own number of examples."""
    check_objective(train.objective, data, functions.config)
    split, context_length = what_is_scored(config, data, train)
    functions.config.check_length(context_length)
    others = open_sets(config, store)
    if data.task:
        return TaskEvaluator(functions, mesh, data.task, split, context_length, config.window, config.batch_size)
    documents = data.documents(store, config.mask_documents)
    config = dataclasses.replace(config, mask_documents=bool(documents))
    check_windows(config, split, context_length, store, others, first_tokens)

    text = make_scoring_program(functions, mesh, documents, config.chunk, config.accuracy)
    baseline = EmpiricalBaseline(store, data.train_split) if config.accuracy else None

    @functools.cache
    def parts_of(split: str) -> tuple[type[Evaluator], Any, EmpiricalBaseline | None]:
        """What scores a split, its program, and the baseline."""
        hiding = train.objective.hiding(store, functions.config.vocab_size, split)
        if hiding is None:
            return Evaluator, text, baseline
        hidden = make_hidden_scoring_program(functions, mesh, hiding)
        return MaskedEvaluator, hidden, EmpiricalBaseline(store, data.train_split, hiding.special)

    def evaluator(store: TokenStore, split: str) -> Evaluator:
        kind, program, baseline = parts_of(split)
        return kind(program, mesh, store, config, split, context_length, baseline, first_tokens)

    if not others and not isinstance(store, Mixture):
        return evaluator(store, split)
    parts = store.parts(split) if isinstance(store, Mixture) else {'': store}
    return SetsEvaluator(
        store,
        {name: evaluator(part, split) for name, part in parts.items()},
        {name: evaluator(part, own or split) for name, (part, own) in others.items()},
    )


def check_evaluation(
    config: EvaluateConfig,
    data: DataConfig,
    model: ModelConfig,
    train: TrainConfig,
    store: Store,
    others: dict[str, tuple[TokenStore, str]],
) -> None:
    """Raises the errors that `make_evaluator` would, without devices; `others` is what `open_sets` returns."""
    split, context_length = what_is_scored(config, data, train)
    if data.task:
        check_task(data.task, split, context_length, config.window, model)
    else:
        check_windows(config, split, context_length, store, others, train.eval_tokens)


def check_windows(
    config: EvaluateConfig,
    split: str,
    context_length: int,
    store: TokenStore | Mixture,
    others: dict[str, tuple[TokenStore, str]],
    first_tokens: int | None = None,
) -> None:
    """Raises ConfigError, which names the set: a split that is missing, a window longer than it or `first_tokens`; and
    what `TokenStore.tokenizer` raises, which else the first evaluation would, a thousand steps later."""
    parts = store.parts(split) if isinstance(store, Mixture) else {'': store}
    for name, (part, own) in ({name: (part, '') for name, part in parts.items()} | others).items():
        try:
            EvaluationWindows.create(part.tokens(own or split), context_length, config.window, first_tokens)
            part.tokenizer()  # its end-of-document token opens the first window
        except ConfigError as error:
            raise ConfigError(f'{error} (the set {name!r})' if name else str(error)) from None


def what_is_scored(config: EvaluateConfig, data: DataConfig, train: TrainConfig) -> tuple[str, int]:
    """(split, context length) of the evaluations of a run. Raises ConfigError for what its kind has not."""
    if data.task and config.mask_documents:
        raise ConfigError('evaluate.mask_documents = True: the examples of a task are no documents; delete this')
    if data.task and config.chunk:
        raise ConfigError(f'evaluate.chunk = {config.chunk}: the examples of a task are computed whole; delete this')
    if data.task and train.eval_tokens:
        raise ConfigError(f'train.eval_tokens = {train.eval_tokens}: the examples of a task are its own; delete this')
    split = config.split or data.eval_split
    if data.task and config.context_length:
        check_context(data.task, split, config.context_length)
    if train.objective.looks_ahead:
        check_masked(config)
    elif config.accuracy and config.chunk:
        raise ConfigError(f'evaluate.chunk = {config.chunk}: evaluate.accuracy is of whole windows; delete one')
    return split, config.context_length or train.context_length
