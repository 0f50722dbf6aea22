"""The mutation run: the code that it changes, the code that it leaves alone; its configuration names existing files."""

import ast
import importlib.util
import tomllib

import pytest
import tiny


@pytest.fixture(scope='module')
def mutation():
    spec = importlib.util.spec_from_file_location('mutation', tiny.ROOT / 'scripts' / 'mutation.py')
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_configuration_names_files_that_exist():
    config = tomllib.loads((tiny.ROOT / 'tests' / 'mutation.toml').read_text())
    for module in config.values():
        paths = [argument for stage in module['tests'] for argument in stage if argument.startswith('tests/')]
        assert paths
        for path in [*module['files'], *paths]:
            assert (tiny.ROOT / path.partition('::')[0]).exists(), path


CODE = """
def f(x: int | None, n=7) -> int | None:
    y: float | None = x + 2
    log.warning('a %s', y + 3)
    if x < 4:
        raise ValueError(f'{x + 5} is wrong')
    return x - 6
"""


def test_messages_and_annotations_are_left_alone(mutation):
    spans = list(mutation.unmutated(ast.parse(CODE)))

    def is_mutated(text: str) -> bool:
        [line] = [number for number, line in enumerate(CODE.split('\n'), 1) if text in line]
        place = line, CODE.split('\n')[line - 1].index(text)
        return not any(first <= place < last for first, last in spans)

    assert all(map(is_mutated, ('7', '2', '4', '6')))
    assert not any(map(is_mutated, ('3', '5', 'int | None,', 'int | None:', 'float |')))


@pytest.mark.parametrize(
    ('operator', 'code', 'mutants'),
    [
        ('OmitKeyword', 'f(1, a=2, b=3)\n', ['f(1, **{}, b=3)\n', 'f(1, a=2, **{})\n']),
        ('OmitKeyword', 'def f(a=1): pass\n', []),
        ('OmitStatement', 'a.b(1)\nc = d(2)\nreturn e(3)\n', ['pass\nc = d(2)\nreturn e(3)\n']),
        ('OmitStatement', 'a.b = 1\nc[0] = 2\n', ['pass\nc[0] = 2\n', 'a.b = 1\npass\n']),
        ('OmitStatement', 'if a:\n    b += 1\n', ['if a:\n    pass\n']),
    ],
)
def test_operators_change_the_code(mutation, operator, code, mutants):
    pytest.importorskip('cosmic_ray')
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.mutating import mutate_code

    made = mutation.provider()[operator]()
    count = sum(1 for node in ast_nodes(get_ast(code)) for _ in made.mutation_positions(node))
    assert [mutate_code(code, made, i) for i in range(count)] == mutants
