"""A Sphinx extension that writes the reference from the code of `lm`.

A page of docs/reference holds a line such as `% generated: gin`. The extension replaces this line by the Markdown that
`lm_reference.gin.page()` returns; further words of the line are arguments. Nothing that is generated is committed.

Pages name files of the checkout, such as `docs/check.md`, because people also read them there. On the site they become
links.
"""

import importlib
import re
from typing import Any

from lm_reference.topics import add_entries

LINE = re.compile(r'^% generated: (.+)$', re.MULTILINE)

PATH = re.compile(r'`((?:docs|data|configs)/[\w/]*\.md)(#[\w-]+)?`')
INCLUDED = {
    'data/README.md': '/how_to/data.md',
    'configs/README.md': '/reference/configurations.md',
    'configs/papers/README.md': '/lab/experiments.md',
}
"""File of the checkout → the page that includes it."""

UNSEARCHED = 'lab/'
"""The folder of pages that the search leaves out: evidence, which no user needs to find."""


def fill(text: str) -> str:
    """Replaces each line `% generated: NAME ARGUMENTS` of a page by the text of the module NAME."""

    def generate(found: re.Match) -> str:
        name, *arguments = found[1].split()
        return importlib.import_module(f'lm_reference.{name}').page(*arguments)

    return LINE.sub(generate, PATH.sub(_link, text))


def _link(found: re.Match) -> str:
    """The name of a file in a page, as a link where the file is a page too."""
    name, anchor = found[1], found[2] or ''
    page = INCLUDED.get(name) or (name.removeprefix('docs') if name.startswith('docs/') else None)
    return f'[{found[0]}]({page}{anchor})' if page else found[0]


def setup(app: Any) -> dict[str, bool]:
    """Registers the extension with Sphinx."""

    def read(app: Any, name: str, source: list[str]) -> None:
        source[0] = fill(add_entries(f'{name}.md', source[0]))

    def hide(app: Any, doctree: Any) -> None:
        if app.env.docname.startswith(UNSEARCHED):
            app.env.metadata[app.env.docname]['nosearch'] = True  # Sphinx then leaves the page out of its index

    app.connect('source-read', read)
    app.connect('doctree-read', hide)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
