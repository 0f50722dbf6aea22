"""The weights of a run, with the objects that are needed to use them.

run = open_run('runs/small')                        # by its own configuration
run = load_run(experiment, 'runs/small', step=1000)
run.score('some text').nats
"""

import dataclasses
import functools
import numbers
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from lm.checkpoint.checkpointer import Checkpointer
from lm.checkpoint.finite import refuse_not_finite
from lm.checkpoint.stored_array import open_arrays
from lm.config.text import dump
from lm.data.dataset import DataConfig, Store
from lm.data.tokenizers import Tokenizer
from lm.data.tokenizers.companions import FOLDER, find_ends, read_companions
from lm.errors import ConfigError, MismatchError
from lm.evaluation.scoring import Scorer, Scores
from lm.experiment import Experiment, find_begin_id, load_of_run
from lm.hardware import Target
from lm.inference.decoding import TokenWriter
from lm.inference.no_data import NoData, choose_fingerprints, open_data
from lm.model import Transformer
from lm.model.functions import ModelFunctions, Weights
from lm.parameters import AVERAGE
from lm.plan.weights import plan_adapted
from lm.pod.mesh import place
from lm.runs.config_diff import compare_texts
from lm.runs.run_dir import RunDir
from lm.runs.weights import SavedWeights

OPENED = "such as lm.load('runs/mine') gives"
"""The sources of a `LoadedRun`, for error messages."""


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """The weights of a run (params and buffers) after the `step` at which they were saved.

    It also holds the functions, data and devices that use them.
    """

    experiment: Experiment
    directory: RunDir
    store: Store | NoData
    mesh: Mesh
    functions: ModelFunctions
    weights: Weights
    step: int

    @property
    def changes(self) -> dict[str, str | None]:
        """The bindings that differ from the run's config.gin, as gin text; devices are left out."""
        differences = compare_texts(self.directory.config.read_text(), dump(self.experiment))
        return {name: new for name, _, new in differences if not name.startswith('mesh.')}

    @property
    def splits(self) -> Store:
        """The store, for those that read a split; UnnamedError if the run has a tokenizer and no data."""
        if isinstance(self.store, NoData):
            raise self.store.error
        return self.store

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the data."""
        return self.store.tokenizer()

    @functools.cached_property
    def begin_id(self) -> int:
        """The token that stands before every text: the end-of-document token, unless the model was trained with
        another one (`lm.experiment.find_begin_id`)."""
        stated = find_begin_id(self.experiment, self.directory)
        return self.tokenizer.eod_id if stated is None else stated

    @functools.cached_property
    def companions(self) -> dict[str, bytes]:
        """Name → contents of the files that came along with imported weights."""
        return read_companions(self.directory.path / FOLDER)

    @functools.cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end a text: the end-of-document token, and what an imported generation_config.json names."""
        known = (i for i in find_ends(self.companions) if i < self.tokenizer.vocab_size)
        return tuple(dict.fromkeys([self.tokenizer.eod_id, *known]))

    @property
    def data(self) -> DataConfig:
        """The section `data` of the configuration, with the token before every text."""
        data = self.experiment.data
        stated = None if data.task else find_begin_id(self.experiment, self.directory)
        return data if stated is None else dataclasses.replace(data, begin_id=stated)

    @functools.cached_property
    def model(self) -> Transformer:
        """Computes logits [B, L, V] of tokens [B, L]."""
        return self.functions.merge(self.weights)

    @functools.cached_property
    def token_writer(self) -> TokenWriter:
        """The programs that continue prompts with `model`."""
        return TokenWriter(self.model)

    @functools.cached_property
    def scorer(self) -> Scorer:
        """Returns a scorer of rows of tokens, with at most the context length of the training."""
        config = self.experiment
        length = config.evaluate.context_length or config.train.context_length
        return Scorer(self.functions, self.mesh, self.weights, length, config.evaluate.batch_size)

    def score(self, text: str) -> Scores:
        """Scores each token of `text` after the tokens before it; the first token begins a document.

        Text longer than the context is cut into windows of that length, as `lm evaluate` cuts a split.
        """
        begin = self.data.text_begin(self.store, self.experiment.evaluate.begin_windows)
        return self.scorer.score_text(self.tokenizer, text, self.begin_id, begin is not None and begin.windows)


def open_run(run_dir: str, gin_params: Sequence[str] = (), step: int | None = None) -> LoadedRun:
    """Opens the run in `run_dir` by its own configuration, changed by `gin_params`, such as "data.path = '…'".

    Raises the errors of `load` and `load_run`, and ConfigError if `run_dir` holds no run.
    """
    return load_run(load_of_run(run_dir, (), gin_params), run_dir, step)


def load_run(experiment: Experiment, run_dir: str, step: int | None = None, *, on_disk: bool = False) -> LoadedRun:
    """Loads the weights of the run in `run_dir` at `step` (None: the newest), laid out on all present devices.

    Args:
        on_disk: leave them where they are, each a `StoredArray`, which is not verified yet; merged adapters are read.

    Raises MismatchError if the checkpoint does not fit the model, was trained with another tokenizer, or has weights
    that are not finite.
    """
    if step is not None and not isinstance(step, numbers.Integral):
        raise ConfigError(f'step = {step!r}: must be an int')
    target, directory = Target.of_devices(jax.devices()), RunDir(run_dir, found=True)
    store = open_data(experiment, directory)
    shape = experiment.mesh.fit(target).plan(target)
    experiment.model.check_parts(shape.sequence)
    mesh = shape.arrange(jax.devices())
    functions = ModelFunctions(experiment.model, experiment.model.resolve_dtype(target.platform))
    # The arrays of a checkpoint that become the parameters: the mean of the last ones, if the run keeps one.
    name = AVERAGE if experiment.optimizer.average_steps else 'params'
    abstract = place(functions.abstract, mesh, functions.declared)
    abstract = {name: abstract['params'], 'buffers': abstract['buffers']}
    # The data may differ from the run's, but their tokenizer must be the same.
    fingerprints = choose_fingerprints(store, directory)
    if experiment.train.adapters:
        chosen = SavedWeights('--run_dir', run_dir, step, fingerprints)
        weights = plan_adapted(experiment, chosen, functions.dtype).read(
            place(functions.abstract, mesh, functions.declared)
        )
        return LoadedRun(experiment, directory, store, mesh, functions, weights, chosen.chosen)
    if on_disk:
        found = open_arrays(directory.checkpoints, abstract, step, fingerprints)
    else:
        with Checkpointer(directory.checkpoints, experiment.checkpoint, fingerprints) as saved:
            found = saved.restore(abstract, step=step)
    if found is None:
        raise MismatchError(f'--run_dir {run_dir}: holds no checkpoint; train it first with lm train')
    weights = {'params': found[0][name], 'buffers': found[0]['buffers']}
    if not on_disk:
        refuse_not_finite(weights, f'--run_dir {run_dir}, step {found[1]}', 'choose another step or run')
    return LoadedRun(experiment, directory, store, mesh, functions, weights, found[1])
