"""Numbers that a run cannot compute with are refused by name, in every numeric field of every configurable."""

import dataclasses
import math
import types
import typing

import pytest

import lm.experiment  # noqa: F401  it imports every configurable
from lm.config.configurable import MOST, REGISTRY
from lm.errors import ConfigError

ABSURD = {
    float: (math.inf, -math.inf, math.nan, 1e-300, -1e-300, 1e300, -1e300),
    int: (2**63, -(2**63), 10**18, -(10**18), MOST + 1, 10**40),
}


def holds(annotation: typing.Any, kind: type) -> bool:
    """Tells whether a value of this annotation can be, or can contain, a number of `kind`."""
    return annotation is kind or any(holds(part, kind) for part in typing.get_args(annotation))


def fill(annotation: typing.Any, value: float) -> typing.Any:
    """Returns a value of this annotation in which every number is `value`."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return fill(next(part for part in typing.get_args(annotation) if holds(part, type(value))), value)
    if typing.get_origin(annotation) is tuple:
        parts = [part for part in typing.get_args(annotation) if part is not Ellipsis]
        return tuple(fill(part, value) for part in parts)
    return 'x' if annotation is str else value


def numeric_fields() -> list[tuple[type, str, typing.Any, type]]:
    """Lists (class, field, annotation, int or float) of everything that a gin file can set to a number."""
    return [
        (cls, spec.name, annotations[spec.name], kind)
        for _, cls in sorted(REGISTRY.items())
        if cls.__module__.startswith('lm.')
        for annotations in [typing.get_type_hints(cls)]
        for spec in dataclasses.fields(cls)
        for kind in (int, float)
        if holds(annotations[spec.name], kind)
    ]


FIELDS = numeric_fields()


def test_the_fields_are_found():
    names = {f'{cls.gin_name}.{name}' for cls, name, _, _ in FIELDS}
    assert {'train.skip_batches', 'optimizer.clip_norm', 'data.mixture', 'polysketch.block'} <= names
    assert len(names) > 150


@pytest.mark.parametrize(
    ('cls', 'name', 'annotation', 'kind'), FIELDS, ids=[f'{c.gin_name}.{n}' for c, n, *_ in FIELDS]
)
def test_absurd_numbers_are_refused_by_name(cls, name, annotation, kind):
    required = {f.name: 'x' for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}
    maximum = cls.__dataclass_fields__[name].metadata['rules']['maximum']
    for value in ABSURD[kind]:
        if kind is int and maximum is not None and 0 <= value <= maximum:
            continue
        with pytest.raises(ConfigError, match=rf'^{cls.gin_name}\.{name} = '):
            cls(**required | {name: fill(annotation, value)})
