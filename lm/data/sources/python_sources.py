"""Text that every machine has."""

import functools
import importlib.metadata
import importlib.util
import pathlib
import platform
import sysconfig

from lm.config.configurable import configurable, field
from lm.data.sources.folder import Folder
from lm.errors import ConfigError
from lm.files import AnyPath, file_size

_SKIPPED = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'}
_PACKAGES = 'site-packages'
"""The first part of the names of documents from packages."""


@configurable('python_sources')
class PythonSources(Folder):
    """The .py files of this Python's standard library, and of installed packages: real text that every machine has.

    Without tests (not every distribution has them) and files that belong to the machine.
    """

    packages: tuple[str, ...] = field(default=(), help="installed packages that are read, too, such as 'jax'")

    suffix = '.py'

    def identity(self) -> dict[str, object]:
        versions = {'packages': {name: _version(name) for name in self.packages}} if self.packages else {}
        given = {name: value for name, value in super().identity().items() if name != 'packages'}
        return given | {'version': platform.python_version()} | versions

    def folder(self) -> pathlib.Path:
        return pathlib.Path(sysconfig.get_paths()['stdlib'])

    def files(self, split: str) -> tuple[list[AnyPath], bool]:
        folders = [self.folder(), *map(_folder_of, self.packages)]
        return [path for folder in folders for path in self.find(folder) if _is_taken(path, folder)], True

    def name_of(self, path: AnyPath, folder: AnyPath) -> str:
        for package in self.packages:
            if path.is_relative_to(top := _folder_of(package).parent):
                return f'{_PACKAGES}/{path.relative_to(top).as_posix()}'
        return super().name_of(path, folder)

    def path_of(self, name: str, folder: AnyPath) -> AnyPath:
        first, _, rest = name.partition('/')
        return _folder_of(rest.partition('/')[0]).parent / rest if first == _PACKAGES else super().path_of(name, folder)


def _is_taken(path: AnyPath, folder: AnyPath) -> bool:
    parts = path.relative_to(folder).parts
    return (
        not _SKIPPED & set(parts)
        and not path.name.startswith(('_sysconfigdata', 'sitecustomize'))
        and not any(part.startswith('config-') for part in parts)
        and bool(file_size(path))
    )


@functools.cache
def _folder_of(package: str) -> pathlib.Path:
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f'python_sources.packages = {package!r}: no such package is installed; install it, or leave it out'
        )
    return pathlib.Path(next(iter(spec.submodule_search_locations)))


def _version(package: str) -> str:
    """Returns the version of the distribution that contains the package."""
    distributions = importlib.metadata.packages_distributions().get(package)
    if not distributions:
        raise ConfigError(f'python_sources.packages = {package!r}: no distribution brings it; leave it out')
    return importlib.metadata.version(distributions[0])
