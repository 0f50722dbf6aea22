"""`lm.ops` by itself: it works without the libraries of the trainer, and its README is right."""

import importlib
import inspect
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable

import pytest
import tiny

import lm.ops
from lm.ops.platform import Implementations

README = (pathlib.Path(lm.ops.__file__).parent / 'README.md').read_text()
PROLOGUE = """
import importlib.util, pathlib, pkgutil, re, sys

BLOCKED = {'absl', 'clu', 'etils', 'flax', 'gin', 'optax', 'orbax', 'tensorflow', 'tensorstore'}


def is_imported_by_jax():  # before 0.11 its Mosaic GPU imports absl
    frame = sys._getframe()
    while frame and (frame.f_globals is globals() or 'importlib' in frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get('__name__', '').startswith(('jax.', 'absl.'))


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition('.')[0] in BLOCKED and not is_imported_by_jax():
            raise ImportError(f'{name} is blocked')


sys.meta_path.insert(0, Blocker())
import lm.ops
"""
IMPORT_ALL = """
modules = [module.name for module in pkgutil.walk_packages(lm.ops.__path__, 'lm.ops.')]
assert len(modules) > 80
for name in modules:
    importlib.import_module(name)
outside = {name for name in sys.modules if name.partition('.')[0] == 'lm' and not f'{name}.'.startswith('lm.ops.')}
assert outside == {'lm'}, outside
"""


def run(code: str) -> str:
    """Runs the code without the other libraries that `lm` needs, and returns its output."""
    environment = {**tiny.environment(), 'JAX_PLATFORMS': 'cpu'}
    command = [sys.executable, '-c', PROLOGUE + code]
    done = subprocess.run(command, env=environment, cwd=tiny.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_modules_are_imported_without_the_trainers_libraries():
    run(IMPORT_ALL)


def test_examples_of_the_readme_run_without_the_trainers_libraries():
    examples = re.findall(r'```python\n(.*?)```', README, re.DOTALL)
    used = ' '.join(examples)
    assert all(f'lm.ops.{operation} import' in used for operation in lm.ops.OPERATIONS)
    printed = run('\n'.join(f'exec({example!r}, {{}})' for example in examples))
    assert 'needs a TPU' in printed


def test_the_readme_lists_the_public_names():
    listed = {
        package: set(re.findall(r'`(\w+)`', names))
        for package, names in re.findall(r'^- `(lm\.ops[\w.]*)`: (.*(?:\n  .*)*)', README, re.MULTILINE)
    }
    packages = ['lm.ops', *(f'lm.ops.{operation}' for operation in lm.ops.OPERATIONS)]
    assert listed == {package: set(importlib.import_module(package).__all__) for package in packages}


def implementations() -> dict[str, Implementations]:
    """Operation → its implementations."""
    values = [vars(importlib.import_module(f'lm.ops.{operation}')).values() for operation in lm.ops.OPERATIONS]
    found = (value for each in values for value in each if isinstance(value, Implementations))
    return {each.operation: each for each in found if not each.operation.endswith('on parts of a window')}


def test_the_readme_lists_the_implementations():
    rows = re.findall(r'^\| ([\w -]+) \| (.*[`–].*) \|$', README, re.MULTILINE)
    listed = {operation: set(re.findall(r'`(\w+)`', names)) for operation, names in rows}
    assert listed == {operation: set(each) for operation, each in implementations().items()}


def test_operations_are_imported_when_they_are_used():
    run("assert 'jax' not in sys.modules; assert lm.ops.rotary.rotate; assert 'jax' in sys.modules")
    with pytest.raises(AttributeError, match='no attribute'):
        lm.ops.nothing  # noqa: B018


@pytest.mark.parametrize('operation', implementations())
def test_every_implementation_takes_one_call(operation):
    """Type checkers see protocols. The modules, which are imported by name, must follow them."""
    shared: set[str] | None = None
    for module in implementations()[operation].values():
        names = {name for name, value in vars(module).items() if inspect.isfunction(value) and takes_one_call(value)}
        shared = names if shared is None else shared & names
    assert shared, 'the operation has no function with the same name in all of its implementations'


def takes_one_call(function: Callable) -> bool:
    """Returns whether the function takes a call as its only required argument."""
    required = (p for p in inspect.signature(function).parameters.values() if p.default is p.empty)
    return [p.name for p in required] == ['call']
