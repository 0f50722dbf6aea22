"""Gin files → typed, frozen dataclasses, strictly; and back. The only file that imports gin.

    experiment = load(['configs/models/small.gin'], ['train.steps = 1000'])
    text = dump(experiment)                       # load of this text gives an equal experiment

Gin's own parser reads the files into statements. Their names are checked, they are flattened (includes and all) into
one text of plain bindings, and only then gin gets them and constructs each section once. Afterwards every statement
must have been used. Gin's global state is cleared before and after. One thread at a time.
"""

import dataclasses
import importlib
import os
import pathlib
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lm.config.checks import Statement, check_macros, check_used, did_you_mean, in_effect, parameters_of
from lm.config.configurable import REGISTRY
from lm.config.text import Macro, Reference, format_value, listed, replace_nodes
from lm.errors import ConfigError
from lm.files import is_remote

PROJECT = pathlib.Path(__file__).resolve().parents[2]
"""The checkout: `configs/…` and `data/…` are found here from any working directory."""

MODULE = 'lm.'
"""Gin's registry is one for the whole process: our names carry a prefix there."""


def load(
    gin_files: Sequence[str] = (),
    gin_params: Sequence[str] = (),
    *,
    root: type,
    allow_imports: bool = False,
    base: str | None = None,
) -> Any:
    """Resolves gin files and then gin parameters; of several values for one binding the last wins.

    Args:
        gin_files: paths or URLs (gs://…), in order; relative ones are looked for in the working directory, then in the
            project.
        gin_params: bindings such as 'train.steps = 1000'.
        allow_imports: permit `import` lines, which run code, and includes from anywhere.
        root: the dataclass to fill, whose fields are annotated with configurable classes.
        base: the config.gin of a run, read before all others. It must be sound on its own; what it says about nested
            configurables (mechanisms, sources) that the others replace is then dropped silently.

    Raises:
        ConfigError: one line that names file and line, the binding and a remedy.
    """
    if base is not None:
        load([base], allow_imports=allow_imports, root=root)
    bindings = {s.key: s for s in read(gin_files, gin_params, allow_imports=allow_imports, base=base)}
    built, calls = resolve(bindings, root)
    check_used(bindings, calls, set(sections_of(root).values()))
    return built


def read(
    gin_files: Sequence[str], gin_params: Sequence[str] = (), *, allow_imports: bool = False, base: str | None = None
) -> list[Statement]:
    """The statements of `base`, of gin files and of gin parameters, in this order; their names are checked against the
    configurables that have been imported."""
    reader = _Reader(allow_imports)
    if base is not None:
        reader.read_file(base, is_base=True)
    for path in gin_files:
        reader.read_file(path)
    for param in gin_params:
        reader.read_param(param)
    return reader.statements


def resolve(bindings: dict[str, Statement], root: type) -> tuple[Any, list[tuple[str, str]]]:
    """`root` filled from `bindings`, and the (scope, name) of everything that was built for it. Whether each binding
    was used remains to be checked."""
    check_macros(bindings)
    sections = sections_of(root)
    built, calls = _construct(bindings | _selected_by_default(bindings, sections.values()), sections)
    return root(**built), calls


def sections_of(root: type) -> dict[str, str]:
    """Field → gin name of its configurable."""
    annotations = typing.get_type_hints(root)
    return {field.name: annotations[field.name].gin_name for field in dataclasses.fields(root)}


# ------------------------------------------------------------------------------------------------------------- reading


class _Delegate:
    """Keeps references and macros as names while gin's parser reads a file."""

    def configurable_reference(self, scoped_name: str, evaluate: bool) -> Reference:
        scope, _, selector = scoped_name.rpartition('/')
        return Reference(scope, selector, evaluate)

    def macro(self, name: str) -> Macro:
        return Macro(name)


class _Reader:
    """Collects the statements of files, includes and parameters; refuses what runs code or leaves the project."""

    def __init__(self, allow_imports: bool):
        self.allow_imports = allow_imports
        self.statements: list[Statement] = []
        self._is_base = False
        self._open: list[str] = []
        self._roots: list[Any] = []
        self._modules: dict[str, Any] = {}

    def read_file(self, name: str, is_base: bool = False) -> None:
        path = _find_file(name)
        self._is_base = is_base
        self._roots = [path.parent, pathlib.Path.cwd(), PROJECT / 'configs', PROJECT / 'data']
        self._collect(path)

    def read_param(self, text: str) -> None:
        self._is_base = False
        self._roots = [pathlib.Path.cwd(), PROJECT / 'configs', PROJECT / 'data']
        self._add(_parse(text, '--gin_param'), None)

    def _collect(self, path: Any, where: str = '') -> None:
        if str(path) in self._open:
            raise ConfigError(f'{where}{path}: includes itself')
        self._open.append(str(path))
        try:
            text = path.read_bytes().decode()
        except UnicodeDecodeError:
            raise ConfigError(f'{where}{path}: is not text in UTF-8') from None
        except Exception as error:
            raise ConfigError(f'{where}{path}: cannot be read: {_first_line(error)}') from None
        self._add(_parse(text, str(path)), path)
        self._open.pop()

    def _add(self, parsed: Iterable[Any], path: Any) -> None:
        from gin import config_parser as grammar

        lines: dict[str, int] = {}
        for item in parsed:
            where = f'{path}:{item.location.line_num}' if path else '--gin_param'
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
                statement = self._statement(item, where)
                if path and statement.key in lines:
                    line = lines[statement.key]
                    raise ConfigError(f'{where}: {statement.key} is already set on line {line}; delete one of them')
                lines[statement.key] = item.location.line_num
                self.statements.append(statement)

    def _import(self, item: Any, where: str) -> None:
        if not self.allow_imports:
            raise ConfigError(
                f'{where}: {item.format()!r} would run code; delete it, or pass --allow_gin_imports if you trust it'
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
            raise ConfigError(
                f'{where}: {item.format()!r} failed: {type(error).__name__}: {_first_line(error)}'
            ) from None
        self._modules[item.bound_name()] = module

    def _statement(self, item: Any, where: str) -> Statement:
        """The statement with all names checked."""

        def resolve(node: Any) -> Any:
            if not isinstance(node, Reference):
                return node
            name = self._resolve(node.selector, where, '@', '()')
            if not node.evaluate:
                raise ConfigError(f'{where}: {format_value(node)} lacks its brackets: write {format_value(node)}()')
            return Reference(node.scope, name)

        value = replace_nodes(item.value, resolve)
        if not item.arg_name:
            return Statement(item.scope, item.selector, '', value, where, self._is_base)
        name = self._resolve(item.selector, where, '', f'.{item.arg_name}')
        known = parameters_of(name)
        if item.arg_name not in known:
            hint = did_you_mean(f'{name}.{item.arg_name}', [f'{name}.{p}' for p in known])
            raise ConfigError(
                f'{where}: {name} has no parameter {item.arg_name!r}{hint or "; it has " + listed(known, 20)}'
            )
        return Statement(item.scope, name, item.arg_name, value, where, self._is_base)

    def _resolve(self, selector: str, where: str, before: str, after: str) -> str:
        """The registered name that `selector` means: itself, or `module.Class` of an imported module."""
        name = selector.removeprefix(MODULE)
        if name in REGISTRY:
            return name
        first, *attributes = selector.split('.')
        thing = self._modules.get(first)
        for attribute in attributes:
            thing = getattr(thing, attribute, None)
        if hasattr(thing, 'gin_name'):
            return thing.gin_name
        owners = [f'{n}{after}' for n in REGISTRY if after[1:] in parameters_of(n)]
        hint = did_you_mean(name, REGISTRY, before, after) or did_you_mean(f'{name}{after}', owners)
        hint = hint or f'; there are {listed(sorted(REGISTRY), 30)}'
        raise ConfigError(f'{where}: nothing is called {before}{selector}{hint}')


def _parse(text: str, label: str) -> list[Any]:
    """The statements of `text` in gin's grammar; nothing has happened yet when this returns."""
    from gin.config_parser import ConfigParser

    try:
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
        raise ConfigError(
            f'{where}: cannot read {shown!r}: write name.parameter = value, strings in quotes, no arithmetic'
        ) from None


def _find_file(name: str, includer: Any = None, where: str = '') -> Any:
    """The path of a gin file: beside the file that includes it, in the working directory, or in the project."""
    if is_remote(name) or (is_remote(str(includer)) and not os.path.isabs(name)):
        from etils import epath

        path = epath.Path(name) if is_remote(name) else includer.parent / name
        if '..' in str(path).split('/'):
            raise ConfigError(f'{where}{name!r}: write the address without ..')
        try:
            exists = path.exists()
        except Exception as error:
            raise ConfigError(f'{where}{name!r}: cannot be read: {_first_line(error)}') from None
        if not exists:
            raise ConfigError(f'{where}{name!r}: no such file')
        return path
    candidates = [pathlib.Path(folder, name) for folder in ([includer.parent] if includer else []) + ['', PROJECT]]
    for path in candidates:
        if os.path.isfile(path):
            return path
    folders = [path.parent for path in candidates if os.path.isdir(path.parent)]
    siblings = [os.path.join(os.path.dirname(name), p.name) for folder in folders[:1] for p in folder.glob('*.gin')]
    raise ConfigError(f'{where}{name!r}: no such file{did_you_mean(name, siblings)}')


def _is_inside(path: Any, folder: Any) -> bool:
    if is_remote(f'{path}') or is_remote(f'{folder}'):
        return str(path).startswith(f'{str(folder).rstrip("/")}/')
    return path.resolve().is_relative_to(folder.resolve())


# -------------------------------------------------------------------------------------------------------- constructing

_registered: set[str] = set()
_observers: list[Callable[[str, str, dict[str, Any]], Any]] = []


def _construct(
    bindings: dict[str, Statement], sections: dict[str, str]
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """The sections, built by gin from `bindings`, and the (scope, name) of everything that was built for them."""
    import gin

    calls: list[tuple[str, str]] = []

    def build(scope: str, name: str, values: dict[str, Any]) -> Any:
        calls.append((scope, name))
        required = [f.name for f in dataclasses.fields(REGISTRY[name]) if f.default is f.default_factory]
        for parameter in required:
            if parameter not in values:
                label = f'{scope}/{name}.{parameter}' if scope else f'{name}.{parameter}'
                raise ConfigError(
                    f"{label}: has no value; set it, --gin_param '{label} = …' ({_help(name, parameter)})"
                )
        try:
            return REGISTRY[name](**values)
        except ConfigError as error:
            field = str(error).partition(' ')[0].removeprefix(f'{name}.')
            statement = in_effect(bindings, scope, name).get(field)
            raise ConfigError(f'{error} ({statement.where})' if statement else str(error)) from None

    gin.clear_config()
    _observers.append(build)
    try:
        for name in REGISTRY.keys() - _registered:
            gin.register(name, module=MODULE.rstrip('.'))(_builder(name))
            _registered.add(name)
        gin.parse_config([statement.text(MODULE) for statement in bindings.values()])
        gin.finalize()
        built = {field: gin.get_configurable(MODULE + name)() for field, name in sections.items()}
    except RecursionError:
        raise ConfigError('a macro or configurable contains itself; break the circle') from None
    except ConfigError as error:
        raise ConfigError(_first_line(error)) from None  # gin adds a line for every level of nesting
    finally:
        _observers.pop()
        gin.clear_config()
    return built, calls


def _selected_by_default(bindings: dict[str, Statement], sections: Iterable[str]) -> dict[str, Statement]:
    """`prepare.tokenizer = @tokenizer()` and the like, where a section's default is a configurable that some binding
    names and no binding replaces: then `tokenizer.vocab_size = 4096` alone has the effect that it says."""
    found = {}
    for section in sections:
        for field in dataclasses.fields(REGISTRY[section]):
            name = getattr(field.default, 'gin_name', None)
            key = f'{section}.{field.name}'
            if key not in bindings and any(s.selector == name and s.parameter for s in bindings.values()):
                found[key] = Statement('', section, field.name, Reference('', name), 'default', False)
    return found


def _builder(name: str) -> Callable[..., Any]:
    """What gin calls for `@name()`."""

    def build(**values: Any) -> Any:
        import gin

        return _observers[-1]('/'.join(gin.current_scope()), name, values)

    return build


def _help(name: str, parameter: str) -> str:
    field = next(f for f in dataclasses.fields(REGISTRY[name]) if f.name == parameter)
    return field.metadata.get('help') or 'it has no default'


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
