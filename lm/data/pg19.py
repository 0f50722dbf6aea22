"""PG-19 (Rae et al. 2020): the word counts that its authors publish."""

from collections.abc import Collection

_WORDS = {'validation': (50, 3_007_061), 'test': (100, 6_966_499)}
"""Documents and words of the full splits (their table 4), by which word-level perplexities are normalised."""


def published_words(split: str, documents: int) -> int | None:
    """Returns the published word count of a full split; None for other splits and where documents are missing."""
    full, words = _WORDS.get(split, (None, None))
    return words if documents == full else None


def are_books(names: Collection[str]) -> bool:
    """Returns whether files are NUMBER.txt, as PG-19's books are: files with consecutive numbers are no books."""
    numbers = [name.removesuffix('.txt') for name in names]
    if not numbers or not all(number.isdecimal() and number[0] != '0' for number in numbers):
        return False
    return max(map(int, numbers)) - min(map(int, numbers)) > 10 * len(numbers)
