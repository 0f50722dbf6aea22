"""Gin files and parameters → statements whose names are checked. This file alone imports gin, and only its parser.

Reading runs no code of a file, unless imports were allowed: a value is a literal, a reference or the name of a macro.
An `import` of a module that is loaded and has defined configurables needs no permission.
"""

import difflib
import functools
import importlib
import logging
import os
import pathlib
import re
import threading
import tomllib
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from lm.config.checks import Statement, did_you_mean, list_parameters
from lm.config.configurable import REGISTRY, Configurable
from lm.config.names import find_current_names, find_meant, use_references
from lm.config.project import project_root
from lm.config.text import Macro, Reference, format_value, join_names, replace_nodes
from lm.errors import ConfigError
from lm.files import AnyPath, is_remote, open_path

log = logging.getLogger(__name__)

# gin reads literals by `ast`, whose C code counts its depth in one place for all threads in Python 3.11: a collection
# half-way runs JAX's callback, another thread goes on, and both fail ("recursion depth mismatch").
_PARSING = threading.Lock()


def read(
    gin_files: Sequence[str],
    gin_params: Sequence[str] = (),
    *,
    allow_imports: bool = False,
    base: str | None = None,
    leave_out: Collection[str] = (),
    edit: Callable[[str], str] | None = None,
) -> list[Statement]:
    """Reads the statements of `base`, of gin files and of gin parameters, in this order.

    Their names are checked against the configurables that have been imported. The statements of `base` whose keys are
    in `leave_out` do not count. `edit` changes the text of each file before it is read; it keeps the lines.
    """
    reader = _Reader(allow_imports, edit)
    if base is not None:
        reader.read_file(base, is_base=True)
        reader.statements = [s for s in reader.statements if s.key not in leave_out]
    for path in gin_files:
        reader.read_file(path)
    for param in gin_params:
        reader.read_param(param)
    return reader.statements


class _Delegate:
    """Keeps references and macros as names while gin's parser reads a file."""

    def configurable_reference(self, scoped_name: str, evaluate: bool) -> Reference:
        scope, _, selector = scoped_name.rpartition('/')
        return Reference(scope, selector, evaluate)

    def macro(self, name: str) -> Macro:
        return Macro(name)


BESIDE_FILES = '--set or --gin_param'
"""The place of a setting that stands in no file."""


class _Reader:
    """Collects the statements of files, includes and parameters; refuses what runs code or leaves the project."""

    def __init__(self, allow_imports: bool, edit: Callable[[str], str] | None = None):
        self.allow_imports, self._edit = allow_imports, edit
        self.statements: list[Statement] = []
        self._is_base = False
        self._open: list[str] = []
        self._roots: list[AnyPath] = []
        self._modules: dict[str, Any] = {}

    def read_file(self, name: str, is_base: bool = False) -> None:
        path = _find_file(name)
        self._is_base = is_base
        self._roots = [path.parent, *_list_roots()]
        self._collect(path)

    def read_param(self, text: str) -> None:
        self._is_base = False
        self._roots = _list_roots()
        self._add(_parse(text, BESIDE_FILES), None)

    def _collect(self, path: AnyPath, where: str = '') -> None:
        if str(path) in self._open:
            raise ConfigError(f'{where}{path}: includes itself')
        self._open.append(str(path))
        try:
            text = path.read_bytes().decode('utf-8-sig')  # with the byte order mark of Windows
        except UnicodeDecodeError:
            raise ConfigError(f'{where}{path}: is not text in UTF-8') from None
        except Exception as error:
            raise ConfigError(f'{where}{path}: cannot be read: {_first_line(error)}') from None
        self._add(_parse(self._edit(text) if self._edit else text, str(path)), path)
        self._open.pop()

    def _add(self, parsed: Iterable[Any], path: AnyPath | None) -> None:
        from gin import config_parser as grammar

        lines: dict[str, tuple[int, str]] = {}
        for item in parsed:
            where = f'{path}:{item.location.line_num}' if path else BESIDE_FILES
            if isinstance(item, grammar.ImportStatement):
                self._import(item, where)
            elif isinstance(item, grammar.IncludeStatement):
                included = _find_file(item.filename, path, f'{where}: include ')
                if not self.allow_imports and not any(_is_inside(included, root) for root in self._roots):
                    raise ConfigError(
                        f'{where}: include {item.filename!r} leaves the project and the folder of the file; '
                        'copy it there or pass --allow_gin_imports'
                    )
                self._collect(included, f'{where}: include ')
            elif isinstance(item, grammar.BindingStatement):
                written = f'{item.selector}.{item.arg_name}' if item.arg_name else item.selector
                for statement in self._check_statement(item, where):
                    line, other = lines.setdefault(statement.key, (item.location.line_num, written))
                    if path and other != written:
                        raise ConfigError(
                            f'{where}: {written} and, on line {line}, {other} are two names of {statement.key}; '
                            'delete one of them'
                        )
                    if path and line != item.location.line_num:
                        raise ConfigError(f'{where}: {statement.key} is already set on line {line}; delete one of them')
                    self.statements.append(statement)

    def _import(self, item: Any, where: str) -> None:
        is_here = item.module in {configurable.__module__ for configurable in REGISTRY.values()}  # and runs no code
        if not (is_here or self.allow_imports):
            raise ConfigError(
                f'{where}: {item.format()!r} would run code; delete it, or if you trust it pass --allow_gin_imports '
                '(in Python import it first)'
            )
        if item.module == '__gin__.dynamic_registration':
            return  # `module.Class` is looked up in imported modules anyway
        package, _, name = item.module.rpartition('.')
        try:
            if item.is_from:
                module = getattr(importlib.import_module(package), name, None) or importlib.import_module(item.module)
            else:
                module = importlib.import_module(item.module)
                module = module if item.alias else importlib.import_module(item.module.partition('.')[0])
        except Exception as error:
            hint = '; PYTHONPATH must name its folder' if isinstance(error, ModuleNotFoundError) else ''
            raise ConfigError(
                f'{where}: {item.format()!r} failed: {type(error).__name__}: {_first_line(error)}{hint}'
            ) from None
        self._modules[item.bound_name()] = module

    def _check_statement(self, item: Any, where: str) -> list[Statement]:
        """Checks the names of a statement. A statement of earlier versions becomes what it means in this version."""

        def resolve(node: Any) -> Any:
            if not isinstance(node, Reference):
                return node
            name = self._resolve(node.selector, where, '@', '()')
            if not node.evaluate:
                raise ConfigError(f'{where}: {format_value(node)} lacks its brackets: write {format_value(node)}()')
            return Reference(node.scope, name)

        value = replace_nodes(item.value, resolve)
        found = [Statement(item.scope, item.selector, '', value, where, self._is_base)]
        if item.arg_name:
            name = self._resolve(item.selector, where, '', f'.{item.arg_name}')
            known, today = list_parameters(name), find_current_names(name, item.arg_name)
            if not today:
                hint = did_you_mean(f'{name}.{item.arg_name}', [f'{name}.{p}' for p in known])
                raise ConfigError(
                    f'{where}: {name} has no parameter {item.arg_name!r}{hint or "; it has " + join_names(known, 20)}'
                )
            # One name may have become several: the selected configurables use it.
            optional = self._is_base or len(today) > 1
            values = [value if (n, p) == (name, item.arg_name) else use_references(value, n, p) for n, p in today]
            found = [
                Statement(item.scope, n, field, meant, where, optional)
                for (n, p), v in zip(today, values, strict=True)
                for field, meant in find_meant(n, p, v).items()
            ]
        try:
            format_value(value)
        except ConfigError as error:
            raise ConfigError(f'{where}: {found[0].key} = {error}') from None
        return found

    def _resolve(self, selector: str, where: str, before: str, after: str) -> str:
        """Returns the registered name that `selector` means: itself, or `module.Class` of an imported module."""
        name = selector.removeprefix('lm.')
        if name in REGISTRY:
            return name
        first, *attributes = selector.split('.')
        thing = self._modules.get(first)
        for attribute in attributes:
            thing = getattr(thing, attribute, None)
        if isinstance(thing, type) and issubclass(thing, Configurable) and thing in REGISTRY.values():
            return thing.gin_name
        owners = [f'{n}{after}' for n in REGISTRY if after[1:] in list_parameters(n)]
        hint = did_you_mean(name, REGISTRY, before, after) or did_you_mean(f'{name}{after}', owners)
        hint = hint or f'; there are {join_names(sorted(REGISTRY), 30)}'
        raise ConfigError(f'{where}: nothing is called {before}{selector}{hint}')


def _parse(text: str, label: str) -> list[Any]:
    """Parses `text` with gin's grammar. Nothing of it runs."""
    from gin.config_parser import ConfigParser

    try:
        with _PARSING:
            return list(ConfigParser(text, _Delegate()))
    except RecursionError:
        raise ConfigError(f'{label}: brackets are nested too deeply') from None
    except Exception as error:
        # SyntaxError, or tokenize.TokenError(message, (line, column)).
        position = error.args[1] if len(error.args) > 1 and isinstance(error.args[1], tuple) else (0,)
        line = getattr(error, 'lineno', None) or (position[0] if isinstance(position[0], int) else 0)
        lines = text.splitlines()
        where = f'{label}:{line}' if line and not label.startswith('--') else label
        shown = lines[line - 1].strip()[:100] if 0 < line <= len(lines) else text.strip()[:100]
        raise ConfigError(f'{where}: cannot read {shown!r}: {_explain(shown)}') from None


def _explain(line: str) -> str:
    """Returns what may be wrong with a line that gin cannot parse."""
    name, is_binding, _ = line.partition('=')
    parts = re.split('[./]', name.strip())
    if is_binding and (wrong := [part for part in parts if not re.fullmatch('[A-Za-z_][A-Za-z0-9_]*', part)]):
        return f'{wrong[0]!r} is no name: names have letters, digits and _, and do not begin with a digit'
    return 'write name.parameter = value, strings in quotes, no arithmetic'


def _find_file(name: str, includer: AnyPath | None = None, where: str = '') -> AnyPath:
    """Finds a gin file: beside the file that includes it, in the working directory, or in the project."""
    beside = includer.parent if includer is not None and is_remote(str(includer)) and not os.path.isabs(name) else None
    if is_remote(name) or beside is not None:
        if '..' in name.split('/'):
            raise ConfigError(f'{where}{name!r}: write the address without ..')
        path = open_path(name, '--gin_file') if is_remote(name) or beside is None else beside / name
        try:
            exists = path.exists()
        except Exception as error:
            raise ConfigError(f'{where}{name!r}: cannot be read: {_first_line(error)}') from None
        if not exists:
            raise ConfigError(f'{where}{name!r}: no such file')
        return path
    folders = [includer.parent] if includer else []
    candidates = [pathlib.Path(folder, name) for folder in (*folders, '', project_root())]
    for path in candidates:
        if os.path.isfile(path):
            return path
    for path in candidates:
        if moved := _moved_files().get(os.path.abspath(path)):
            log.warning('%s%s has moved to %s', where, name, moved)
            return moved
    folders = [path.parent for path in candidates if os.path.isdir(path.parent)]
    siblings = [os.path.join(os.path.dirname(name), p.name) for folder in folders[:1] for p in folder.glob('*.gin')]
    hint = did_you_mean(name, siblings)
    if not hint and (shipped := _find_shipped(pathlib.PurePath(name).stem)):
        hint = f'; did you mean {shipped[0]}?'
    raise ConfigError(f'{where}{name!r}: no such file{hint}')


def _find_shipped(stem: str) -> list[str]:
    """Returns the gin files of the project with the nearest name, without its suffix; experiments come first."""
    root = project_root()
    paths = list((root / 'configs').rglob('*.gin'))
    close = difflib.get_close_matches(stem, {path.stem for path in paths}, 1)
    found = [path.relative_to(root).as_posix() for path in paths if path.stem in close]
    return sorted(found, key=lambda name: (not name.startswith('configs/experiments/'), name))


def _list_roots() -> list[AnyPath]:
    """Returns the folders, besides the folder of the file itself, whose files may be included."""
    return [pathlib.Path.cwd(), project_root() / 'configs', project_root() / 'data']


@functools.cache
def _moved_files() -> dict[str, pathlib.Path]:
    """Returns former path → path today of the project's gin files, from configs/moved.toml. Old commands still work."""
    folder = project_root() / 'configs'
    table = folder / 'moved.toml'
    moves = tomllib.loads(table.read_text(encoding='utf-8')) if table.is_file() else {}
    return {str(folder / old): folder / new for old, new in moves.items()}


def _is_inside(path: AnyPath, folder: AnyPath) -> bool:
    if is_remote(str(path)) or is_remote(str(folder)):
        return str(path).startswith(f'{str(folder).rstrip("/")}/')
    return path.resolve().is_relative_to(folder.resolve())


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
