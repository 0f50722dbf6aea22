"""The axes of a sweep: what varies alone, what varies together, and what has a name.

A list is an axis. Lists of one scope `zip`, `zip_a`, … are one axis, whose values go together. Statements in scopes
`variant/NAME` are one axis, too: a point takes all statements of one name. A file may have several such axes:
`variant_a`, `variant_b`, ….
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from lm.attention import Attention
from lm.config.checks import Statement
from lm.config.names import find_field_classes
from lm.config.text import Reference, format_value
from lm.errors import ConfigError
from lm.sweep.search.distributions import split_distribution


@dataclasses.dataclass(frozen=True)
class Setting:
    """A value on an axis: its `text` in tables, and its `label` in the names of points."""

    text: str
    label: str


@dataclasses.dataclass(frozen=True)
class AxisValue:
    """One value of an axis.

    Attributes:
        statements: binding → what the value sets.
        settings: binding → how tables and names show it; of a variant, the axis → the name of the variant.
        is_variant: it has a name, and each of its statements must have an effect in some point of this name.
    """

    statements: Mapping[str, Statement]
    settings: Mapping[str, Setting]
    is_variant: bool = False

    def has_effect(self, used: set[str]) -> bool:
        """Returns whether all statements of a variant have an effect in a point; lists of a mechanism need not."""
        return not self.is_variant or self.statements.keys() <= used

    def list_settings(self, used: set[str]) -> dict[str, Setting]:
        """Returns the settings without the bindings that have no effect in a point; a variant always shows its name."""
        return {key: s for key, s in self.settings.items() if key in used or key not in self.statements}


def find_axis(statement: Statement) -> str:
    """Returns the scope of an axis of several statements (`zip`, `zip_a`, `variant`, …); '' for other statements."""
    first = statement.scope.partition('/')[0]
    return first if re.fullmatch(r'(zip|variant)(_\w+)?', first) else ''


def make_grid(statements: Sequence[Statement], files: str) -> tuple[dict[str, Statement], list[list[AxisValue]]]:
    """Returns what every point of sweep files sets, by binding, and the values of each axis; the first varies slowest.

    Raises ConfigError, with `files` where no line is to blame.
    """
    fixed: dict[str, Statement] = {}
    lists: dict[str, dict[str, Statement]] = {}
    variants: dict[str, dict[str, dict[str, Statement]]] = {}
    order: dict[str, None] = {}
    for statement in statements:
        axis, rest = find_axis(statement), statement.scope.partition('/')[2]
        if split_distribution(statement.value):
            raise ConfigError(
                f'{statement.where}: {statement.key} = {statement.value}: is a distribution, which lm sweep --search '
                'draws from; a grid needs a list'
            )
        if axis.startswith('variant'):
            name, inner = _split_variant(statement, axis, rest)
            variants.setdefault(axis, {}).setdefault(name, {})[inner.key] = inner
            order[axis] = None
        elif axis:
            inner = dataclasses.replace(statement, scope=rest)
            # A file that includes another may replace one of its axes: the later one takes the last place.
            group = lists.setdefault(axis, {})
            group.pop(inner.key, None)
            group[inner.key] = _check_list(inner, axis)
            order[axis] = None
        elif isinstance(statement.value, list | tuple):
            fixed.pop(statement.key, None)
            lists[statement.key] = {statement.key: _check_list(statement)}
            order[statement.key] = None
        else:
            lists.pop(statement.key, None)
            order.pop(statement.key, None)
            fixed[statement.key] = statement
    if not order:
        raise ConfigError(f'{files}: no value is a list, so there is nothing to sweep; use lm train for a single run')
    _check_distinct(lists, variants, fixed)
    parameters = [key.rpartition('.')[2] for group in lists.values() for key in group]
    axes = []
    for name in order:
        if name in variants:
            axes.append([AxisValue(own, {name: Setting(title, title)}, True) for title, own in variants[name].items()])
        else:
            axes.append(_zip(name, list(lists[name].values()), parameters))
    return fixed, axes


def _split_variant(statement: Statement, axis: str, rest: str) -> tuple[str, Statement]:
    """Returns the name of a variant, and the statement that the variant makes."""
    name, _, scope = rest.partition('/')
    if not name:
        raise ConfigError(
            f'{statement.where}: {statement.key}: names no variant; write {axis}/NAME/SECTION.FIELD = VALUE'
        )
    return name, dataclasses.replace(statement, scope=scope)


def _check_list(statement: Statement, group: str = '') -> Statement:
    """Returns a statement whose value is a list. Raises ConfigError for any other value, and for an empty list."""
    if not isinstance(statement.value, list | tuple):
        raise ConfigError(
            f'{statement.where}: {group}/{statement.key} = {format_value(statement.value)}: '
            'must be a list, as long as the others of its group'
        )
    if not statement.value:
        raise ConfigError(f'{statement.where}: {statement.key} = []: an axis needs a value')
    texts = [format_value(value) for value in statement.value]
    if not group and len(set(texts)) < len(texts):
        raise ConfigError(
            f'{statement.where}: {statement.key} = {format_value(statement.value)}: has a value twice; an axis needs '
            'different values, and a list that is one value, such as a pattern of layers, stands in double brackets'
        )
    return statement


def _check_distinct(
    lists: Mapping[str, Mapping[str, Statement]],
    variants: Mapping[str, Mapping[str, Mapping[str, Statement]]],
    fixed: Mapping[str, Statement],
) -> None:
    """Raises ConfigError if two axes set one binding. A variant, unlike a list, may replace what all points set."""
    owners: dict[str, tuple[str, Statement]] = {}
    for axis, group in lists.items():
        for key, statement in group.items():
            _claim(owners, key, axis, statement)
            if key in fixed:
                _claim(owners, key, '', fixed[key])
    for axis, named in variants.items():
        for key, statement in {key: s for own in named.values() for key, s in own.items()}.items():
            _claim(owners, key, axis, statement)


def _claim(owners: dict[str, tuple[str, Statement]], key: str, axis: str, statement: Statement) -> None:
    """Records the axis that sets a binding. Raises ConfigError if another one does."""
    if key in owners:
        other, found = owners[key]
        places = [
            f'{name}/ ({s.where})' if name not in ('', key) else s.where
            for name, s in ((other, found), (axis, statement))
        ]
        raise ConfigError(f'{key}: is set twice, by {places[0]} and by {places[1]}; delete one of them')
    owners[key] = axis, statement


def _zip(name: str, group: list[Statement], parameters: list[str]) -> list[AxisValue]:
    """Returns the values of lists that vary together. `parameters` has the parameters of all lists of the sweep."""
    if len({len(s.value) for s in group}) > 1:
        lengths = ', '.join(f'{s.key} has {len(s.value)}' for s in group)
        raise ConfigError(f'{group[0].where}: the lists of {name}/ must be equally long: {lengths} values')
    values = []
    for i in range(len(group[0].value)):
        statements = {s.key: dataclasses.replace(s, value=s.value[i]) for s in group}
        values.append(AxisValue(statements, {key: _show(s, parameters) for key, s in statements.items()}))
    return values


def _show(statement: Statement, parameters: list[str]) -> Setting:
    """Returns a mechanism by its name, and other values after the name of their parameter, where that is unique."""
    key, plain = statement.key, _format_plain(statement.value)
    parameter = key.rpartition('.')[2]
    if not any(issubclass(cls, Attention) for cls in find_field_classes(key)):
        plain = f'{parameter if parameters.count(parameter) == 1 else key}-{plain}'
    return Setting(format_value(statement.value), plain)


def _format_plain(value: object) -> str:
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
