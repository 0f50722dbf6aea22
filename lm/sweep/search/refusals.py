"""The share of a search space whose values make no configuration, and the fields at fault."""

import collections
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lm.errors import ConfigError
from lm.sweep.search.space import SearchSpace
from lm.sweep.search.study import Study

DRAWS = 1000
"""The points that a dry run draws."""
PARTS = 4
"""A range of numbers counts as so many values, each with the same number of draws."""


def describe_refusals(space: SearchSpace, study: Study) -> list[str]:
    """Draws points at random and makes their configurations, without data or devices. Returns lines for people."""
    draws = study.draw_at_random(DRAWS)
    reasons = {number: why for number, values in enumerate(draws) if (why := _try(space, number, values))}
    share = f'{len(reasons)} of {DRAWS:,} points drawn at random make no configuration'
    if not reasons:
        return [share]
    commonest, count = collections.Counter(map(_drop_numbers, reasons.values())).most_common(1)[0]
    example = next(why for why in reasons.values() if _drop_numbers(why) == commonest)
    lines = [share, f'the commonest reason, {count} times: {example}']
    if pair := find_fields_at_fault(draws, set(reasons)):
        lines.append(f'the fields that decide it most: {" with ".join(pair)}')
    return lines


def find_fields_at_fault(draws: Sequence[Mapping[str, object]], refused: set[int]) -> tuple[str, ...]:
    """Returns the pair of fields, or the one field, whose values tell most about which draws were refused.

    The measure is the mutual information of the values and the refusal. A pair counts only if it tells clearly more
    than its better field alone.
    """
    parts = {key: _split(key, draws) for key in sorted(set().union(*draws))}

    def rate(fields: tuple[str, ...]) -> float:
        return _measure(list(zip(*(parts[field] for field in fields), strict=True)), refused)

    best = max(itertools.combinations(parts, 1), key=rate)
    pair = max(itertools.combinations(parts, 2), key=rate, default=best)
    return pair if rate(pair) > 1.2 * rate(best) else best


def _try(space: SearchSpace, number: int, values: Mapping[str, Any]) -> str:
    """Returns why a point makes no configuration; '': it makes one."""
    try:
        space.make_point(number, values)
    except ConfigError as error:
        return str(error).partition(' (in trial-')[0]
    return ''


def _split(key: str, draws: Sequence[Mapping[str, object]]) -> list[object]:
    """Returns the value of a field in each draw; of many numbers, the part of their range."""
    values = [draw.get(key) for draw in draws]
    numbers = [value for value in values if isinstance(value, int | float)]
    if len(numbers) < len(values) or len(set(numbers)) <= 2 * PARTS:
        return values
    edges = [sorted(numbers)[len(numbers) * part // PARTS] for part in range(1, PARTS)]
    return [sum(number >= edge for edge in edges) for number in numbers]


def _measure(cells: Sequence[tuple], refused: set[int]) -> float:
    """Returns the mutual information, in nats, of the cell of a draw and of its refusal."""
    sizes = collections.Counter(cells)
    bad = collections.Counter(cell for number, cell in enumerate(cells) if number in refused)
    share = len(refused) / len(cells)
    return _entropy(share) - sum(size / len(cells) * _entropy(bad[cell] / size) for cell, size in sizes.items())


def _entropy(share: float) -> float:
    return -sum(p * math.log(p) for p in (share, 1 - share) if p > 0)


def _drop_numbers(text: str) -> str:
    return ''.join('#' if character.isdigit() else character for character in text)
