"""Numbers that a run cannot compute with are refused by name, in every numeric field of every configurable."""

import dataclasses
import math
import types
import typing

import pytest

import lm.experiment
from lm.cli import main
from lm.config.configurable import MOST, REGISTRY
from lm.errors import ConfigError

ABSURD = {
    float: (math.inf, -math.inf, math.nan, 1e-300, -1e-300, 1e300, -1e300, -1.0, 0.0),
    int: (2**63, -(2**63), 10**18, -(10**18), MOST + 1, 10**40, -1, 0),
}
ZERO = {
    'the first seed': ('seed',),
    'the first token, or the initial weights': ('mask_id', 'eod', 'begin_id', 'teacher_step'),
    'none of them': ('keep_best', 'warmup_steps', 'distractors', 'shared_key_dim'),
    'a mean of the newest gradient alone': ('b1', 'b2', 'momentum'),
    'the part is left out': (
        'weight_decay',
        'z_loss',
        'cross_entropy',
        'mask_share',
        'random_share',
        'turn',
        'balance',
    ),
    'the rate ends at zero': ('final_fraction',),
    'these parameters stay as they are': ('embedding_rate', 'head_rate', 'gain_rate'),
    'nothing is added': ('denominator_bias', 'key_offset', 'offset', 'stabilizer', 'kernel_epsilon', 'balance'),
}
"""Why zero is a value that a run can compute with → the names of the fields that take it."""


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
        if kind is int and maximum is not None and 0 < value <= maximum:
            continue
        if name == 'skip_batches' and value in (0, -1):
            continue  # `BatchWindows` refuses ranges without batches by this name (tests/data/test_batches.py)
        if value == 0 and any(name in names for names in ZERO.values()):
            continue
        with pytest.raises(ConfigError, match=rf'^{cls.gin_name}\.{name} = '):
            cls(**required | {name: fill(annotation, value)})


def test_every_reason_for_zero_has_fields():
    assert {name for names in ZERO.values() for name in names} <= {name for _, name, _, _ in FIELDS}


def test_absurd_numbers_in_gin_files_are_refused_by_name():
    """The fields of the sections, which every configuration has."""
    sections = {spec.type for spec in dataclasses.fields(lm.experiment.Experiment)}
    fields = [(cls, name, annotation, kind) for cls, name, annotation, kind in FIELDS if cls in sections]
    assert len({cls for cls, *_ in fields}) > 5
    for cls, name, annotation, kind in fields:
        value = repr(fill(annotation, -(10**18) if kind is int else 1e300))
        with pytest.raises(ConfigError, match=rf'^{cls.gin_name}\.{name} = '):
            lm.experiment.load([], [f'{cls.gin_name}.{name} = {value}'])


@pytest.mark.parametrize('setting', ['optimizer.weight_decay=1e999', 'train.steps=3000000000', 'muon.rms=-1'])
def test_a_run_with_an_absurd_number_ends_with_2_and_writes_nothing(setting, tmp_path, capsys):
    run = tmp_path / 'run'
    assert main(['train', '--run_dir', str(run), '--set', 'optimizer.rule=@muon()', '--set', setting]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f'{setting.partition("=")[0]} = ' in line
    assert not run.exists()
