"""Numbers and tables as people read them."""

import math

import pytest

from lm import text


@pytest.mark.parametrize(
    ('write', 'value', 'expected'),
    [
        (text.si, 0, '0'),
        (text.si, 999.4, '999'),
        (text.si, 999.6, '1k'),
        (text.si, 999_999, '1M'),
        (text.si, 1_234_567, '1.23M'),
        (text.si, -1_234_567, '-1.23M'),
        (text.si, 1.2345e15, '1,230T'),
        (text.si, math.inf, 'inf'),
        (lambda n: text.counted(n, 'step'), 1, '1 step'),
        (lambda n: text.counted(n, 'step'), 2000, '2,000 steps'),
        (lambda n: text.counted(n, 'batch', 'batches'), 0, '0 batches'),
        (text.short, 512, '512'),
        (text.short, 32_768, '32k'),
        (text.short, 1.5e9, '1.5B'),
        (text.short, 1000, '1k'),
        (text.digits, 0, '0'),
        (text.digits, 0.012345, '0.0123'),
        (text.digits, 1.2345, '1.23'),
        (text.digits, 99.96, '100'),
        (text.digits, 870, '870'),
        (text.digits, 1150.4, '1,150'),
        (text.digits, math.nan, 'nan'),
        (text.duration, 59.6, '1m00s'),
        (text.duration, 3900, '1h05m'),
        (text.duration, 183_600, '2d03h'),
        (text.perplexity, 0.0, 1.0),
        (text.perplexity, 1e9, math.inf),
    ],
)
def test_numbers(write, value, expected):
    assert write(value) == expected


def test_a_markdown_table():
    rows = [['a|b', '1', 'x'], ['c\nd', '2', '']]
    assert text.markdown_table(rows, ['name', 'n', 'm'], left=1).splitlines() == [
        '| name | n | m |',
        '| --- | ---: | ---: |',
        r'| a\|b | 1 | x |',
        '| c d | 2 |  |',
    ]
