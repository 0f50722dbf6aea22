"""The prose of the project is plain English: docstrings, Markdown pages and the headers of gin files.

The rules: no docstring begins with a word that leaves out the subject, no phrase stands in for a noun, no sentence has
more than 25 words.
"""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

ROOT = pathlib.Path(__file__).parents[1]
LONGEST = 25
OPENINGS = ('Of', 'What', 'Whether', 'Which', 'That', 'Those', 'As')
STAND_INS = re.compile(r'\b(?:that|those) of\b', re.IGNORECASE)


def prose(path: pathlib.Path) -> Iterator[tuple[int, str, bool]]:
    """Yields (line, paragraph, is a docstring's first one) of a file."""
    text = path.read_text()
    if path.suffix == '.py':
        for node in ast.walk(ast.parse(text)):
            is_string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if is_string and isinstance(node.value.value, str):
                for i, (offset, paragraph) in enumerate(paragraphs(node.value.value)):
                    yield node.lineno + offset, paragraph, i == 0
    else:
        if path.suffix == '.gin':
            header = re.sub(r'^#   .*', '', text.partition('\n\n')[0], flags=re.MULTILINE)  # without its commands
            text = re.sub(r'^#+ ?', '', header, flags=re.MULTILINE)
        yield from ((1 + offset, paragraph, False) for offset, paragraph in paragraphs(text))


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of the paragraphs of running text; tables, code, headings and indented lines are none."""
    lines: list[str] = []
    fenced = False
    for i, line in enumerate([*text.splitlines(), '']):
        fenced ^= line.lstrip().startswith('```')
        stripped = line.strip()
        ends = not stripped or fenced or stripped.startswith(('|', '#', '```', '!['))
        if (ends or re.match(r'[-*•] |\d+\. |\w+:$', stripped)) and lines:
            yield i - len(lines), ' '.join(lines)
            lines = []
        if not ends and not line.startswith('     '):
            lines.append(re.sub(r'^(?:[-*•]|\d+\.) ', '', stripped))


def faults(path: pathlib.Path) -> Iterator[str]:
    """Yields a line per place of the file that breaks a rule."""
    for line, paragraph, is_opening in prose(path):
        where = f'{path.relative_to(ROOT)}:{line}'
        if is_opening and paragraph.split(' ', 1)[0] in OPENINGS:
            yield f'{where}: begins with {paragraph.split()[0]!r}'
        if found := STAND_INS.search(paragraph):
            yield f'{where}: {found[0]!r} stands for a noun'
        plain = re.sub(r'`[^`]*`|\([^()]*\)|\[([^]]*)\]\([^)]*\)', 'x', paragraph)
        for sentence in re.split(r'(?<=[.!?:;])\s+', plain):
            if (words := len(re.findall(r"\w[\w'’-]*", sentence))) > LONGEST:
                yield f'{where}: a sentence of {words} words: {sentence[:60]} …'


def files() -> list[pathlib.Path]:
    """Returns the files whose prose people read."""
    found = (path for pattern in ('*.py', '*.md', '*.gin') for path in ROOT.rglob(pattern))
    return sorted(path for path in found if not path.relative_to(ROOT).as_posix().startswith('.'))


def test_prose_is_plain_english():
    found = [fault for path in files() for fault in faults(path)]
    assert not found, '\n'.join(found)


@pytest.mark.parametrize(
    ('text', 'rule'),
    [
        ('"""Of all windows."""', 'begins with'),
        ('"""Returns the loss, not that of the run."""', 'stands for'),
        (f'"""It {"very " * 24}long."""', 'a sentence of 26 words'),
    ],
)
def test_each_rule_finds_what_breaks_it(text, rule, tmp_path, monkeypatch):
    monkeypatch.setattr(f'{__name__}.ROOT', tmp_path)
    (tmp_path / 'x.py').write_text(text)
    assert [rule in fault for fault in faults(tmp_path / 'x.py')] == [True]
