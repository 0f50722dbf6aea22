"""Text of the Long Range Arena (Tay et al. 2021, §2.2.2): is a review for or against a film, byte by byte?

    path/{train,test}/CLASS/*.txt

The Large Movie Review Dataset (Maas et al. 2011) as it is distributed, with the classes neg and pos; other folders of
classes are read alike, in the order of their names. Like the Arena, which has no other texts to validate on, validation
is the test split.
"""

import functools
import pathlib

import numpy as np

from lm.config.configurable import configurable, field
from lm.errors import ConfigError
from lm.tasks.long_range_arena.classification import FromFiles

UNLABELLED = 'unsup'
"""A folder of reviews without a class."""


@configurable('arena_texts')
class ArenaTexts(FromFiles):
    """The class of a text in bytes."""

    max_length: int = field(default=4000, minimum=1, help='bytes of a text; what is behind them is cut off')

    symbols = 256

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Returns the names of the classes."""
        found = sorted(p.name for p in (self.folder / 'train').glob('*') if p.is_dir() and p.name != UNLABELLED)
        if len(found) < 2:
            raise self.missing('train/CLASS/*.txt of two classes or more')
        return tuple(found)

    @property
    def classes(self) -> int:
        return len(self.names)

    def shortest_context(self) -> int:
        return self.max_length + 1

    @functools.cached_property
    def _files(self) -> dict[str, list[tuple[pathlib.Path, int]]]:
        """Returns split → path and class of each text, in the order of classes and names."""
        found = {}
        for split, folder in {'train': 'train', 'validation': 'test', 'test': 'test'}.items():
            folders = [self.folder / folder / name for name in self.names]
            found[split] = [(file, label) for label, each in enumerate(folders) for file in sorted(each.glob('*.txt'))]
            if not found[split]:
                raise self.missing(f'{folder}/{self.names[0]}/*.txt')
        return found

    def held(self, split: str) -> int:
        return len(self._files[split])

    def read(self, split: str, index: int) -> tuple[np.ndarray, int]:
        file, label = self._files[split][index]
        try:
            return np.frombuffer(file.read_bytes()[: self.max_length], np.uint8), label
        except OSError as error:
            raise ConfigError(f'{file} cannot be read ({error.strerror})') from None
