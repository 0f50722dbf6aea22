"""The tables of the keys of files, made of the `TypedDict`s in `keys.py`."""

import ast
import importlib
import inspect
import re
import sys
import types
import typing

from lm_reference.markdown import code, first_paragraph, prose, sentence, table

KEY = re.compile(r"^\s+'?(\w+)'?: (.+?),?  #: (.+)$", re.MULTILINE)

WORDS = {'str': 'string', 'int': 'integer', 'float': 'number', 'bool': '`true` or `false`', 'Any': 'any'}


def page(name: str) -> str:
    """The keys of `MODULE:CLASS`, and of the objects in it. The keys of a base have a table of their own."""
    module, _, word = name.partition(':')
    parts, found = [], [getattr(importlib.import_module(module), word)]
    for cls in found:  # which grows
        rows = own_keys(cls)
        nested = [each for _, kind, _ in rows for each in _typed(cls, kind)]
        found += [each for each in dict.fromkeys(nested) if each not in found]
        parts += [f'({_label(cls.__name__)})=', *([] if cls is found[0] else [f'#### {cls.__name__}'])]
        inherited = [f'It also has the keys of [{base.__name__}](#{_label(base.__name__)}).' for base in _bases(cls)]
        parts += [' '.join([_description(cls), *inherited]), table(('key', 'value', 'meaning'), map(_row, rows))]
    return '\n\n'.join(parts).replace(')=\n\n', ')=\n')


def keys(cls: type) -> list[tuple[str, str, str]]:
    """Returns (key, type, meaning) of each key of a `TypedDict`. Keys of its bases come first."""
    return [entry for base in _bases(cls) for entry in keys(base)] + own_keys(cls)


def own_keys(cls: type) -> list[tuple[str, str, str]]:
    """(key, type, meaning) of the keys that a `TypedDict` adds to its bases. No key may lack its meaning."""
    node, _ = _nodes(cls)
    lines = inspect.getsource(_module(cls)).splitlines()[node.lineno - 1 : node.end_lineno]
    found = KEY.findall('\n'.join(lines))
    inherited = {key for base in _bases(cls) for key in base.__annotations__}
    assert {key for key, *_ in found} == cls.__annotations__.keys() - inherited, f'{cls}: write `#: MEANING` of each'
    return found


def _bases(cls: type) -> list[type]:
    names = [base.id for base in getattr(_nodes(cls)[0], 'bases', ()) if isinstance(base, ast.Name)]
    return [getattr(_module(cls), name) for name in names if name != 'TypedDict']


def _row(entry: tuple[str, str, str]) -> tuple[str, str, str]:
    key, kind, text = entry
    return code(key), _words(ast.parse(kind, mode='eval').body), sentence(prose(text))


def _words(kind: ast.expr) -> str:
    """A type in the words of JSON."""
    match kind:
        case ast.Constant(value=None):
            return '`null`'
        case ast.BinOp(left=left, right=right):
            return f'{_words(left)} or {_words(right)}'
        case ast.Subscript(value=ast.Name(id='NotRequired'), slice=inner):
            return f'{_words(inner)}, optional'
        case ast.Subscript(value=ast.Name(id='list'), slice=inner):
            return f'list of {_words(inner)}'
        case ast.Subscript(value=ast.Name(id='dict'), slice=ast.Tuple(elts=[_, inner])):
            return f'object, values: {_words(inner)}'
        case ast.Name(id=name):
            return WORDS.get(name) or f'[{name}](#{_label(name)})'
    raise AssertionError(ast.unparse(kind))


def _description(cls: type) -> str:
    node, following = _nodes(cls)
    if isinstance(node, ast.ClassDef):
        return first_paragraph(ast.get_docstring(node))
    is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
    return first_paragraph(following.value.value) if is_text else ''


def _nodes(cls: type) -> tuple[ast.stmt, ast.stmt]:
    """The statement that defines a `TypedDict`, of either form, and the one behind it."""
    body = ast.parse(inspect.getsource(_module(cls))).body
    for node, following in zip(body, [*body[1:], ast.Pass()], strict=True):
        targets = [target.id for target in getattr(node, 'targets', ()) if isinstance(target, ast.Name)]
        if getattr(node, 'name', None) == cls.__name__ or cls.__name__ in targets:
            return node, following
    raise AssertionError(cls)


def _module(cls: type) -> types.ModuleType:
    return sys.modules[cls.__module__]


def _typed(cls: type, annotation: str) -> list[type]:
    """The `TypedDict`s that a type names."""
    named = [getattr(_module(cls), name, None) for name in re.findall(r'\w+', annotation)]
    return [each for each in named if typing.is_typeddict(each)]


def _label(name: str) -> str:
    return f'key-{name.lower()}'
