"""Statements → frozen dataclasses, with gin's references, macros and scopes, as a pure function of its arguments.

`@a/b/name()` is built in the scope a/b wherever it stands, and `@name()` in the scope of the object that holds it. The
value of the macro `%a/NAME` is built in the scope a/NAME. Each is evaluated anew in every place that uses it.
"""

import contextlib
import dataclasses
import typing
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from lm.config.checks import Statement, check_macros, find_effective
from lm.config.configurable import REGISTRY, Configurable, list_fields
from lm.config.text import Macro, Reference, replace_nodes
from lm.errors import ConfigError

T = TypeVar('T')


def resolve(bindings: dict[str, Statement], root: type[T]) -> tuple[T, list[tuple[str, str]]]:
    """Builds `root` from `bindings`. Returns it with the (scope, name) of everything that was built for it."""
    check_macros(bindings)
    sections = map_sections(root)
    builder = _Builder(bindings | _select_defaults(bindings, sections.values()))
    try:
        return root(**{field: builder.build('', name) for field, name in sections.items()}), builder.calls
    except RecursionError:
        raise ConfigError('macros or configurables are nested too deeply') from None


def map_sections(root: type) -> dict[str, str]:
    """Returns field → gin name of its configurable."""
    assert dataclasses.is_dataclass(root)
    annotations = typing.get_type_hints(root)
    return {field.name: annotations[field.name].gin_name for field in dataclasses.fields(root)}


class _Builder:
    """Builds configurables, and keeps in `calls` the (scope, name) of each in the order in which they were finished."""

    def __init__(self, bindings: dict[str, Statement]):
        self.bindings = bindings
        self.calls: list[tuple[str, str]] = []
        self._open: list[Any] = []

    def build(self, scope: str, name: str) -> Configurable:
        """Builds what `@scope/name()` stands for."""
        statements = find_effective(self.bindings, scope, name)
        with self._inside((scope, name)):
            values = {parameter: self._evaluate(s.value, scope) for parameter, s in statements.items()}
        self.calls.append((scope, name))
        for field in list_fields(REGISTRY[name]).values():
            if field.default is field.default_factory and field.name not in values:
                label = f'{scope}/{name}.{field.name}' if scope else f'{name}.{field.name}'
                help = field.metadata.get('help') or 'it has no default'
                raise ConfigError(f"{label}: has no value; set it, --gin_param '{label} = …' ({help})")
        try:
            return REGISTRY[name](**values)
        except ConfigError as error:
            statement = statements.get(str(error).partition(' ')[0].removeprefix(f'{name}.'))
            raise ConfigError(f'{error} ({statement.where})' if statement else str(error)) from None

    def _evaluate(self, value: object, scope: str) -> object:
        """Returns `value`, found in `scope`, with what its references and macros stand for."""

        def evaluate(node: Any) -> Any:
            if isinstance(node, Reference):
                return self.build(node.scope or scope, node.selector)
            if isinstance(node, Macro):
                with self._inside(node):
                    return self._evaluate(self.bindings[node.name].value, node.name)
            return node

        return replace_nodes(value, evaluate)

    @contextlib.contextmanager
    def _inside(self, part: object) -> Iterator[None]:
        if part in self._open:
            raise ConfigError('a macro or configurable contains itself; break the circle')
        self._open.append(part)
        yield
        self._open.pop()


def _select_defaults(bindings: dict[str, Statement], sections: Iterable[str]) -> dict[str, Statement]:
    """Returns statements such as `prepare.tokenizer = @tokenizer()` for the defaults that some binding names and no
    binding replaces. `tokenizer.vocab_size = 4096` alone then has its effect."""
    found = {}
    for section in sections:
        for field in list_fields(REGISTRY[section]).values():
            if not isinstance(field.default, Configurable):
                continue
            name, key = field.default.gin_name, f'{section}.{field.name}'
            if key not in bindings and any(s.selector == name and s.parameter for s in bindings.values()):
                found[key] = Statement('', section, field.name, Reference('', name), 'default', False)
    return found
