"""The plan of the house, held by the syntax trees of `lm/`: floors, rooms, privacy, sizes, one meaning a word.

What is imported lazily, or for type checkers alone, counts like everything else.
"""

import ast
import collections
import functools
import pathlib
import re
import sys
from collections.abc import Iterator

import pytest

import lm.attention
from lm.attention import Attention
from lm.config.configurable import REGISTRY

ROOT = pathlib.Path(lm.__file__).parent

FLOORS = (
    ('ops',),
    ('lm', 'errors', 'output', 'text'),
    ('files', 'hardware', 'plots', 'parameters'),
    ('config', 'compilation'),
    ('attention', 'tasks', 'checkpoint', 'trackers'),
    ('model', 'data', 'runs'),
    ('training',),
    ('evaluation',),
    ('experiment',),
    ('plan',),
    ('cost_model',),
    ('session', 'inference'),
    ('eval_harness',),
    ('check', 'sweep', 'report', 'bench', 'summary', 'interop'),
    ('commands',),
    ('cli',),
    ('__main__',),
)  # fmt: skip
"""From the ground up. A file belongs to the longest entry that its name begins with; rooms of one floor do not meet."""

GROUND = {'__version__'}
"""What the modules of `lm` take from `lm` itself, which stands on the ground. All else that it offers (`lm.PUBLIC`) is
above every floor, imported when a user asks for it, and for nobody inside."""

OWNERS = {
    'argparse': ('lm.commands.', 'lm.cli'),
    'gin': 'lm.config.',
    'orbax': 'lm.checkpoint.',
    'tensorflow_datasets': 'lm.data.sources.tfds',
    'tokenizers': 'lm.data.tokenizers.huggingface',
    'tiktoken': 'lm.data.tokenizers.ranks',
    'lm_eval': 'lm.eval_harness.',
    'tensorboardX': 'lm.trackers.',
    **dict.fromkeys(('torch', 'transformers', 'safetensors'), 'lm.interop.'),
}
"""Library → the only place that imports it, or places."""

FORMULAS = 'lm.interop.formulas.'
"""Files that belong to the mechanism of their name."""


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Module → its syntax tree."""
    found = {}
    for path in sorted(ROOT.rglob('*.py')):
        name = '.'.join(('lm', *path.relative_to(ROOT).with_suffix('').parts)).removesuffix('.__init__')
        found[name] = ast.parse(path.read_text())
    return found


MODULE_IN_A_STRING = re.compile(r'(lm(?:\.\w+)+)(?::\w+)?')
"""A module by name, as `importlib.import_module` takes it, or a name in it: 'lm.x:y'."""


def imports(module: str) -> Iterator[tuple[str, str | None]]:
    """(module, name imported from it or None) of every import, wherever it stands.

    A string that names a module of `lm` is an import of it. `lm` itself is left out: it offers names from above
    (`lm.PUBLIC`), and `tests/test_public.py` proves that it imports none of them.
    """
    for node in ast.walk(trees()[module]) if module != 'lm' else ():
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            named = MODULE_IN_A_STRING.fullmatch(node.value)
            if named and named[1] in trees() and named[1] != module:
                yield named[1], None
        elif isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, 'write imports in full'
            yield from ((node.module, alias.name) for alias in node.names)


@functools.cache
def graph() -> dict[str, frozenset[str]]:
    """Module → the modules of `lm` that it imports."""
    found = {}
    for module in trees():
        targets = set()
        for name, attribute in imports(module):
            if name == 'lm' or name.startswith('lm.'):
                full = f'{name}.{attribute}'
                targets.add(full if full in trees() else name)
        found[module] = frozenset(targets - {module})
    return found


def place(module: str) -> tuple[int, str]:
    """(floor, room) of a module."""
    name = module.removeprefix('lm.')
    entries = [(floor, room) for floor, rooms in enumerate(FLOORS) for room in rooms]
    fitting = [(floor, room) for floor, room in entries if name == room or name.startswith(f'{room}.')]
    assert fitting, f'{module} stands on no floor: give it one in FLOORS'
    return max(fitting, key=lambda entry: len(entry[1]))


def mechanisms() -> dict[str, str]:
    """Gin name → module of the attention mechanisms."""
    return {name: cls.__module__ for name, cls in REGISTRY.items() if issubclass(cls, Attention)}


def test_imports_go_down_only():
    wrong = []
    for module, targets in graph().items():
        floor, room = place(module)
        for target in targets:
            below, other = place(target)
            if below > floor or (below == floor and other != room):
                wrong.append(f'{module} imports {target}')
    assert not wrong


def test_public_names_are_for_those_outside():
    wrong = []
    for module, tree in trees().items():
        for name, attribute in imports(module):
            if name == 'lm' and attribute and f'lm.{attribute}' not in trees() and attribute not in GROUND:
                wrong.append(f'{module} imports {attribute} from lm')
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == 'lm':
                wrong += [f'{module} uses lm.{node.attr}'] if node.attr in lm.PUBLIC else []
    assert not wrong


def test_no_circles():
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, ' → '.join((*path[path.index(module) :], module))
        if module not in done:
            for target in graph()[module]:
                visit(target, (*path, module))
            done.add(module)

    for module in graph():
        visit(module, ())


def test_operations_import_only_jax_and_numpy():
    """Besides the standard library and themselves, so that they serve programs that use nothing else of `lm`."""
    allowed = {*sys.stdlib_module_names, 'jax', 'numpy'}
    wrong = []
    for module in (m for m in trees() if m == 'lm.ops' or m.startswith('lm.ops.')):
        outside = {name for name, _ in imports(module) if not name.startswith('lm.')}
        wrong += [f'{module} imports {name}' for name in outside if name.split('.')[0] not in allowed]
        wrong += [f'{module} imports {name}' for name in graph()[module] if not f'{name}.'.startswith('lm.ops.')]
    assert not wrong


@pytest.mark.parametrize('library', OWNERS)
def test_one_owner_a_library(library):
    users = {module for module in trees() for name, _ in imports(module) if name.split('.')[0] == library}
    assert all(user.startswith(OWNERS[library]) for user in users), users
    assert users


def test_nobody_touches_what_is_private():
    owners = collections.defaultdict(set)
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                owners[node.name].add(module)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                owners[node.id if isinstance(node, ast.Name) else node.attr].add(module)
    wrong = []
    for module, tree in trees().items():
        names = {attribute for name, attribute in imports(module) if name.startswith('lm') and attribute}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        private = {name for name in names if name.startswith('_') and not name.startswith('__')}
        wrong += [f'{module}: {name}' for name in private if owners[name] and module not in owners[name]]
    assert not wrong


def test_no_file_but_its_own_names_a_mechanism():
    known = mechanisms()
    wrong = []
    for module, tree in trees().items():
        wrong += [f'{module} imports {t}' for t in graph()[module] if t in known.values()]
        if place(module)[1] == 'attention':
            continue
        words = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        if module.startswith(FORMULAS):
            words -= {module.removeprefix(FORMULAS)}
        wrong += [f'{module} says {word!r}' for word in words & known.keys()]
    assert not wrong


def test_one_meaning_a_class_name():
    classes = collections.defaultdict(list)
    for module, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith('_'):
                classes[node.name].append(module)
    assert {name: modules for name, modules in classes.items() if len(modules) > 1} == {}


def test_rooms_have_their_tests():
    """`tests/` mirrors the rooms."""
    tests = pathlib.Path(__file__).parent
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != '__pycache__'}
    without = {room for room in rooms if not list((tests / room).glob('test_*.py'))}
    assert not without


def test_one_file_a_name_of_tests():
    """pytest imports them by name alone, and refuses the second one."""
    names = collections.Counter(path.name for path in pathlib.Path(__file__).parent.rglob('*.py'))
    assert {name for name, n in names.items() if n > 1} == set()
