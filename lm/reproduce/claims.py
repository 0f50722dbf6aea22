"""The claims of the papers and their verdicts, from `configs/papers/claims.toml`."""

import dataclasses
import functools
import tomllib
from collections.abc import Iterable
from typing import Any

from lm.config.project import project_root
from lm.errors import ConfigError
from lm.reproduce.descriptions import FOLDER, Description, load_descriptions
from lm.text import print_table

VERDICTS = ('repeated', 'refuted', 'untried', 'not ours')
TRIED = ('repeated', 'refuted')
NEEDED = ('size', 'tokens', 'seeds', 'device', 'command', 'ours')
"""Fields without which nothing counts as tried."""


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim.

    Attributes:
        paper: key of `load_papers`.
        statement: what the paper says, in a sentence.
        verdict: one of VERDICTS; it holds for the size of this row.
        tables: the tables of `lm reproduce` that it is about.
        size, tokens, seeds, device, command: of our runs.
        section: the heading in docs/lab that has it.
        tests: the file of tests that has it.
        note: what else a reader should know.
    """

    paper: str
    place: str
    statement: str
    verdict: str
    tables: tuple[str, ...] = ()
    size: str = ''
    tokens: str = ''
    seeds: str = ''
    device: str = ''
    command: str = ''
    ours: str = ''
    section: str = ''
    tests: str = ''
    note: str = ''

    def __post_init__(self) -> None:
        """Raises ConfigError for a verdict without its evidence."""
        where = f'claims.toml: {self.paper}, {self.place}'
        if self.verdict not in VERDICTS:
            raise ConfigError(f'{where}: {self.verdict}: the verdict must be one of {", ".join(VERDICTS)}')
        missing = [name for name in NEEDED if not getattr(self, name)]
        if self.verdict in TRIED and missing:
            raise ConfigError(f'{where}: {self.verdict} without {", ".join(missing)}')
        if self.ours and not (self.section or self.tests):
            raise ConfigError(f'{where}: name the section of docs/lab, or the tests, with this figure')


@functools.cache
def _read() -> dict[str, Any]:
    return tomllib.loads((project_root() / FOLDER / 'claims.toml').read_text(encoding='utf-8'))


def load_papers() -> dict[str, str]:
    """Returns the folder of each paper in configs/papers → its title."""
    return _read()['papers']


@functools.cache
def load_claims() -> tuple[Claim, ...]:
    """Returns all claims in the order of the file. Raises ConfigError for one without its evidence."""
    return tuple(Claim(**row | {'tables': tuple(row.get('tables', ()))}) for row in _read()['claims'])


def count_verdicts(claims: Iterable[Claim]) -> str:
    """Returns '2 repeated, 1 untried'; a dash for no claim."""
    found = [claim.verdict for claim in claims]
    return ', '.join(f'{found.count(verdict)} {verdict}' for verdict in VERDICTS if verdict in found) or '–'


def describe_verdict(description: Description) -> str:
    """Returns the verdicts of the claims about a table."""
    return count_verdicts(claim for claim in load_claims() if description.name in claim.tables)


def print_tables() -> None:
    """Prints every table and figure of the papers, what `lm reproduce` offers for it, and the verdicts."""
    headings = ('PAPER/TABLE', 'what', 'scales', 'verdicts')
    rows = [
        (name, one.title, ', '.join(one.offered) or f'none: {one.missing}', describe_verdict(one))
        for name, one in sort_by_paper().items()
    ]
    print_table(headings, rows, left=headings, title='Tables and figures of the papers')
    print(
        'A verdict holds at the size that its claim names (configs/papers/claims.toml), not at the size of the paper.'
    )


def sort_by_paper() -> dict[str, Description]:
    """Returns the descriptions, the papers in the order of `load_papers`."""
    found, order = load_descriptions(), list(load_papers())
    return dict(sorted(found.items(), key=lambda item: order.index(item[0].partition('/')[0])))
