"""The structure of `lm/`, checked on its syntax trees: layers, private names, sizes, one meaning per class name.

Lazy imports and imports for type checkers count like all others.
"""

import ast
import collections
import functools
import pathlib
import re
import shutil
import sys
from collections.abc import Iterator

import pytest

import lm.attention
from lm.attention import Attention
from lm.attention.formulas.base import FORMULAS
from lm.config.configurable import REGISTRY

ROOT = pathlib.Path(lm.__file__).parent

LAYERS = (
    ('ops',),
    ('lm', 'errors', 'output', 'secrets', 'text'),
    ('buckets',),
    ('files', 'hardware', 'plots', 'parameters', 'signals', 'options', 'own_folder'),
    ('config', 'compilation', 'lease', 'folders'),
    ('attention', 'tasks', 'checkpoint', 'trackers'),
    ('model', 'data', 'runs', 'pod'),
    ('training',),
    ('evaluation',),
    ('experiment',),
    ('plan',),
    ('cost_model',),
    ('session', 'inference'),
    ('eval_harness',),
    ('check', 'sweep', 'report', 'bench', 'summary', 'interop', 'doctor'),
    ('reproduce',),
    ('commands',),
    ('cli',),
    ('__main__',),
)  # fmt: skip
"""From the bottom up. A module belongs to the longest entry that its name begins with. Packages of one layer do not
import each other."""

FROM_LM = {'__version__'}
"""Names that the modules of `lm` import from `lm` itself. Its other names (`lm.PUBLIC`) are for users: they come from
higher layers and are imported at their first use."""

OWNERS = {
    'apache_beam': 'lm.data.prepare.beam',
    'argparse': ('lm.commands.', 'lm.cli'),
    'gguf': 'lm.interop.gguf.',
    'gin': 'lm.config.',
    'orbax': 'lm.checkpoint.',
    'tensorflow_datasets': 'lm.data.sources.tfds',
    'tokenizers': 'lm.data.tokenizers.huggingface',
    'tiktoken': 'lm.data.tokenizers.ranks',
    'lm_eval': 'lm.eval_harness.',
    'tensorboardX': 'lm.trackers.',
    **dict.fromkeys(('torch', 'transformers'), 'lm.interop.'),
}
"""Library → the only modules that import it."""

MOST_LINES = 70
"""Lines per function without its docstring."""
MOST_FIELDS = 16
"""Attributes per class that has methods and can change; configurations and records may have more."""
MOST_NOUNS = 5
"""Public classes with methods per module; a class and the subclasses beside it count once."""


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Returns module → syntax tree."""
    found = {}
    for path in sorted(ROOT.rglob('*.py')):
        name = '.'.join(('lm', *path.relative_to(ROOT).with_suffix('').parts)).removesuffix('.__init__')
        found[name] = ast.parse(path.read_text())
    return found


MODULE_IN_A_STRING = re.compile(r'(lm(?:\.\w+)+)(?::\w+)?')
"""A module as `importlib.import_module` takes it, or a name in a module: 'lm.x:y'."""


def imports(module: str) -> Iterator[tuple[str, str | None]]:
    """Yields (module, imported name or None) for every import of a module.

    A string that names a module of `lm` counts as an import. The module `lm` has none: it offers names of higher layers
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
    """Returns module → the modules of `lm` that it imports."""
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
    """Returns (layer, package) of a module."""
    name = module.removeprefix('lm.')
    entries = [(layer, package) for layer, packages in enumerate(LAYERS) for package in packages]
    fitting = [(layer, package) for layer, package in entries if f'{name}.'.startswith(f'{package}.')]
    assert fitting, f'{module} has no layer: add it to LAYERS'
    return max(fitting, key=lambda entry: len(entry[1]))


def mechanisms() -> dict[str, str]:
    """Returns gin name → module of the attention mechanisms."""
    return {name: cls.__module__ for name, cls in REGISTRY.items() if issubclass(cls, Attention)}


def test_imports_go_down_only():
    wrong = []
    for module, targets in graph().items():
        layer, package = place(module)
        for target in targets:
            other_layer, other_package = place(target)
            if other_layer > layer or (other_layer == layer and other_package != package):
                wrong.append(f'{module} imports {target}')
    assert not wrong


def test_the_page_on_architecture_shows_the_layers():
    page = (ROOT.parent / 'docs' / 'architecture.md').read_text()
    table = page.partition('## Layers')[2].partition('\n## ')[0]
    shown = [set(re.findall(r'`(\w+)`', row)) for row in re.findall(r'^\| (`.*?) \|', table, re.MULTILINE)]
    assert shown == [set(layer) for layer in reversed(LAYERS)]


def test_modules_do_not_use_the_public_names():
    wrong = []
    for module, tree in trees().items():
        for name, attribute in imports(module):
            if name == 'lm' and attribute and f'lm.{attribute}' not in trees() and attribute not in FROM_LM:
                wrong.append(f'{module} imports {attribute} from lm')
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == 'lm':
                wrong += [f'{module} uses lm.{node.attr}'] if node.attr in lm.PUBLIC else []
    assert not wrong


def test_a_module_in_a_string_is_an_import():
    assert [MODULE_IN_A_STRING.fullmatch(text)[1] for text in ('lm.x', 'lm.x.y:z')] == ['lm.x', 'lm.x.y']
    assert not any(map(MODULE_IN_A_STRING.fullmatch, ('lm', 'lm.x is a module', 'lm bench step')))
    built = [
        f'{module}: {ast.unparse(node)}'
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith('import_module')
        and isinstance(node.args[0], ast.JoinedStr) and ast.unparse(node.args[0])[2:].startswith('lm.')
    ]  # fmt: skip
    assert not built, 'write the name of a module in full'


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
    """They also import the standard library and each other. Other programs can use them without the rest of `lm`."""
    allowed = {*sys.stdlib_module_names, 'jax', 'numpy'}
    wrong = []
    for module in (m for m in trees() if m == 'lm.ops' or m.startswith('lm.ops.')):
        outside = {name for name, _ in imports(module) if not name.startswith('lm.')}
        wrong += [f'{module} imports {name}' for name in outside if name.split('.')[0] not in allowed]
        wrong += [f'{module} imports {name}' for name in graph()[module] if not f'{name}.'.startswith('lm.ops.')]
    assert not wrong


@pytest.mark.parametrize('library', OWNERS)
def test_a_library_has_one_owner(library):
    users = {module for module in trees() for name, _ in imports(module) if name.split('.')[0] == library}
    assert all(user.startswith(OWNERS[library]) for user in users), users
    assert users


def test_private_names_stay_in_their_module():
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


def test_only_its_own_files_name_a_mechanism():
    known = mechanisms()
    wrong = []
    for module, tree in trees().items():
        wrong += [f'{module} imports {t}' for t in graph()[module] if t in known.values()]
        if place(module)[1] == 'attention':
            continue
        words = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        wrong += [f'{module} says {word!r}' for word in words & known.keys()]
    assert not wrong


def test_a_class_name_has_one_meaning():
    classes = collections.defaultdict(list)
    for module, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith('_'):
                classes[node.name].append(module)
    assert {name: modules for name, modules in classes.items() if len(modules) > 1} == {}


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yields all functions and methods."""
    yield from (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def decorators(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Returns the decorators as text."""
    return ' '.join(ast.unparse(decorator) for decorator in node.decorator_list)


def methods(node: ast.ClassDef) -> list[str]:
    """Returns the public methods of a class; properties and constructors are none."""
    found = [child for child in node.body if isinstance(child, ast.FunctionDef) and not child.name.startswith('_')]
    return [child.name for child in found if not re.search(r'property|classmethod|staticmethod', decorators(child))]


def attributes(node: ast.ClassDef) -> set[str]:
    """Returns the names of the fields of a class, and of the attributes that its methods assign."""
    fields = [child for child in node.body if isinstance(child, ast.AnnAssign)]
    names = {ast.unparse(child.target) for child in fields if 'ClassVar' not in ast.unparse(child.annotation)}
    nodes = [child for child in ast.walk(node) if isinstance(child, ast.Attribute)]
    return names | {n.attr for n in nodes if isinstance(n.ctx, ast.Store) and ast.unparse(n.value) == 'self'}


TESTS = ROOT.parent / 'tests'
FORMULAS_ELSEWHERE = ('lm/attention/formulas/', 'lm/ops/', 'tests/ops/', 'tests/random_models/')
"""Folders with formulas of mechanisms, of operations, and of whole random models in float64."""
MULTIPLIES = {'einsum', 'matmul', 'dot', 'scores', 'weights'}
BENDS = {'exp', 'softmax', 'tanh', 'where', 'tril', 'cumsum', 'mix', 'mix_values'}


def weighs(node: ast.FunctionDef) -> bool:
    """Tells whether a function takes queries and keys, multiplies them, and bends or masks products, or adds tokens up
    in a loop."""
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    names = {argument.arg.split('_')[0] for argument in arguments}
    if not any(pair <= names for pair in ({'q', 'k'}, {'queries', 'keys'})):
        return False
    called = {ast.unparse(n.func).rpartition('.')[2] for n in ast.walk(node) if isinstance(n, ast.Call)}
    signs = {type(n.op) for n in ast.walk(node) if isinstance(n, ast.BinOp)}
    is_loop = any(isinstance(n, ast.For) for n in ast.walk(node))
    return bool(called & MULTIPLIES or ast.MatMult in signs) and bool(called & BENDS or ast.Pow in signs or is_loop)


def formulas(folder: pathlib.Path) -> list[str]:
    """Returns the functions below a folder that hold a formula of attention, outside of their places."""
    found = []
    for path in sorted(folder.rglob('*.py')):
        place = path.relative_to(folder.parent).as_posix()
        if not place.startswith(FORMULAS_ELSEWHERE):
            held = (node for node in functions(ast.parse(path.read_text())) if not node.name.startswith('test_'))
            found += [f'{place}: {node.name}' for node in held if weighs(node)]
    return found


def test_a_mechanism_has_one_formula():
    """It is in the file of the mechanism's name. Tests and exports run it."""
    assert {name: cls.__module__ for name, cls in FORMULAS.items()} == {
        name: f'lm.attention.formulas.{name}' for name in mechanisms()
    }
    assert formulas(ROOT) + formulas(TESTS) == []


SECOND_FORMULAS = {
    'weights': """
def reference(config, arrays, q, k, v):
    s = np.einsum('blhd,bmhd->bhlm', q, k) / np.sqrt(q.shape[-1])
    w = np.tril(1 + s + s**2 / 2)
    return np.einsum('bhlm,bmhd->blhd', w / w.sum(-1, keepdims=True), v)
""",
    'a state': """
def recur(q_BxLxHxC, k_BxLxKxC, v, beta):
    state, parts = 0.0, []
    for i in range(q_BxLxHxC.shape[1]):
        new = beta[:, i, :, None] * (v[:, i] - torch.einsum('bked,bke->bkd', state, k_BxLxKxC[:, i]))
        state = state + k_BxLxKxC[:, i, :, :, None] * new[..., None, :]
        parts.append(state)
    return parts
""",
    'a method': """
class Weigh(nn.Module):
    def forward(self, queries, keys, v):
        return torch.softmax(queries @ keys.mT, -1) @ v
""",
}


@pytest.mark.parametrize('name', SECOND_FORMULAS)
def test_a_second_formula_is_found(name, tmp_path):
    folder = tmp_path / 'tests' / 'attention'
    folder.mkdir(parents=True)
    (folder / 'test_mine.py').write_text(SECOND_FORMULAS[name])
    assert len(formulas(tmp_path / 'tests')) == 1
    shutil.copytree(folder, tmp_path / 'tests' / 'random_models')
    assert len(formulas(tmp_path / 'tests')) == 1


def test_functions_are_short():
    wrong = []
    for module, tree in trees().items():
        for node in functions(tree):
            first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
            lines = node.body[0].lineno - node.lineno + node.body[-1].end_lineno - first.lineno + 1
            name = f'{module}.{node.name}'
            wrong += [f'{name}: {lines} lines'] if lines > MOST_LINES else []
    assert not wrong


def test_classes_have_few_attributes():
    """A class with many attributes hides several nouns: group them."""
    wrong = []
    for module, tree in trees().items():
        for node in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            is_record = re.search(r'frozen=True|configurable', decorators(node)) or not methods(node)
            count = len(attributes(node))
            wrong += [f'{module}.{node.name}: {count} attributes'] if count > MOST_FIELDS and not is_record else []
    assert not wrong


def test_a_module_holds_few_nouns():
    wrong = []
    for module, tree in trees().items():
        classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef) and methods(node)}
        roots = [name for name, node in classes.items() if not classes.keys() & set(map(ast.unparse, node.bases))]
        nouns = [name for name in roots if not name.startswith('_')]
        wrong += [f'{module}: {", ".join(nouns)}'] if len(nouns) > MOST_NOUNS else []
    assert not wrong


def test_packages_have_tests():
    """`tests/` has a folder for each package."""
    tests = pathlib.Path(__file__).parent
    packages = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != '__pycache__'}
    assert not {package for package in packages if not list((tests / package).glob('test_*.py'))}


def test_files_of_tests_have_different_names():
    """pytest imports them by their names alone."""
    names = collections.Counter(path.name for path in pathlib.Path(__file__).parent.rglob('*.py'))
    assert {name for name, count in names.items() if count > 1} == set()
