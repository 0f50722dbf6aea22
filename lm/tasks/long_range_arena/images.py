"""Image of the Long Range Arena (Tay et al. 2021, §2.2.4): the class of an image whose pixels come one by one.

    path/data_batch_1.bin … data_batch_5.bin, test_batch.bin

The files are the binary version of CIFAR-10 (Krizhevsky 2009). A record is one byte for the class and 3,072 for the
red, green and blue values of 32 × 32 pixels. They become 1,024 levels of grey, row by row. The last tenth of the
training records is for validation.
"""

import functools

import numpy as np

from lm.config.configurable import configurable
from lm.errors import ConfigError
from lm.tasks.long_range_arena.classification import FromFiles

PIXELS = 32 * 32
RECORD = 1 + 3 * PIXELS
VALIDATION = 0.1
"""The fraction of the training records for validation."""
GREY = np.array([0.2989, 0.587, 0.114])
"""Weights of red, green and blue (ITU-R BT.601)."""


@configurable('arena_images')
class ArenaImages(FromFiles):
    """One of ten classes of an image in 1,024 grey pixels."""

    symbols = 256
    classes = 10

    def shortest_context(self) -> int:
        return PIXELS + 1

    @functools.cached_property
    def _records(self) -> dict[str, np.ndarray]:
        """Returns split → bytes [N, RECORD], mapped from the files."""
        files = sorted(self.folder.glob('data_batch_*.bin'))
        if not files:
            raise self.missing('data_batch_1.bin; the binary version of CIFAR-10 is meant')
        train = np.concatenate([self._of(file) for file in files])
        first = len(train) - round(VALIDATION * len(train))
        return {'train': train[:first], 'validation': train[first:], 'test': self._of(self.folder / 'test_batch.bin')}

    def _of(self, file) -> np.ndarray:
        if not file.is_file():
            raise self.missing(file.name)
        size = file.stat().st_size
        if not size or size % RECORD:
            raise ConfigError(f'{file}: {size} bytes are no multiple of {RECORD}, so it is not one of CIFAR-10')
        return np.memmap(file, np.uint8, 'r').reshape(-1, RECORD)

    def held(self, split: str) -> int:
        return len(self._records[split])

    def read(self, split: str, index: int) -> tuple[np.ndarray, int]:
        record = self._records[split][index]
        colours_3xN = record[1:].reshape(3, PIXELS)
        return np.rint(GREY @ colours_3xN).astype(np.uint8), int(record[0])
