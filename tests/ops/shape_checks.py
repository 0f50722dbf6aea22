"""Checks, while a call runs, that arrays have the shapes in the names of arguments, fields and results.

`q_BxLxHxD` has four axes. A letter means the same number wherever it stands in a call. A stands for any axes. A name
without such an ending states no shape. `typing.Annotated[jax.Array, 'BxL']` states the shape of a result.
"""

import contextlib
import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import jax
from jaxtyping import Float, Int, jaxtyped

from lm.ops.platform import Implementations

ENDING = re.compile(r'_((?:[A-Z]|\d)(?:x(?:[A-Z]|\d+))*)$')
INTEGERS = ('starts', 'targets', 'reach', 'position')
"""First words in the names of integer arrays; other arrays hold floating-point numbers."""
LOCAL = ('G', 'M')
"""Letters that may differ between elements of a tuple and between levels of a network: heads per sketch, and the
size of vectors."""


class ShapeError(AssertionError):
    """An array has another shape than its name states."""


def check(name: str, annotation: Any, value: Any, element: str = '') -> None:
    """Compares the arrays in `value` with the shapes that names and annotations state.

    Args:
        name: of the argument, field or result.
        annotation: its type, with `Annotated`.
        value: an array, a dataclass or a `NamedTuple` with arrays, a tuple of these, or anything else.
        element: the place in a tuple, and the level of a network, of which this is a part; '' for the first.
    """
    if isinstance(value, jax.Array):
        if stated := stated_shape(name, annotation):
            letters = [f'{x}{element}' if element and x in LOCAL else x for x in stated.split('x')]
            dims = ' '.join('*A' if x == 'A' else x for x in letters)
            kind = Int if name.startswith(INTEGERS) else Float
            if not isinstance(value, kind[jax.Array, dims]):
                raise ShapeError(f'{name}: {value.dtype}{list(value.shape)} is not [{dims}] like the other arrays')
    elif dataclasses.is_dataclass(value) or hasattr(value, '_fields'):
        hints = typing.get_type_hints(type(value), include_extras=True)
        names = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else value._fields
        for field in names:
            check(field, hints.get(field), getattr(value, field), element + ('upper' if field == 'upper' else ''))
    elif isinstance(value, tuple):
        each = typing.get_args(annotation) if typing.get_origin(annotation) is tuple else ()
        states_each = Ellipsis not in each and len(each) == len(value)
        for i, part in enumerate(value):
            check(name, each[i] if states_each else annotation, part, str(i or ''))


def stated_shape(name: str, annotation: Any) -> str | None:
    """Returns the letters of a shape, 'BxL', from the ending of a name or from an annotation."""
    if found := ENDING.search(name):
        return found[1]
    members = typing.get_args(annotation) if is_union(annotation) else (annotation,)
    notes = (note for a in members if typing.get_origin(a) is Annotated for note in a.__metadata__)
    return next((note for note in notes if isinstance(note, str)), None)


def is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def checked(function: Callable, result: type | None = None) -> Callable:
    """Returns `function`, which then raises `ShapeError` for arguments or results that have other shapes than stated.

    Args:
        function: takes arrays and what is made of them.
        result: a `NamedTuple` with the names of the results, for a function that returns one of them or several.
    """
    signature, hints = inspect.signature(function), typing.get_type_hints(function, include_extras=True)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        arguments = signature.bind(*args, **kwargs).arguments

        def check_arguments() -> None:
            for name, value in arguments.items():
                check(name, hints.get(name), value)

        with jaxtyped('context'):
            check_arguments()
        returned = function(*args, **kwargs)
        with jaxtyped('context'):
            check_arguments()
            named = returned
            if result is not None:
                several = returned if isinstance(returned, tuple) else (returned,)
                named = result(*several, *[None] * (len(result._fields) - len(several)))
            check('result', hints.get('return'), named)
        return returned

    return run


@contextlib.contextmanager
def checked_calls(implementations: Implementations) -> Iterator[list[Any]]:
    """Checks the fields of each call object for which an implementation is chosen; yields the calls."""
    calls: list[Any] = []
    choose = implementations.choose

    def check_and_choose(requested: str | None, call: Any) -> Any:
        with jaxtyped('context'):
            check('call', None, call)
        calls.append(call)
        return choose(requested, call)

    implementations.choose = check_and_choose
    try:
        yield calls
    finally:
        del implementations.choose
