"""Configurations as gin text. Knows gin's syntax; gin itself is not needed to write it.

# model
model.attention = [@a/softmax(), @b/softmax()]
model.d_model = 768
…
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

from lm.config.configurable import Configurable, is_stated, list_fields, list_values
from lm.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Reference:
    """`@scope/selector()`, or without the brackets the configurable itself."""

    scope: str
    selector: str
    evaluate: bool = True


@dataclasses.dataclass(frozen=True)
class Macro:
    """`%name`."""

    name: str


def replace_nodes(value: Any, change: Callable[[Any], Any]) -> Any:
    """Returns `value` with `change` applied to everything in its lists and dicts that is not a list or dict itself."""
    if isinstance(value, dict):
        return {replace_nodes(k, change): replace_nodes(v, change) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(replace_nodes(v, change) for v in value)
    return change(value)


def format_value(value: object) -> str:
    """Writes `value` as gin does. Raises ConfigError for a value that gin cannot express."""
    match value:
        case Reference():
            scope = f'{value.scope}/' if value.scope else ''
            return f'@{scope}{value.selector}{"()" if value.evaluate else ""}'
        case Macro():
            return f'%{value.name}'
        case None | bool() | bytes():
            return repr(value)
        case int() if value.bit_length() > 128:
            raise ConfigError(f'an integer of {value.bit_length()} bits: does not fit into 128')
        case int():
            return repr(int(value))
        case float() if math.isnan(value):
            raise ConfigError('nan: a gin file cannot hold it')
        case float() if math.isinf(value):
            return '1e999' if value > 0 else '-1e999'  # gin has no name for infinity, but this literal is one
        case float():
            return float.__repr__(value)
        case str():
            return str.__repr__(value)
        case list() | tuple():
            return f'[{", ".join(format_value(v) for v in value)}]'
        case dict():
            return f'{{{", ".join(f"{format_value(k)}: {format_value(v)}" for k, v in value.items())}}}'
    raise ConfigError(f'{value!r}: a {type(value).__name__} cannot be written to a gin file')


def dump(experiment: object) -> str:
    """Writes the complete configuration as sorted gin text, from which `lm.experiment.load` makes an equal experiment.

    Nested configurables become references. Where different ones share a name, each gets a scope: a, b, c, …
    The text imports the modules of configurables outside this package.

    Raises:
        ConfigError: for a value that gin cannot express, or an argument that is not an Experiment.
    """
    values = []
    if dataclasses.is_dataclass(experiment) and not isinstance(experiment, type):
        values = [getattr(experiment, field.name) for field in dataclasses.fields(experiment)]
    sections = {config.gin_name: config for config in values if isinstance(config, Configurable)}
    if not values or len(sections) < len(values):
        raise ConfigError(f'experiment = {repr(experiment)[:80]}: must be an Experiment, such as lm.configure makes')
    nested: dict[str, list[Configurable]] = {}
    for name in sorted(sections):
        _gather(sections[name], nested)
    scopes: dict[str, str] = {}
    for name, configs in nested.items():
        # A section owns the bindings without a scope.
        if len(configs) > 1 or (name in sections and _identity(configs[0]) != _identity(sections[name])):
            scopes |= {_identity(config): _scope(i) for i, config in enumerate(configs)}

    def reference(value: Any) -> Any:
        is_nested = isinstance(value, Configurable)
        return Reference(scopes.get(_identity(value), ''), value.gin_name) if is_nested else value

    blocks = [(name, '', config) for name, config in sections.items()]
    for name, configs in nested.items():
        blocks += [(name, scope, c) for c in configs if (scope := scopes.get(_identity(c), '')) or name not in sections]
    lines = ['# A complete configuration, written by lm; a file to read and to run again (--gin_file).']
    modules = {type(config).__module__ for *_, config in blocks} - {'__main__'}  # a script or notebook has no module
    lines += [f'import {module}' for module in sorted(modules) if module.partition('.')[0] != 'lm']
    for name, scope, config in sorted(
        blocks, key=lambda block: (block[0] not in sections, block[0], len(block[1]), block[1])
    ):
        title = f'{scope}/{name}' if scope else name
        lines += ['', f'# {title}']
        fields, values = list_fields(type(config)), list_values(config)
        for field in sorted(name for name, value in values.items() if is_stated(value, fields[name])):
            value = replace_nodes(values[field], reference)
            try:
                lines.append(f'{title}.{field} = {format_value(value)}')
            except ConfigError as error:
                raise ConfigError(f'{title}.{field} = {error}') from None
    return '\n'.join(lines) + '\n'


def _gather(config: Configurable, nested: dict[str, list[Configurable]]) -> None:
    """Adds the different configurables inside `config` to `nested`, by gin name, in a fixed order."""

    def visit(value: object) -> object:
        if isinstance(value, Configurable):
            known = nested.setdefault(value.gin_name, [])
            if _identity(value) not in map(_identity, known):
                known.append(value)
                _gather(value, nested)
        return value

    for _, value in sorted(list_values(config).items(), key=lambda item: item[0]):
        replace_nodes(value, visit)


def _identity(config: Configurable) -> str:
    """Returns equal text for configurations that build the same thing. Unlike ==, it distinguishes 1 from True."""
    return repr(config)


def _scope(index: int) -> str:
    """Converts 0, 1, … to a, b, …, z, aa, ab, …"""
    letters = ''
    index += 1
    while index:
        index, letter = divmod(index - 1, 26)
        letters = chr(ord('a') + letter) + letters
    return letters


def join_names(names: Iterable[str], limit: int = 12) -> str:
    """Formats a list as `a, b and 3 more`."""
    names = list(names)
    rest = f' and {len(names) - limit} more' if len(names) > limit else ''
    return ', '.join(names[:limit]) + rest
