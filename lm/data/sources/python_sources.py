"""Text that every machine has."""

import pathlib
import platform
import sysconfig
from typing import Any

from lm.config.configurable import configurable
from lm.data.sources.base import file_size
from lm.data.sources.folder import Folder, find

_SKIPPED = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'}


@configurable('python_sources')
class PythonSources(Folder):
    """The .py files of this Python's standard library: real text that every machine has.

    Without installed packages, tests (not every distribution has them) and files that belong to the machine.
    """

    def identity(self) -> dict[str, Any]:
        return super().identity() | {'version': platform.python_version()}

    def folder(self) -> pathlib.Path:
        return pathlib.Path(sysconfig.get_paths()['stdlib'])

    def files(self, split: str) -> tuple[list[Any], bool]:
        folder = self.folder()
        return [
            path
            for path in find(folder, '.py')
            if not _SKIPPED & set(path.relative_to(folder).parts)
            and not path.name.startswith(('_sysconfigdata', 'sitecustomize'))
            and not any(part.startswith('config-') for part in path.parts)
            and file_size(path)
        ], True
