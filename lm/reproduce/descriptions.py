"""Descriptions of the tables of the papers, and of what they run: the files TABLE.toml below `configs/papers/PAPER`.

The papers' numbers stand beside them in `published*.toml`.
"""

import dataclasses
import functools
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm.config.checks import did_you_mean
from lm.config.project import project_root
from lm.errors import ConfigError

FOLDER = Path('configs') / 'papers'
PAPER_SCALE = 'paper'


@dataclasses.dataclass(frozen=True)
class RunGroup:
    """Experiments of a table: gin files, and the sweep files on top of them.

    Attributes:
        name: a word; run directories begin with it.
        gin_files, sweep_files: below configs/papers.
        gin_params: bindings that win over both.
        starts_from: the group whose runs give the first weights: to each run, the run with an equal model.
        scale: the scale at which they are made: the paper's, or a small form of their own.
    """

    name: str
    gin_files: tuple[str, ...]
    sweep_files: tuple[str, ...] = ()
    gin_params: tuple[str, ...] = ()
    starts_from: str = ''
    scale: str = PAPER_SCALE


@dataclasses.dataclass(frozen=True, eq=False)
class Description:
    """A table or figure of a paper.

    Attributes:
        name: PAPER/TABLE, as on the command line.
        title: its place in the paper and contents.
        runs: the experiments, at the paper's size where they do not say otherwise.
        published: keys of the tables with its numbers (`lm.report.published`).
        topology: the slice of TPUs that `--price` takes if none is named.
        scales: smaller scales at which the same runs are made, with all lengths divided (`scales.toml`).
        commands: scale → commands that follow the runs, or make up the table where it has no runs; `{root}` is
            replaced by the folder of the table.
        missing: why no command repeats it; '': one does.
    """

    name: str
    title: str
    runs: tuple[RunGroup, ...] = ()
    published: tuple[str, ...] = ()
    topology: str = 'v4-64'
    scales: tuple[str, ...] = ()
    commands: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    missing: str = ''

    @property
    def offered(self) -> list[str]:
        """The scales that the table has, the smallest first."""
        known = [*self.scales, *self.commands, *(group.scale for group in self.runs)]
        return [scale for scale in (*load_scales(), PAPER_SCALE) if scale in known]

    def list_groups(self, scale: str) -> list[RunGroup]:
        """Returns the experiments of a scale: its own, or the experiments of the paper, whose lengths it divides."""
        own = PAPER_SCALE if scale in self.scales else scale
        return [group for group in self.runs if group.scale == own]

    def check_scale(self, scale: str) -> None:
        """Raises ConfigError where the table has no such scale."""
        if not self.offered:
            raise ConfigError(f'{self.name}: nothing repeats it: {self.missing}')
        if scale not in self.offered:
            raise ConfigError(f'--scale {scale}: {self.name} has {", ".join(self.offered)}')


def find_paths(names: tuple[str, ...]) -> list[str]:
    """Returns files below configs/papers as paths that gin finds from any folder."""
    return [str(FOLDER / name) for name in names]


@functools.cache
def load_descriptions() -> dict[str, Description]:
    """Returns name → description of every table, paper by paper in the order of their files."""
    folder = project_root() / FOLDER
    files = sorted(path for path in folder.glob('*/**/*.toml') if not path.name.startswith('published'))
    found = [_read(path, f'{path.relative_to(folder).parts[0]}/{path.stem}') for path in files]
    return {description.name: description for description in found}


def find_description(name: str) -> Description:
    """Returns the description of PAPER/TABLE. Raises ConfigError where there is none."""
    known = load_descriptions()
    if name not in known:
        raise ConfigError(f'{name}: no such table{did_you_mean(name, known)}; lm reproduce --list shows all')
    return known[name]


@functools.cache
def load_scales() -> dict[str, dict[str, Any]]:
    """Returns scale → its divisor and settings, from the smallest scale up."""
    return tomllib.loads((project_root() / FOLDER / 'scales.toml').read_text(encoding='utf-8'))


@functools.cache
def load_corpora() -> dict[str, dict[str, Any]]:
    """Returns corpus, the last part of its data.path → its size."""
    return tomllib.loads((project_root() / FOLDER / 'corpora.toml').read_text(encoding='utf-8'))


def _read(path: Path, name: str) -> Description:
    data = tomllib.loads(path.read_text(encoding='utf-8'))
    runs = []
    for group in data.pop('runs', ()):
        lists = {key: tuple(value) for key, value in group.items() if isinstance(value, list)}
        runs.append(RunGroup(**group | lists))
    commands = {scale: tuple(lines) for scale, lines in data.pop('commands', {}).items()}
    lists = {key: tuple(data.pop(key)) for key in ('published', 'scales') if key in data}
    return Description(name, runs=tuple(runs), commands=commands, **lists, **data)
