"""A Sphinx extension that writes the reference from the code of `lm`.

A page of docs/reference holds a line such as `% generated: gin`. The extension replaces this line by the Markdown that
`lm_reference.gin.page()` returns; further words of the line are arguments. Nothing that is generated is committed.
"""

import importlib
import re
from typing import Any

LINE = re.compile(r'^% generated: (.+)$', re.MULTILINE)


def fill(text: str) -> str:
    """Replaces each line `% generated: NAME ARGUMENTS` of a page by the text of the module NAME."""

    def generate(found: re.Match) -> str:
        name, *arguments = found[1].split()
        return importlib.import_module(f'lm_reference.{name}').page(*arguments)

    return LINE.sub(generate, text)


def setup(app: Any) -> dict[str, bool]:
    """Registers the extension with Sphinx."""

    def read(app: Any, name: str, source: list[str]) -> None:
        source[0] = fill(source[0])

    app.connect('source-read', read)
    return {'parallel_read_safe': True, 'parallel_write_safe': True}
