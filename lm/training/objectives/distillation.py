"""The base of objectives with a teacher: the student learns from what a trained model computes for the same tokens.

    train.objective = @align(teacher = 'runs/teacher')

The teacher is a run, whose weights never change. The step computes both models.
"""

import abc
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import jax

from lm.config.configurable import configurable_base, field
from lm.data.dataset import Store
from lm.errors import ConfigError
from lm.model import ModelConfig
from lm.model.functions import ModelFunctions, Weights, over_windows
from lm.model.key_heads import clone_key_heads, unshare_key_heads
from lm.ops.documents import Documents
from lm.training.objectives.base import Objective


class Pair(NamedTuple):
    """The student and its teacher, with their weights."""

    student: ModelFunctions
    student_weights: Weights
    teacher: ModelFunctions
    teacher_weights: Weights

    def over_windows(self, function: Callable, documents: Documents | None, *arrays_BxL: jax.Array) -> Any:
        """Calls function(student, teacher, …) on each device's tokens (`lm.model.functions.over_windows`)."""
        models = [(self.student, self.student_weights), (self.teacher, self.teacher_weights)]
        return over_windows(function, models, documents, *arrays_BxL)


@configurable_base
class Distillation(Objective):
    """Base of the objectives that compare a student with a teacher."""

    teacher: str = field(help='the run directory of the teacher')
    teacher_step: int | None = field(
        default=None, minimum=0, resume=True, help="the teacher's checkpoint; None: the newest"
    )

    clone_key_heads: bool = field(
        default=False, help="the student has a key head per query head: copies of those that the teacher's heads share"
    )

    trains_adapters: ClassVar[bool] = True
    """False if it trains parameters that adapters do not stand beside."""

    looks_ahead = False
    remedy = '{}, and a student is compared with its teacher from left to right; set that to True'

    def unpack(self, store: Store | None, vocab_size: int) -> None:
        return None

    @property
    def is_cached(self) -> bool:
        """The batches have what the teacher computes, so that steps do not read its weights."""
        return False

    def make_taught(self, tokens_BxL: jax.Array) -> dict[str, jax.Array]:
        """Returns arrays in the place of cached ones for such windows of inputs."""
        return {}

    def compare_with_cached(
        self,
        student: ModelFunctions,
        weights: Weights,
        documents: Documents | None,
        tokens_BxL: jax.Array,
        targets_BxL: jax.Array,
        taught: Mapping[str, jax.Array],
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns what `compare` returns; `taught` are the arrays of a batch beside its tokens, [B, L, …]."""
        raise NotImplementedError(f'@{self.gin_name}() has no cached form')

    @abc.abstractmethod
    def compare(
        self, pair: Pair, documents: Documents | None, tokens_BxL: jax.Array, targets_BxL: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the loss of each token of a batch [B, L], and further measures by name, [B, L, …].

        Args:
            pair: both models.
            documents: the documents of a window do not see each other; None: a window is one document.
            tokens_BxL: the inputs.
            targets_BxL: the token that each position predicts.
        """

    @abc.abstractmethod
    def make_measures(self, student: ModelFunctions) -> dict[str, jax.Array]:
        """Returns zeros with the names of the measures, in the shape that they have without batch and tokens."""

    @abc.abstractmethod
    def read_measures(self, metrics: Mapping[str, Any]) -> tuple[dict[str, float], str | None]:
        """Returns the measures of a step, from its metrics, and what the line of the step says of the loss."""

    def choose_frozen(self, student: ModelFunctions, teacher: ModelFunctions) -> Any:
        """Returns True for each parameter of the student that stays as it is, a nested dict like the parameters."""
        return jax.tree.map(lambda declaration: False, student.declared)

    @classmethod
    @abc.abstractmethod
    def name_loss(cls, values: Mapping[str, Any]) -> str:
        """Names what a run minimizes, for people. `values` has the fields of its configuration."""

    @abc.abstractmethod
    def flops_per_token(self, student: ModelConfig, teacher: ModelConfig, length: int) -> float:
        """Returns the floating-point operations per token of a step of both models at context `length`."""

    def check(self, student: ModelFunctions, teacher: ModelFunctions) -> None:
        """Raises ConfigError if the two models cannot be compared, or the student cannot take the teacher's heads."""
        for ours, theirs in zip(student.config.layers, teacher.config.layers, strict=True):
            heads, own = student.config.resolve(ours).heads, teacher.config.resolve(theirs).heads
            taken = own.queries if self.clone_key_heads else own.keys
            if (heads.queries, heads.keys) == (own.queries, taken):
                continue
            remedy = f'set model.n_heads = {own.queries} and model.n_kv_heads = {own.keys}'
            if heads.queries == heads.keys == own.queries:
                remedy += f', or {self.gin_name}.clone_key_heads = True'
            elif self.clone_key_heads:
                remedy = f'set model.n_heads = {own.queries} and model.n_kv_heads = None'
            raise ConfigError(
                f'model.n_heads = {heads.queries}, model.n_kv_heads = {heads.keys}: the teacher has {own.queries} '
                f'heads of queries and {own.keys} of keys; {remedy}'
            )
        if self.clone_key_heads:
            jax.eval_shape(functools.partial(clone_key_heads, teacher), teacher.abstract)

    def find_source(self, teacher: ModelFunctions) -> ModelFunctions:
        """Returns the functions of the model from which the student starts, which computes what the teacher does."""
        return unshare_key_heads(teacher) if self.clone_key_heads else teacher

    def make_source(self, teacher: ModelFunctions, weights: Weights) -> Weights:
        """Returns the weights of this model."""
        return clone_key_heads(teacher, weights) if self.clone_key_heads else weights
