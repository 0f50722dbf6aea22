"""Large grids of cases: the complete check runs some of them, drawn by their text, and `-m slow` the others."""

import zlib
from collections.abc import Iterable

import pytest


def draw(cases: Iterable, count: int) -> list:
    """Returns all cases as parameters of a test. Those that are not among the `count` drawn ones are marked slow.

    A case is a value, a tuple of values or a `pytest.param`, which keeps its marks.
    """
    cases = [case if hasattr(case, 'marks') else _parameter(case) for case in cases]
    quick = [case for case in cases if not case.marks]
    drawn = sorted(quick, key=lambda case: zlib.crc32(repr((case.id, *case.values)).encode()))[:count]
    return [
        case if case.marks or any(case is one for one in drawn) else case._replace(marks=(pytest.mark.slow,))
        for case in cases
    ]


def _parameter(case):
    return pytest.param(*case) if isinstance(case, tuple) else pytest.param(case)
