"""The tests that `transformers` runs on each of its own classes, as a module: `ModelTesterMixin`.

They come with the source of the installed version, which pip fetches. The tests of `generate` are in a checkout of
transformers alone: $TRANSFORMERS_TESTS names its folder `tests`.
"""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import types

import pytest

STAND_INS = {'exporters.test_export': 'ExportTesterMixin', 'generation.test_utils': 'GenerationTesterMixin'}
"""Module that the source of a release lacks → the class that stands in its place, without tests."""


def find_folder(cache: pathlib.Path) -> pathlib.Path:
    """Returns the folder of the tests; it fetches them into `cache`, and skips the test where that fails."""
    if given := os.environ.get('TRANSFORMERS_TESTS'):
        return pathlib.Path(given)
    import transformers

    name = f'transformers-{transformers.__version__}'
    if not (cache / name).exists():
        fetch = [sys.executable, '-m', 'pip', 'download', '--quiet', '--no-deps', '--no-binary', ':all:']
        wanted = name.replace('-', '==')
        asked = subprocess.run([*fetch, '--no-build-isolation', '-d', cache, wanted], capture_output=True, text=True)
        if asked.returncode:
            pytest.skip(f'needs the source of {wanted}: {asked.stderr.strip()[-200:]}')
        with tarfile.open(cache / f'{name}.tar.gz') as archive:
            archive.extractall(cache, filter='data')
    return cache / name / 'tests'


def load(cache: pathlib.Path, config: pytest.Config) -> types.ModuleType:
    """Returns the module with `ModelTesterMixin`; `config` learns the library's marks, for unknown ones are errors."""
    folder, own = find_folder(cache), importlib.util.find_spec('transformers.testing_utils').origin
    files = [*folder.glob('*.py'), *folder.glob('generation/*.py'), pathlib.Path(own)]
    for name in sorted({mark for file in files for mark in re.findall(r'\bmark\.(\w+)', file.read_text())}):
        config.addinivalue_line('markers', f'{name}: a mark of transformers')
    package = types.ModuleType('transformers_tests')
    package.__path__ = [str(folder)]
    sys.modules['transformers_tests'] = package
    for module, name in STAND_INS.items():
        if not (folder / f'{module.replace(".", "/")}.py').exists():
            stand_in = types.ModuleType(f'transformers_tests.{module}')
            setattr(stand_in, name, type(name, (), {}))
            above = types.ModuleType(f'transformers_tests.{module.split(".")[0]}')
            above.__path__ = []
            sys.modules[above.__name__], sys.modules[stand_in.__name__] = above, stand_in
    return importlib.import_module('transformers_tests.test_modeling_common')
