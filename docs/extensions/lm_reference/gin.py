"""Every name that a gin file can set: the sections of an experiment, and what their fields can be set to."""

import dataclasses
import functools
import types
import typing
from typing import Any

from lm.config.configurable import REGISTRY, find_classes, list_annotations, list_fields
from lm.config.text import Reference, format_value, replace_nodes
from lm.experiment import Experiment
from lm_reference.markdown import code, docstring, prose, sentence, table
from lm_reference.topics import index

HEADS = ('name', 'value', 'default', 'meaning')
WORDS = {int: 'integer', float: 'float', str: 'string', bool: '`True` or `False`', type(None): '`None`'}


def sections() -> dict[str, type]:
    """Gin name → dataclass of the sections, in the order of `Experiment`."""
    hints = typing.get_type_hints(Experiment)
    return {field.name: hints[field.name] for field in dataclasses.fields(Experiment)}


@functools.cache
def choices() -> dict[type, dict[str, type]]:
    """Base class → gin name → dataclass, of everything that is the value of a field."""
    found: dict[type, dict[str, type]] = {base: {} for base in _takers()}
    for name, cls in sorted(REGISTRY.items()):
        if name not in sections() and cls.__module__.startswith('lm.'):
            found[_base(cls)][name] = cls
    return found


def page() -> str:
    """Returns the tables of all sections, then the tables of all values."""
    parts = ['## Sections', *(_configurable(name, cls) for name, cls in sections().items())]
    for base, values in choices().items():
        takers = [code(taker) for taker in _takers()[base]]
        parts += [f'({_label(base)})=\n## Values of {" and ".join(takers)}', docstring(base.__doc__)]
        if (shared := shared_fields(base)) and _base(base) is base:
            parts += ['Each of them has these fields:', table(HEADS, (_row('NAME', base, field) for field in shared))]
        parts += [_configurable(name, cls) for name, cls in values.items()]
    return '\n\n'.join(parts)


def _configurable(name: str, cls: type) -> str:
    title = name if name in sections() else f'@{name}()'
    shared = {field.name for field in shared_fields(_base(cls))} if name not in sections() else ()
    fields = [field for field in list_fields(cls).values() if field.name not in shared]
    entries = (name, *(f'{field.name.replace("_", " ")}; {name}.{field.name}' for field in fields))
    parts = [f'(gin-{name})=\n### {code(title)}', index(entries), docstring(cls.__doc__)]
    parts.append(table(HEADS, (_row(name, cls, field) for field in fields)) if fields else 'It has no fields.')
    return '\n\n'.join(parts)


def shared_fields(base: type) -> tuple[dataclasses.Field, ...]:
    """Returns the fields that all values of a kind have from their base, and that texts state only where they are
    set."""
    fields = dataclasses.fields(base) if dataclasses.is_dataclass(base) else ()
    return tuple(field for field in fields if field.metadata.get('omit_default'))


def _row(name: str, cls: type, field: dataclasses.Field) -> tuple[str, ...]:
    metadata = field.metadata
    former = metadata.get('formerly')
    was = f' Formerly {code(former if "." in former else f"{name}.{former}")}.' if former else ''
    may_change = metadata.get('resume') or cls.gin_resume
    return (
        code(f'{name}.{field.name}'),
        _kind(list_annotations(cls)[field.name]) + _range(metadata['rules']),
        _default(field),
        sentence(prose(metadata['help'])) + (' *May change on resume.*' if may_change else '') + was,
    )


def _kind(annotation: Any) -> str:
    """The type of a field in words, with a link where its values have their own tables."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return ' or '.join(map(_kind, arguments))
    if origin is tuple and Ellipsis in arguments:
        return f'list of {_kind(arguments[0])}'
    if origin is tuple:
        return f'({", ".join(map(_kind, arguments))})'
    if origin is typing.Literal:
        return ' or '.join(code(format_value(argument)) for argument in arguments)
    if annotation in choices():
        return f'[{annotation.__name__}](#{_label(annotation)})'
    return WORDS.get(annotation) or code(annotation.gin_name)


def _range(rules: dict[str, Any]) -> str:
    signs = {'minimum': '≥', 'maximum': '≤', 'above': '>', 'below': '<'}
    limits = [f'{sign} {rules[name]}' for name, sign in signs.items() if rules[name] is not None]
    limits += ['even'] if rules['even'] else []
    limits += [' '.join(code(format_value(choice)) for choice in rules['choices'])] if rules['choices'] else []
    return f', {", ".join(limits)}' if limits else ''


def _default(field: dataclasses.Field) -> str:
    if field.default is dataclasses.MISSING:
        return '*required*'
    named = replace_nodes(field.default, lambda v: Reference('', v.gin_name) if hasattr(v, 'gin_name') else v)
    return code(format_value(named))


def _base(cls: type) -> type:
    """The class that the fields name which take a `cls`."""
    return next(base for base in reversed(cls.__mro__) if base in _takers())


@functools.cache
def _takers() -> dict[type, list[str]]:
    """Class → the fields that take a value of it."""
    found: dict[type, list[str]] = {}
    for name, cls in (sections() | REGISTRY).items():
        hints = list_annotations(cls)
        for field in list_fields(cls):
            for kind in dict.fromkeys(find_classes(hints[field])):
                if kind.__module__.startswith('lm.'):
                    found.setdefault(kind, []).append(f'{name}.{field}')
    return found


def _label(base: type) -> str:
    return f'gin-values-{base.__name__.lower()}'
