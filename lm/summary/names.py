"""`lm help NAME`: the fields, values and gin files behind a name, from the classes that the reference is made of."""

import dataclasses
import difflib
import re
import sys
import textwrap
import typing
from collections.abc import Iterator, Sequence

from lm.config.configurable import REGISTRY, Configurable, find_classes, list_annotations, list_fields
from lm.config.project import project_root
from lm.config.text import Reference, format_value, replace_nodes
from lm.errors import ConfigError
from lm.experiment import Experiment, load_registry

WIDTH = 100
MOST = 25
"""The most fields that a search prints."""
KINDS = {int: 'integer', float: 'number', str: 'text', bool: 'True or False'}


@dataclasses.dataclass(frozen=True)
class KnownField:
    """A field that a gin file can set.

    Attributes:
        name: `section.field`.
        values: the classes that it takes, besides numbers and texts.
    """

    name: str
    field: dataclasses.Field
    values: Sequence[type]

    @property
    def is_shared(self) -> bool:
        """The field is an option of all layers; it counts where it differs from the model."""
        return bool(self.field.metadata.get('omit_default'))

    def describe(self) -> str:
        """Returns one line: the name with its default, and the meaning."""
        metadata = self.field.metadata
        default = '' if self.field.default is dataclasses.MISSING else f' = {_format(self.field.default)}'
        choices = metadata['rules']['choices']
        return f'{self.name}{default}: {metadata["help"]}' + (f' ({", ".join(map(str, choices))})' if choices else '')


def show_help(words: Sequence[str]) -> None:
    """Prints what is known about a name; without one, the topics. Raises ConfigError for a name that nothing has."""
    load_registry()
    name = ' '.join(words).strip().lower()
    lines = list(_list_topics() if not name else _describe(name) or _search(name))
    if not lines:
        close = difflib.get_close_matches(name, [*_sections(), *REGISTRY], 1)
        hint = f', did you mean {close[0]}?' if close else ';'
        raise ConfigError(
            f'{name!r}: no section, value, field or gin file has this name{hint} lm help lists the topics'
        )
    print('\n'.join(lines))


def list_fields_known() -> list[KnownField]:
    """Returns every field of every section and value."""
    found = []
    for section, cls in {**_sections(), **REGISTRY}.items():
        hints = list_annotations(cls)
        for name, field in list_fields(cls).items():
            kinds = [kind for kind in find_classes(hints[name]) if kind not in KINDS and kind is not type(None)]
            found.append(KnownField(f'{section}.{name}', field, kinds))
    return found


def _sections() -> dict[str, type[Configurable]]:
    hints = typing.get_type_hints(Experiment)
    return {field.name: hints[field.name] for field in dataclasses.fields(Experiment)}


def _list_topics() -> Iterator[str]:
    yield 'lm help NAME shows the fields, values and gin files of a name: polysketch, optimizer.rule or recipes.'
    yield 'lm help WORDS searches in fields, such as: lm help learning rate'
    yield _wrap('sections', sorted(_sections()))
    for field in list_fields_known():
        if (values := _list_values(field)) and field.name.partition('.')[0] in _sections():
            yield _wrap(field.name, values)
    folders = sorted(path.name for path in (project_root() / 'configs').iterdir() if path.is_dir())
    yield _wrap('gin files', folders)
    yield 'lm VERB --help shows the flags of a command; lm --help lists the commands.'


def _describe(name: str) -> list[str]:
    """Returns what a section, a value, a field or a folder of gin files is; [] if `name` is none of these."""
    lines: list[str] = []
    plain = name.removeprefix('@').removesuffix('()').replace(' ', '_')
    if (cls := _sections().get(plain) or REGISTRY.get(plain)) is not None:
        lines += [_first_paragraph(cls.__doc__), _first_paragraph(sys.modules[cls.__module__].__doc__)]
        takers = [f.name for f in list_fields_known() if plain in _list_values(f)]
        lines += [f'set it: {taker} = @{plain}(), or --set {taker}={plain}' for taker in takers[:3]]
        own = [f for f in list_fields_known() if f.name.startswith(f'{plain}.')]
        lines += ['fields:', *(_indent(f.describe()) for f in own if not f.is_shared)]
        if any(f.is_shared for f in own):
            lines.append(f'and those of each layer, which are as in the model: lm help model, such as {plain}.n_heads')
    for field in list_fields_known():
        if field.name == plain:
            lines.append(field.describe())
            lines += [_indent(f'{value}: {_first_paragraph(REGISTRY[value].__doc__)}') for value in _list_values(field)]
    files = _find_files(plain)
    return [*lines, *(['gin files:', *map(_indent, files)] if files else [])]


def _search(words: str) -> list[str]:
    """Returns the fields that hold all words in their name, or else in their meaning."""
    wanted = re.findall(r'\w+', words)
    fields = list_fields_known()
    named = [f for f in fields if all(word in f.name.lower() for word in wanted)]
    meant = [f for f in fields if f not in named and all(word in f.describe().lower() for word in wanted)]
    found = [*named, *meant]
    more = [f'… and {len(found) - MOST} more'] if len(found) > MOST else []
    return [*(textwrap.fill(f.describe(), WIDTH, subsequent_indent='  ') for f in found[:MOST]), *more]


def _find_files(name: str) -> list[str]:
    """Returns the gin files with this name or in the folder of this name, with the first sentence of each."""
    root, found = project_root(), []
    for path in sorted((root / 'configs').rglob('*.gin')):
        text = path.read_text()
        if name in (path.stem, path.parent.name) or re.search(rf'^model\.attention = @{name}\(\)', text, re.MULTILINE):
            comment = re.match(r'(?:#[^\n]*\n)*', text)
            words = ' '.join(line.lstrip('# ') for line in comment[0].split('\n#\n')[0].splitlines()) if comment else ''
            found.append(f'{path.relative_to(root)}: {textwrap.shorten(words, WIDTH, placeholder=" …")}')
    return found


def _list_values(field: KnownField) -> list[str]:
    """Returns the gin names of what a field takes."""
    known = REGISTRY.items()
    return sorted(
        name
        for name, cls in known
        if name not in _sections() and any(kind in cls.__mro__ for kind in field.values if kind is not object)
    )


def _first_paragraph(text: str | None) -> str:
    return textwrap.fill(' '.join((text or '').split('\n\n')[0].split()), WIDTH)


def _indent(text: str) -> str:
    return textwrap.fill(' '.join(text.split()), WIDTH, initial_indent='  ', subsequent_indent='    ')


def _wrap(title: str, names: Sequence[str]) -> str:
    return textwrap.fill(f'{title}: {", ".join(names)}', WIDTH, subsequent_indent='  ')


def _format(value: object) -> str:
    return format_value(replace_nodes(value, lambda v: Reference('', v.gin_name) if hasattr(v, 'gin_name') else v))
