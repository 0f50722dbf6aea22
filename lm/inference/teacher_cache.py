"""`lm distill --cache`: the predictions of a teacher for the windows of training, kept in the token store."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from lm.data.store import TokenStore
from lm.data.teacher_logits import TYPES, write_logits
from lm.errors import ConfigError
from lm.experiment import Experiment, list_not_inherited, load, load_of_run
from lm.inference.loaded_run import load_run
from lm.model.distillation import find_most_probable
from lm.model.functions import over_windows
from lm.plan.weights import PlanCache, plan_weights
from lm.pod.mesh import batch_sharding, round_up_rows
from lm.runs.paths import explain_absence, find_import
from lm.runs.run_dir import RunDir
from lm.text import format_si
from lm.training.inputs import check_vocabulary, make_cache_key
from lm.training.objectives import Distillation
from lm.training.objectives.next_token import next_token


def load_cached(
    teacher: str, gin_files: Sequence[str], gin_params: Sequence[str], *, allow_imports: bool = False
) -> Experiment:
    """Returns the configuration of stage 2, whose data and windows count; arguments as of `lm.experiment.load`."""
    run = RunDir(teacher, found=True)
    if not run.config.exists() or find_import(run.path):
        raise ConfigError(f'--teacher {teacher}: {explain_absence(run.path)}')
    given = {'allow_imports': allow_imports, 'base': str(run.config), 'leave_out': list_not_inherited()}
    return load(gin_files, ['train.objective = @distill()', f'distill.teacher = {teacher!r}', *gin_params], **given)


def cache_predictions(experiment: Experiment, teacher: str, k: int) -> None:
    """Writes the k most probable tokens of the teacher for each position that training may see. Files that are there
    stay, so that the same call goes on after a stop.

    Raises ConfigError or MismatchError if teacher and data do not fit each other.
    """
    train, data = experiment.train, experiment.data
    own = dataclasses.replace(load_of_run(teacher), data=data, mesh=experiment.mesh)
    model = own.model
    if not 0 < k <= model.vocab_size:
        raise ConfigError(f'--cache {k}: must be from 1 to the {model.vocab_size} tokens of the teacher')
    store = data.open(train.context_length)
    check_vocabulary(store, data, model)
    step = train.objective.teacher_step if isinstance(train.objective, Distillation) else None
    run = load_run(own, teacher, step)
    weights = plan_weights('distill.teacher', teacher, step, store.fingerprints, run.functions, PlanCache())
    key = make_cache_key(train, data, store, weights.fingerprint(), k)
    assert isinstance(store, TokenStore), '`make_cache_key` has refused others'
    begin, documents, sharding = data.text_begin(store), data.documents(store), batch_sharding(run.mesh)
    rows = round_up_rows(experiment.evaluate.batch_size, run.mesh)

    @jax.jit
    def find(weights, tokens_BxL):
        inputs_BxL, _, _ = next_token(tokens_BxL.astype(jnp.int32), begin)
        return over_windows(
            functools.partial(find_most_probable, k=k), [(run.functions, weights)], documents, inputs_BxL
        )

    def predict(windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        shape = len(windows), train.context_length, k
        found = [np.empty(shape, kind) for kind in TYPES.values()]
        for first in range(0, len(windows), rows):
            own = windows[first : first + rows]
            padded = np.resize(own, rows)  # one program for all batches
            tokens = store.read_many(data.train_split, padded * train.context_length, train.context_length + 1)
            arrays = find(run.weights, jax.device_put(tokens, sharding))
            for whole, part in zip(found, jax.device_get(arrays), strict=True):
                whole[first : first + len(own)] = part[: len(own)]
        return found[0], found[1]

    size = store.tokens(data.train_split) * k * sum(np.dtype(kind).itemsize for kind in TYPES.values())
    print(
        f'{k} tokens per position take {format_si(size)}B in {store.path}/{data.train_split}/{key.folder}', flush=True
    )
    with jax.set_mesh(run.mesh):
        for done, files in write_logits(store, key, predict):
            print(f'{done} of {files} files', flush=True)
    print(f'train with --set distill.top_k={k}')
