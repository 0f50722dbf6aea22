"""The names that `import lm` offers, with their signatures and docstrings."""

import dataclasses
import functools
import inspect
import re
from typing import Any

import lm
from lm_reference.markdown import code, docstring, fenced


def page() -> str:
    """The functions, then the classes."""
    found = {name: getattr(lm, name) for name in sorted(lm.PUBLIC)}
    functions = [describe_function(f'lm.{name}', value) for name, value in found.items() if not _is_class(value)]
    classes = [_describe_public_class(f'lm.{name}', value) for name, value in found.items() if _is_class(value)]
    return '\n\n'.join(['## Functions', *functions, '## Classes', *classes])


def describe_function(name: str, value: Any) -> str:
    """Heading, signature and docstring of a function."""
    return '\n\n'.join([heading(name), _signature(name, value), docstring(inspect.getdoc(value))])


def describe_class(name: str, cls: type) -> str:
    """Heading, docstring and fields of a class, and what is public in it and has a docstring."""
    parts = [heading(name), docstring(cls.__doc__)]
    if dataclasses.is_dataclass(cls):
        parts.append(
            fenced(f'{name}({_indented([_field(f.name, f.type) for f in dataclasses.fields(cls)])})', 'python')
        )
    elif hasattr(cls, '_fields'):  # a NamedTuple, whose docstring may be made of these
        parts.append(fenced(f'{name}({_indented([_field(*item) for item in cls.__annotations__.items()])})', 'python'))
    for word, member in inspect.getmembers_static(cls):
        if word.startswith('_') or not inspect.getdoc(member) or word in getattr(cls, '_fields', ()):
            continue
        title = f'{name.rpartition(".")[2]}.{word}'
        if isinstance(member, property | functools.cached_property):
            parts += [f'#### {code(title)}', docstring(inspect.getdoc(member))]
        elif inspect.isfunction(member):
            parts += [f'#### {code(title)}', _signature(title, member), docstring(inspect.getdoc(member))]
    return '\n\n'.join(parts)


def heading(name: str, level: int = 3) -> str:
    """A heading with a label of its own; deep names are cut to their last word."""
    title = name if level == 2 or name.count('.') == 1 else name.rpartition('.')[2]
    return f'({name})=\n{"#" * level} {code(title)}'


def _describe_public_class(name: str, cls: type) -> str:
    if not hasattr(cls, 'gin_name'):
        return describe_class(name, cls)
    where = f'Its fields are the gin names of [{code(cls.gin_name)}](#gin-{cls.gin_name}).'
    return '\n\n'.join([heading(name), docstring(cls.__doc__), where])


def _is_class(value: Any) -> bool:
    return isinstance(value, type)


def _field(name: str, annotation: Any) -> str:
    return f'{name}: {shorten(inspect.formatannotation(annotation))}'


def shorten(text: str) -> str:
    """A type without the names of modules."""
    return re.sub(r'\b(?:[a-z_]\w*\.)+(?=\w)', '', text)


def _signature(name: str, value: Any) -> str:
    signature = inspect.signature(value)
    shown: list[str] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and '*' not in shown and not any(s.startswith('*') for s in shown):
            shown.append('*')
        shown.append(re.sub(r'(?<=: )[^=]+', lambda found: shorten(found[0]), str(parameter)))
    result = signature.return_annotation
    returns = '' if result is signature.empty else f' -> {shorten(inspect.formatannotation(result))}'
    return fenced(f'{name}({_indented(shown)}){returns}', 'python')


def _indented(parts: list[str]) -> str:
    """One parameter per line where they do not fit into a line."""
    line = ', '.join(parts)
    return line if len(line) < 70 else ''.join(f'\n    {part},' for part in parts) + '\n'
