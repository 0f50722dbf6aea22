"""The claims of the papers: each has its evidence, and the page, the README and the results agree with them."""

import re
import shlex
import sys

import pytest
import tiny

from lm import cli
from lm.errors import ConfigError
from lm.reproduce.claims import Claim, count_verdicts, load_claims, load_papers
from lm.reproduce.descriptions import load_descriptions

sys.path.append(str(tiny.ROOT / 'docs' / 'extensions'))

import lm_reference

RESULTS = '\n'.join(page.read_text() for page in sorted((tiny.ROOT / 'docs' / 'lab').glob('*.md')))
NUMBER = re.compile(r'\d[\d,]*\.\d+')
IDS = [f'{claim.paper}: {claim.place}' for claim in load_claims()]


def find_section(heading: str) -> str:
    """Returns the text below a heading of the lab notebook, up to the next heading of its level."""
    return RESULTS.partition(f'\n## {heading}\n')[2].partition('\n## ')[0]


def test_no_claim_stands_twice():
    assert len(set(IDS)) == len(IDS)
    assert {claim.paper for claim in load_claims()} == set(load_papers())


def test_every_table_has_a_claim_and_every_claim_a_table_that_exists():
    named = {name for claim in load_claims() for name in claim.tables}
    assert named == set(load_descriptions())
    assert all(name.startswith(f'{claim.paper}/') for claim in load_claims() for name in claim.tables)


@pytest.mark.parametrize('claim', load_claims(), ids=IDS)
def test_figures_stand_in_the_results(claim):
    if claim.section:
        text = find_section(claim.section)
        assert text, f'docs/lab has no section {claim.section!r}'
        assert NUMBER.findall(claim.ours) or claim.ours
        for number in NUMBER.findall(claim.ours):
            assert number in text, number
    if claim.tests:
        assert (tiny.ROOT / claim.tests).exists()


@pytest.mark.parametrize('claim', [c for c in load_claims() if c.command], ids=lambda claim: claim.place)
def test_a_command_names_files_that_exist(claim):
    words = shlex.split(claim.command)
    for word in words:
        if word.startswith(('configs/', 'tests/')):
            assert (tiny.ROOT / word).exists(), word
    if 'pytest' in words and '-k' in words:
        file = next(word for word in words if word.startswith('tests/'))
        names = re.findall(r'^def (test\w+)', (tiny.ROOT / file).read_text(), re.MULTILINE)
        for part in words[words.index('-k') + 1].split(' or '):
            assert any(part in name for name in names), part


@pytest.mark.parametrize('missing', ['size', 'seeds', 'command', 'ours'])
def test_nothing_is_repeated_without_its_evidence(missing):
    fields = dict.fromkeys(('size', 'tokens', 'seeds', 'device', 'command', 'ours'), 'something') | {'tests': 'a.py'}
    assert Claim('llops', 'Table 1', 'It holds', 'repeated', **fields)
    with pytest.raises(ConfigError, match=f'repeated without {missing}'):
        Claim('llops', 'Table 1', 'It holds', 'repeated', **fields | {missing: ''})


def test_other_verdicts_are_refused():
    with pytest.raises(ConfigError, match='confirmed: the verdict must be one of repeated, refuted'):
        Claim('llops', 'Table 1', 'It holds', 'confirmed')
    with pytest.raises(ConfigError, match='name the section'):
        Claim('llops', 'Table 1', 'It holds', 'untried', ours='3.2')


def test_the_page_has_every_claim_and_the_readme_leads_to_it():
    page = lm_reference.fill((tiny.ROOT / 'docs' / 'papers.md').read_text())
    assert '% generated' not in page
    rows = [line for line in page.splitlines() if line.startswith('| **')]
    assert [re.search(r'\| \*\*([a-z ]+)\*\* \|', row)[1] for row in rows] == [
        claim.verdict for paper in load_papers() for claim in load_claims() if claim.paper == paper
    ]
    for name in load_descriptions():
        assert f'`{name}`' in page
    assert '(docs/papers.md)' in (tiny.ROOT / 'README.md').read_text()


def test_links_of_the_page_lead_to_headings():
    from lm_reference.claims import anchor

    page = lm_reference.fill((tiny.ROOT / 'docs' / 'papers.md').read_text())
    found = re.findall(r'\((lab/\w+\.md)#([\w-]+)\)', page)
    assert found
    for name, heading in found:
        text = (tiny.ROOT / 'docs' / name).read_text()
        assert heading in map(anchor, re.findall(r'^## (.+)$', text, re.MULTILINE))


def test_the_list_shows_every_table_with_its_verdicts(capsys):
    assert cli.main(['reproduce', '--list']) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in load_descriptions())
    assert count_verdicts(c for c in load_claims() if 'llops/table_3' in c.tables) in printed
