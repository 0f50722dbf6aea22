"""The burn-in finds nothing on sound devices, and names simulated devices that are wrong in one part."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from lm import cli
from lm.bench import chip_parts, chips
from lm.experiment import load

BAD = 2


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    for name, value in {'SIDE': 64, 'PRODUCTS': 3, 'VALUES': 1024, 'LINK_WORDS': 64, 'MEMORY_UNKNOWN': 4096}.items():
        monkeypatch.setattr(chip_parts, name, value)
    programs = chip_parts._products, chip_parts._functions, chip_parts._memory, chip_parts._links
    for program in programs:
        program.cache_clear()
    yield
    for program in programs:
        program.cache_clear()


def spoil(x):
    """Flips the lowest bit of the first word on the chip BAD."""
    bits = lax.bitcast_convert_type(x.ravel(), jnp.uint32)
    bits = bits.at[0].set(bits[0] ^ (lax.axis_index(chip_parts.AXIS) == BAD).astype(jnp.uint32))
    return lax.bitcast_convert_type(bits, x.dtype).reshape(x.shape)


WRONG = {
    'matrix units': (jnp, 'dot'),
    'vector units': (jnp, 'tanh'),
    'links': (lax, 'ppermute'),
}


@pytest.mark.parametrize('part', [None, *WRONG])
def test_a_wrong_part_is_told_from_the_others(part, monkeypatch):
    if part:
        module, name = WRONG[part]
        plain = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *arguments, **options: spoil(plain(*arguments, **options)))
    tests = chip_parts.make_tests(jax.devices()[:4], 4096)
    found = {name: set(test(7)) for name, test in tests.items()}
    assert found == {name: {BAD} if name == part else set() for name in tests}
    assert tests.keys() == {'matrix units', 'vector units', 'memory', 'links'}


def test_a_word_that_changes_in_memory_is_found(monkeypatch):
    plain = chip_parts._memory

    def damaged(mesh, words):
        write, read = plain(mesh, words)

        def lose(*arguments):
            array = write(*arguments)
            return array.at[3 * words + 5].add(1)

        return lose, read

    monkeypatch.setattr(chip_parts, '_memory', damaged)
    assert chip_parts.make_tests(jax.devices()[:4], 4096)['memory'](0) == {3}


def test_one_chip_has_no_links_and_is_compared_with_itself():
    tests = chip_parts.make_tests(jax.devices()[:1], 4096)
    assert 'links' not in tests
    assert [set(test(1)) for test in tests.values()] == [set()] * 3


FLAGS = ['--minutes', '0.0001', '--gin_file', 'configs/models/tiny.gin', '--set', 'train.tokens_per_step=1024']
FLAGS += ['--set', 'train.context_length=64', '--set', 'model.n_layers=1', '--set', 'model.vocab_size=300']


def test_the_command(tmp_path, monkeypatch, capsys):
    assert cli.main(['bench', 'chips', *FLAGS, '--save', str(tmp_path / 'chips.json')]) == 0
    rows = json.loads((tmp_path / 'chips.json').read_text())['rows']
    assert [row['part'] for row in rows] == ['matrix units', 'vector units', 'memory', 'links', 'training step']
    assert all(row['rounds'] == 1 and not row['wrong'] for row in rows)
    assert capsys.readouterr().out.count('right') == 5

    monkeypatch.setattr(chips, 'make_step_check', lambda experiment: lambda step: 'cpu:3 on there disagrees')
    monkeypatch.setattr(chip_parts, 'compute_products', lambda seed: -1)
    assert cli.main(['bench', 'chips', *FLAGS]) == 45
    error = capsys.readouterr().err.splitlines()[-1]
    assert 'matrix units: cpu:0 on ' in error
    assert 'training step: cpu:3 on there disagrees; use another machine' in error


def test_the_step_of_a_distillation_has_a_teacher(tmp_path):
    path = tmp_path / 'teacher.gin'
    shape = ['model.d_model = 8', 'model.n_layers = 1', 'model.n_heads = 1', 'model.vocab_size = 64']
    path.write_text('\n'.join(shape))
    given = ['train.context_length = 16', 'train.tokens_per_step = 128', 'train.objective = @distill()']
    check = chips.make_step_check(load([], [*shape, *given, f"distill.teacher = '{path}'"]))
    assert [check(step) for step in range(2)] == ['', '']


def test_rows_say_what_was_found():
    row = chips.ChipRow('memory', 3, 1.0, '')
    assert row.result == 'right'
    assert dataclasses.replace(row, wrong='cpu:1').result == 'cpu:1'
