"""Synthetic tasks. Examples are a pure function of (seed, split, index); some of their tokens are answers.

    configuration   a frozen dataclass, `@configurable('name') class Name(Task)`; data.task = @name() in a gin file
    TaskStore       its examples where the trainer expects a token store

An example is a sequence of tokens; only the answers count, in the loss and in the accuracy. A model reads it from left
to right, or sees it from both sides with its answers hidden (`model.causal = False`). N examples of L + 1 tokens, L =
train.context_length. Adding a task means adding one file with the configuration to this package, which finds it by
itself.
"""

import abc
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lm.config.configurable import Configurable, configurable_base, field
from lm.errors import ConfigError
from lm.tasks.draws import Draws

HIDDEN = 0
"""The token in place of what a model that sees later tokens shall tell. Tasks with filler have it as filler."""
SPLITS = ('train', 'validation', 'test')


@dataclasses.dataclass(frozen=True)
class Slice:
    """A part of a split with an accuracy: the numbers of its examples, and their context length."""

    index_N: np.ndarray
    context_length: int


@configurable_base
class Task(Configurable, abc.ABC):
    """Base of the tasks (frozen dataclasses made by `@configurable`)."""

    train_examples: int = field(default=65_536, minimum=1, help='they come again every epoch')
    eval_examples: int = field(default=4096, minimum=1, help='in each of validation and test')
    seed: int = field(default=0, minimum=0, help='which examples there are; train.seed decides their order')

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """The number of different tokens; a field in some tasks."""

    whole_answers = True
    """Accuracy counts examples whose answers are all right (True) or single answers (False)."""

    def generate(self, draws: Draws, length: int) -> np.ndarray:
        """Returns token ids [N, length] of the examples with the random numbers `draws`; length = context length + 1.

        A task whose examples depend on their numbers in another way overrides `made` or `examples` instead.
        """
        raise TypeError(f'@{self.gin_name}() has none of generate, made and examples')

    def made(self, split: str, index_N: np.ndarray, length: int) -> np.ndarray:
        """Returns token ids [N, length] of examples `index_N` of a known split, at a length that holds them."""
        return self.generate(Draws(self.seed, split, index_N), length)

    @abc.abstractmethod
    def scored(self, tokens_BxN: jax.Array) -> jax.Array:
        """Returns bool [B, N - 1]: the token after each position is an answer."""

    @abc.abstractmethod
    def shortest_context(self) -> int:
        """Returns the least context length that holds an example."""

    def unpack(self, tokens_BxN: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns inputs and targets (both [B, N - 1]), and which targets count (`scored`).

        A task whose targets are not the next tokens packs both into the tokens of its examples.
        """
        return tokens_BxN[:, :-1], tokens_BxN[:, 1:], self.scored(tokens_BxN)

    def unpack_hidden(self, tokens_BxN: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Unpacks for a model whose tokens see later ones: `HIDDEN` stands in the inputs where answers were."""
        inputs_BxL, targets_BxL, scored_BxL = self.unpack(tokens_BxN)
        is_answer_BxL = jnp.pad(scored_BxL[:, :-1], ((0, 0), (1, 0)))
        return jnp.where(is_answer_BxL, HIDDEN, inputs_BxL), targets_BxL, scored_BxL

    def choose_unpacking(self, sees_later: bool) -> Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]:
        """Returns `unpack`, or `unpack_hidden` for a model whose tokens see later ones."""
        return self.unpack_hidden if sees_later else self.unpack

    def slices(self, split: str, context_length: int) -> dict[str, Slice]:
        """Returns name → part of a split with its own accuracy; one part without a name is the whole split."""
        return {'': Slice(np.arange(self.count(split)), context_length)}

    def examples(self, split: str, index_N: Sequence[int] | np.ndarray, context_length: int) -> np.ndarray:
        """Returns examples `index_N` of a split, [N, context_length + 1] int32.

        Raises ConfigError for a split that there is not and for a context that cannot hold an example.
        """
        self.count(split)
        if context_length < self.shortest_context():
            raise ConfigError(
                f'train.context_length = {context_length}: @{self.gin_name}() needs at least {self.shortest_context()}'
            )
        return self.made(split, np.asarray(index_N), context_length + 1).astype(np.int32)

    def identity(self) -> str:
        """Returns text that determines the examples, for the fingerprint of a run's data."""
        return repr(self)

    def count(self, split: str) -> int:
        """Returns the number of examples of a split."""
        if split not in SPLITS:
            raise ConfigError(
                f'split {split!r}: @{self.gin_name}() has {", ".join(SPLITS)}; choose one of them with '
                'data.train_split, data.eval_split or evaluate.split'
            )
        return self.train_examples if split == 'train' else self.eval_examples


class TaskStore:
    """The examples of a task laid out like the windows of a text: example i stands at offset i · context_length.

    Windows, batches, their order and their distribution over hosts are then the same as for text (`lm.data.batches`).
    """

    def __init__(self, task: Task, context_length: int):
        """Raises ConfigError when the context cannot hold an example."""
        self.task, self.context_length = task, context_length
        self.path = f'@{task.gin_name}()'
        self.vocab_size = task.vocab_size
        content = f'{task.identity()} {context_length} {self.read("train", 0, 1)}'
        self.fingerprints = {'data': hashlib.sha256(content.encode()).hexdigest()}

    def tokens(self, split: str) -> int:
        """Returns the end of the last window; windows share no tokens here."""
        return self.task.count(split) * self.context_length + 1

    def read(self, split: str, start: int, stop: int) -> np.ndarray:
        """Returns the tokens of one example; `start` is its offset."""
        return self.read_many(split, [start], stop - start)[0]

    def read_many(self, split: str, starts: Sequence[int] | np.ndarray, length: int) -> np.ndarray:
        """Returns the first `length` tokens of the examples at the offsets `starts`, [N, length] int32."""
        index = np.asarray(starts, np.int64) // self.context_length
        return self.task.examples(split, index, self.context_length)[:, :length]

    def tokenizer(self) -> Any:
        """Raises ConfigError: tasks are not text."""
        raise ConfigError(f'data.task = {self.path}: this run was trained on a task, so there is no text to write')
