"""Names of bindings: the current name of an earlier one, and whether a resumed run may change its value."""

import ast
import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterable
from typing import Any

from lm.config.configurable import REGISTRY, Configurable, find_classes, list_annotations, list_fields
from lm.config.text import Reference, format_value, replace_nodes
from lm.errors import ConfigError


def may_change(binding: str, *, rewound: bool = False) -> bool:
    """Returns whether a run may be resumed with another value of `scope/section.field`, as its class or field declares.

    `rewound`: the run goes back to a checkpoint.
    """
    name, _, parameter = binding.rpartition('/')[2].partition('.')
    if name not in REGISTRY:
        return False
    allowed = REGISTRY[name].gin_resume or (rewound and REGISTRY[name].gin_rewind)
    return allowed or any(f.name == parameter and f.metadata.get('resume') for f in _fields(name))


def is_omitted(binding: str, text: str) -> bool:
    """Returns whether config.gin leaves `scope/section.field` out while its gin text is `text` (`omit_default`)."""
    return text == find_omitted(binding)


def find_omitted(binding: str) -> str | None:
    """Returns the gin text of `scope/section.field` where config.gin leaves it out; None: it is always stated."""
    name, _, parameter = binding.rpartition('/')[2].partition('.')
    return _format_omitted(REGISTRY[name]).get(parameter) if name in REGISTRY else None


def find_class(text: str) -> type[Configurable] | None:
    """Returns the class that a reference such as '@a/wsd()' names; None for all other values."""
    match = re.fullmatch(r'@(?:[\w./]*/)?(\w+)\(\)', text)
    return REGISTRY.get(match[1]) if match else None


def find_field_classes(binding: str) -> list[type]:
    """Returns the classes that the annotation of `scope/section.field` holds; none for an unknown binding."""
    name, _, parameter = binding.rpartition('/')[2].partition('.')
    hints = list_annotations(REGISTRY[name]) if name in REGISTRY else {}
    return find_classes(hints[parameter]) if parameter in hints else []


def find_current_names(name: str, parameter: str) -> list[tuple[str, str]]:
    """Returns the (configurable, field) that `name.parameter` means, or fields with this former name."""
    if any(field.name == parameter for field in _fields(name)):
        return [(name, parameter)]
    return [
        (owner, field.name)
        for owner in tuple(REGISTRY)
        for field in _fields(owner)
        if _former(owner, field) == f'{name}.{parameter}'
    ]


def use_references(value: Any, name: str, parameter: str) -> Any:
    """Returns `value` with references for strings that name a configurable, where the field takes it and no string."""
    kinds = find_classes(list_annotations(REGISTRY[name])[parameter])

    def reference(node: Any) -> Any:
        takes = isinstance(node, str) and str not in kinds and node in REGISTRY
        return Reference('', node) if takes and issubclass(REGISTRY[node], tuple(kinds)) else node

    return replace_nodes(value, reference)


def find_meant(name: str, parameter: str, value: Any) -> dict[str, Any]:
    """Returns field → value that `name.parameter = value` means: itself, or what it meant in earlier versions."""
    earlier = next((field.metadata.get('earlier') for field in _fields(name) if field.name == parameter), None)
    return (earlier(value) if earlier else {}) or {parameter: value}


def update_names(bindings: dict[str, str]) -> dict[str, str]:
    """Returns binding → gin text of a dumped configuration, with the names that this version would have written.

    A field that the configuration lacks, because it is younger, has its default. Names that no configurable has stay.
    """
    found: dict[str, str] = {}
    for key, text in bindings.items():
        scope, slash, name = _title(key).rpartition('/')
        parameter = key.rpartition('.')[2]
        for owner, field in (find_current_names(name, parameter) if name in REGISTRY else []) or [(name, parameter)]:
            is_same = (owner, field) == (name, parameter)
            moved = text if is_same else _renewed(text, owner, field)
            found |= {f'{scope}{slash}{owner}.{today}': now for today, now in _read_meant(moved, owner, field).items()}
    for title in dict.fromkeys(map(_title, found)):
        name = title.rpartition('/')[2]
        for field, default in _format_defaults(REGISTRY[name]).items() if name in REGISTRY else ():
            found.setdefault(f'{title}.{field}', default)
    # A field that moved to several configurables counts in the selected ones.
    there = {*map(_title, bindings), *re.findall(r'@([\w./]+)\(\)', ' '.join(found.values()))}
    return {key: text for key, text in found.items() if _title(key) in there}


@functools.cache
def _format_omitted(kind: type[Configurable]) -> dict[str, str]:
    """Returns field → gin text of its default, of the fields that config.gin leaves out at their default."""
    fields = list_fields(kind).values()
    return {f.name: format_value(f.default) for f in fields if f.metadata.get('omit_default') is True}


@functools.cache
def _format_defaults(kind: type[Configurable]) -> dict[str, str]:
    """Returns field → gin text of its default, of the fields that have one."""
    found = {}
    for field in list_fields(kind).values():
        default = replace_nodes(
            field.default, lambda v: Reference('', v.gin_name) if isinstance(v, Configurable) else v
        )
        with contextlib.suppress(ConfigError):  # it has no default
            found[field.name] = format_value(default)
    return found


def _former(owner: str, field: dataclasses.Field) -> str | None:
    """Returns the former name in full; a name without a dot belonged to the same configurable."""
    name = field.metadata.get('formerly')
    return f'{owner}.{name}' if name and '.' not in name else name


def _title(key: str) -> str:
    """Shortens 'a/polynomial.degree' to 'a/polynomial'."""
    return key.rpartition('.')[0]


def _read_meant(text: str, name: str, parameter: str) -> dict[str, str]:
    """Returns field → gin text of `find_meant`."""
    if name not in REGISTRY or not any(f.name == parameter and f.metadata.get('earlier') for f in _fields(name)):
        return {parameter: text}  # a report parses it where it asks for it
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {parameter: text}  # holds references
    meant = find_meant(name, parameter, value)
    is_as_before = meant == {parameter: value}
    return {parameter: text} if is_as_before else {field: format_value(now) for field, now in meant.items()}


def _renewed(text: str, name: str, parameter: str) -> str:
    try:
        return format_value(use_references(ast.literal_eval(text), name, parameter))
    except (ValueError, SyntaxError):
        return text  # holds references already


def _fields(name: str) -> Iterable[dataclasses.Field]:
    return list_fields(REGISTRY[name]).values()
