"""The weights of its teacher and of other runs that a run begins with and learns from, planned without reading them."""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar, cast

import jax.numpy as jnp
from jax.typing import DTypeLike

from lm.data.dataset import Store
from lm.data.store import TokenStore
from lm.data.teacher_logits import TeacherLogits
from lm.errors import ConfigError, LmError
from lm.experiment import Experiment, load, load_of_run
from lm.model.adapters import AdaptedFunctions, adapt, find_base
from lm.model.functions import ModelFunctions
from lm.runs.weights import SavedWeights
from lm.training.config import TrainConfig
from lm.training.first_weights import BASE, AdaptedWeights, FirstWeights
from lm.training.inputs import make_cache_key
from lm.training.objectives import Distillation, Objective
from lm.training.objectives.distill import Distill
from lm.training.step import Teaching

Found = TypeVar('Found')


class PlanCache:
    """Keeps everything that plans have opened and built, or failed to open: many plans with one cache do nothing
    twice."""

    def __init__(self) -> None:
        self._found: dict[Hashable, object] = {}

    def get(self, key: Hashable, make: Callable[[], Found]) -> Found:
        """Returns what `make` returned for this key at the first call, or raises what it raised."""
        if key not in self._found:
            try:
                self._found[key] = make()
            except LmError as error:
                self._found[key] = error
        if isinstance(found := self._found[key], LmError):
            raise found
        return cast(Found, found)


def plan_teaching(objective: Objective, student: ModelFunctions, cache: PlanCache) -> Teaching | None:
    """Returns the teacher of the step, from the configuration of its run; None without a teacher.

    Raises ConfigError if the objective names no run, or if student and teacher cannot be compared.
    """
    if not isinstance(objective, Distillation):
        return None
    config = cache.get(('teacher', objective.teacher), lambda: read_teacher(objective)).model
    dtype = student.dtype
    teacher = cache.get(('model', config, dtype), lambda: ModelFunctions(config, dtype))
    if config.n_layers != student.config.n_layers or config.d_model != student.config.d_model:
        raise ConfigError(
            f'train.objective = @{objective.gin_name}(): the teacher {objective.teacher} has {config.n_layers} layers '
            f'of width {config.d_model}, the student {student.config.n_layers} of {student.config.d_model}; set '
            'model.n_layers and model.d_model to the values of the teacher'
        )
    objective.check(student, teacher)
    return Teaching(objective, teacher)


def plan_adapters(train: TrainConfig, functions: ModelFunctions, cache: PlanCache) -> ModelFunctions:
    """Returns the functions of the model with the adapters that are trained, if there are any.

    Raises ConfigError if they would stand beside nothing that is trained already, or learn nothing.
    """
    if train.adapters is None:
        return functions
    objective, setting = train.objective, f'train.adapters = @{train.adapters.gin_name}()'
    if isinstance(objective, Distillation) and not objective.trains_adapters:
        raise ConfigError(
            f'{setting}: @{objective.gin_name}() trains attention itself, whose new parameters adapters do not have; '
            'take adapters for the stage distill'
        )
    if train.init_from is None and not isinstance(objective, Distillation):
        raise ConfigError(f'{setting}: the weights beside them stay as they are; name a run in train.init_from')
    return cache.get(('adapters', functions, train.adapters), lambda: adapt(functions, train.adapters))


def plan_first(
    train: TrainConfig,
    functions: ModelFunctions,
    teaching: Teaching | None,
    fingerprints: Mapping[str, str],
    data: str,
    cache: PlanCache,
) -> FirstWeights:
    """Returns what the weights of a new run are taken from.

    Args:
        train: names the run that it starts from, and the teacher.
        functions: of its model, without adapters.
        teaching: the comparison with the teacher.
        fingerprints: of its data.
        data: where they lie.
        cache: keeps what is read.
    """
    objective, given, teacher = train.objective, None, None
    if train.init_from:
        given = plan_weights('train.init_from', train.init_from, None, fingerprints, functions, cache)
    if isinstance(objective, Distillation) and teaching:
        setting = f'{objective.gin_name}.teacher'
        named = objective.teacher, objective.teacher_step
        teacher = plan_weights(setting, *named, fingerprints, teaching.functions, cache)
    source = plan_source(train.init_from, functions, teaching is not None, cache)
    if isinstance(given, AdaptedWeights) and source is None:
        source = find_base(given.functions)
    return FirstWeights(functions, train.seed, data, given, source, teaching, teacher)


def open_taught(experiment: Experiment, store: Store, first: FirstWeights) -> TeacherLogits | None:
    """Opens the cached predictions of the teacher; None: the objective asks for none.

    Raises the errors of `make_cache_key` and of `TeacherLogits`.
    """
    objective = experiment.train.objective
    if not isinstance(objective, Distill) or objective.top_k is None or first.teacher is None:
        return None
    fingerprint = first.teacher.fingerprint()
    key = make_cache_key(experiment.train, experiment.data, store, fingerprint, objective.top_k)
    assert isinstance(store, TokenStore), '`make_cache_key` has refused others'
    return TeacherLogits(store, key)


def plan_weights(
    setting: str,
    run_dir: str,
    step: int | None,
    fingerprints: Mapping[str, str],
    like: ModelFunctions,
    cache: PlanCache,
) -> SavedWeights | AdaptedWeights:
    """Returns the weights of another run; adapters that it has trained are merged into its model.

    Args:
        setting, run_dir, step, fingerprints: as in `SavedWeights`.
        like: computes in the type of its products.
        cache: keeps what is read.
    """
    saved = SavedWeights(setting, run_dir, step, fingerprints)
    try:
        experiment = cache.get(('source', run_dir), lambda: load_of_run(run_dir))
    except ConfigError:  # reading the weights tells what is wrong
        return saved
    return plan_adapted(experiment, saved, like.dtype, cache) if experiment.train.adapters else saved


def plan_adapted(
    experiment: Experiment, saved: SavedWeights, dtype: DTypeLike, cache: PlanCache | None = None
) -> AdaptedWeights:
    """Returns the weights of a run that trains adapters, merged into its model.

    Args:
        experiment: its configuration, with `train.adapters`.
        saved: the checkpoint.
        dtype: of the products of the model.
        cache: keeps what is read.
    """
    train, model, cache = experiment.train, experiment.model, PlanCache() if cache is None else cache
    functions = cache.get(('model', model, jnp.dtype(dtype)), lambda: ModelFunctions(model, dtype))
    teaching = plan_teaching(train.objective, functions, cache)
    first = plan_first(train, functions, teaching, saved.fingerprints, saved.run_dir, cache)
    adapted = plan_adapters(train, functions, cache)
    assert isinstance(adapted, AdaptedFunctions), 'the configuration has adapters'
    own = dataclasses.replace(saved, fingerprints={**saved.fingerprints, BASE: first.fingerprint()})
    return AdaptedWeights(own, adapted, first)


def plan_source(
    init_from: str | None, functions: ModelFunctions, is_taught: bool, cache: PlanCache
) -> ModelFunctions | None:
    """Returns the functions of the model whose weights a run starts from, if it stacks as many layers otherwise.

    None: there is no such run, or parameters of equal names belong to equal layers. A student with a teacher takes
    from its first stage only layers of its own mechanisms, so these must be equal, too.
    """
    try:
        config = cache.get(('source', init_from), lambda: load_of_run(init_from)).model if init_from else None
    except ConfigError:  # `check_initial` tells what is wrong
        return None
    model = functions.config
    if config is None or config.n_layers != model.n_layers:
        return None
    is_alike = not is_taught or [type(one) for one in config.layers] == [type(one) for one in model.layers]
    if len(config.pattern) == len(model.pattern) and is_alike:
        return None
    return cache.get(('model', config, functions.dtype), lambda: ModelFunctions(config, functions.dtype))


def read_teacher(objective: Distillation) -> Experiment:
    """Returns the configuration of the teacher: of its run, or from a gin file, which suffices for `lm check`.

    Raises ConfigError, with the field, if it is neither.
    """
    try:
        return load([objective.teacher]) if objective.teacher.endswith('.gin') else load_of_run(objective.teacher)
    except ConfigError as error:
        raise ConfigError(f'{objective.gin_name}.teacher = {objective.teacher!r}: {error}') from error
