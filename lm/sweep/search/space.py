"""The space of a search: a base configuration, and a distribution for each searched parameter.

A trial is a point of a sweep. Its values can be read back from the config.gin of its run.
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence

from lm.config.checks import Statement, check_used, find_used_bindings
from lm.config.names import find_omitted
from lm.config.read import read
from lm.config.resolve import map_sections, resolve
from lm.config.text import dump, format_value
from lm.errors import ConfigError, MismatchError
from lm.experiment import Experiment
from lm.runs.config_diff import parse_bindings
from lm.sweep.axes import find_axis
from lm.sweep.points import Point
from lm.sweep.search.distributions import (
    Choice,
    Distribution,
    Drawn,
    make_distribution,
    quote_distributions,
    split_distribution,
)

FITS = 50
"""So often a value is tried with other values of the other parameters, before it counts as wrong."""


@dataclasses.dataclass(frozen=True)
class SearchSpace:
    """The part that all trials share, and the distributions of the rest.

    Attributes:
        bindings: the statements of all trials, by key.
        distributions: of the searched parameters, by key.
        written: the same as text, for people and for sweep.json.
        used: the keys that have an effect in some trial.
    """

    bindings: Mapping[str, Statement]
    distributions: Mapping[str, Distribution]
    written: Mapping[str, str]
    used: frozenset[str] = frozenset()

    def make_point(self, index: int, drawn: Mapping[str, Drawn]) -> Point:
        """Returns the trial with those drawn values that have an effect. Raises ConfigError if they do not fit."""
        bindings = dict(self.bindings)
        for key, value in drawn.items():
            bindings[key] = dataclasses.replace(bindings[key], value=self.distributions[key].to_gin(value))
        name = name_trial(index)
        experiment, used = _resolve(bindings, self.used, name)
        settings = {key: format_value(bindings[key].value) for key in drawn if key in used}
        return Point(index, name, settings, experiment)

    def read_values(self, config: Mapping[str, str], name: str) -> dict[str, Drawn]:
        """Returns the drawn values of the trial `name`, in Optuna's form, from binding → text of its config.gin.

        Raises MismatchError for a value that this space does not have.
        """
        found: dict[str, Drawn] = {}
        owners = {key.rpartition('.')[0] for key in config}
        for key, distribution in self.distributions.items():
            text = config.get(key, find_omitted(key) if key.rpartition('.')[0] in owners else None)
            if text is not None:
                if (drawn := distribution.find(text)) is None:
                    raise MismatchError(
                        f'{name}: its {key} = {text} is not in {self.written[key]}; '
                        'name another --run_dir, or search as before'
                    )
                found[key] = drawn
        return found


def name_trial(index: int) -> str:
    """Returns the name of a trial's run directory."""
    return f'trial-{index:04}'


def make_space(
    gin_files: Sequence[str], sweep_files: Sequence[str], gin_params: Sequence[str] = (), allow_imports: bool = False
) -> SearchSpace:
    """Returns the space of a search.

    Raises ConfigError for a mistake in the files, and for distributions of values that cannot be read back: macros and
    parameters in scopes.
    """
    base = read(gin_files, allow_imports=allow_imports)
    swept = read(sweep_files, allow_imports=allow_imports, edit=quote_distributions)
    params = read((), gin_params, allow_imports=allow_imports)
    distributions: dict[str, Distribution] = {}
    written: dict[str, str] = {}
    fixed = {s.key: s for s in base}
    for statement in swept:
        if axis := find_axis(statement):
            raise ConfigError(
                f'{statement.where}: {statement.key}: {axis}/ is an axis of a grid; a search needs choice(…) and other '
                'distributions, and a grid needs no --search'
            )
        fixed[statement.key] = statement
        for known in (distributions, written):
            known.pop(statement.key, None)
        if found := split_distribution(statement.value):
            written[statement.key] = str(statement.value)
            distributions[statement.key] = _read_distribution(statement, *found)
        elif isinstance(statement.value, list | tuple):
            raise ConfigError(f'{statement.where}: {statement.key}: a list makes a grid; a search needs choice(…)')
    if not distributions:
        files = ', '.join(sweep_files)
        raise ConfigError(f'{files}: nothing to search; write a distribution, such as log_uniform(1e-4, 1e-2)')
    for key in distributions.keys() & {s.key for s in params}:
        raise ConfigError(f'--gin_param {key}: the search draws it ({written[key]}); change it there')
    for key, distribution in distributions.items():
        fixed[key] = dataclasses.replace(fixed[key], value=distribution.list_probes()[0])
    space = SearchSpace(fixed | {s.key: s for s in params}, distributions, written)
    return _probe(space)


def _read_distribution(statement: Statement, name: str, arguments: str) -> Distribution:
    label = f'{statement.where}: {statement.key} = {statement.value}'
    if statement.scope or not statement.parameter:
        raise ConfigError(f'{label}: a search draws parameters without a scope, and no macros')
    try:
        (values,) = read((), [f'{statement.key} = [{arguments}]'])
    except ConfigError:
        raise ConfigError(f'{label}: cannot be read; write numbers, references, or strings in quotes') from None
    try:
        return make_distribution(name, list(values.value))
    except ConfigError as error:
        raise ConfigError(f'{label}: {error}') from None


def _probe(space: SearchSpace) -> SearchSpace:
    """Returns the space with what its choices have an effect on, and how config.gin writes each choice."""
    used: set[str] = set()
    written: dict[str, list[str]] = {}
    probes = [(key, value) for key, d in space.distributions.items() for value in d.list_probes()]
    fitting = {(key, str(value)): _fit(space, key, value) for key, value in probes}
    for key, value in probes:
        bindings = fitting[key, str(value)]
        experiment, calls = resolve(bindings, Experiment)
        used |= set(find_used_bindings(bindings, calls))
        text = parse_bindings(dump(experiment)).get(key, format_value(value))
        if text in written.setdefault(key, []) and isinstance(space.distributions[key], Choice):
            raise ConfigError(
                f'{space.bindings[key].where}: {key} = {space.written[key]}: config.gin writes two of these values as '
                f'{text}, so a trial could not be read back; search the fields in which they differ'
            )
        written[key].append(text)
    known = {
        key: dataclasses.replace(d, written=tuple(written[key])) if isinstance(d, Choice) else d
        for key, d in space.distributions.items()
    }
    found = dataclasses.replace(space, distributions=known, used=frozenset(used))
    for key, value in probes:
        _resolve(fitting[key, str(value)], found.used, key)
    return found


def _fit(space: SearchSpace, key: str, value: object) -> dict[str, Statement]:
    """Returns bindings with this value that make a configuration: with the first values of the other parameters, or
    with others that are drawn. Raises the ConfigError of the first if none does."""
    first, draw = {**space.bindings, key: dataclasses.replace(space.bindings[key], value=value)}, random.Random(key)
    tried, error = first, None
    for _ in range(FITS):
        try:
            resolve(tried, Experiment)
            return tried
        except ConfigError as refused:
            error = error or refused
        others = {name: draw.choice(d.list_probes()) for name, d in space.distributions.items() if name != key}
        tried = first | {name: dataclasses.replace(first[name], value=other) for name, other in others.items()}
    assert error is not None
    raise error


def _resolve(bindings: dict[str, Statement], used_somewhere: frozenset[str], name: str) -> tuple[Experiment, set[str]]:
    """Returns the experiment of a trial, and the keys that have an effect in it."""
    try:
        experiment, calls = resolve(bindings, Experiment)
    except ConfigError as error:
        raise ConfigError(f'{error} (in {name}; narrow the distributions)') from None
    used = set(find_used_bindings(bindings, calls))
    kept = {key: s for key, s in bindings.items() if key in used or key not in used_somewhere}
    check_used(kept, calls, set(map_sections(Experiment).values()))
    return experiment, used
