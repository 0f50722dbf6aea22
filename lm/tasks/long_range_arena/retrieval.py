"""Retrieval of the Long Range Arena (Tay et al. 2021, §2.2.3): does one paper cite the other, both byte by byte?

    path/new_aan_pairs.train.tsv, new_aan_pairs.eval.tsv, new_aan_pairs.test.tsv

The Arena's own files of pairs from the ACL Anthology Network (Radev et al. 2013): lines of label, two names and two
texts between tabs. A model reads one text, a separator, the other and the mark; the Arena's models read each alone and
see the other only as one vector.
"""

import functools
import mmap
import pathlib

import numpy as np

from lm.config.configurable import configurable, field
from lm.errors import ConfigError
from lm.tasks.long_range_arena.classification import FromFiles

FILES = {'train': 'train', 'validation': 'eval', 'test': 'test'}
SEPARATOR = 256


@configurable('arena_retrieval')
class ArenaRetrieval(FromFiles):
    """Decide whether two texts belong together."""

    max_length: int = field(default=4000, minimum=1, help='bytes of each text; what is behind them is cut off')

    symbols = 257
    classes = 2

    def shortest_context(self) -> int:
        return 2 * self.max_length + 2

    @functools.cached_property
    def _lines(self) -> dict[str, tuple[mmap.mmap, np.ndarray]]:
        """Returns split → the file and the starts of its lines, followed by its end."""
        return {split: self._open(self.folder / f'new_aan_pairs.{name}.tsv') for split, name in FILES.items()}

    def _open(self, file: pathlib.Path) -> tuple[mmap.mmap, np.ndarray]:
        if not file.is_file() or not file.stat().st_size:
            raise self.missing(file.name)
        with file.open('rb') as opened:
            content = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
            starts = np.cumsum([0, *map(len, opened)])
        return content, starts

    def held(self, split: str) -> int:
        return len(self._lines[split][1]) - 1

    def read(self, split: str, index: int) -> tuple[np.ndarray, int]:
        content, starts = self._lines[split]
        fields = content[starts[index] : starts[index + 1]].rstrip(b'\r\n').split(b'\t')
        try:
            label, _, _, first, second = fields
            label = int(float(label))
        except ValueError:
            label = -1
        if label not in (0, 1):
            name = f'new_aan_pairs.{FILES[split]}.tsv'
            raise ConfigError(
                f'{self.folder / name}: line {index + 1} is not label, two names and two texts between tabs'
            )
        texts = [np.frombuffer(text[: self.max_length], np.uint8).astype(np.int64) for text in (first, second)]
        return np.concatenate([texts[0], [SEPARATOR], texts[1]]), label
