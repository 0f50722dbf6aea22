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
    functions = [_function(name, value) for name, value in found.items() if not isinstance(value, type)]
    classes = [_class(name, value) for name, value in found.items() if isinstance(value, type)]
    return '\n\n'.join(['## Functions', *functions, '## Classes', *classes])


def _function(name: str, value: Any) -> str:
    return '\n\n'.join([_heading(name), _signature(f'lm.{name}', value), docstring(inspect.getdoc(value))])


def _class(name: str, cls: type) -> str:
    parts = [_heading(name), docstring(cls.__doc__)]
    if hasattr(cls, 'gin_name'):
        return '\n\n'.join([*parts, f'Its fields are the gin names of [{code(cls.gin_name)}](#gin-{cls.gin_name}).'])
    if dataclasses.is_dataclass(cls):
        parts.append(fenced(f'lm.{name}({_indented(_fields(cls))})', 'python'))
    for word, member in inspect.getmembers_static(cls):
        if word.startswith('_') or not inspect.getdoc(member):
            continue
        if isinstance(member, property | functools.cached_property):
            parts += [f'#### {code(f"{name}.{word}")}', docstring(inspect.getdoc(member))]
        elif inspect.isfunction(member):
            parts += [f'#### {code(f"{name}.{word}")}', _signature(f'{name}.{word}', member)]
            parts.append(docstring(inspect.getdoc(member)))
    return '\n\n'.join(parts)


def _heading(name: str) -> str:
    return f'(lm.{name})=\n### {code(f"lm.{name}")}'


def _fields(cls: Any) -> list[str]:
    return [f'{f.name}: {_annotation(f.type)}' for f in dataclasses.fields(cls)]


def _annotation(annotation: Any) -> str:
    """A type without the names of modules."""
    return _short(inspect.formatannotation(annotation))


def _short(text: str) -> str:
    return re.sub(r'\b(?:[a-z_]\w*\.)+(?=\w)', '', text)


def _signature(name: str, value: Any) -> str:
    signature = inspect.signature(value)
    shown, seen_star = [], False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not seen_star:
            shown.append('*')
            seen_star = True
        shown.append(re.sub(r'(?<=: )[^=]+', lambda found: _short(found[0]), str(parameter)))
    result = signature.return_annotation
    returns = '' if result is signature.empty else f' -> {_annotation(result)}'
    return fenced(f'{name}({_indented(shown)}){returns}', 'python')


def _indented(parts: list[str]) -> str:
    """One parameter per line where they do not fit into a line."""
    line = ', '.join(parts)
    return line if len(line) < 70 else ''.join(f'\n    {part},' for part in parts) + '\n'
