"""From the data that a configuration names to the batches of a run."""

from jax.sharding import Mesh

from lm.data.batches import Batches, BatchWindows, Windows
from lm.data.dataset import DataConfig, Store
from lm.data.mixture import MixedWindows, Mixture
from lm.errors import MismatchError
from lm.model import ModelConfig
from lm.ops.platform import SEQUENCE_AXIS, data_shards
from lm.training.config import TrainConfig
from lm.training.mesh import batch_sharding
from lm.training.objectives import Unpack, check_objective


def open_store(data: DataConfig, config: TrainConfig, model: ModelConfig) -> Store:
    """The token store, or the examples of a task. Raises MismatchError if its tokens do not fit the model, ConfigError
    if the model has too few positions or is not one of the objective."""
    check_objective(config.objective, data, model)
    model.check_length(config.context_length)
    store = data.open(config.context_length)
    check_vocabulary(store, data, model)
    return store


def check_vocabulary(store: Store, data: DataConfig, model: ModelConfig) -> None:
    """Raises MismatchError if the tokens of the store do not fit the model."""
    pieces = store.vocab_size
    if pieces > model.vocab_size:
        what = (
            f'{store.path} has {pieces} tokens' if data.task else f'the tokenizer of {store.path} has {pieces} pieces'
        )
        raise MismatchError(f'model.vocab_size = {model.vocab_size}: {what}; set model.vocab_size = {pieces}')


def unpacking(data: DataConfig, config: TrainConfig, model: ModelConfig, store: Store | None) -> Unpack | None:
    """What a step makes of its windows, for `TrainStep`: a task says so, else the objective, whose arguments are the
    last two and whose errors are raised."""
    check_objective(config.objective, data, model)
    return data.task.unpack if data.task else config.objective.unpack(store, model.vocab_size)


def make_batches(data: DataConfig, config: TrainConfig, store: Store, mesh: Mesh) -> Batches:
    """The batches of the run. Raises ConfigError if they cannot be split over the devices."""
    config.check_divides(data_shards(mesh))
    config.check_parts(mesh.shape.get(SEQUENCE_AXIS, 1))
    windows = make_windows(data, config, store)
    return Batches(store, data.train_split, windows, config.microbatches, batch_sharding(mesh, axis=1))


def make_windows(data: DataConfig, config: TrainConfig, store: Store) -> BatchWindows:
    """Which tokens each step sees. Raises ConfigError for a split that is missing or too short, or wrong ranges."""
    settings = config.context_length, config.batch_size, config.seed, config.skip_batches
    if isinstance(store, Mixture):
        return MixedWindows(store, data.train_split, *settings)
    return Windows(store.tokens(data.train_split), *settings)
