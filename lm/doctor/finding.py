"""One finding of `lm doctor`, and the checks that make them."""

import dataclasses
import enum
from collections.abc import Callable, Iterable


class Weight(enum.StrEnum):
    """The weight of a finding."""

    FINE = 'ok'
    DOUBT = 'warn'
    WRONG = 'bad'


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line: what is so, and what to do about it where that is not fine."""

    subject: str
    weight: Weight
    text: str
    remedy: str = ''


@dataclasses.dataclass(frozen=True)
class Examination:
    """One check: `examine` makes its findings within `seconds`, or counts as hanging."""

    subject: str
    examine: Callable[[], Iterable[Finding]]
    seconds: float = 20.0


def fine(subject: str, text: str) -> Finding:
    return Finding(subject, Weight.FINE, text)


def doubt(subject: str, text: str, remedy: str) -> Finding:
    return Finding(subject, Weight.DOUBT, text, remedy)


def wrong(subject: str, text: str, remedy: str) -> Finding:
    return Finding(subject, Weight.WRONG, text, remedy)
