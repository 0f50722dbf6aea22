"""The points of a sweep: gin files whose values are lists → experiments with names.

A sweep file is plain gin:

      model.attention = [@softmax(), @polysketch()]      a list is an axis; axes make a grid, the first varies slowest
      polysketch.sketch_size = [32, 64]                  an axis of a mechanism: for the points that select it
      zip/model.n_layers = [12, 13]                      lists of one scope zip, zip_a, zip_b, … vary together
      zip/optimizer.peak_learning_rate = [7e-4, 6e-4]
      variant/cautious/optimizer.cautious = True         a named set of values; the names are an axis, in their order
      variant/no_gate/model.output_gate = False
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
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from etils import epath

from lm.config.checks import Statement, check_used, did_you_mean, find_used_bindings
from lm.config.read import read
from lm.config.resolve import map_sections, resolve
from lm.config.text import dump
from lm.errors import ConfigError
from lm.experiment import Experiment, load
from lm.files import is_remote
from lm.runs import sweep_file
from lm.runs.config_diff import parse_bindings
from lm.runs.paths import check_name, check_path, read_text
from lm.runs.records import find_run_paths, is_run, read_json
from lm.sweep.axes import AxisValue, Setting, make_grid
from lm.sweep.search.distributions import quote_distributions

LONGEST_NAME = 100
"""Longer names are cut and end in a hash. This leaves room for suffixes within the 128 characters of a run name."""


@dataclasses.dataclass(frozen=True)
class Point:
    """One run of a sweep.

    Attributes:
        index: its place in the list, from 0.
        name: made of its values on the axes; a name of `lm.runs.paths.check_name`.
        settings: binding → gin text, for the axes that the point uses; of named variants, variant → its name.
        experiment: the resolved configuration; with `fault`, the one of another point of the search.
        fault: why the values of a trial make no configuration; None: they make one.
    """

    index: int
    name: str
    settings: dict[str, str]
    experiment: Experiment
    fault: str | None = None

    @property
    def config(self) -> str:
        """The resolved configuration as gin text."""
        return dump(self.experiment)


def make_points(
    gin_files: Sequence[str], sweep_files: Sequence[str], gin_params: Sequence[str] = (), allow_imports: bool = False
) -> list[Point]:
    """Returns all points, each resolved and checked.

    If a binding has several values, the gin parameter wins, then the sweep files.

    Raises:
        ConfigError: one line, for a mistake in any point; no file has been written.
    """
    base = {s.key: s for s in read(gin_files, allow_imports=allow_imports)}
    fixed, axes = make_grid(
        read(sweep_files, allow_imports=allow_imports, edit=quote_distributions), ', '.join(sweep_files)
    )
    params = {s.key: s for s in read((), gin_params, allow_imports=allow_imports)}
    swept = {key: s for axis in axes for value in axis for key, s in value.statements.items()}
    for key in swept.keys() & params.keys():
        raise ConfigError(f'--gin_param {key}: is an axis of the sweep ({swept[key].where}); change it there')

    resolved = []
    for values in itertools.product(*axes):
        own = {key: statement for value in values for key, statement in value.statements.items()}
        resolved.append(_resolve(values, {**base, **fixed, **own, **params}))
    _check_effects(resolved)
    found: dict[str, _Resolved] = {}
    for point in resolved:
        known = found.setdefault(dump(point.experiment), point)
        if not known.has_effect and point.has_effect:
            found[dump(point.experiment)] = point
    names = _make_names([point.settings for point in found.values()])
    points = []
    for i, (name, point) in enumerate(zip(names, found.values(), strict=True)):
        texts = {key: setting.text for key, setting in point.settings.items()}
        points.append(Point(i, name, texts, point.experiment))
    return points


class _Resolved(NamedTuple):
    """A point before equal points become one: its values on the axes, and what its bindings have an effect on."""

    values: tuple[AxisValue, ...]
    bindings: dict[str, Statement]
    calls: list[tuple[str, str]]
    used: set[str]
    experiment: Experiment

    @property
    def settings(self) -> dict[str, Setting]:
        return {key: setting for value in self.values for key, setting in value.list_settings(self.used).items()}

    @property
    def has_effect(self) -> bool:
        return all(value.has_effect(self.used) for value in self.values)


def _resolve(values: tuple[AxisValue, ...], bindings: dict[str, Statement]) -> _Resolved:
    try:
        experiment, calls = resolve(bindings, Experiment)
    except ConfigError as error:
        settings = {key: setting for value in values for key, setting in value.settings.items()}
        raise ConfigError(f'{error} (in the point {_describe(settings)})') from None
    return _Resolved(values, bindings, calls, find_used_bindings(bindings, calls), experiment)


def _check_effects(points: Sequence[_Resolved]) -> None:
    """Raises ConfigError for a statement without an effect in any point; of a variant, in any point of its name."""
    sections = set(map_sections(Experiment).values())
    used_somewhere = set().union(*(point.used for point in points))
    used_with: dict[int, set[str]] = {}
    for point in points:
        for value in point.values:
            used_with.setdefault(id(value), set()).update(point.used)
    for point in points:
        idle = {key for v in point.values if v.is_variant for key in v.statements if key not in used_with[id(v)]}
        expected = point.used | idle | (point.bindings.keys() - used_somewhere)
        check_used({key: s for key, s in point.bindings.items() if key in expected}, point.calls, sections)


def read_points(root: epath.PathLike, allow_imports: bool = False) -> list[Point]:
    """Returns the points that the folder of a sweep lists, with the configurations that `lm sweep --emit` wrote there.

    So a machine that reaches the folder needs no other file.

    A trial whose values make no configuration has no file.

    Raises ConfigError if there is no sweep, or if the configuration of another point is missing.
    """
    root = epath.Path(check_path(root))
    if not sweep_file.is_sweep(root):
        raise ConfigError(f'--run_dir {root}: holds no {sweep_file.NAME}; give --sweep_file, or a folder of lm sweep')
    rows = sweep_file.read_rows(root)
    paths = [root / sweep_file.NOTES / f'{check_name(row["point"])}.gin' for row in rows]
    experiments = [load([str(path)], allow_imports=allow_imports) if path.exists() else None for path in paths]
    another, points = next(filter(None, experiments), None), []
    for index, (row, path, own) in enumerate(zip(rows, paths, experiments, strict=True)):
        fault = row['error'] if own is None and row['exit_code'] == ConfigError.exit_code else None
        experiment = another if fault else own
        if experiment is None:
            raise ConfigError(f'{path}: no such file; lm sweep --emit writes it, or give --sweep_file')
        points.append(Point(index, row['point'], row['settings'] or {}, experiment, fault))
    return points


def keep_names(root: epath.PathLike, points: Sequence[Point]) -> list[Point]:
    """Returns the points; one whose run lies in the folder under another name has that name.

    A further axis is a part of every new name, and one of its values may be what a run was trained with. That run is
    the point, and is not trained again. Branches are none: they began with other configurations. A bucket is not read:
    the machine that makes a job's manifests may not reach it.
    """
    folder, names = epath.Path(root), {point.name for point in points}
    if is_remote(folder) or is_run(folder):  # a sweep refuses a run
        return list(points)
    known = {
        frozenset(parse_bindings(read_text(run / 'config.gin')).items()): run.name
        for run in reversed(find_run_paths(str(root)))
        if run.name not in names and 'branch' not in (read_json(run / 'run.json') or {})
    }
    kept = []
    for point in points:
        name = known.get(frozenset(parse_bindings(point.config).items())) if known else None
        is_kept = name is not None and not is_run(folder / point.name)
        kept.append(dataclasses.replace(point, name=name) if is_kept else point)
    return kept


def find_point(points: Sequence[Point], index: int | str) -> Point:
    """Returns the point of this number, or of this name. Raises ConfigError if there is none."""
    if isinstance(index, str):
        named = {point.name: point for point in points}
        if index not in named:
            raise ConfigError(f'--index {index}: no point has this name{did_you_mean(index, named)}')
        return named[index]
    if not 0 <= index < len(points):
        raise ConfigError(f'--index {index}: must be 0 to {len(points) - 1}, or the name of a point')
    return points[index]


def _describe(settings: Mapping[str, Setting]) -> str:
    return ', '.join(f'{key} = {setting.text}' for key, setting in settings.items())


def _make_names(points: list[dict[str, Setting]]) -> list[str]:
    """Returns a different name for each point, of all its axes: a second value on one changes no old name."""
    names = []
    for settings in points:
        name = re.sub('[^A-Za-z0-9._-]+', '-', '_'.join(setting.label for setting in settings.values()))
        names.append(re.sub(r'\.\.+', '.', name).strip('-._') or 'point')
    digests = [hashlib.sha256(_describe(settings).encode()).hexdigest()[:8] for settings in points]
    folded = [name.lower() for name in names]  # some file systems do not distinguish A from a
    unique = [
        f'{name[: LONGEST_NAME - 9]}-{digest}' if len(name) > LONGEST_NAME or folded.count(name.lower()) > 1 else name
        for name, digest in zip(names, digests, strict=True)
    ]
    return [check_name(name) for name in unique]
