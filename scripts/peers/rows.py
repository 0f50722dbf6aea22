"""The results of `scripts.peers.compare`: what one package needs for one call."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from lm.files import write_atomically
from scripts.peers.measure import Figures

OURS = 'lm'
"""Our own name among the peers."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One call on one generation.

    Attributes:
        peer: the name of the package; 'lm' is ours.
        version: of the package.
        compiler: the versions of jax and libtpu.
        differs: how its work differs from ours; '': it is equal.
        figures: None where there is no program.
        reason: why there is none.
    """

    operation: str
    heads: str
    length: int
    generation: str
    peer: str
    version: str
    compiler: str
    differs: str = ''
    figures: Figures | None = None
    reason: str = ''

    @property
    def key(self) -> tuple[Any, ...]:
        """All that decides the figures."""
        return *self.call, self.peer, self.version, self.compiler

    @property
    def call(self) -> tuple[str, str, int, str]:
        return self.operation, self.heads, self.length, self.generation


def read_rows(path: pathlib.Path) -> list[Row]:
    """Reads the rows of a file; none if there is no file."""
    rows = json.loads(path.read_text())['rows'] if path.exists() else []
    return [Row(**row | {'figures': row['figures'] and Figures(**row['figures'])}) for row in rows]


def write_rows(path: pathlib.Path, rows: Sequence[Row]) -> None:
    write_atomically(path, json.dumps({'rows': [dataclasses.asdict(row) for row in rows]}, indent=1) + '\n')
