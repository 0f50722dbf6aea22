"""The plan of the evaluations of a run, made without devices.

`settle_evaluation` resolves the configuration alone, and `plan_evaluation` adds the data.
"""

import dataclasses
import functools

from lm.data.dataset import DataConfig, Store
from lm.data.mixture import Mixture, check_same_tokenizer
from lm.data.store import TokenStore
from lm.errors import ConfigError
from lm.evaluation.baseline import EmpiricalBaseline
from lm.evaluation.config import EvaluateConfig
from lm.evaluation.windows import EvaluationWindows, WholeWindows
from lm.model import ModelConfig
from lm.ops.documents import Documents, TextBegin
from lm.tasks import Task, TaskStore
from lm.training.config import TrainConfig
from lm.training.objectives import Hiding, Objective
from lm.training.room import check_tokens


@dataclasses.dataclass(frozen=True)
class EvaluationSettings:
    """The settings of an evaluation that need no data.

    Attributes:
        split, context_length: resolved; `config` has the other settings.
        first_tokens: the number of tokens of each text that are scored; None: all.
    """

    config: EvaluateConfig
    data: DataConfig
    objective: Objective
    vocab_size: int
    split: str
    context_length: int
    first_tokens: int | None


OpenedSet = tuple[TokenStore, str | None]
"""The store of a text of `evaluate.sets`, and its split; None: the split of the evaluation."""


@dataclasses.dataclass(frozen=True)
class ScoredText:
    """A split that is scored.

    Attributes:
        hiding: hides the tokens that are scored; None: the tokens before each token predict it.
        baseline: predicts by frequencies alone; None: no accuracy is reported.
    """

    store: TokenStore
    split: str
    windows: EvaluationWindows
    hiding: Hiding | None = None
    baseline: EmpiricalBaseline | None = None


@dataclasses.dataclass(frozen=True)
class TaskPlan:
    """The examples of a task that an evaluation scores."""

    task: Task
    split: str
    context_length: int
    batch_size: int


@dataclasses.dataclass(frozen=True)
class TextPlan:
    """The texts that an evaluation scores.

    Attributes:
        store: the data of the run.
        documents: how the documents of a window are separated; None: they are not.
        begin: the token before a text; None: the end-of-document token before it stays.
        parts: name → text of the data of the run; a single store has the name ''.
        others: name → text of `evaluate.sets`.
    """

    store: TokenStore | Mixture
    settings: EvaluationSettings
    documents: Documents | None
    parts: dict[str, ScoredText]
    others: dict[str, ScoredText]
    begin: TextBegin | None = None


EvaluationPlan = TaskPlan | TextPlan


def settle_evaluation(
    config: EvaluateConfig, data: DataConfig, train: TrainConfig, model: ModelConfig, first_tokens: int | None = None
) -> EvaluationSettings:
    """Resolves the settings of an evaluation. `first_tokens` limits the tokens of each text, to at least one window.

    Raises ConfigError if the sections contradict each other, or need a property that this kind of data lacks. Call
    `lm.training.objectives.check_objective` as well.
    """
    split, context_length = config.split or data.eval_split, config.context_length or train.context_length
    if data.task:
        _check_task(config, data.task, split, context_length, train.eval_tokens, model)
    elif train.objective.looks_ahead:
        _check_masked(config)
    elif config.accuracy and config.chunk:
        raise ConfigError(f'evaluate.chunk = {config.chunk}: evaluate.accuracy is of whole windows; delete one')
    model.check_length(context_length)
    return EvaluationSettings(config, data, train.objective, model.vocab_size, split, context_length, first_tokens)


def check_evaluation(
    settings: EvaluationSettings, model: ModelConfig, devices: int, itemsize: int, memory: int
) -> None:
    """Raises ConfigError for batches that surely do not fit devices with so many bytes of memory each."""
    config = settings.config
    at_once = max(config.batch_size / devices, 1) * (config.chunk or settings.context_length)
    check_tokens('evaluate.batch_size', config.batch_size, model, at_once, itemsize, memory)


def plan_evaluation(
    settings: EvaluationSettings, store: Store, sets: dict[str, OpenedSet] | None = None
) -> EvaluationPlan:
    """Plans the evaluation on the data of a run; `sets` None: this function opens them (`open_sets`).

    Raises ConfigError, which names the set, if a split is missing or shorter than a window. Raises the errors of
    `TokenStore.tokenizer` now; the first evaluation would raise them a thousand steps later.
    """
    config, split, length = settings.config, settings.split, settings.context_length
    sets = open_sets(settings, store) if sets is None else sets
    if isinstance(store, TaskStore):
        return TaskPlan(store.task, split, length, config.batch_size)
    documents = settings.data.documents(store, config.mask_documents)

    @functools.cache
    def hide(split: str) -> tuple[Hiding | None, EmpiricalBaseline | None]:
        hiding = settings.objective.make_hiding(store, settings.vocab_size, split)
        if hiding is None and not config.accuracy:
            return None, None
        return hiding, EmpiricalBaseline(store, settings.data.train_split, hiding.special if hiding else ())

    def plan_text(name: str, part: TokenStore, split: str) -> ScoredText:
        kind = WholeWindows if settings.objective.looks_ahead else EvaluationWindows
        try:
            windows = kind.create(part.tokens(split), length, config.window, settings.first_tokens)
            part.tokenizer()  # its end-of-document token opens the first window
        except ConfigError as error:
            raise ConfigError(f'{error} (the set {name!r})' if name else f'{error} (split {split!r})') from None
        return ScoredText(part, split, windows, *hide(split))

    parts = store.parts(split) if isinstance(store, Mixture) else {'': store}
    return TextPlan(
        store=store,
        settings=settings,
        documents=documents,
        parts={name: plan_text(name, part, split) for name, part in parts.items()},
        others={name: plan_text(name, part, own or split) for name, (part, own) in sets.items()},
        begin=settings.data.text_begin(store, config.begin_windows),
    )


def open_sets(settings: EvaluationSettings, store: Store, timeout: float | None = None) -> dict[str, OpenedSet]:
    """Opens the stores of `evaluate.sets`, by name.

    Raises ConfigError if the run has no text, or a set has the name of a part of its mixture. Raises MismatchError if a
    set has another tokenizer than `store`, and the errors of `TokenStore.open`.
    """
    found = {}
    for name, place in settings.config.sets:
        if isinstance(store, TaskStore):
            raise ConfigError(f'evaluate.sets: {name!r} is text, and the run learns a task; delete it')
        if isinstance(store, Mixture) and name in store.stores:
            raise ConfigError(f'evaluate.sets: {name!r} is a store of data.mixture, which is scored anyway; rename it')
        path, _, split = place.rpartition('@')  # 'data/books@test' is a path and a split
        path, split = (path, split) if path and '/' not in split else (place, None)
        opened = TokenStore.open(path, timeout)
        check_same_tokenizer(opened, store, f'evaluate.sets, {name!r}')
        found[name] = (opened, split)
    return found


def _check_task(
    config: EvaluateConfig, task: Task, split: str, context_length: int, eval_tokens: int | None, model: ModelConfig
) -> None:
    """Raises ConfigError for settings that task examples lack, for lengths that the model or the task lacks, and the
    errors of `Task.examples`."""
    for name, given in (('mask_documents', config.mask_documents), ('begin_windows', config.begin_windows)):
        if given:
            raise ConfigError(f'evaluate.{name} = True: the examples of a task are no documents; delete this')
    if config.chunk:
        raise ConfigError(f'evaluate.chunk = {config.chunk}: the examples of a task are computed whole; delete this')
    if eval_tokens:
        raise ConfigError(f'train.eval_tokens = {eval_tokens}: the examples of a task are its own; delete this')
    if config.context_length:
        _check_context(task, split, config.context_length)
    if config.window != 'disjoint':
        raise ConfigError(f"evaluate.window = '{config.window}': examples of a task are scored whole; set 'disjoint'")
    for part in task.slices(split, context_length).values():
        model.check_length(part.context_length)
        task.examples(split, part.index_N[:1], part.context_length)


def _check_context(task: Task, split: str, context_length: int) -> None:
    """Raises ConfigError if a context holds no example, or the task has its own lengths for the split."""
    lengths = sorted({part.context_length for part in task.slices(split, context_length).values()})
    if lengths != [context_length]:
        raise ConfigError(
            f'evaluate.context_length = {context_length}: @{task.gin_name}() is scored at lengths of its own, '
            f'{", ".join(map(str, lengths))}; leave this out, or change them in the settings of the task'
        )
    if context_length < task.shortest_context():
        raise ConfigError(
            f'evaluate.context_length = {context_length}: @{task.gin_name}() needs at least {task.shortest_context()}'
        )


def _check_masked(config: EvaluateConfig) -> None:
    """Raises ConfigError for settings that need a causal model."""
    if config.window != 'disjoint':
        raise ConfigError(f"evaluate.window = '{config.window}': windows with hidden tokens are whole; set 'disjoint'")
    if config.chunk:
        raise ConfigError(
            f'evaluate.chunk = {config.chunk}: where tokens see later ones a window is computed whole; delete this'
        )
    for name, given in (('mask_documents', config.mask_documents), ('begin_windows', config.begin_windows)):
        if given:
            raise ConfigError(f'evaluate.{name} = True: is for tokens that see earlier ones alone; delete this')
