"""Settings of the command line, `data.path=runs/x`, as bindings of gin: a text gets the quotes that gin wants."""

import ast
from collections.abc import Collection, Iterable

from lm.config.checks import did_you_mean, list_parameters
from lm.config.configurable import REGISTRY
from lm.config.names import find_current_names, find_field_classes
from lm.errors import ConfigError

REFERENCES = ('@', '%', '"', "'")
KEPT = (*REFERENCES, '[', '(', '{')
"""Beginnings of values that gin reads as they are: references, macros, lists, dicts and what has quotes."""
NAMED = {'true': ('True', bool), 'false': ('False', bool), 'none': ('None', type(None))}
"""Word in small letters → how gin writes it, and the type of the fields that can only mean that."""


def write_binding(setting: str) -> str:
    """Returns `name=value` as a binding of gin: 'data.path=runs/x' → "data.path = 'runs/x'".

    Numbers, True, False, None, lists, references and values in quotes stay as they are. A field that takes nothing but
    text gets quotes around a number, too. A name that the field takes may be bare: `model.attention=polysketch` means
    `@polysketch()`.

    Raises:
        ConfigError: there is no `=`, or a section that `lm` has does not have this field.
    """
    name, equals, value = (part.strip() for part in setting.partition('='))
    if not (name and equals):
        raise ConfigError(f'{setting!r}: write NAME=VALUE, such as data.path=data/mine')
    fields = _find_fields(name)
    return f'{name} = {_quote(value, {kind for field in fields for kind in find_field_classes(field)})}'


def suggest_fields(word: str, sections: Iterable[str]) -> list[str]:
    """Returns the fields of sections, as `section.field`, that a word may mean: their names, endings or initials."""
    fields = [(f'{section}.{field}', field) for section in sections for field in list_parameters(section)]
    equal = [name for name, field in fields if field == word]
    ending = [name for name, field in fields if field.endswith(f'_{word}')]
    initials = [n for n, f in fields if '_' in f and ''.join(part[0] for part in f.split('_')).endswith(word)]
    return equal or ending or (initials if len(word) > 1 else [])


def _find_fields(name: str) -> list[str]:
    """Returns the fields that a name means in this version; none for macros and for sections that are not known yet."""
    section, _, parameter = name.rpartition('/')[2].removeprefix('lm.').rpartition('.')
    if section not in REGISTRY:
        return []
    found = [f'{owner}.{field}' for owner, field in find_current_names(section, parameter)]
    if not found:
        known = [f'{section}.{field}' for field in list_parameters(section)]
        hint = did_you_mean(f'{section}.{parameter}', known)
        raise ConfigError(f'{section} has no parameter {parameter!r}{hint or "; it has " + ", ".join(known)}')
    return found


def _quote(value: str, kinds: Collection[type]) -> str:
    if value in NAMED and NAMED[value][1] in kinds and str not in kinds:
        return NAMED[value][0]
    takes_text_alone = {*kinds} - {type(None)} == {str}
    try:
        literal = ast.literal_eval(value)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        name = value.removesuffix('()')
        chosen = REGISTRY.get(name.rpartition('/')[2])
        if chosen is not None and not takes_text_alone and any(issubclass(chosen, kind) for kind in kinds):
            return f'@{name}()'
        # Text may begin with a bracket, such as '{split}-*.jsonl'.
        return value if value.startswith(REFERENCES if takes_text_alone else KEPT) else repr(value)
    return repr(value) if takes_text_alone and isinstance(literal, bool | int | float | complex) else value
