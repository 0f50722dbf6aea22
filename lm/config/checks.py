"""The statements of a configuration, and whether each of them has an effect."""

import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any

from lm.config.configurable import REGISTRY, find_classes, list_annotations, list_fields
from lm.config.text import Macro, Reference, format_value, join_names, replace_nodes
from lm.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Statement:
    """`scope/selector.parameter = value`, found at `where`; a macro `scope/selector = value` has no parameter. An
    `optional` statement about nested configurables (mechanisms, sources, rules) need not have an effect."""

    scope: str
    selector: str
    parameter: str
    value: Any
    where: str
    optional: bool

    @property
    def key(self) -> str:
        path = f'{self.scope}/{self.selector}' if self.scope else self.selector
        return f'{path}.{self.parameter}' if self.parameter else path


def find_effective(bindings: dict[str, Statement], scope: str, name: str) -> dict[str, Statement]:
    """Returns parameter → the statement that sets it where `@scope/name()` is built; the longest scope wins."""
    scopes = scope.split('/') if scope else []
    prefixes = ['/'.join(scopes[:n]) for n in range(len(scopes) + 1)]
    found: dict[str, Statement] = {}
    for statement in sorted(
        (s for s in bindings.values() if s.selector == name and s.parameter), key=lambda s: len(s.scope)
    ):
        if statement.scope in prefixes:
            found[statement.parameter] = statement
    return found


def _macros(value: object) -> list[str]:
    found: list[str] = []
    replace_nodes(value, lambda node: found.append(node.name) if isinstance(node, Macro) else None)
    return found


def check_macros(bindings: dict[str, Statement]) -> None:
    """Raises ConfigError for a macro without a value and for what is still `%gin.REQUIRED`."""
    known = [s.key for s in bindings.values() if not s.parameter]
    for statement in bindings.values():
        for name in _macros(statement.value):
            if name == 'gin.REQUIRED':
                raise ConfigError(
                    f"{statement.key}: must be set (--gin_param '{statement.key} = …'; {statement.where})"
                )
            if name not in known:
                hint = did_you_mean(f'%{name}', [f'%{k}' for k in known]) or f'; write {name} = … above'
                raise ConfigError(f'{statement.where}: the macro %{name} has no value{hint}')


def find_used_bindings(bindings: dict[str, Statement], calls: list[tuple[str, str]]) -> set[str]:
    """Returns the keys of the statements that had an effect on what was built, with macros."""
    used = {s.key for scope, name in set(calls) for s in find_effective(bindings, scope, name).values()}
    pending = list(used)
    while pending:
        macros = {m for m in _macros(bindings[pending.pop()].value) if m not in used}
        used |= macros
        pending += macros
    return used


def check_used(bindings: dict[str, Statement], calls: list[tuple[str, str]], sections: set[str]) -> None:
    """Raises ConfigError for the statements without effect, each with what might have been meant."""
    used = find_used_bindings(bindings, calls)
    unused = [s for key, s in bindings.items() if key not in used]
    unused = [s for s in unused if not (s.optional and s.parameter and s.selector not in sections)]
    if unused:
        names = [f'{s.key}{_explain(s, bindings, used, calls)} ({s.where})' for s in unused]
        raise ConfigError(
            f'nothing uses {"; nor ".join(names[:8])}{f"; nor {len(names) - 8} more" if names[8:] else ""}'
        )


def _explain(statement: Statement, bindings: dict[str, Statement], used: set[str], calls: list[tuple[str, str]]) -> str:
    if not statement.parameter:
        macros = [key for key in used if not bindings[key].parameter]
        parameters = {p: f'{name}.{p}' for _, name in calls for p in list_parameters(name)}
        close = difflib.get_close_matches(statement.key, [*macros, *parameters], 1)
        return f', did you mean {parameters.get(close[0], close[0])}?' if close else ', a macro without a use'
    scopes = [scope for scope, name in calls if name == statement.selector]
    if any(f'{scope}/'.startswith(f'{statement.scope}/') or not statement.scope for scope in scopes):
        owners = join_names(sorted(f'@{scope}/{statement.selector}()' for scope in set(scopes)))
        return f', because {owners} sets it in its own scope'
    if scopes:
        built = sorted({f'{scope}/{statement.selector}'.lstrip('/') for scope in scopes})
        close = difflib.get_close_matches(statement.key, [f'{b}.{statement.parameter}' for b in built], 1, 0)
        return f', did you mean {close[0]}?'
    reference = format_value(Reference(statement.scope, statement.selector))
    for _, name in calls:
        for parameter, annotation in list_annotations(REGISTRY[name]).items():
            bases = [c for c in find_classes(annotation) if c.__module__ != 'builtins']
            if parameter in list_parameters(name) and issubclass(REGISTRY[statement.selector], tuple(bases)):
                now = f'{name}.{parameter}'
                return f', because {reference} is not selected: set {now} = {reference} or delete it'
    return f', because {reference} is not selected'


def list_parameters(name: str) -> list[str]:
    """Returns the parameters of a registered configurable."""
    return list(list_fields(REGISTRY[name]))


def did_you_mean(name: str, known: Iterable[str], before: str = '', after: str = '') -> str:
    """Returns a hint with the known name that is nearest to `name`, or nothing."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f'; did you mean {before}{close[0]}{after}?' if close else ''
