"""Numbers and tables in the form that people read."""

import math
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

CONTROLS = re.compile('[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]')
"""Characters that move the cursor, colour the text or turn its direction, and halves of pairs, which no file holds."""
SUFFIXES = ((1e12, 'T'), (1e9, 'B'), (1e6, 'M'), (1e3, 'k'))


def make_visible(text: str) -> str:
    """Returns the text with control characters as their escapes, so that text of a stranger cannot steer a terminal."""
    return CONTROLS.sub(lambda found: found[0].encode('unicode_escape').decode(), text)


def make_all_visible(value: Any) -> Any:
    """Returns a value of JSON whose texts `make_visible` has been applied to, keys too."""
    if isinstance(value, Mapping):
        return {make_visible(str(k)): make_all_visible(v) for k, v in value.items()}
    if isinstance(value, list):
        return [make_all_visible(v) for v in value]
    return make_visible(value) if isinstance(value, str) else value


def escape_markdown(text: str) -> str:
    """Returns the text such that Markdown shows it and makes no HTML, link or code of it."""
    return re.sub(r'[\\`\[\]]|<(?=[a-zA-Z/!?])', r'\\\g<0>', make_visible(text))


def perplexity(nats: float) -> float:
    """Returns exp(nats): infinity where it would overflow, and NaN for NaN."""
    return math.inf if nats >= 700 else math.exp(nats)


def format_si(value: float) -> str:
    """Formats 1234567 as '1.23M', with three digits; numbers too large for 'T' look like '1,234T'."""
    if not math.isfinite(value):
        return f'{value:g}'
    value = float(f'{value:.3g}')
    limit, suffix = next((pair for pair in SUFFIXES if abs(value) >= pair[0]), (1, ''))
    return f'{value / limit:,.0f}{suffix}' if abs(value) >= 1000 * limit else f'{value / limit:.3g}{suffix}'


def shorten(value: float) -> str:
    """Formats a number exactly, for axes and headings: 512 → '512', 32768 → '32k', 1.5e9 → '1.5B'."""
    if value >= 1024 and value % 1024 == 0 and value < 2**20:
        return f'{value // 1024:.0f}k'
    limit, suffix = next((pair for pair in SUFFIXES if value >= pair[0]), (1, ''))
    return f'{value / limit:g}{suffix}'


def format_digits(value: float) -> str:
    """Formats three digits, or all digits before the point, without powers of ten: 0.0123, 1.23, 870, 1,150."""
    if not math.isfinite(value) or value == 0:
        return f'{value:g}'
    exponent = math.floor(math.log10(abs(float(f'{value:.2e}'))))
    return f'{value:,.{max(0, 2 - exponent)}f}'


def format_count(number: int, noun: str, plural: str | None = None) -> str:
    """Formats 1 and 'step' as '1 step', 2000 as '2,000 steps'; `plural` is for nouns that do not just add -s."""
    return f'{number:,} {noun if number == 1 else plural or f"{noun}s"}'


def make_markdown_table(rows: Sequence[Sequence[str]], headings: Sequence[str], left: int = 1) -> str:
    """Returns a table in Markdown.

    Args:
        rows: cells; a bar in one is escaped, a line break becomes a space.
        left: the number of columns, from the first, that are aligned to the left; the others hold numbers.
    """
    rule = ['---' if i < left else '---:' for i in range(len(headings))]
    lines = [_cells(headings), f'| {" | ".join(rule)} |', *map(_cells, rows)]
    return '\n'.join(lines)


def _cells(cells: Sequence[str]) -> str:
    return '| ' + ' | '.join(' '.join(cell.replace('|', r'\|').split()) for cell in cells) + ' |'


def make_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = (), title: str | None = None
) -> 'Table':
    """Returns a table for a terminal; the columns `left` hold words, the others numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify='left')
    for heading in headings:
        table.add_column(heading, justify='left' if heading in left else 'right', overflow='fold')
    for row in rows:
        table.add_row(*row)
    return table


def print_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str] = (), title: str | None = None
) -> None:
    """Prints the table of `make_table` as it is: its words are no markup. A file or a pipe gets 160 columns."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 160, markup=False, emoji=False)
    console.print(make_table(headings, rows, left, title))


def format_duration(seconds: float) -> str:
    """Formats seconds as '2d03h', '1h05m', '4m09s' or '12s'."""
    s = round(seconds)
    if s >= 86_400:
        return f'{s // 86_400}d{s % 86_400 // 3600:02}h'
    if s >= 3600:
        return f'{s // 3600}h{s % 3600 // 60:02}m'
    return f'{s // 60}m{s % 60:02}s' if s >= 60 else f'{s}s'


def parse_whole(text: str) -> int | None:
    """Reads a whole number from the digits 0 to 9. Returns None for any other text, and for 19 digits or more."""
    return int(text) if re.fullmatch('[0-9]{1,18}', text) else None
