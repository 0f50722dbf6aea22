"""What is done to the text of a document before it is tokenised: named, explicit, recorded in dataset.json."""

from collections.abc import Callable


def none(text: str) -> str:
    """The text as it is."""
    return text


CLEANINGS: dict[str, Callable[[str], str]] = {'none': none}
