"""Classification tasks. An example is a sequence, a mark, and the class after the mark."""

import abc
import dataclasses
import pathlib

import jax
import numpy as np

from lm.config.configurable import configurable_base, field
from lm.errors import ConfigError
from lm.files import local_path
from lm.tasks.base import SPLITS, Task

FILLER = 0
"""The token after the class; input symbol s is token 1 + s."""


class Classification(Task):
    """A task with one class per example.

    The Arena's models are classifiers that see an example in both directions. Here the class is the next token after
    the mark, and only this token counts.
    """

    symbols: int
    """The number of input symbols."""
    classes: int

    @property
    def ask(self) -> int:
        """The mark."""
        return 1 + self.symbols

    @property
    def vocab_size(self) -> int:
        return 2 + self.symbols + self.classes

    def scored(self, tokens_BxN: jax.Array) -> jax.Array:
        return tokens_BxN[:, :-1] == self.ask

    def row(self, symbols_N: np.ndarray, label: int, length: int) -> np.ndarray:
        """One example, [length]."""
        tokens_L = np.full(length, FILLER)
        tokens_L[: len(symbols_N)] = 1 + symbols_N.astype(np.int64)
        tokens_L[len(symbols_N) : len(symbols_N) + 2] = self.ask, self.ask + 1 + label
        return tokens_L


@configurable_base
class FromFiles(Classification):
    """The base of tasks whose examples come from files, in the format of their authors."""

    path: str = field(help='the folder of the files, a local one', resume=True)
    train_examples: int = field(default=2**31 - 1, minimum=1, help='at most; there are as many as the files hold')
    eval_examples: int = field(default=2**31 - 1, minimum=1, help='at most, in each of validation and test')

    @property
    def folder(self) -> pathlib.Path:
        return local_path(self.path, f'{self.gin_name}.path')

    @abc.abstractmethod
    def held(self, split: str) -> int:
        """Returns the number of examples of a split in the files."""

    @abc.abstractmethod
    def read(self, split: str, index: int) -> tuple[np.ndarray, int]:
        """Returns the symbols of an example, and its class."""

    def identity(self) -> str:
        """Returns the identity without the path: files may be moved."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != 'path'}
        choice = ' spread' if any(self.count(split) < self.held(split) for split in SPLITS) else ''
        return f'{self.gin_name} {fields} {[self.count(split) for split in SPLITS]}{choice}'

    def count(self, split: str) -> int:
        return min(super().count(split), self.held(split))

    def made(self, split: str, index_N: np.ndarray, length: int) -> np.ndarray:
        # Files may be in the order of their classes, so fewer examples are spread over all of them.
        held, count = self.held(split), self.count(split)
        return np.stack([self.row(*self.read(split, int(i) * held // count), length) for i in index_N])

    def missing(self, name: str) -> ConfigError:
        return ConfigError(f'{self.gin_name}.path = {self.path!r}: holds no {name}')
