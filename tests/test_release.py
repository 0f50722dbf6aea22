"""The distribution: its metadata, the contents of a wheel, and `lm` outside of a checkout."""

import ast
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence

import pytest
import tiny

import lm

uv = pytest.importorskip('uv', reason='needs uv, which is in the extra [test]')

FILES = ('pyproject.toml', 'setup.py', 'MANIFEST.in', 'README.md', 'CHANGELOG.md', 'LICENSE')
DATA = (tiny.ROOT / 'data' / 'README.md', *sorted((tiny.ROOT / 'data').glob('*.gin')))
"""Folders of recipes; in a checkout, prepared data lie beside them."""
BUILD = 'import sys, setuptools.build_meta as b; getattr(b, f"build_{sys.argv[1]}")(sys.argv[2])'
QUICKSTART = ('--gin_file', 'configs/experiments/quickstart.gin')
TWENTY_STEPS = tiny.params({'train.steps': 20, 'optimizer.warmup_steps': 2, 'train.eval_tokens': 8192})


def build(kind: str, source: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """Builds a 'wheel' or an 'sdist' of the folder `source`."""
    out.mkdir()
    command = [sys.executable, '-c', BUILD, kind, str(out)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope='module')
def source(tmp_path_factory) -> pathlib.Path:
    """Copies the checkout without prepared data; adds leftovers of an earlier version to its build folder."""
    copy = tmp_path_factory.mktemp('source')
    for folder in ('lm', 'configs'):
        shutil.copytree(tiny.ROOT / folder, copy / folder, ignore=shutil.ignore_patterns('__pycache__'))
    (copy / 'data').mkdir()
    for name in (*FILES, *(path.relative_to(tiny.ROOT) for path in DATA)):
        shutil.copyfile(tiny.ROOT / name, copy / name)
    left = copy / 'build' / 'lib' / 'lm' / 'module_of_an_earlier_version.py'
    left.parent.mkdir(parents=True)
    left.touch()
    return copy


@pytest.fixture(scope='module')
def sdist(source, tmp_path_factory) -> pathlib.Path:
    return build('sdist', source, tmp_path_factory.mktemp('sdist') / 'out')


@pytest.fixture(scope='module')
def wheel(source, sdist, tmp_path_factory) -> pathlib.Path:  # one build after the other: both write into `source`
    return build('wheel', source, tmp_path_factory.mktemp('wheel') / 'out')


def contents(wheel: pathlib.Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_a_wheel_holds_the_package_and_its_configurations(wheel):
    held = contents(wheel)
    kinds = ('.py', '.md', '.typed', '.json')
    package = {p.relative_to(tiny.ROOT) for p in (tiny.ROOT / 'lm').rglob('*') if p.suffix in kinds}
    package |= {p.relative_to(tiny.ROOT) for p in (tiny.ROOT / 'lm' / 'report' / 'assets').iterdir()}
    project = {p.relative_to(tiny.ROOT) for p in (tiny.ROOT / 'configs').rglob('*') if p.is_file()}
    project |= {p.relative_to(tiny.ROOT) for p in DATA}
    expected = {str(p) for p in package} | {f'lm/_project/{p}' for p in project if '__pycache__' not in p.parts}
    assert {name for name in held if '.dist-info/' not in name} == expected
    assert all(held[name] == (tiny.ROOT / name.removeprefix('lm/_project/')).read_bytes() for name in expected)
    (metadata,) = [text.decode() for name, text in held.items() if name.endswith('.dist-info/METADATA')]
    assert f'\nVersion: {lm.__version__}\n' in metadata


def test_a_wheel_of_the_source_distribution_is_the_same(wheel, sdist, tmp_path):
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter='data')
    (folder,) = tmp_path.iterdir()
    again = build('wheel', folder, tmp_path / 'out')
    assert again.name == wheel.name
    assert contents(again) == contents(wheel)


def test_a_checkout_is_found_beside_a_clone_named_lm(source, tmp_path):
    """An interpreter that starts in the parent of a clone sees the clone's folder first."""
    held = contents(build('editable', source, tmp_path / 'editable'))
    (path,) = [text for name, text in held.items() if name.endswith('.pth')]
    (tmp_path / 'packages').mkdir()
    (tmp_path / 'packages' / 'lm.pth').write_bytes(path)
    (tmp_path / 'parent' / 'lm' / 'lm').mkdir(parents=True)
    code = (
        f'import site; site.addsitedir({str(tmp_path / "packages")!r}); import lm; print(lm.__version__, lm.__file__)'
    )
    command = [sys.executable, '-S', '-c', code]  # -S: nothing that is installed, this checkout included
    done = subprocess.run(command, cwd=tmp_path / 'parent', env={}, capture_output=True, text=True)
    assert done.stdout == f'{lm.__version__} {source / "lm" / "__init__.py"}\n', done.stderr


def test_only_its_own_file_names_the_distribution():
    """Until it is published, anybody may register the name: nobody may be told to install it."""
    name = tomllib.loads((tiny.ROOT / 'pyproject.toml').read_text())['project']['name']
    command = ['git', 'grep', '-lIF', name, '--', '.', ':!pyproject.toml', ':!CHANGELOG.md', ':!tests/test_release.py']
    done = subprocess.run(command, cwd=tiny.ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, ''), 'a path or a checkout installs it'


def try_out(environment: pathlib.Path, folder: pathlib.Path) -> None:
    """Runs the installed `lm` beside a clone of that name: check, and the quickstart for 20 steps."""
    (folder / 'lm' / 'lm').mkdir(parents=True)

    def run(*arguments: str, command: Sequence[str] = (str(environment / 'bin' / 'lm'),)) -> str:
        variables = tiny.environment()
        del variables['PYTHONPATH']
        done = subprocess.run(
            [*command, *arguments], cwd=folder, env=variables, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run('--version') == f'lm {lm.__version__}\n'
    python = [str(environment / 'bin' / 'python')]
    assert 'function open_run' in run('-c', 'import lm; print(lm.load)', command=python)
    assert run('-m', 'lm', '--version', command=python) == f'lm {lm.__version__}\n'
    assert 'parameters              109,549,056' in run('check', '--gin_file', 'configs/models/small.gin')
    run('prepare', *QUICKSTART)
    assert 'done: 20 steps' in run('train', *QUICKSTART, '--run_dir', 'runs/first', *TWENTY_STEPS)
    assert (folder / 'data' / 'quickstart' / 'dataset.json').is_file()
    assert '| first | softmax |' in run('report', 'runs/first', '--no_pictures', '--out', 'report')
    assert 'uPlot' in (folder / 'report' / 'report.html').read_text(), 'the page has all its parts'
    assert not list(environment.rglob('quickstart/dataset.json')), 'the installation stays as it is'


def test_an_installed_wheel_trains_in_an_empty_folder(wheel, tmp_path):
    """The environment holds `lm` alone; its dependencies come from this interpreter."""
    environment = tmp_path / 'environment'
    subprocess.run([sys.executable, '-m', 'venv', '--without-pip', str(environment)], check=True, timeout=120)
    python = environment / 'bin' / 'python'
    command = [
        uv.find_uv_bin(),
        'pip',
        'install',
        '--quiet',
        '--offline',
        '--no-deps',
        f'--python={python}',
        str(wheel),
    ]
    subprocess.run(command, check=True, timeout=120)
    (packages,) = environment.glob('lib/python*/site-packages')
    paths = dict.fromkeys(sysconfig.get_path(name) for name in ('purelib', 'platlib'))
    (packages / 'dependencies.pth').write_text('\n'.join(paths))
    try_out(environment, tmp_path / 'a folder with spaces')


@pytest.mark.slow
def test_a_wheel_brings_all_that_it_needs(wheel, tmp_path):
    environment = tmp_path / 'environment'
    python = environment / 'bin' / 'python'
    program = uv.find_uv_bin()
    subprocess.run([program, 'venv', '--quiet', f'--python={sys.executable}', str(environment)], check=True)
    constraints = tiny.ROOT / 'scripts' / 'constraints.txt'
    command = [program, 'pip', 'install', '--quiet', f'--python={python}', f'--constraints={constraints}', str(wheel)]
    subprocess.run(command, check=True, timeout=1200)
    try_out(environment, tmp_path / 'a folder with spaces')


@pytest.mark.parametrize(
    ('file', 'pattern'),
    [
        ('CHANGELOG.md', r'^## \[(\d.*?)\]'),
        ('README.md', r'@software\{.*version = \{(.+?)\}'),
    ],
)
def test_documents_name_this_version(file, pattern):
    assert re.search(pattern, (tiny.ROOT / file).read_text(), re.MULTILINE)[1] == lm.__version__


def test_messages_name_extras_that_exist():
    project = tomllib.loads((tiny.ROOT / 'pyproject.toml').read_text())['project']
    trees = [ast.parse(path.read_text()) for path in (tiny.ROOT / 'lm').rglob('*.py')]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    hints = [call.args for call in calls if ast.unparse(call.func) in ('MissingPackageError', 'require')]
    named = {extra.value for _, _, *rest in hints for extra in rest[:1] if isinstance(extra, ast.Constant)}
    assert len(named) > 5
    assert named <= project['optional-dependencies'].keys()
