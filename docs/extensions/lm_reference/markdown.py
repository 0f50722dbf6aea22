"""Prose, code and tables of the project as Markdown for MyST."""

import inspect
import re
from collections.abc import Iterable, Sequence

SECTIONS = ('Args', 'Attributes', 'Returns', 'Raises', 'Yields')
"""Headings of docstrings whose indented lines are a list."""


CODE = re.compile(
    r'`[^`]+`'
    r'|--\w+(?: [A-Z]+\b)?'  # --flag VALUE
    r'|@(?:\w+/)?\w+\(\)'  # @scope/name()
    r"|(?<!\w)'[^' ]+'"  # 'value'
    r'|(?<![\w/.])(?:\w+[./])*\w*[a-z0-9]_\w+(?:\.\w+)*'  # a_name, section.a_name
    r'|(?<![\w/.])[a-z]+(?:\.[a-z]+)+\b(?! [a-z]\.)'  # section.name, file.suffix
)
"""Matches code in prose, in backticks or not."""


def prose(text: str) -> str:
    """Plain text as Markdown: names become code, and what would be markup is escaped."""
    done, end = [], 0
    for found in CODE.finditer(text):
        done += [_escape(text[end : found.start()]), found[0] if found[0].startswith('`') else code(found[0])]
        end = found.end()
    return ''.join([*done, _escape(text[end:])])


def _escape(text: str) -> str:
    return re.sub(r'([\\`*_<\[\]{}#$~])', r'\\\1', text)


def code(text: str) -> str:
    """`text` in backticks."""
    return f'`` {text} ``' if '`' in text else f'`{text}`'


def fenced(text: str, language: str = 'text') -> str:
    """A block of code."""
    return f'```{language}\n{text.strip()}\n```'


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; a pipe in a cell is escaped."""
    lines = [list(heads), ['---'] * len(heads), *([cell.replace('|', r'\|') for cell in row] for row in rows)]
    return '\n'.join(f'| {" | ".join(" ".join(cell.split()) for cell in line)} |' for line in lines)


def sentence(text: str) -> str:
    """`text` with a capital letter, unless it begins with a name, and a full stop."""
    text = text.strip()
    word = re.match(r"[a-z'-]+(?=[ ,:;]|$)", text)
    return text and f'{text[0].upper() if word else text[0]}{text[1:]}{"" if text.endswith((".", "!", "…")) else "."}'


def first_paragraph(docstring: str | None) -> str:
    """The first paragraph of a docstring, as prose."""
    return prose(' '.join(inspect.cleandoc(docstring or '').partition('\n\n')[0].split()))


def docstring(text: str | None) -> str:
    """A docstring of the project: paragraphs, indented code, and sections such as `Args:` as lists."""
    done: list[str] = []
    in_section = in_entry = False
    for line in inspect.cleandoc(text or '').splitlines():
        head = re.fullmatch(rf'({"|".join(SECTIONS)}):', line)
        entry = re.match(r'    ([\w*][\w*, ]*?)(?: \([^)]*\))?: (.*)', line) if in_section else None
        if head:
            in_section, in_entry = True, False
            done += [f'**{head[1]}**', '']
        elif in_section and entry:
            in_entry = True
            done.append(f'- {code(entry[1])}: {prose(entry[2])}')
        elif in_section and line.startswith('    '):
            done.append(f'{"  " if in_entry else ""}{prose(line.strip())}')
        elif line.startswith('    '):  # code
            done.append(line)
        else:
            in_section = in_section and not line
            done.append(prose(line))
    return '\n'.join(done).strip()
