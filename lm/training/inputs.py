"""The inputs of a training step: sections that fit each other, the windows that it sees, and how it unpacks them."""

import functools

from lm.data.batches import BatchWindows, WindowReader, Windows
from lm.data.dataset import DataConfig, Store
from lm.data.mixture import MixedWindows, Mixture
from lm.data.store import TokenStore
from lm.data.teacher_logits import CacheKey
from lm.errors import ConfigError, MismatchError
from lm.model import ModelConfig
from lm.pod.mesh import MeshShape
from lm.training.config import TrainConfig
from lm.training.objectives import Unpack, check_objective
from lm.training.objectives.next_token import NextToken, next_answer, next_token
from lm.training.optimizer import OptimizerConfig

ROUTERS = 'glu'
"""The part of a model that routers belong to (`lm.parameters.PARTS`)."""


def check_training(
    config: TrainConfig, optimizer: OptimizerConfig, data: DataConfig, model: ModelConfig, mesh: MeshShape
) -> None:
    """Raises ConfigError if the sections do not fit each other, or the devices cannot share the batches."""
    if mesh.shards is not None:
        config.check_divides(mesh.shards)
    config.check_parts(mesh.sequence)
    optimizer.build_schedule(config.steps)
    check_objective(config.objective, data, model)
    model.check_parts(mesh.sequence, config.context_length)
    model.check_length(config.context_length)
    if config.objective.trains_feed_forward and config.adapters is None and ROUTERS not in optimizer.frozen:
        reasons = (kind.why_untrained() for kind in model.feed_forwards)
        if reason := next(filter(None, reasons), None):
            raise ConfigError(reason)


def make_cache_key(config: TrainConfig, data: DataConfig, store: Store, teacher: str, k: int) -> CacheKey:
    """Returns what the cached predictions of a teacher with this fingerprint are of.

    Raises ConfigError if the data are no token store, which alone keeps predictions.
    """
    if not isinstance(store, TokenStore):
        name = 'data.task' if data.task else 'data.mixture'
        raise ConfigError(f'{name}: predictions of a teacher lie in one token store; set data.path alone')
    inputs = f'{data.text_begin(store)}, {data.documents(store)}'
    return CacheKey(teacher, store.fingerprint, data.train_split, config.context_length, k, inputs)


def check_vocabulary(store: Store, data: DataConfig, model: ModelConfig) -> None:
    """Raises MismatchError if the tokens of the store do not fit the model."""
    pieces = store.vocab_size
    if pieces > model.vocab_size:
        what = (
            f'{store.path} has {pieces} tokens' if data.task else f'the tokenizer of {store.path} has {pieces} pieces'
        )
        raise MismatchError(f'model.vocab_size = {model.vocab_size}: {what}; set model.vocab_size = {pieces}')


def choose_unpacking(data: DataConfig, config: TrainConfig, model: ModelConfig, store: Store | None) -> Unpack | None:
    """Returns the function that unpacks the windows of a step: the objective's (`Objective.unpack`), or else the
    task's. None: each token predicts the next one, and the tokens are the inputs as they are.

    `Objective.unpack` describes the last two arguments and the errors.
    """
    if data.task and not config.objective.looks_ahead:
        return data.task.choose_unpacking(bool(model.looks_ahead))
    unpack, begin = config.objective.unpack(store, model.vocab_size), data.text_begin(store)
    if reads_marks(config, store):
        return functools.partial(next_answer, begin=begin)
    return functools.partial(next_token, begin=begin) if unpack is None and begin else unpack


def reads_marks(config: TrainConfig, store: Store | None) -> bool:
    """Tells whether a store says which tokens are predicted, and the objective listens."""
    return isinstance(store, TokenStore | Mixture) and store.marks_answers and isinstance(config.objective, NextToken)


class MarkedReader:
    """The windows of a store whose tokens are marked (`TokenStore.read_marked`)."""

    def __init__(self, store: TokenStore | Mixture):
        self.read_many = store.read_marked


def choose_reader(config: TrainConfig, store: Store) -> WindowReader:
    """Returns what reads the windows of training."""
    if reads_marks(config, store):
        assert isinstance(store, TokenStore | Mixture)
        return MarkedReader(store)
    return store


def make_windows(data: DataConfig, config: TrainConfig, store: Store) -> BatchWindows:
    """Returns the windows that each step sees.

    Raises ConfigError if the split is missing or too short, or if the ranges are wrong.
    """
    settings = config.context_length, config.batch_size, config.seed, config.skip_batches
    if isinstance(store, Mixture):
        return MixedWindows(store, data.train_split, *settings)
    return Windows(store.tokens(data.train_split), *settings)
