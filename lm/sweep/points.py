"""The points of a sweep: gin files whose values are lists → experiments with names.

A sweep file is plain gin:

      model.attention = [@softmax(), @polysketch()]      a list is an axis; axes make a grid, the first varies slowest
      polysketch.sketch_size = [32, 64]                  an axis of a mechanism: for the points that select it
      zip/model.n_layers = [12, 13]                      lists of one scope zip, zip_a, zip_b, … vary together
      zip/optimizer.peak_learning_rate = [7e-4, 6e-4]
      LENGTH = [512, 1024]                               a macro of the base files can be an axis too
      train.steps = 1000                                 anything else is set in every point
      evaluate.split = ['test']                          a list of one item too
      model.attention = [[@taylor(), @softmax()]]        so the value of a parameter that is itself a list stands in two

What a point's mechanisms do not use (`polysketch.sketch_size` where softmax is selected) is left out of that point;
points that become equal by this are one. What no point uses is an error, as everywhere.
"""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Sequence
from typing import Any

from etils import epath

from lm.attention import Attention
from lm.config.checks import Statement, check_used, find_used_bindings
from lm.config.names import find_field_classes
from lm.config.read import read
from lm.config.resolve import map_sections, resolve
from lm.config.text import Reference, dump, format_value
from lm.errors import ConfigError
from lm.runs import sweep_file
from lm.runs.paths import check_name, check_path
from lm.sweep.search.distributions import quote_distributions, split_distribution

LONGEST_NAME = 100
"""Longer names are cut and end in a hash. This leaves room for suffixes within the 128 characters of a run name."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
        index: its place in the list, from 0.
        name: made of its values on the axes; a name of `lm.runs.paths.check_name`.
        settings: binding → gin text, for the axes that the point uses.
        experiment: the resolved configuration.
    """

    index: int
    name: str
    settings: dict[str, str]
    experiment: Any

    @property
    def config(self) -> str:
        """The resolved configuration as gin text."""
        return dump(self.experiment)


@dataclasses.dataclass(frozen=True)
class Axis:
    """Statements whose lists vary together."""

    statements: tuple[Statement, ...]

    def __len__(self) -> int:
        return len(self.statements[0].value)

    def at(self, i: int) -> list[Statement]:
        return [dataclasses.replace(s, value=s.value[i]) for s in self.statements]


def make_points(
    gin_files: Sequence[str], sweep_files: Sequence[str], gin_params: Sequence[str] = (), allow_imports: bool = False
) -> list[Point]:
    """Returns all points, each resolved and checked.

    If a binding has several values, the gin parameter wins, then the sweep files.

    Raises:
        ConfigError: one line, for a mistake in any point; no file has been written.
    """
    from lm.experiment import Experiment

    base = {s.key: s for s in read(gin_files, allow_imports=allow_imports)}
    swept_statements = read(sweep_files, allow_imports=allow_imports, edit=quote_distributions)
    fixed, axes = _collect_axes(swept_statements, ', '.join(sweep_files))
    params = {s.key: s for s in read((), gin_params, allow_imports=allow_imports)}
    swept = {statement.key: statement for axis in axes for statement in axis.statements}
    for key in swept.keys() & params.keys():
        raise ConfigError(f'--gin_param {key}: is an axis of the sweep ({swept[key].where}); change it there')

    resolved = []
    for choice in itertools.product(*(range(len(axis)) for axis in axes)):
        chosen = {s.key: s for axis, i in zip(axes, choice, strict=True) for s in axis.at(i)}
        bindings = base | fixed | chosen | params
        try:
            experiment, calls = resolve(bindings, Experiment)
        except ConfigError as error:
            raise ConfigError(f'{error} (in the point {_describe(chosen)})') from None
        resolved.append((bindings, calls, experiment, find_used_bindings(bindings, calls)))
    used_somewhere = set().union(*(used for *_, used in resolved))

    found: dict[tuple, tuple[dict[str, Statement], Any]] = {}
    for bindings, calls, experiment, used in resolved:
        kept = {key: s for key, s in bindings.items() if key in used or key not in used_somewhere}
        check_used(kept, calls, set(map_sections(Experiment).values()))
        settings = {key: bindings[key] for key in swept if key in used}
        found.setdefault(tuple((key, format_value(s.value)) for key, s in settings.items()), (settings, experiment))
    names = _make_names(list(swept), [settings for settings, _ in found.values()])
    points = []
    for i, (name, (settings, experiment)) in enumerate(zip(names, found.values(), strict=True)):
        points.append(Point(i, name, {key: format_value(s.value) for key, s in settings.items()}, experiment))
    return points


def read_points(root: epath.PathLike, allow_imports: bool = False) -> list[Point]:
    """Returns the points that the folder of a sweep lists, with the configurations that `lm sweep --emit` wrote there.

    So a machine that reaches the folder needs no other file.

    Raises ConfigError if there is no sweep, or if the configuration of a point is missing.
    """
    from lm.experiment import load

    root = epath.Path(check_path(root))
    if not sweep_file.is_sweep(root):
        raise ConfigError(f'--run_dir {root}: holds no {sweep_file.NAME}; give --sweep_file, or a folder of lm sweep')
    points = []
    for index, row in enumerate(sweep_file.read_rows(root)):
        path = root / sweep_file.NOTES / f'{check_name(row["point"])}.gin'
        if not path.exists():
            raise ConfigError(f'{path}: no such file; lm sweep --emit writes it, or give --sweep_file')
        experiment = load([str(path)], allow_imports=allow_imports)
        points.append(Point(index, row['point'], row['settings'] or {}, experiment))
    return points


def find_point(points: Sequence[Point], index: int) -> Point:
    """Returns the point at `index`. Raises ConfigError if there is none."""
    if not 0 <= index < len(points):
        raise ConfigError(f'--index {index}: must be 0 to {len(points) - 1}')
    return points[index]


def _collect_axes(statements: list[Statement], files: str) -> tuple[dict[str, Statement], list[Axis]]:
    """Returns the statements that are no lists, by key, and the axes in the order of the file."""
    groups: dict[str, list[Statement]] = {}
    fixed: dict[str, Statement] = {}
    for statement in statements:
        first, _, rest = statement.scope.partition('/')
        is_zipped = re.fullmatch(r'zip(_\w+)?', first) is not None
        if is_zipped:
            statement = dataclasses.replace(statement, scope=rest)
        if split_distribution(statement.value):
            raise ConfigError(
                f'{statement.where}: {statement.key} = {statement.value}: is a distribution, which lm sweep --search '
                'draws from; a grid needs a list'
            )
        if not isinstance(statement.value, list | tuple):
            if is_zipped:
                raise ConfigError(
                    f'{statement.where}: {first}/{statement.key} = {format_value(statement.value)}: '
                    'must be a list, as long as the others of its group'
                )
            fixed[statement.key] = statement
        elif not statement.value:
            raise ConfigError(f'{statement.where}: {statement.key} = []: an axis needs a value')
        else:
            group = groups.setdefault(first if is_zipped else statement.key, [])
            # A file that includes another may replace one of its axes.
            group[:] = [s for s in group if s.key != statement.key] + [statement]
    for name, group in groups.items():
        if len({len(s.value) for s in group}) > 1:
            lengths = ', '.join(f'{s.key} has {len(s.value)}' for s in group)
            raise ConfigError(f'{group[0].where}: the lists of {name}/ must be equally long: {lengths} values')
    keys = [s.key for group in groups.values() for s in group]
    for key in keys:
        if keys.count(key) > 1 or key in fixed:
            raise ConfigError(f'{files}: {key} is set twice, alone and in a group; delete one of them')
    if not groups:
        raise ConfigError(f'{files}: no value is a list, so there is nothing to sweep; use lm train for a single run')
    return fixed, [Axis(tuple(group)) for group in groups.values()]


def _describe(chosen: dict[str, Statement]) -> str:
    return ', '.join(f'{key} = {format_value(s.value)}' for key, s in chosen.items())


def _make_names(keys: list[str], points: list[dict[str, Statement]]) -> list[str]:
    """Returns a different name for each point: mechanisms by name, other values after the name of their parameter.

    Names contain all axes, also axes of one value: with a second value the old points keep their names.
    """
    parameters = [key.rpartition('.')[2] for key in keys]
    labels = {key: p if parameters.count(p) == 1 else key for key, p in zip(keys, parameters, strict=True)}

    names = []
    for settings in points:
        parts = []
        for key, label in labels.items():
            if key in settings:
                value = settings[key].value
                is_mechanism = any(issubclass(cls, Attention) for cls in find_field_classes(key))
                parts.append(_format_plain(value) if is_mechanism else f'{label}-{_format_plain(value)}')
        name = re.sub('[^A-Za-z0-9._-]+', '-', '_'.join(parts))
        names.append(re.sub(r'\.\.+', '.', name).strip('-._') or 'point')
    digests = [hashlib.sha256(_describe(settings).encode()).hexdigest()[:8] for settings in points]
    folded = [name.lower() for name in names]  # some file systems do not distinguish A from a
    unique = [
        f'{name[: LONGEST_NAME - 9]}-{digest}' if len(name) > LONGEST_NAME or folded.count(name.lower()) > 1 else name
        for name, digest in zip(names, digests, strict=True)
    ]
    return [check_name(name) for name in unique]


def _format_plain(value: Any) -> str:
    """Formats a gin value as a part of a name."""
    match value:
        case Reference():
            return f'{value.scope}-{value.selector}' if value.scope else value.selector
        case list() | tuple():
            return '-'.join(map(_format_plain, value))
        case float():
            return repr(value).replace('+', '')
        case str():
            return value.rstrip('/').rpartition('/')[2]
    return format_value(value)
