"""The manuals can be held: their size, their table of results, their search.

Manuals are the pages of docs/ that a user reads: all but the lab notebook (docs/lab), the notebooks (docs/notebooks),
and what the site generates from the code. A README of another folder that a page includes counts with that page, and
CONTRIBUTING.md, which is for developers, does not.
"""

import pathlib
import re
import sys

import pytest
import tiny

sys.path.append(str(tiny.ROOT / 'docs' / 'extensions'))

import lm_reference
from lm_reference.claims import anchor
from lm_reference.topics import TOPICS, add_entries

DOCS = tiny.ROOT / 'docs'
MOST_WORDS, MOST_WORDS_OF_A_PAGE = 30_000, 4_000
MANUALS = sorted(
    path
    for path in DOCS.rglob('*.md')
    if not {'lab', 'notebooks', '_build', 'extensions'} & {*path.relative_to(DOCS).parts}
)
LAB = sorted((DOCS / 'lab').glob('*.md'))
RESULTS = ('recipes', 'text', 'tasks', 'conversion', 'features')
"""The pages of the lab notebook behind the table of results."""


def read_whole(page: pathlib.Path) -> str:
    """Returns the text of a page with the files that it includes."""
    pattern = r'```{include} (\S+README\.md)\n```'
    return re.sub(pattern, lambda found: (page.parent / found[1]).read_text(), page.read_text())


def count_words(page: pathlib.Path) -> int:
    return len(read_whole(page).split())


def test_the_manuals_can_be_held():
    words = {str(page.relative_to(DOCS)): count_words(page) for page in MANUALS}
    total = sum(words.values())
    assert total <= MOST_WORDS, f'{total} words: move measurements to docs/lab, or shorten {max(words, key=words.get)}'
    assert max(words.values()) <= MOST_WORDS_OF_A_PAGE, max(words, key=words.get)


def test_each_experiment_has_a_row_of_the_table_of_results():
    sections = {
        f'lab/{name}.md#{anchor(heading)}'
        for name in RESULTS
        for heading in re.findall(r'^## (.+)$', (DOCS / 'lab' / f'{name}.md').read_text(), re.MULTILINE)
    }
    rows = re.findall(r'^\| \[.+?\]\((\S+?)\) \|', (DOCS / 'results.md').read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows))
    assert set(rows) == sections


@pytest.mark.parametrize('name', ['results.md', 'benchmarks.md'])
def test_figures_of_a_table_stand_in_the_lab_notebook(name):
    """A figure with a decimal point stands in the section that its row links to, else on any page of the lab."""
    whole = '\n'.join(page.read_text() for page in LAB)
    for line in (DOCS / name).read_text().splitlines():
        link = re.search(r'\(lab/(\w+\.md)#([\w-]+)\)', line) if line.startswith('|') else None
        text = find_section(*link.groups()) if link else whole
        for number in re.findall(r'(?<![\w.])\d[\d,]*\.\d+(?![\w.])', re.sub(r'[\w/]+\.\d+\.\d+|`[^`]*`', '', line)):
            assert re.search(rf'(?<![\d.]){re.escape(number)}', text), f'{number}: {line}'


def find_section(page: str, heading: str) -> str:
    parts = re.split(r'^## ', (DOCS / 'lab' / page).read_text(), flags=re.MULTILINE)
    return next(part for part in parts if anchor(part.partition('\n')[0]) == heading)


def test_the_site_leaves_the_lab_notebook_out_of_its_search():
    handlers, env = {}, type('Env', (), {'docname': 'lab/text', 'metadata': {'lab/text': {}, 'check': {}}})()
    app = type('App', (), {'env': env, 'connect': lambda self, name, call: handlers.setdefault(name, call)})()
    lm_reference.setup(app)
    for env.docname in ('lab/text', 'check'):
        handlers['doctree-read'](app, None)
    assert env.metadata == {'lab/text': {'nosearch': True}, 'check': {}}


@pytest.fixture(scope='module')
def index_entries():
    """Page → entries of its index."""
    texts = {page: (DOCS / page).read_text() for page in ['reference/gin.md', *TOPICS]}
    filled = {page: lm_reference.fill(add_entries(page, text)) for page, text in texts.items()}
    return {
        page: [
            entry
            for line in re.findall(r'^```{index} (.+)$', text, re.MULTILINE)
            for entry in re.split(r', |; ', line.replace('! ', '').lower())
        ]
        for page, text in filled.items()
    }


@pytest.mark.parametrize(
    ('words', 'page'),
    [
        ('learning rate', 'reference/gin.md'),
        ('resume', 'how_to/train.md'),
        ('memory', 'how_to/train.md'),
        ('sketch size', 'reference/gin.md'),
        ('polysketch.sketch_size', 'reference/gin.md'),
        ('perplexity', 'how_to/evaluate.md'),
    ],
)
def test_the_best_entry_of_the_index_is_on_the_right_page(words, page, index_entries):
    """Sphinx's search ranks main entries of the index first, by the share of the entry that the words are."""
    shares = {
        name: max((len(words) / len(entry) for entry in entries if words in entry), default=0)
        for name, entries in index_entries.items()
    }
    assert max(shares, key=shares.get) == page
    assert shares[page] >= 0.5, 'Sphinx leaves out entries of which the words are less than a half'


def test_the_index_has_no_words_of_pages_that_are_gone():
    assert {str(path.relative_to(DOCS)) for path in MANUALS} >= set(TOPICS)
