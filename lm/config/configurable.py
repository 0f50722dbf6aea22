"""Typed, frozen configuration dataclasses and the registry of those that a gin file can name.

    @configurable('polynomial')
    class Polynomial(Attention):              # Attention is a Configurable
        degree: int = field(default=4, minimum=2, even=True)

makes `Polynomial` a frozen, keyword-only dataclass whose values are checked at construction, and lets a gin file
write `polynomial.degree = 8` and `model.attention = @polynomial()`. Nothing here knows gin: `lm.config.read` does.
"""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import operator
import pkgutil
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar

from lm.errors import ConfigError
from lm.secrets import Secret


class Configurable:
    """Base of every class that `configurable` registers, and of the bases of such classes."""

    gin_name: ClassVar[str]
    """The name in gin files; `configurable` sets it, so that the bases have none."""
    gin_resume: ClassVar[bool] = False
    """A run may be resumed with other values of all fields. Subclasses inherit it."""
    gin_rewind: ClassVar[bool] = False
    """A run that goes back to a checkpoint may go on with other values of all fields."""
    is_open_ended: ClassVar[bool] = False
    """A run with this choice may be made longer: no step before depends on how many steps there are."""
    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field]]

    def __post_init__(self) -> None:
        """Raises ConfigError for a value of a wrong type or outside its range."""
        check_fields(self)

    def __repr__(self) -> str:
        fields, values = list_fields(type(self)), list_values(self)
        shown = (f'{name}={values[name]!r}' for name, spec in fields.items() if is_stated(values[name], spec))
        return f'{type(self).__qualname__}({", ".join(shown)})'


T = TypeVar('T', bound=Configurable)

REGISTRY: dict[str, type[Configurable]] = {}
"""Gin name → dataclass. Filled by `configurable` when the module that holds the class is imported."""


def field(
    default: Any = dataclasses.MISSING,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    even: bool = False,
    choices: tuple | None = None,
    check: Callable[[Any], str | None] | None = None,
    help: str = '',
    resume: bool = False,
    formerly: str | None = None,
    omit_default: bool = False,
    inherit: bool | None = None,
    secret: bool = False,
    inlined: bool = False,
    earlier: Callable[[Any], dict[str, Any]] | None = None,
) -> Any:
    """Returns a dataclass field with the range of its values.

    Args:
        default: the default; without one the field is required. Type checkers read it only by name.
        minimum, maximum: inclusive bounds. Without a `maximum` an int is at most `MOST`.
        above, below: exclusive bounds.
        even: the value must be divisible by 2.
        choices: the permitted values.
        check: returns None for a good value, else what is wrong ("must be …").
        help: one line for people.
        resume: the value does not change what is learned: a run may be resumed with another one.
        formerly: the name in earlier versions, which gin files may still use: `bias`, or `optimizer.b1` of a field that
            stood in another configurable. Where the value was the name of a configurable, it becomes a reference.
        omit_default: config.gin and other texts leave the field out while it has its default.
        inherit: a student has the value of its teacher (`lm distill`); None: nobody has said so, and it has.
        inlined: the value is a configurable whose fields stand among the others, in gin files and in the constructor:
            `model.n_heads` for the field `n_heads` of `model.layer`. The default is one.
        earlier: returns the fields, with values, that a value of earlier versions means; none for a value of today.
        secret: no text, log or file shows the value (`lm.secrets`). The default is the variable that holds it.
    """
    rules = dict(minimum=minimum, maximum=maximum, above=above, below=below, even=even, choices=choices, check=check)
    facts = {'help': help, 'resume': resume, 'formerly': formerly, 'omit_default': omit_default}
    facts |= {'inherit': inherit, 'secret': secret, 'inlined': type(default) if inlined else None, 'earlier': earlier}
    return dataclasses.field(default=default, metadata={'rules': rules} | facts)


@functools.cache
def list_fields(cls: type[Configurable]) -> Mapping[str, dataclasses.Field]:
    """Returns name → field as gin files have them: the fields of what is inlined stand among the others."""
    found: dict[str, dataclasses.Field] = {}
    for spec in dataclasses.fields(cls):
        found |= list_fields(spec.metadata['inlined']) if spec.metadata.get('inlined') else {spec.name: spec}
    return types.MappingProxyType(found)


def list_annotations(cls: type[Configurable]) -> dict[str, object]:
    """Returns name → annotation of `list_fields`."""
    found = typing.get_type_hints(cls)
    for spec in _list_inlined(cls):
        found |= typing.get_type_hints(spec.metadata['inlined'])
    return found


def list_values(config: Configurable) -> dict[str, object]:
    """Returns name → value of `list_fields`."""
    found = {spec.name: getattr(config, spec.name) for spec in dataclasses.fields(config)}
    for spec in _list_inlined(type(config)):
        found |= list_values(found.pop(spec.name))
    return found


def _list_inlined(cls: type[Configurable]) -> list[dataclasses.Field]:
    return [spec for spec in dataclasses.fields(cls) if spec.metadata.get('inlined')]


def _construct_inlined(cls: type[Configurable]) -> Callable[..., None]:
    """Returns the constructor that also takes the fields of what is inlined."""
    plain = cls.__init__

    @functools.wraps(plain)
    def construct(self: Configurable, **values: Any) -> None:
        for spec in _list_inlined(cls):
            own = {name: values.pop(name) for name in list_fields(spec.metadata['inlined']) if name in values}
            if own:
                values[spec.name] = dataclasses.replace(values.get(spec.name, spec.default), **own)
        plain(self, **values)

    return construct


def is_stated(value: object, spec: dataclasses.Field) -> bool:
    """Returns whether texts state the value of a field (`omit_default` of `field`)."""
    return not spec.metadata.get('omit_default') or value != spec.default


@typing.dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def configurable_base(cls: type[T]) -> type[T]:
    """Makes a class with fields, which gin files do not know, a base of configurables."""
    return dataclasses.dataclass(frozen=True, kw_only=True)(cls)


@typing.dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
def configurable(name: str, *, resume: bool = False) -> Callable[[type[T]], type[T]]:
    """Makes a class a frozen keyword-only dataclass, checked at construction, that gin files know as `name`.

    Args:
        name: unique in the registry.
        resume: a run may be resumed with other values of all its fields.
    """

    def decorate(cls: type[T]) -> type[T]:
        refine = cls.__dict__.get('__post_init__')

        def check(self: T) -> None:
            check_fields(self)
            if refine:
                refine(self)

        cls.__post_init__ = check
        cls.gin_name = name
        cls.gin_resume = resume or cls.gin_resume
        if '__repr__' not in cls.__dict__:
            cls.__repr__ = Configurable.__repr__
        cls = configurable_base(cls)
        if _list_inlined(cls):
            cls.__init__ = _construct_inlined(cls)
        known = REGISTRY.setdefault(name, cls)
        if known is not cls and known.__qualname__ != cls.__qualname__:
            raise ValueError(f'two configurables are named {name!r}: {known} and {cls}')
        REGISTRY[name] = cls
        return cls

    return decorate


def import_modules(package: str, paths: Iterable[str]) -> None:
    """Imports all modules below a package, given its name and `__path__`, so that their classes are registered."""
    for module in pkgutil.walk_packages(paths, f'{package}.'):
        importlib.import_module(module.name)


def check_fields(config: Configurable) -> None:
    """Converts lists to tuples and ints to floats. Raises ConfigError for the first field of wrong type or range."""
    annotations = typing.get_type_hints(type(config))
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        label = f'{config.gin_name}.{spec.name}'
        try:
            converted = convert(value, annotations[spec.name])
        except TypeError:
            raise ConfigError(
                f'{label} = {value!r}: must be {describe(annotations[spec.name])}, not {type(value).__name__}'
                + _suggest(value, annotations[spec.name])
            ) from None
        if spec.metadata.get('secret'):
            converted = _hide(label, converted, spec)
        if converted is not value:
            object.__setattr__(config, spec.name, converted)
        if not (isinstance(converted, str) and converted == spec.default):  # a word for the default has no range
            _check_range(label, converted, spec.metadata.get('rules', {}))


def _suggest(value: object, annotation: object) -> str:
    """Returns how a value of the wrong type would be right, or the registered value that a text may mean; '' else."""
    whole = [int(value)] if isinstance(value, float) and value == value // 1 else []
    for right in (*whole, (value,)):
        with contextlib.suppress(TypeError):
            convert(right, annotation)
            return f' (write {right!r})'
    kinds = [kind for kind in find_classes(annotation) if issubclass(kind, Configurable)]
    known = [name for name, cls in REGISTRY.items() if any(issubclass(cls, kind) for kind in kinds)]
    close = difflib.get_close_matches(str(value), known, 1) if isinstance(value, str) else []
    return f'; did you mean @{close[0]}()?' if close else ''


def _hide(label: str, value: Any, spec: dataclasses.Field) -> str:
    """Returns the value of a secret field in the form that shows a variable. Raises ConfigError, without the value."""
    check = spec.metadata['rules'].get('check')
    if not isinstance(value, Secret) and check and (remedy := check(value)):
        raise ConfigError(f'{label}: {remedy}')
    return value if value.startswith('$') else Secret.hide(value, str(spec.default))


def check_kind(name: str, given: object, kind: type, remedy: str) -> None:
    """Raises ConfigError unless the argument `name` of a public function is of `kind`; it may be a path instead."""
    if not isinstance(given, kind):
        text = repr(given)
        text = f'{text[:40]}…' if len(text) > 80 else text
        raise ConfigError(f'{name} = {text}: must be a value of type {kind.__name__}, {remedy}')


def convert(value: object, annotation: Any) -> object:
    """Returns `value` in the type that `annotation` demands. Raises TypeError where that is impossible without loss:
    int → float, list → tuple and dict → tuple of pairs are possible."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        for option in arguments:
            try:
                return convert(value, option)
            except TypeError:
                pass
        raise TypeError
    if origin is tuple:
        if isinstance(value, dict):  # {'a': 1} for a list of pairs
            value = list(value.items())
        if not isinstance(value, list | tuple):
            raise TypeError
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            arguments = (arguments[0],) * len(value)
        if len(arguments) != len(value):
            raise TypeError
        return tuple(convert(v, a) for v, a in zip(value, arguments, strict=True))
    if origin is typing.Literal:
        if value in arguments:
            return value
        raise TypeError
    if annotation is None or annotation is type(None):
        if value is None:
            return None
        raise TypeError
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, annotation) or (isinstance(value, bool) and annotation is int):
        raise TypeError
    return value


def find_classes(annotation: object) -> list[type]:
    """Returns the classes inside an annotation: `A | tuple[B, ...] | None` → A, B and NoneType."""
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation]
    return [c for argument in typing.get_args(annotation) for c in find_classes(argument)]


ITEMS = 'a list, each item '


def describe(annotation: Any) -> str:
    """Describes a type in plain words: `int | None` → 'an int or None'."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        kinds = [describe(a) for a in arguments]
        return ' or '.join(
            'a list of these' if kind.removeprefix(ITEMS) in kinds[:i] else kind for i, kind in enumerate(kinds)
        )
    if origin is tuple and Ellipsis not in arguments:
        return f'({", ".join(describe(a) for a in arguments)})'
    if origin is tuple:
        return ITEMS + describe(arguments[0])
    if origin is typing.Literal:
        return ' or '.join(map(repr, arguments))
    if annotation is type(None):
        return 'None'
    name = getattr(annotation, '__name__', str(annotation))
    if annotation in (int, float, str, bool):
        return ('an ' if name == 'int' else 'a ') + {'str': 'string', 'bool': 'bool (True or False)'}.get(name, name)
    options = [key for key, cls in REGISTRY.items() if issubclass(cls, annotation)]
    return f'one of {", ".join("@" + o + "()" for o in sorted(options))}' if options else name


SMALLEST, LARGEST = 1.2e-38, 3.4e38
"""The least and the greatest size of a float other than 0: float32 makes 0 of less, and infinity of more."""
MOST = 2**31 - 1
"""The greatest size of an int whose field has no `maximum`: programs count in int32."""
RULES: dict[str, tuple[Callable[[Any, Any], bool], str]] = {
    'minimum': (operator.ge, 'at least'),
    'maximum': (operator.le, 'at most'),
    'above': (operator.gt, 'above'),
    'below': (operator.lt, 'below'),
}
"""Rule of a field → the comparison of a good value with the bound, and the words of the error."""


def _check_number(label: str, value: object, maximum: float | None) -> None:
    """Raises ConfigError for a number that a program cannot hold. Each item of a tuple is checked so."""
    if isinstance(value, tuple):
        for item in value:
            _check_number(label, item, maximum)
    elif isinstance(value, float) and value != 0 and not SMALLEST <= abs(value) <= LARGEST:
        raise ConfigError(
            f'{label} = {value!r}: must be 0 or between {SMALLEST:g} and {LARGEST:g}, which float32 holds'
        )
    elif isinstance(value, int) and maximum is None and abs(value) > MOST:
        raise ConfigError(f'{label} = {value!r}: must be at most {MOST}')


def _check_range(label: str, value: Any, rules: dict[str, Any]) -> None:
    """Raises ConfigError for a value that breaks a rule of its field. None breaks no rule."""
    if value is None:
        return
    _check_number(label, value, rules.get('maximum'))
    if remedy := _find_remedy(value, rules):
        raise ConfigError(f'{label} = {value!r}: {remedy}')


def _find_remedy(value: Any, rules: dict[str, Any]) -> str | None:
    """Returns what a value must be that breaks a rule ("must be even"), or None."""
    for rule, (is_good, words) in RULES.items():
        bound = rules.get(rule)
        if bound is not None and not is_good(value, bound):
            return f'must be {words} {bound}'
    if rules.get('even') and value % 2:
        return 'must be even'
    choices = rules.get('choices')
    if choices is not None and value not in choices:
        return f'must be one of {", ".join(map(str, choices))}'
    return rules['check'](value) if rules.get('check') else None
