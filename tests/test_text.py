"""Numbers and tables as people read them."""

import math

import pytest

from lm import text


@pytest.mark.parametrize(
    ('write', 'value', 'expected'),
    [
        (text.format_si, 0, '0'),
        (text.format_si, 999.4, '999'),
        (text.format_si, 999.6, '1k'),
        (text.format_si, 999_999, '1M'),
        (text.format_si, 1_234_567, '1.23M'),
        (text.format_si, -1_234_567, '-1.23M'),
        (text.format_si, 1.2345e15, '1,230T'),
        (text.format_si, math.inf, 'inf'),
        (lambda n: text.format_count(n, 'step'), 1, '1 step'),
        (lambda n: text.format_count(n, 'step'), 2000, '2,000 steps'),
        (lambda n: text.format_count(n, 'batch', 'batches'), 0, '0 batches'),
        (text.shorten, 512, '512'),
        (text.shorten, 32_768, '32k'),
        (text.shorten, 1.5e9, '1.5B'),
        (text.shorten, 1000, '1k'),
        (text.format_digits, 0, '0'),
        (text.format_digits, 0.012345, '0.0123'),
        (text.format_digits, 1.2345, '1.23'),
        (text.format_digits, 99.96, '100'),
        (text.format_digits, 870, '870'),
        (text.format_digits, 1150.4, '1,150'),
        (text.format_digits, math.nan, 'nan'),
        (text.format_duration, 59.6, '1m00s'),
        (text.format_duration, 3900, '1h05m'),
        (text.format_duration, 183_600, '2d03h'),
        (text.perplexity, 0.0, 1.0),
        (text.perplexity, 1e9, math.inf),
    ],
)
def test_numbers(write, value, expected):
    assert write(value) == expected


def test_the_perplexity_of_no_number_is_none():
    assert math.isnan(text.perplexity(math.nan))


def test_a_markdown_table():
    rows = [['a|b', '1', 'x'], ['c\nd', '2', '']]
    assert text.make_markdown_table(rows, ['name', 'n', 'm'], left=1).splitlines() == [
        '| name | n | m |',
        '| --- | ---: | ---: |',
        r'| a\|b | 1 | x |',
        '| c d | 2 |  |',
    ]


@pytest.mark.parametrize(
    ('written', 'number'),
    [('0', 0), ('007', 7), ('9' * 18, 10**18 - 1), ('9' * 19, None), ('9' * 5000, None)]
    + [(word, None) for word in ('', '²', '٣', '-1', '+1', '1_0', ' 1', '1\n', 'x')],
)
def test_only_plain_digits_are_a_whole_number(written, number):
    assert text.parse_whole(written) == number
