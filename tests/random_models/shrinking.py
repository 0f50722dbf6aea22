"""Shrinks a case that fails to a small one that fails in the same check, and describes cases briefly."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from cases import Case
from drawer import check_case

from lm.config.configurable import Configurable, list_fields, list_values
from lm.errors import ConfigError
from lm.ops.errors import OperationError

REFUSALS = (ConfigError, OperationError)
SMALL = {'n_heads': 1, 'head_dim': 2, 'vocab_size': 5, 'd_model': 6, 'hidden_dim': 7, 'n_experts': 2}
"""Sizes to which a model shrinks; all other fields shrink to their defaults."""
PLAIN = {'rotary_base': None, 'sinusoids': False, 'biases': False, 'norm': 'rms', 'gated': False, 'tied': True}
"""Fields whose default does more than another value."""


def shrink(case: Case, fails: Callable[[Case], bool], tries: int = 150) -> Case:
    """Returns a case from which nothing more can be taken so that it still fails, or the smallest after so many tries.

    Args:
        case: fails.
        fails: tells whether a case fails.
        tries: the calls of `fails`.
    """
    moved = True
    while moved:
        moved = False
        for smaller in simplify(case):
            if tries <= 0:
                return case
            tries -= 1
            if fails(smaller):
                case, moved = smaller, True
                break
    return case


def simplify(case: Case) -> Iterator[Case]:
    """Yields cases that are simpler in one thing, the largest steps first."""
    changes = [
        {'devices': None},
        {'microbatches': 1},
        {'rows': 1},
        {'eod': None, 'restart': False},
        {'restart': False},
        {'z_loss': 0.0},
        {'pieces': (1,)},
        {'length': max(1, case.length // 2)},
        {'length': max(1, case.length - 1)},
    ]
    models = [{'model': model} for model in _simplify_model(case.model)]
    for change in [*changes[:1], *models, *changes[1:]]:
        try:
            smaller = dataclasses.replace(case, **change)
            check_case(smaller)
        except REFUSALS:
            continue
        if smaller != case and (smaller.devices is None or smaller.rows % smaller.devices.rows == 0):
            yield smaller


def _simplify_model(model: Any) -> Iterator[Any]:
    listed = model.attention if isinstance(model.attention, tuple) else (model.attention,)
    kinds = model.feed_forward if isinstance(model.feed_forward, tuple) else (model.feed_forward,)
    for one in listed if model.n_layers > 1 else ():
        yield from _replace(model, n_layers=1, attention=one, feed_forward=kinds[0])
    yield from _replace(model, feed_forward=None)
    if model.n_layers > 1:
        fewer = model.n_layers - 1
        cut = listed[:fewer]
        yield from _replace(model, n_layers=fewer, attention=cut, feed_forward=kinds[:fewer] if kinds[0] else None)
    for kind in kinds if len(kinds) > 1 else ():
        yield from _replace(model, feed_forward=kind)
    yield from _simplify_fields(model, skipped=('n_layers', 'attention', 'feed_forward'))
    for place, one in enumerate(listed):
        for simpler in _simplify_fields(one):
            yield from _replace(model, attention=(*listed[:place], simpler, *listed[place + 1 :]))
    for place, one in enumerate(kinds):
        for simpler in _simplify_fields(one) if one is not None else ():
            yield from _replace(model, feed_forward=(*kinds[:place], simpler, *kinds[place + 1 :]))


def _simplify_fields(config: Any, skipped: tuple[str, ...] = ()) -> Iterator[Any]:
    """Yields the configuration with a field at its default, or at a small or plain value."""
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        if spec.name in skipped:
            continue
        if spec.name in PLAIN and value != 'model':
            aim = PLAIN[spec.name]
        elif spec.name in SMALL and value not in ('model', None):
            aim = SMALL[spec.name]
        else:
            aim = value if _is_larger(spec.default, value) else spec.default
        if aim is not dataclasses.MISSING and aim != value:
            yield from _replace(config, **{spec.name: aim})
        if dataclasses.is_dataclass(value) and hasattr(value, 'gin_name'):
            for simpler in _simplify_fields(value):
                yield from _replace(config, **{spec.name: simpler})


def _is_larger(default: Any, value: Any) -> bool:
    """Tells whether a default would make the model larger."""
    counts = [isinstance(x, int) and not isinstance(x, bool) for x in (default, value)]
    return all(counts) and default > value


def _replace(config: Any, **changes: Any) -> Iterator[Any]:
    try:
        yield dataclasses.replace(config, **changes)
    except REFUSALS:
        return


def describe(config: Any) -> str:
    """Returns a text from which a configuration can be made again: a call with the fields that are no defaults."""
    if isinstance(config, tuple):
        return f'({", ".join(map(describe, config))}{"," * (len(config) == 1)})'
    if not dataclasses.is_dataclass(config):
        return repr(config)
    known = isinstance(config, Configurable)
    specs = list_fields(type(config)) if known else {spec.name: spec for spec in dataclasses.fields(config)}
    values = list_values(config) if known else vars(config)
    fields = [f'{name}={describe(values[name])}' for name, spec in specs.items() if values[name] != spec.default]
    return f'{type(config).__name__}({", ".join(fields)})'
