"""Builds the `lm` package. pyproject.toml describes it; here stands what pyproject.toml cannot say.

A wheel also holds the gin files and their companions, below `lm/_project`. `lm.config.project` finds them there.
"""

import pathlib
import shutil

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = pathlib.Path(__file__).parent
COMPANIONS = ('configs/**/*', 'data/*.gin', 'data/README.md')


class BuildWithConfigurations(build_py):
    """Builds into an empty folder: one that an earlier version left would add its modules to the wheel."""

    def run(self) -> None:
        if self.editable_mode:  # it reads the checkout
            return super().run()
        package = pathlib.Path(self.build_lib, 'lm')
        shutil.rmtree(package, ignore_errors=True)
        super().run()
        for pattern in COMPANIONS:
            for path in ROOT.glob(pattern):
                if path.is_file() and path.suffix != '.pyc':
                    target = package / '_project' / path.relative_to(ROOT)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, target)


setup(cmdclass={'build_py': BuildWithConfigurations})
