"""The page on what of the papers holds: the claims of configs/papers/claims.toml, and the tables of `lm reproduce`."""

import functools
import pathlib
import re

from lm.reproduce.claims import Claim, count_verdicts, describe_verdict, load_claims, load_papers, sort_by_paper
from lm_reference.markdown import code, prose, sentence, table

HEADS = ('claim', 'verdict', 'ours')
LAB = pathlib.Path(__file__).resolve().parents[2] / 'lab'


def page() -> str:
    """A table of claims per paper, and the list of tables."""
    claims = load_claims()
    parts = [f'In all {len(claims)} claims: {count_verdicts(claims)}.']
    for paper, name in load_papers().items():
        found = [claim for claim in claims if claim.paper == paper]
        parts += [f'## {name}', f'{len(found)} claims: {count_verdicts(found)}.', table(HEADS, map(_row, found))]
    rows = [
        (code(name), prose(one.title), ', '.join(one.offered) or prose(f'none: {one.missing}'), describe_verdict(one))
        for name, one in sort_by_paper().items()
    ]
    parts += ['## Tables and figures', table(('table', 'what', 'scales', 'verdicts'), rows)]
    return '\n\n'.join(parts)


def _row(claim: Claim) -> tuple[str, ...]:
    said = f'**{prose(claim.place)}**: {sentence(prose(claim.statement))}'
    return said, f'**{claim.verdict}**', ' '.join(_evidence(claim))


def _evidence(claim: Claim) -> list[str]:
    """Our figure, and how it was measured."""
    facts = {'size': claim.size, 'tokens': claim.tokens, 'seeds': claim.seeds, 'device': claim.device}
    parts = [sentence(prose(claim.ours))] if claim.ours else []
    parts += [f'{name.capitalize()}: {prose(text)}.' for name, text in facts.items() if text]
    parts += [f'Command: {code(claim.command)}.'] if claim.command else []
    parts += [f'See {link(claim.section)}.'] if claim.section else []
    parts += [f'See {code(claim.tests)}.'] if claim.tests else []
    return [*parts, *([sentence(prose(claim.note))] if claim.note else [])]


@functools.cache
def link(heading: str) -> str:
    """A link from docs/papers.md to the page of the lab notebook that has a heading."""
    (page,) = [path for path in LAB.glob('*.md') if f'\n## {heading}\n' in path.read_text()]
    return f'[{prose(heading)}](lab/{page.name}#{anchor(heading)})'


def anchor(heading: str) -> str:
    """The anchor that MyST and GitHub give a heading."""
    return re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-')
