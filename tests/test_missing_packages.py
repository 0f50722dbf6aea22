"""Hints on packages: one form and one exit code, whatever is missing."""

import ast
import importlib.util

import pytest
import tiny

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
