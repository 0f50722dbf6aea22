"""Cleaning of the text of a document before it is tokenised: named, explicit, recorded in dataset.json."""

import re
from collections.abc import Callable

_WIKI40B_LINES = re.compile(r'\n?_START_(?:ARTICLE|SECTION|PARAGRAPH)_\n')


def wiki40b_strip(text: str) -> str:
    """Returns Wiki-40B (Guo et al. 2020) without its structure markers.

    A line that holds _START_ARTICLE_, _START_SECTION_ or _START_PARAGRAPH_ becomes a line break, and so does each
    _NEWLINE_; line breaks at the beginning of the article go.
    """
    return _WIKI40B_LINES.sub('\n', text).replace('_NEWLINE_', '\n').lstrip('\n')


CLEANINGS: dict[str, Callable[[str], str]] = {
    'none': str,
    'wiki40b_strip': wiki40b_strip,
    'wiki40b_keep': str,  # with its structure markers, as trax's Hourglass models it; dataset.json records this choice
}
"""The values of prepare.cleaning."""
