"""Hints on packages: one form and one exit code, whatever is missing."""

import ast
import dataclasses
import importlib
import importlib.util
import sys

import pytest
import tiny

from lm.cli import VERBS, main
from lm.errors import ConfigError, MissingPackageError
from lm.hardware import check_libtpu, parse

OTHERS = {'errors.py', 'trackers/base.py', 'sweep/manifests/skypilot.py', 'interop/families/recurrent_decoder.py'}
"""Where the hint is made; a warning about a package of the user's own choice, which stops nothing; commands that set up
the machines of a cloud; and a line of code in the card of an exported model, for other people's machines."""


def test_the_hint_has_one_form_and_the_code_of_a_wrong_command():
    error = MissingPackageError('--out x', 'matplotlib', 'report', ', or leave it out')
    assert str(error) == "--out x: needs matplotlib; pip install -e '.[report]', or leave it out"
    assert error.exit_code == ConfigError.exit_code == 2
    assert str(MissingPackageError('data.path', 'gcsfs')) == 'data.path: needs gcsfs; pip install gcsfs'


def test_checks_raise_it(monkeypatch):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(MissingPackageError, match=r"needs \w+; pip install -e '\.\[\w+\]'"):
        check_libtpu(parse('v5e:2x2'))


def test_a_package_that_does_not_load_is_named(tmp_path, monkeypatch, capsys):
    (tmp_path / 'optuna').mkdir()
    (tmp_path / 'optuna' / '__init__.py').write_text("import ctypes\nctypes.CDLL('libnothing.so')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition('.')[0] == 'optuna']:
        monkeypatch.delitem(sys.modules, name)

    def run(arguments):
        importlib.import_module('optuna')

    monkeypatch.setitem(VERBS, 'inspect', dataclasses.replace(VERBS['inspect'], make_call=run))
    assert main(['inspect', 'x']) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith('lm inspect: error: optuna: is installed and does not load (OSError: libnothing.so')
    assert line.endswith('; pip install --force-reinstall optuna')


def test_no_other_error_says_what_to_install():
    wrong = []
    for path in sorted((tiny.ROOT / 'lm').rglob('*.py')):
        name = path.relative_to(tiny.ROOT / 'lm').as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and 'pip install' in ast.unparse(node):
                wrong.append(f'{name}:{node.lineno}')
            if isinstance(node, ast.Constant) and 'pip install' in str(node.value) and name not in OTHERS:
                wrong.append(f'{name}:{node.lineno}')
    assert not wrong
