"""`docs/templates`: the files of each template are enough to add it to a fresh checkout and pass the shared tests.

The quick form adds all templates to one checkout; the slow form adds each template to its own checkout.
"""

import pathlib
import shutil
import subprocess
import sys

import pytest
import tiny

TEMPLATES = tiny.ROOT / 'docs' / 'templates'
SHARED = {
    'mechanism': [
        'attention/test_both_ways.py',
        'attention/test_flops.py',
        'attention/test_formulas.py',
        'config/test_config.py',
        'interop/test_exchange.py',
        'interop/test_transformers.py',
        'model/test_documents.py',
        'model/test_model.py',
        'model/test_sequence.py',
        'test_golden.py',
    ],
    'branch': ['config/test_config.py', 'model/test_branch_parts.py'],
    'rule': ['training/test_optimizer.py'],
    'schedule': ['training/test_optimizer.py'],
    'source': ['config/test_config.py', 'data/test_sources.py'],
    'task': ['tasks/test_tasks.py'],
    'tokenizer': ['data/test_other_tokenizers.py'],
    'tracker': ['trackers/test_trackers.py'],
}
"""Template → the tests that find its file by themselves."""
COPIED = ('configs', 'data', 'docs', 'lm', 'tests')
LISTINGS = (
    'found or every_source or every_tokenizer or every_tracker or causal_mechanism_refuses '
    'or formulas_fit or may_change'
)
"""The tests that cover whole registries."""

READ = """
import sys
from lm.data.store import TokenStore
store = TokenStore.open(sys.argv[1])
print(store.tokenizer().decode(store.read('train', 0, store.tokens('train'))))
"""
"""Prints the training text of a token store."""


def files_of(template: str) -> list[pathlib.Path]:
    """Returns the files of a template, relative to the checkout."""
    folder = TEMPLATES / template
    return sorted(path.relative_to(folder) for path in folder.rglob('*') if path.is_file() and path.suffix != '.pyc')


def names_of(template: str) -> list[str]:
    """Returns the words in the names of a template's tests: its gin name and its class."""
    name = next(path.stem for path in files_of(template) if path.suffix == '.py')
    return [name, name.replace('_', '')]


def checkout(folder: pathlib.Path, templates: list[str]) -> pathlib.Path:
    """Copies the project and adds the templates; no file of the project changes."""
    for name in COPIED:
        shutil.copytree(tiny.ROOT / name, folder / name, ignore=shutil.ignore_patterns('__pycache__', '.*'))
    shutil.copy(tiny.ROOT / 'pyproject.toml', folder)
    for template in templates:
        for path in files_of(template):
            assert not (folder / path).exists()
            assert (folder / path).parent.exists(), f'{path}: a new folder'
            shutil.copy(TEMPLATES / template / path, folder / path)
    return folder


def run(folder: pathlib.Path, *arguments: str) -> str:
    """Runs a Python command in the copy and returns its output; the command must succeed."""
    environment = tiny.environment(devices=8) | {'PYTHONPATH': str(folder)}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


def check(folder: pathlib.Path, templates: list[str], *flags: str) -> None:
    """Runs the tests of structure and listings, and the shared tests of the templates' names; each template must have
    some."""
    files = sorted({f'tests/{file}' for template in templates for file in SHARED[template]})
    chosen = ' or '.join(['test_house', LISTINGS, *(name for template in templates for name in names_of(template))])
    flags = ('-q', '-rA', '-p', 'no:cacheprovider', '-k', chosen, *flags)
    report = run(folder, '-m', 'pytest', *flags, 'tests/test_house.py', *files)
    passed = [line.lower() for line in report.splitlines() if line.startswith('PASSED')]
    for template in templates:
        found = [line for line in passed if any(f'[{name}' in line for name in names_of(template))]
        assert found, f'no shared test found the {template}'


def test_each_template_is_one_file():
    """A mechanism has a module and a formula."""
    assert {path.name for path in TEMPLATES.iterdir() if path.is_dir()} == SHARED.keys()
    for template in SHARED:
        assert len(files_of(template)) == (2 if template == 'mechanism' else 1)


def test_templates_pass_the_shared_tests_of_a_fresh_checkout(tmp_path):
    """The test puts all templates into one checkout, and trains with all of them except the task."""
    templates = list(SHARED)
    folder = checkout(tmp_path / 'copy', templates)
    check(folder, templates)
    pages = tmp_path / 'pages'
    pages.mkdir()
    for i in range(20):
        (pages / f'{i}.md').write_text(f'---\ntitle: none\n---\n# Page {i}\n' + 'one line of text\n' * 40)
    data = {'data.path': str(tmp_path / 'tokens')}
    text = {
        'prepare.source': '@markdown()',
        'markdown.path': str(pages),
        'prepare.tokenizer': '@byte_level()',
    }
    training = tiny.MODEL | {
        'model.vocab_size': 257,
        'model.attention': '@rebased()',
        'model.branch': '@layer_scale()',
        'optimizer.rule': '@lion()',
        'optimizer.schedule': '@inverse_square_root()',
        'train.trackers': '[@csv_file()]',
        'train.steps': 10,
        'train.eval_every': 10,
    }
    run(folder, '-m', 'lm', 'prepare', *tiny.params(data | text), '--processes', '1')
    run(folder, '-m', 'lm', 'train', '--run_dir', str(tmp_path / 'run'), *tiny.params(data | training))
    rows = [line.split(',') for line in (tmp_path / 'run' / 'figures.csv').read_text().splitlines()]
    losses = {int(step): float(value) for step, name, value in rows if name == 'train/loss'}
    assert list(losses) == list(range(1, 11))
    assert losses[10] < losses[1] - 0.5
    read = run(folder, '-c', READ, str(tmp_path / 'tokens'))
    assert '# Page ' in read
    assert 'title' not in read


@pytest.mark.slow
@pytest.mark.parametrize('template', SHARED)
def test_a_template_alone_passes_all_shared_tests(template, tmp_path):
    """Slow tests run too. With PyTorch installed, the tests of its formula run as well."""
    check(checkout(tmp_path / 'copy', [template]), [template], '-m', 'not gpu')
